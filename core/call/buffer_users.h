// SPDX-License-Identifier: Apache-2.0
// How many objects use the buffer of a jax.Array: arrays that `jax.device_put` made of it, views of NumPy, capsules of
// dlpack. JAX counts them and tells nobody, so the places of the counts are found by trial, once a process.
// See docs/internals/decisions/0011-donation-that-is-proven.md.
#pragma once

#include <algorithm>
#include <cstring>

#include "python/py.h"

namespace graftax {

class BufferUsers {
 public:
  // A number behind an array. At `array` in the object is a pointer to what holds it, at `count`; where `buffer` is not
  // `direct`, to what has the pointer to that, at `buffer`.
  struct Place {
    static constexpr size_t direct = SIZE_MAX;
    size_t array, buffer, count;
    int32_t one_user = 0;  // what the number is for an array that nobody shares
  };

  // Each function in `aliases` makes another array of the buffer of one, in another way. Looks for the one number behind
  // each of the samples that is one more for each such array and one less when that is gone. The samples are pairs of
  // arrays that differ in their buffers alone: what else arrays share is counted as well, for both. Unless there is a
  // single place for each way, the same for all samples, none is known.
  static BufferUsers find(PyTypeObject* type, const nb::list& samples, const nb::list& aliases);

  bool known() const { return !places_.empty(); }

  // Is this array the only user of its buffer? It has to lie on one device.
  bool is_only_user(PyObject* array) const {
    return known() && std::all_of(places_.begin(), places_.end(), [&](const Place& place) {
             const char* at = pointer_at(reinterpret_cast<const char*>(array) + place.array);
             if (at && place.buffer != Place::direct) at = pointer_at(at + place.buffer);
             return at && number_at(at + place.count) == place.one_user;
           });
  }

 private:
  static const char* pointer_at(const char* place) {
    const char* out;
    std::memcpy(&out, place, sizeof(out));
    return out;
  }
  static int32_t number_at(const char* place) {
    int32_t out;
    std::memcpy(&out, place, sizeof(out));
    return out;
  }

  std::vector<Place> places_;
};

}  // namespace graftax
