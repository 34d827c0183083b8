// SPDX-License-Identifier: Apache-2.0
// Calls of installed packages' code that a trace has judged to have no effect, and need not hear again.
#pragma once

#include "python/py.h"

namespace graftax {

void bind_judged_calls(nb::module_& m);

}  // namespace graftax
