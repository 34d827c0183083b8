// SPDX-License-Identifier: Apache-2.0
// What a function is apart from its defaults, cells and attributes: a static of its code, its globals and its names.
#pragma once

#include "graph/graphdef.h"

namespace graftax {

// `function` is never kept: a bare twin without closure and defaults is.
uint32_t add_function(Program& program, PyObject* function);
bool function_matches(const Static& s, PyObject* function);
bool functions_equal(const Static& a, const Static& b);
// Lets a function's static hold its code and its module weakly. False where its code cannot be held that way.
void weaken_function(Program& program, Static& s);
// Gives a function the code and the names back that it was recorded with.
void restore_code(const Static& s, PyObject* function);

// Is it code and nothing else: no closure, no attributes, defaults that cannot change?
bool is_plain_function(PyObject* function);
// Was it made by a call of another function, so that the next call makes another one?
bool made_in_a_call(PyObject* function);

// The name of item `i`: "__defaults__", "__kwdefaults__", then the names of its free variables; borrowed, null when the
// code is gone.
PyObject* function_item_name(const Static& s, uint32_t i);
PyObject* code_item_name(PyObject* code, Py_ssize_t i);

}  // namespace graftax
