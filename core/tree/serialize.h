// SPDX-License-Identifier: Apache-2.0
// A PyTreeDef as a list of its records, in pre-order, and back: for pickle, and for JAX's own treedefs.
#pragma once

#include "tree/treedef.h"

namespace graftax {

// The data that JAX's node_data() shows, as a structure keeps it.
Owned kept_data(const TreeKind& kind, PyObject* data);

// Raises where a node of this kind cannot have these data: whoever reads them later does not check.
void check_data(const TreeKind& kind, PyObject* data, size_t arity);

// The kind of JAX's (type, data).
const TreeKind& kind_of_node_data(PyObject* pair);

// (role, arity, type, data) of each record, to be pickled.
nb::list state_of(const TreeDef& def);
TreeDef from_state(nb::list state);

// (node data, number of children) of each record; of leaves: (None, how many stand side by side).
nb::list records_of(const TreeDef& def);
TreeDef from_records(nb::list records);

}  // namespace graftax
