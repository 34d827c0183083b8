// SPDX-License-Identifier: Apache-2.0
// Write-back of nodes that are registered with JAX: their raw attributes are compared with a snapshot.
#include <algorithm>

#include "writeback.h"

namespace graftax {

// (instance dict, slot values) of a registered node, to see later what changed.
Owned Trace::raw_snapshot(PyObject* obj, const Kind& kind) const {
  Owned dict = kind.has_dict ? own(PyDict_Copy(instance_dict(obj).get())) : own(PyDict_New());
  Owned slots = own(PyTuple_New(static_cast<Py_ssize_t>(kind.slots.size())));
  for (size_t i = 0; i < kind.slots.size(); ++i) {
    PyObject* value = slot_value(obj, kind.slots[i]);
    PyTuple_SET_ITEM(slots.get(), static_cast<Py_ssize_t>(i), Py_NewRef(value ? value : Py_NotImplemented));
  }
  return own(PyTuple_Pack(2, dict.get(), slots.get()));
}

// Does an attribute hold a node that is none of the children which the object was made of, nor its aux data? A flatten may look into it.
bool Trace::hides_node(uint32_t pc, PyObject* attributes) const {
  const Program& p = recording_->program();
  const Instr& n = p.code[pc];
  PyObject *name, *value;
  for (Py_ssize_t pos = 0; PyDict_Next(attributes, &pos, &name, &value);) {
    const Kind* kind = known_kind(Py_TYPE(value));
    if (kind && !kind->is_node()) continue;
    bool child_of_it = false;
    uint32_t child = pc + 1;
    for (uint32_t i = 0; i < 1 + n.items && !child_of_it; ++i, child = p.after(child))
      child_of_it = value == expected(child);
    if (!child_of_it) return true;
  }
  return false;
}

// Does a registered node flatten to other leaves than those that it was made of? Where it does, another one is made of
// them: its class's flatten may give something else than its unflatten was given.
bool Trace::flattens_otherwise(uint32_t pc, PyObject* obj) {
  const Program& p = recording_->program();
  const Instr& n = p.code[pc];
  Owned made_of = own(PyList_New(0));
  uint32_t child = p.after(pc + 1);
  for (uint32_t i = 0; i < n.items; ++i, child = p.after(child)) check(PyList_Append(made_of.get(), expected(child)));
  auto same = [](PyObject* a, PyObject* b) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(a); ++i) {
      PyObject *x = PySequence_Fast_GET_ITEM(a, i), *y = PySequence_Fast_GET_ITEM(b, i);
      if (x != y && kind_of(x).is_leaf()) return false;
    }
    return true;
  };
  Cursor now(obj, *n.kind, &opened_);
  if (now.items() != static_cast<Py_ssize_t>(n.items)) return true;
  if (same(made_of.get(), now.materialised())) return false;
  Owned twin = own(PyObject_CallMethod(n.treedef, "unflatten", "O", made_of.get()));
  if (Py_TYPE(twin.get()) != Py_TYPE(obj)) return true;
  Cursor before(twin.get(), *n.kind);
  return before.items() != now.items() || !same(before.materialised(), now.materialised());
}

bool Trace::raw_changed(uint32_t track, PyObject* obj, PyObject* delta, PyObject* deleted) {
  uint32_t pc = recording_->program().track_pc[track];
  const Kind& kind = kind_of(obj);
  Owned now = raw_snapshot(obj, kind);
  PyObject* before = raw_[track];
  auto part = [](PyObject* snapshot, Py_ssize_t i) { return PyTuple_GET_ITEM(snapshot, i); };
  auto note = [&](PyObject* name, PyObject* value) {
    if (value) check(PyDict_SetItem(delta, name, value));
    else check(PyList_Append(deleted, name));
  };
  PyObject *name, *value;
  Py_ssize_t pos = 0;
  bool any = false;
  while (PyDict_Next(part(now.get(), 0), &pos, &name, &value))
    if (dict_get(part(before, 0), name) != value) note(name, value), any = true;
  pos = 0;
  while (PyDict_Next(part(before, 0), &pos, &name, &value))
    if (!dict_get(part(now.get(), 0), name)) note(name, nullptr), any = true;
  for (size_t i = 0; i < kind.slots.size(); ++i) {
    PyObject* a = PyTuple_GET_ITEM(part(before, 1), static_cast<Py_ssize_t>(i));
    PyObject* b = PyTuple_GET_ITEM(part(now.get(), 1), static_cast<Py_ssize_t>(i));
    if (a != b) note(kind.slots[i].name, b == Py_NotImplemented ? nullptr : b), any = true;
  }
  if (!donated_.empty()) {  // an attribute that holds a donated array is written, although it did not change
    auto held = [&](PyObject* v) {
      return v && (PyTuple_Check(v) || std::binary_search(donated_.begin(), donated_.end(), v));
    };
    pos = 0;
    while (PyDict_Next(part(now.get(), 0), &pos, &name, &value))
      if (held(value)) note(name, value), any = true;
    for (const Slot& slot : kind.slots)
      if (held(slot_value(obj, slot))) note(slot.name, slot_value(obj, slot)), any = true;
  }
  if (any) return true;
  // The same attributes, yet the class flattens to something else: a container behind an attribute was changed.
  if (!hides_node(pc, part(now.get(), 0)) || !flattens_otherwise(pc, obj)) return false;
  pos = 0;
  while (PyDict_Next(part(now.get(), 0), &pos, &name, &value))
    if (kind_of(value).is_node()) note(name, value), any = true;
  return any;
}

// Gives a registered node the attributes back that its snapshot holds.
void Trace::restore_raw(uint32_t track, OwnedList& graveyard) {
  PyObject* obj = recording_->live[recording_->program().track_pc[track]];
  const Kind& kind = kind_of(obj);
  PyObject *snapshot = raw_[track], *before = PyTuple_GET_ITEM(snapshot, 0), *name, *value;
  if (kind.has_dict) {
    Owned now = own(PyDict_Copy(instance_dict(obj).get()));
    Py_ssize_t pos = 0;
    while (PyDict_Next(now.get(), &pos, &name, &value))
      if (!dict_get(before, name)) write_field(obj, kind, name, nullptr, graveyard);
    pos = 0;
    while (PyDict_Next(before, &pos, &name, &value)) write_field(obj, kind, name, value, graveyard);
  }
  for (size_t i = 0; i < kind.slots.size(); ++i) {
    PyObject* old = PyTuple_GET_ITEM(PyTuple_GET_ITEM(snapshot, 1), static_cast<Py_ssize_t>(i));
    write_field(obj, kind, kind.slots[i].name, old == Py_NotImplemented ? nullptr : old, graveyard);
  }
}

}  // namespace graftax
