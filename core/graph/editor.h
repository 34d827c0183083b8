// SPDX-License-Identifier: Apache-2.0
// One object graph with every value in it as a leaf: to look at, to copy with other values for some rows, to write into.
#pragma once

#include "python/py.h"

namespace graftax {

void bind_surgery(nb::module_& m);

}  // namespace graftax
