// SPDX-License-Identifier: Apache-2.0
// One recording of the roots of a call: looked up, traced and compared without walking the roots again.
#pragma once

#include "call/fast_dispatch.h"
#include "graph/record.h"

namespace graftax {

struct Recording {
  nb::object graphdef;  // a GraphDef
  nb::object names;     // tuple, one name a root
  OwnedList live;       // by instruction, the object that it stands for
  OwnedList leaves;
  std::vector<uint32_t> assumed;  // leaves that are other numbers here than the roots have; sorted
  std::vector<LeafLook> looks;    // of the leaves, once they were asked for; a direct call takes them

  const Program& program() const;
  // What a replay of the same roots would collect.
  void walk(Walk& out) const;

  static const Recording& nothing();
};

void bind_recording(nb::module_& m);

}  // namespace graftax
