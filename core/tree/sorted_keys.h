// SPDX-License-Identifier: Apache-2.0
// The keys of dicts in a tree, sorted as JAX sorts them.
#pragma once

#include "tree/treedef.h"

namespace graftax {

// Pushes the values of a dict in the order of its sorted keys; the result is the keys, a tuple. Keys that cannot be
// sorted are an error. Runs user code only to compare keys that are neither text nor whole numbers.
Owned sorted_items(PyObject* dict, OwnedList& values);

}  // namespace graftax
