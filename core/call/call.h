// SPDX-License-Identifier: Apache-2.0
// The hit: bind -> replay -> dispatch -> finish. A miss asks Python (_jit/jitted.py) for an entry and goes the same way.
#pragma once

#include "call/trace.h"

namespace graftax {

void bind_call(nb::module_& m);

}  // namespace graftax
