// SPDX-License-Identifier: Apache-2.0
// The key paths of the leaves of a tree. They follow from its structure, but for nodes that name their children themselves.
#pragma once

#include "tree/treedef.h"

namespace graftax {

// A node whose class gives the key path entries of its children, for each object anew.
struct NamedNode {
  uint32_t node;
  OwnedList entries;
};
using NamedNodes = std::vector<NamedNode>;  // in pre-order

// The key path entries of the children of a node, in order: JAX's own classes. `n` is the record that was made of it.
void child_entries(const TreeNode& n, OwnedList& entries);

// Pushes a tuple of key path entries for each leaf, in order.
void leaf_paths(const Structure& t, const NamedNodes& named, OwnedList& out);

}  // namespace graftax
