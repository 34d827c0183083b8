// SPDX-License-Identifier: Apache-2.0
// What one recording of the roots of a call leaves: looked up, traced and compared without walking the roots again.
#pragma once

#include "record.h"

namespace graftax {

struct Recorded {
  nb::object graphdef;  // a GraphDef
  nb::object names;     // tuple, one name a root
  OwnedList live;       // by instruction, the object that it stands for
  OwnedList leaves;

  const Program& program() const;
  // What a replay of the same roots would collect.
  void walk(Walk& out) const;

  static const Recorded& nothing();
};

void bind_recorded(nb::module_& m);

}  // namespace graftax
