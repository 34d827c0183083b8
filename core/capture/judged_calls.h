// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "python/py.h"

namespace graftax {

void bind_judged_calls(nb::module_& m);

}  // namespace graftax
