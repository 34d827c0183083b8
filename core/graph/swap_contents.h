// SPDX-License-Identifier: Apache-2.0
// Exchanges the contents of two builtin containers; identities, attributes and weak references stay. No allocation, no
// user code, no signal handler: it cannot fail. That is what a commit of several writes needs, which has to happen as a
// whole or not at all.
#pragma once

#include "python/py.h"

namespace graftax {

void exchange_lists(PyObject* a, PyObject* b);
void exchange_dicts(PyObject* a, PyObject* b);
void exchange_odicts(PyObject* a, PyObject* b);
void exchange_deques(PyObject* a, PyObject* b);
void exchange_sets(PyObject* a, PyObject* b);
void exchange_bytearrays(PyObject* a, PyObject* b);
void exchange_arrays(PyObject* a, PyObject* b);

// Makes a dict ready without a visible change. False where others would have to be told.
bool can_exchange_dict(PyObject* dict);
// Is the layout of these known in this Python?
bool can_exchange_odict(PyObject* dict);
bool knows_deques();
bool knows_arrays();
// How many buffers show the memory of an array.array, of a known layout.
Py_ssize_t exports_of_array(PyObject* array);

// Finds out which layouts are known.
void bind_exchange(nb::module_& m);

}  // namespace graftax
