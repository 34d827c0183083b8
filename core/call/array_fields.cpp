// SPDX-License-Identifier: Apache-2.0
#include "call/array_fields.h"

#include <functional>

namespace graftax {

namespace {

using Holds = std::function<bool(const unsigned char* place, nb::handle sample)>;

// The only place, each `step` bytes, that is right for all samples; 0 where there is none, or several.
size_t only_place(PyTypeObject* type, const nb::list& samples, size_t step, const Holds& holds) {
  size_t found = 0;
  for (size_t at = sizeof(PyObject); at + step <= static_cast<size_t>(type->tp_basicsize); at += step) {
    bool all = true;
    for (nb::handle sample : samples) {
      nb::object array = sample[0];
      all = all && holds(reinterpret_cast<const unsigned char*>(array.ptr()) + at, sample);
    }
    if (all && found) return 0;  // two places that are right for all samples: nobody knows which one is meant
    if (all) found = at;
  }
  return found;
}

}  // namespace

ArrayParts ArrayParts::find(PyTypeObject* type, const nb::list& samples) {
  for (nb::handle sample : samples)
    if (nb::len(sample) != 4) raise_error(PyExc_TypeError, "expected an array and its three parts");
  for (nb::handle sample : samples)
    if (nb::object(sample[0]).type().ptr() != reinterpret_cast<PyObject*>(type)) return {};
  auto object = [](size_t part) {
    return [part](const unsigned char* place, nb::handle sample) {
      return object_at(place) == nb::object(sample[part]).ptr();
    };
  };
  auto flag = [](const unsigned char* place, nb::handle sample) { return *place == nb::cast<bool>(sample[3]); };
  ArrayParts parts;
  if (samples.size() == 0) return parts;
  parts.sharding_ = only_place(type, samples, sizeof(void*), object(2));
  parts.committed_ = only_place(type, samples, 1, flag);
  // Last, as `known` asks for this one: all three are known, or none.
  if (parts.sharding_ && parts.committed_) parts.aval_ = only_place(type, samples, sizeof(void*), object(1));
  return parts;
}

}  // namespace graftax
