// SPDX-License-Identifier: Apache-2.0
// Announces a function that the core has made itself: an interpreter without watchers reports none. `capture/` sets it,
// which this folder must not include.
#pragma once

#include "python/py.h"

namespace graftax {

inline void (*tell_function_made)(PyObject* function) = [](PyObject*) {};

}  // namespace graftax
