// SPDX-License-Identifier: Apache-2.0
// How many objects use the buffer of a jax.Array: arrays that `jax.device_put` made of it, views of NumPy, capsules of
// dlpack. JAX counts them and tells nobody, so the places of the counts are found by trial, once a process.
// See docs/internals/decisions/0011-donation-that-is-proven.md.
#pragma once

#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>

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

  // Looks for the numbers behind arrays on several devices, whose buffers are a list elsewhere. `list_alias` makes
  // another array of the same list, and function number i of a group one of buffer i. A group is a pair of arrays and
  // such functions, for as many devices. The places of the buffers have to be evenly spaced, and a single choice of
  // them the same in all groups: freed memory behind a list may have old pointers.
  bool find_on_meshes(PyTypeObject* type, const nb::list& groups, nb::handle list_alias);

  bool known() const { return !places_.empty(); }

  // Is this array, on so many devices, the only user of its buffers?
  bool is_only_user(PyObject* array, uint32_t devices) const {
    if (devices != 1) return known_on_meshes_ && is_only_user_on_mesh(array, devices);
    return known() && std::all_of(places_.begin(), places_.end(), [&](const Place& place) {
             const char* at = pointer_at(reinterpret_cast<const char*>(array) + place.array);
             if (at && place.buffer != Place::direct) at = pointer_at(at + place.buffer);
             return at && number_at(at + place.count) == place.one_user;
           });
  }

 private:
  // Of an array on several devices: its object with the list, at `list.array`, has the pointer to the pointers to the
  // counts, at `buffers`; the first of these is at `first`.
  struct MeshPlaces {
    Place list;
    size_t buffers = 0, first = 0, stride = 0, count = 0;
    int32_t one_user = 0;

    bool operator==(const MeshPlaces& other) const {
      auto parts = [](const MeshPlaces& p) {
        return std::tuple(p.list.array, p.list.count, p.list.one_user, p.buffers, p.first, p.stride, p.count,
                          p.one_user);
      };
      return parts(*this) == parts(other);
    }
  };

  static std::vector<MeshPlaces> places_on_mesh(PyTypeObject* type, nb::handle array, nb::handle another,
                                                const nb::list& shard_aliases, nb::handle list_alias);

  bool is_only_user_on_mesh(PyObject* array, uint32_t devices) const {
    const Place& list = on_meshes_.list;
    const char* holder = pointer_at(reinterpret_cast<const char*>(array) + list.array);
    if (!holder || number_at(holder + list.count) != list.one_user) return false;
    const char* next = pointer_at(holder + on_meshes_.buffers) + on_meshes_.first;
    for (uint32_t i = 0; i < devices; ++i, next += on_meshes_.stride)
      if (number_at(pointer_at(next) + on_meshes_.count) != on_meshes_.one_user) return false;
    return true;
  }

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
  MeshPlaces on_meshes_;
  bool known_on_meshes_ = false;
};

}  // namespace graftax
