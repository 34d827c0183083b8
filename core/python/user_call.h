// SPDX-License-Identifier: Apache-2.0
// Calls of functions of the user that run on the host, such as those of `jax.pure_callback`.
#pragma once

#include "python/py.h"

namespace graftax {

void bind_host_call(nb::module_& m);

}  // namespace graftax
