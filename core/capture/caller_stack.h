// SPDX-License-Identifier: Apache-2.0
// Whose references are the arguments of a call?
#pragma once

#include "python/py.h"

namespace graftax {

// Has the bytecode of a Python frame made this call, with a reference of its own for each of these arguments, which it
// releases when the call returns? False where that is not known: a call from C, such as one of functools.partial, may
// pass what something else holds.
bool stack_owns_arguments(PyObject* callable, PyObject* const* args);

}  // namespace graftax
