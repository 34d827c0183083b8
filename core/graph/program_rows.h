// SPDX-License-Identifier: Apache-2.0
// A recorded program as records with names: how Python reads a structure.
#pragma once

#include "graph/graphdef.h"

namespace graftax {

// One row an instruction of the roots; what dict keys are made of has none. Linear in the program: key entries, values
// and paths are made when they are asked for. `owner`, the GraphDef or Outcome, is kept by every row.
nb::list rows(nb::handle owner, const Program& program);

template <class Holder>
nb::list rows_of(nb::handle holder) {
  return rows(holder, nb::cast<const Holder&>(holder).program);
}

// The statics that count by identity, keys among them.
nb::list identities(const Program& program);

void bind_rows(nb::module_& m);

}  // namespace graftax
