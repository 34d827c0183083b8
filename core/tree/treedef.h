// SPDX-License-Identifier: Apache-2.0
// The structure of a tree, as `jax.tree` has it: nodes in pre-order, neighbouring leaves as one record.
#pragma once

#include "tree/treekind.h"

namespace graftax {

struct TreeNode {
  const TreeKind* kind = nullptr;  // null for leaves
  PyObject* data = nullptr;        // owned by the structure; null where the role says all
  uint32_t arity = 0;              // children; leaves: how many stand side by side
  uint32_t leaves = 0;             // below it
  uint32_t next = 0;               // first record after this subtree
  Role role = Role::leaf;
};

struct Structure {
  std::vector<TreeNode> nodes;
  OwnedList owned;                                     // data, and the types of named tuples
  std::vector<std::shared_ptr<const TreeKind>> kinds;  // those that the nodes name
  uint32_t leaves = 0;
  mutable Py_hash_t hash = -1;  // -1: not computed yet

  PyObject* keep(Owned obj) {
    owned.push_stolen(std::move(obj));
    return owned.back();
  }
  void keep_kinds();  // of all nodes, and their types

  // A node whose children follow; `close` is due once they are there, and `keep_kinds` once all are.
  uint32_t open(const TreeKind& kind, uint32_t arity, PyObject* data) {
    auto node = static_cast<uint32_t>(nodes.size());
    TreeNode n;
    n.kind = &kind;
    n.role = kind.role;
    n.arity = arity;
    n.leaves = leaves;  // those before it, until it closes
    nodes.push_back(n);
    if (data) set_data(node, data);
    return node;
  }
  void set_data(uint32_t node, PyObject* data);
  void close(uint32_t node) {
    nodes[node].next = static_cast<uint32_t>(nodes.size());
    nodes[node].leaves = leaves - nodes[node].leaves;
  }
  // `run`: the last record is leaves of the same parent.
  void add_leaves(uint32_t count, bool run) {
    leaves += count;
    if (run) {
      nodes.back().arity += count;
      nodes.back().leaves += count;
      return;
    }
    TreeNode n;
    n.arity = n.leaves = count;
    n.next = static_cast<uint32_t>(nodes.size()) + 1;
    nodes.push_back(n);
  }
  // Copies one subtree of another structure; true where it is leaves.
  bool append(const Structure& other, uint32_t node, bool run);

  bool is_leaf() const { return nodes.size() == 1 && nodes[0].role == Role::leaf; }
  size_t num_nodes() const;  // as JAX counts: each leaf is one

  void clear();
};

struct TreeDef {
  Structure tree;
};

// What keeps the kinds of these nodes alive. Those of the builtin containers live as long as the process.
std::vector<std::shared_ptr<const TreeKind>> kinds_of(const std::vector<TreeNode>& nodes);

bool operator==(const Structure& a, const Structure& b);  // may call user code: == of data

// The keys of a node of a dict role, as a tuple; borrowed.
PyObject* keys_of(const TreeNode& n);

// JAX's `(type, data)` of a node, or None for a leaf.
nb::object node_data(const TreeNode& n);

// A treedef of ours: this one itself, or one of JAX's turned into ours.
nb::object as_treedef(nb::handle treedef);

void bind_treedef(nb::module_& m);

}  // namespace graftax
