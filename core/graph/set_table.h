// SPDX-License-Identifier: Apache-2.0
// Where the elements of a set stand in its hash table. That is the order in which it iterates, and it decides where the
// next element goes: two sets that iterate alike need not do so after the same change.
#pragma once

#include <vector>

#include "graph/kinds/node_kind.h"

namespace graftax {

struct SetTable {
  Py_ssize_t mask = 0;
  Py_ssize_t finger = 0;            // where pop() goes on
  std::vector<uint32_t> slots;      // of the elements, in the order of iteration
  std::vector<Py_hash_t> hashes;    // theirs
  std::vector<uint32_t> removed;    // slots that are not free: elements were taken out there
  std::vector<uint32_t> of_a_copy;  // slots of the elements in a copy of the set, which may be another table
  bool is_frozen = false;           // of a frozenset
  bool is_plain = false;            // may be what adding the elements to an empty set gives, in some order
  mutable bool is_changed = false;  // a traced function changes the set

  // Of a set or a frozenset.
  static SetTable of(PyObject* set);
  // Does this set have the same table now?
  bool is_of(PyObject* set) const;
  // A new set with this table; empty where one of the elements has another hash, as objects that hash by identity do.
  Owned make(PyObject* const* elements) const;
};

bool operator==(const SetTable& a, const SetTable& b);

// Does a function that was traced with the first of two sets do the same with the other, whose elements are equal and in
// the same order? Where it changes the set, the tables have to be the same.
bool serves(const SetTable& traced, const SetTable& other, Order order = Order::in_a_trace);

}  // namespace graftax
