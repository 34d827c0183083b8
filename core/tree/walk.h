// SPDX-License-Identifier: Apache-2.0
// Walks by the rules of `jax.tree`: everything is a tree, references are not followed twice as one, text is a leaf.
#pragma once

#include "tree/paths.h"

namespace graftax {

// What a walk is asked for. The caller is `Walking`.
struct WalkRequest {
  Structure* structure = nullptr;  // null: not wanted
  OwnedList* leaves = nullptr;
  NamedNodes* named = nullptr;  // nodes that name their children themselves; null: not wanted
  PyObject* is_leaf = nullptr;  // called with each value before it is opened
  bool is_leaf_takes_path = false;
};

void walk_tree(PyObject* tree, const WalkRequest& request);

// The children of one node, pushed in order; the result is its data, empty where its role has none.
Owned open_tree_node(PyObject* obj, const TreeKind& kind, OwnedList& children);

// Pushes the key path entries and children of a registered node; the result is its data. Empty, and nothing is pushed,
// where JAX cannot be asked for the entries.
Owned open_with_keys(PyObject* obj, const TreeKind& kind, OwnedList& entries, OwnedList& children);

// Thrown where a tree is not what the structure says. The binding that catches it asks Python for the message.
struct Mismatch {};

// The subtrees of `tree` that stand where `prefix` has leaves; throws Mismatch.
void take_up_to(const Structure& prefix, PyObject* tree, OwnedList& out);

void bind_tree(nb::module_& m);
void bind_signed(nb::module_& m);

}  // namespace graftax
