// SPDX-License-Identifier: Apache-2.0
// Equality and hash of static leaves: the same type and an equal value, at every depth.
#pragma once

#include "graph/graphdef.h"

namespace graftax {

// Adds `obj` to the program's pool and returns its id. Dict keys and set elements go this way too, where a tuple is
// compared element by element. `copy` is set for the NumPy constants of an Outcome.
uint32_t add_static(Program& program, PyObject* obj, const Kind& kind, bool copy = false);
// Adds what its class compares with an `__eq__` and a `__hash__` of its own.
uint32_t add_hashed(Program& program, PyObject* obj);
// Does the class compare its instances by value? Those of other classes count by identity as keys.
bool defines_eq(PyTypeObject* type);
// What a key is compared by: the referent of a weak reference (empty when it is gone), else the key itself.
Owned contents_root(PyObject* key);
// The object that a key is, or refers to weakly, if that is recorded as a node; else empty.
Owned object_of_key(PyObject* key);
// What of a key that counts by identity may stand elsewhere in the graph.
Owned node_of_key(PyObject* key);
// Is this a key that counts by identity: an object or a function whose class defines no ==?
bool is_identity_key(const Static& s);
[[noreturn]] void refuse_key_with_arrays(PyObject* key, const std::string& path = {});
// Refuses keys, or elements of a set, that their container does not find any more: among rebuilt ones it would.
void refuse_lost_keys(PyObject* container, PyObject* const* keys, Py_ssize_t count);
uint32_t add_identity(Program& program, PyObject* obj);
uint32_t add_context_field(Program& program, PyObject* make);
uint32_t add_key(Program& program, PyObject* key, int depth = 0);
// The hash of a tuple with these statics as its elements, which are in the program already.
Py_hash_t hash_of_elements(const Program& program, const uint32_t* ids, size_t count);

// Does `obj` equal static `id`? May run a registry function or an extension type's own ==.
bool static_matches(const Program& program, uint32_t id, PyObject* obj);

// A static that stands for any value: of a field that says where the program is running.
inline bool is_context_field(const Static& s) { return s.how == How::context && s.type == &PyBaseObject_Type; }

inline bool context_matches(const Static& s, PyObject* obj) { return is_context_field(s) || Py_TYPE(obj) == s.type; }

constexpr unsigned bit_of(How how) { return 1u << static_cast<unsigned>(how); }

// The same where no more than a look at the pointer tells; false may mean that it has to be asked.
inline bool matches_at_once(const Static& s, PyObject* obj) {
  constexpr unsigned asked =
      bit_of(How::function) | bit_of(How::reduce) | bit_of(How::contents) | bit_of(How::tuple) | bit_of(How::hashed);
  if (s.how == How::context) return context_matches(s, obj);
  return (s.weak ? refers_to(s.obj, obj) : s.obj == obj) && !(asked & bit_of(s.how));
}

// Does an object that has matched match for as long as it lives?
inline bool matches_for_good(const Static& s) {
  constexpr unsigned by_value =
      bit_of(How::integer) | bit_of(How::floating) | bit_of(How::complex) | bit_of(How::string) | bit_of(How::bytes);
  return (bit_of(How::identity) | by_value) & bit_of(s.how);
}

// The same for two pools.
bool statics_equal(const Program& a, uint32_t ia, const Program& b, uint32_t ib);

// Has one of these elements another hash than its equal among the others? Then they stand in an order by identity (two
// nan objects do), which says nothing.
bool hash_apart(const Program& program, uint32_t first, PyObject* const* others, uint32_t count);
// Do the elements of a set equal the `count` keys that start at `first`?
bool set_matches(const Program& program, uint32_t first, uint32_t count, PyObject* set);

}  // namespace graftax
