// SPDX-License-Identifier: Apache-2.0
// What code runs in this thread during a trace, and which globals it sees. A Python frame of a module some of whose
// globals are rebuilt sees the rebuilt ones: in this thread, for as long as the trace runs. Other threads see their own.
#pragma once

#include "python/py.h"

namespace graftax {

// Told by the interpreter (3.12 and later), so that a trace knows which functions are its own.
void function_made(PyObject* function);
void function_gone(PyObject* function);

// Is this thread inside of a trace that notes what is read?
bool is_watched();

void bind_frames(nb::module_& m);

}  // namespace graftax
