// SPDX-License-Identifier: Apache-2.0
// Who is told of functions that the core makes itself: where the interpreter has no watchers, nobody else says so.
#pragma once

#include "python/py.h"

namespace graftax {

inline void (*tell_function_made)(PyObject* function) = [](PyObject*) {};

}  // namespace graftax
