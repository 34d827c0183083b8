// SPDX-License-Identifier: Apache-2.0
// Leaves and a structure -> a tree.
#pragma once

#include "tree/treedef.h"

namespace graftax {

// One node of these children, as JAX's unflatten makes it. May run user code.
Owned build_tree_node(const TreeNode& n, PyObject* const* children);

// Builds bottom-up: `make(node, items)` for each node, in the order in which they close.
template <class Make>
Owned build(const Structure& t, PyObject* const* leaves, Make make) {
  struct Open {
    uint32_t node;
    size_t base;  // where its children's values start
  };
  std::vector<Open> open;
  OwnedList values;
  auto n = static_cast<uint32_t>(t.nodes.size());
  for (uint32_t i = 0; i < n; ++i) {
    const TreeNode& node = t.nodes[i];
    if (node.role == Role::leaf) {  // a run of them
      if (n == 1) return Owned::borrow(leaves[0]);
      for (uint32_t k = 0; k < node.arity; ++k) values.push(leaves[k]);
      leaves += node.arity;
    } else if (node.leaves == node.arity && node.next <= i + 2) {  // leaves alone, or nothing
      Owned made = make(node, leaves);
      leaves += node.arity;
      i = node.next - 1;
      if (open.empty()) return made;
      values.push_stolen(std::move(made));
    } else {
      open.push_back({i, values.size()});
    }
    // The last record of a subtree closes its node, and all nodes that end with it.
    while (!open.empty() && t.nodes[open.back().node].next == i + 1) {
      auto [at, base] = open.back();
      open.pop_back();
      Owned made = make(t.nodes[at], values.data() + base);
      values.resize(base);
      if (open.empty()) return made;
      values.push_stolen(std::move(made));
    }
  }
  raise_error(PyExc_SystemError, "a structure has no end");
}

}  // namespace graftax
