// SPDX-License-Identifier: Apache-2.0
// Where a jax.Array holds its aval, its sharding, and whether it is committed. JAX promises no such places: they are found
// by trial, once a process. See docs/internals/direct.md.
#pragma once

#include "python/py.h"

namespace graftax {

class ArrayParts {
 public:
  // Looks for them in arrays that are as different as they can be: tuples (array, aval, sharding, committed). Unless each
  // part has one place that is right for all of them, none is known.
  static ArrayParts find(PyTypeObject* type, const nb::list& samples);

  bool known() const { return aval_ != 0; }

  // Has this array these very objects? Where it has others, or nothing is known, they may still be equal.
  bool are(PyObject* array, PyObject* aval, PyObject* sharding, bool committed) const {
    auto* start = reinterpret_cast<const unsigned char*>(array);
    return known() && object_at(start + aval_) == aval && object_at(start + sharding_) == sharding &&
           start[committed_] == committed;
  }

 private:
  static const void* object_at(const unsigned char* place) { return *reinterpret_cast<const void* const*>(place); }

  size_t aval_ = 0, sharding_ = 0, committed_ = 0;  // from the array's start; the first bytes are the interpreter's
};

}  // namespace graftax
