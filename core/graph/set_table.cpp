// SPDX-License-Identifier: Apache-2.0
#include "graph/set_table.h"

#include <algorithm>

namespace graftax {

namespace {

PySetObject* as_set(PyObject* set) { return reinterpret_cast<PySetObject*>(set); }

// The interpreter's own object that marks a slot from which an element was taken out. It has no name in C: a set that
// has lost its only element shows it.
PyObject* find_mark() {
  Owned set = own(PySet_New(nullptr)), element = own(PyLong_FromLong(0));
  check(PySet_Add(set.get(), element.get()));
  check(PySet_Discard(set.get(), element.get()));
  return as_set(set.get())->table[0].key;
}

PyObject* mark_of_removed() {
  static PyObject* const mark = find_mark();
  return mark;
}

// The slots of the elements.
std::vector<uint32_t> slots_of(PyObject* set) {
  PyObject* mark = mark_of_removed();
  std::vector<uint32_t> out;
  out.reserve(static_cast<size_t>(as_set(set)->used));
  for (Py_ssize_t i = 0; i <= as_set(set)->mask; ++i) {
    PyObject* key = as_set(set)->table[i].key;
    if (key && key != mark) out.push_back(static_cast<uint32_t>(i));
  }
  return out;
}

}  // namespace

SetTable SetTable::of(PyObject* set) {
  SetTable out;
  // What Python would make of this set: a copy has a table of its own, and `&` adds one element after the other.
  Owned copy = own(PySet_New(set)), other = own(PySet_New(copy.get()));
  Owned plain = own(PyNumber_And(copy.get(), other.get()));
  const PySetObject* from = as_set(set);
  out.mask = from->mask;
  out.finger = from->finger;
  out.slots = slots_of(set);
  for (uint32_t slot : out.slots) out.hashes.push_back(from->table[slot].hash);
  for (Py_ssize_t i = 0; from->fill != from->used && i <= from->mask; ++i)
    if (from->table[i].key == mark_of_removed()) out.removed.push_back(static_cast<uint32_t>(i));
  out.of_a_copy = slots_of(copy.get());
  out.is_frozen = !PySet_Check(set);
  out.is_plain = out.removed.empty() && out.mask == as_set(plain.get())->mask;
  return out;
}

bool SetTable::is_of(PyObject* set) const {
  const PySetObject* live = as_set(set);
  if (live->mask != mask || live->finger != finger || live->used != static_cast<Py_ssize_t>(slots.size()) ||
      live->fill != live->used + static_cast<Py_ssize_t>(removed.size()))
    return false;
  PyObject* mark = mark_of_removed();
  for (size_t i = 0; i < slots.size(); ++i) {
    const setentry& entry = live->table[slots[i]];
    if (entry.hash != hashes[i] || !entry.key || entry.key == mark) return false;
  }
  return std::all_of(removed.begin(), removed.end(), [&](uint32_t slot) { return live->table[slot].key == mark; });
}

Owned SetTable::make(PyObject* const* elements) const {
  for (size_t i = 0; i < slots.size(); ++i) {
    Py_hash_t hash = hash_of(elements[i]);
    if (hash != hashes[i]) return {};
  }
  // The table is put together here, because adding the elements would place them anew.
  Owned out = own(PySet_New(nullptr));
  PySetObject* to = as_set(out.get());
  auto size = static_cast<size_t>(mask) + 1;
  setentry* table = to->smalltable;
  if (size > PySet_MINSIZE) table = static_cast<setentry*>(PyMem_Calloc(size, sizeof(setentry)));
  if (!table) throw std::bad_alloc();
  for (size_t i = 0; i < slots.size(); ++i) table[slots[i]] = {Py_NewRef(elements[i]), hashes[i]};
  for (uint32_t slot : removed) table[slot] = {mark_of_removed(), -1};
  to->used = static_cast<Py_ssize_t>(slots.size());
  to->fill = to->used + static_cast<Py_ssize_t>(removed.size());
  to->mask = mask;
  to->finger = finger;
  to->table = table;
  return out;
}

bool operator==(const SetTable& a, const SetTable& b) {
  return a.mask == b.mask && a.finger == b.finger && a.slots == b.slots && a.hashes == b.hashes &&
         a.removed == b.removed;
}

bool serves(const SetTable& traced, const SetTable& other, Order order) {
  // Hashes that differ, as those of two nan objects, stand in an order that says nothing.
  if (traced == other || traced.hashes != other.hashes) return true;
  if (traced.is_changed || traced.of_a_copy != other.of_a_copy) return false;
  if (traced.is_frozen || order == Order::of_iteration) return true;
  // What did nothing to the one may still do something to the other: `s &= t` makes any table a plain one, and so does
  // clear() of an empty one; `s -= t` and `s |= t` make a new table where many elements were taken out, or few slots are
  // free, whatever is in `t`.
  auto many_removed = [](const SetTable& t) { return static_cast<Py_ssize_t>(t.removed.size()) > t.mask / 4; };
  // How many more elements it takes before the interpreter makes a larger table, at three fifths.
  auto room = [](const SetTable& t) {
    return (3 * t.mask - 1) / 5 - static_cast<Py_ssize_t>(t.slots.size() + t.removed.size());
  };
  return !traced.is_plain && (many_removed(traced) || !many_removed(other)) &&
         room(other) >= std::min(room(traced), static_cast<Py_ssize_t>(traced.slots.size()));
}

}  // namespace graftax
