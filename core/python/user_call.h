// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "python/py.h"

namespace graftax {

void bind_host_call(nb::module_& m);

}  // namespace graftax
