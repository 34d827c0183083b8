// SPDX-License-Identifier: Apache-2.0
// Structures that `flatten` has met before: most programs flatten the same few again and again.
#pragma once

#include "graph/record.h"

namespace graftax {

// (leaves, GraphDef) of one object.
nb::tuple flatten(nb::handle obj);

void bind_kept(nb::module_& m);

}  // namespace graftax
