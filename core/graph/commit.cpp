// SPDX-License-Identifier: Apache-2.0
#include "graph/commit.h"

#include "graph/rebuild.h"

namespace graftax {

namespace {

PyObject* field_name(const Program& p, const Instr& n, uint32_t i) {
  return p.statics[p.keys[n.node->keys + p.item_keys(n) + i]].obj;
}

bool has_name(PyObject* names, PyObject* name) {
  for (Py_ssize_t i = 0; names && i < PyTuple_GET_SIZE(names); ++i)
    if (PyTuple_GET_ITEM(names, i) == name) return true;
  return false;
}

void set_item(PyObject* dict, PyObject* key, PyObject* value, bool ordered) {
  check(ordered ? PyODict_SetItem(dict, key, value) : PyDict_SetItem(dict, key, value));
}

void delete_item(PyObject* dict, PyObject* key, bool ordered) {
  check(ordered ? PyODict_DelItem(dict, key) : PyDict_DelItem(dict, key));
}

}  // namespace

bool is_simple_key(PyObject* key) {
  return PyUnicode_CheckExact(key) || PyLong_CheckExact(key) || PyBytes_CheckExact(key) || PyFloat_CheckExact(key) ||
         PyBool_Check(key) || key == Py_None;
}

void Commit::exchange(const NodeKind& kind, PyObject* node, Owned fresh) {
  exchanges_.push_back({&kind, Owned::borrow(node), std::move(fresh)});
}

void Commit::list_item(PyObject* list, Py_ssize_t index, PyObject* value) {
  items_.push_back({Owned::borrow(list), index, Owned::borrow(value)});
}

void Commit::slot(PyObject* obj, Py_ssize_t offset, PyObject* value) {
  slots_.push_back({Owned::borrow(obj), offset, Owned::borrow(value)});
}

void Commit::step(std::function<void()> go, std::function<void()> back) {
  steps_.push_back({std::move(go), std::move(back)});
}

void Commit::assign(PyObject* dict, PyObject* key, PyObject* value, bool ordered) {
  assignments_.push_back({Owned::borrow(dict), Owned::borrow(key), Owned::borrow(value), ordered, {}});
}

void Commit::field(PyObject* obj, const Kind& kind, PyObject* name, PyObject* value) {
  for (const Slot& slot : kind.slots)
    if (slot.name == name) return this->slot(obj, slot.offset, value);
  assign(instance_dict(obj).get(), name, value);
}

void Commit::move_fields(PyObject* from, PyObject* to, const Kind& kind) {
  if (kind.has_dict) {
    // Attributes that `from` lacks stay.
    Owned dict = instance_dict(from), into = instance_dict(to);
    PyObject *name, *value;
    for (Py_ssize_t pos = 0; PyDict_Next(dict.get(), &pos, &name, &value);) assign(into.get(), name, value);
  }
  for (const Slot& slot : kind.slots) this->slot(to, slot.offset, slot_value(from, slot));
}

void Commit::content(const Program& p, uint32_t pc, PyObject* node, PyObject* const* values, PyObject* const* inputs,
                     const Touched* parts) {
  static const Touched whole;
  const Touched& touched = parts ? *parts : whole;
  const Instr& n = p.code[pc];
  const Kind& kind = *n.node->kind;
  kind.node->write(*this, {p, n, values, inputs}, node, touched);
  if (kind.node->is_registered) return;  // its attributes are written by `field` and `move_fields`
  PyObject* const* of_fields = values + n.node->has_extra + n.node->items;
  if (kind.node->is_function) {
    // Asking for the dict of a function makes one: only where there is something to write, or to delete.
    if (reinterpret_cast<PyFunctionObject*>(node)->func_dict || n.node->fields)
      fields(p, n, instance_dict(node).get(), of_fields, touched);
  } else if (kind.has_dict && !(n.flags & OWN_DICT)) {
    fields(p, n, instance_dict(node).get(), of_fields, touched);
  }
  if (!kind.slots.empty()) slots(p, n, node, of_fields + n.node->fields, touched);
}

void Commit::parts(const Instr& n, PyObject* node, PyObject* const* items) {
  // Shared: a std::function has to be copyable, and lists of references are not.
  auto after = std::make_shared<OwnedList>(), before = std::make_shared<OwnedList>();
  for (uint32_t i = 0; i < n.node->items; ++i) after->push(items[i]);
  // What is there now, to be put back if a later step fails.
  Cursor cursor(node, *n.node->kind);
  PyObject *child, *key;
  while (cursor.next(child, key) && cursor.stage() == Cursor::Stage::items) before->push(child);
  if (before->size() != n.node->items)
    raise_error(PyExc_RuntimeError, "a function or an exception has other parts than were recorded");
  auto put = [node = Owned::borrow(node), kind = n.node->kind->node](const std::shared_ptr<OwnedList>& values) {
    kind->set_parts(node.get(), values->data(), static_cast<Py_ssize_t>(values->size()));
  };
  step([put, after] { put(after); }, [put, before] { put(before); });
}

void Commit::fields(const Program& p, const Instr& n, PyObject* dict, PyObject* const* values, const Touched& touched) {
  if (touched.fields) return all_fields(p, n, dict, values);
  uint32_t first = n.node->has_extra + n.node->items;
  for (uint32_t i : touched.children)
    if (i >= first && i < first + n.node->fields) assign(dict, field_name(p, n, i - first), values[i - first]);
  for (Py_ssize_t i = 0; touched.deleted && i < PyTuple_GET_SIZE(touched.deleted); ++i)
    assign(dict, PyTuple_GET_ITEM(touched.deleted, i), nullptr);
}

// Names that are there stay where they are, others are added at the end. Where that would not give the order that was
// recorded, the whole content is exchanged; also where names go, which `take_back` has to put back in their places.
void Commit::all_fields(const Program& p, const Instr& n, PyObject* dict, PyObject* const* values) {
  // Made although it is seldom put in place: memory is asked for before the first write.
  Owned wanted = own(PyDict_New());
  for (uint32_t i = 0; i < n.node->fields; ++i) check(PyDict_SetItem(wanted.get(), field_name(p, n, i), values[i]));
  OwnedList gone;
  PyObject *name, *value;
  uint32_t next = 0;
  bool by_name = n.node->kind->by_name, in_order = true;
  for (Py_ssize_t pos = 0; in_order && PyDict_Next(dict, &pos, &name, &value);) {
    if (name == runtime.tables) continue;  // what is compiled for a function is no attribute of the user's
    if (next < n.node->fields && equal(field_name(p, n, next), name)) ++next;
    else if (!dict_get(wanted.get(), name)) gone.push(name);
    else in_order = by_name;
  }
  if (!in_order || (gone.size() > 0 && !by_name)) {
    if (PyObject* tables = dict_get(dict, runtime.tables)) check(PyDict_SetItem(wanted.get(), runtime.tables, tables));
    exchange(dict_node, dict, std::move(wanted));
    return;
  }
  for (uint32_t i = 0; i < n.node->fields; ++i)
    if (dict_get(dict, field_name(p, n, i)) != values[i]) assign(dict, field_name(p, n, i), values[i]);
  for (size_t i = 0; i < gone.size(); ++i) assign(dict, gone[i], nullptr);
}

void Commit::slots(const Program& p, const Instr& n, PyObject* node, PyObject* const* values, const Touched& touched) {
  // The program names the slots that were filled, in the order of the class: a slot that is not named was empty.
  uint32_t filled = 0, first = n.node->has_extra + n.node->items + n.node->fields;
  for (const Slot& slot : n.node->kind->slots) {
    PyObject* next = filled < n.node->slots ? field_name(p, n, n.node->fields + filled) : nullptr;
    bool present = next && (next == slot.name || PyUnicode_Compare(next, slot.name) == 0);
    bool is_touched = touched.fields || (present ? touched.has(first + filled) : has_name(touched.deleted, slot.name));
    PyObject* value = present ? values[filled++] : nullptr;
    if (is_touched && slot_value(node, slot) != value) this->slot(node, slot.offset, value);
  }
}

void Commit::Item::exchange() {
  PyObject* old = PyList_GET_ITEM(list.get(), index);
  PyList_SET_ITEM(list.get(), index, value.release());
  value = Owned::steal(old);
}

void Commit::SlotWrite::exchange() {
  auto** place = reinterpret_cast<PyObject**>(reinterpret_cast<char*>(obj.get()) + offset);
  value = Owned::steal(std::exchange(*place, value.release()));
}

// Keys that are new need memory: they are added first. Deleting them again needs none.
void Commit::insert_keys() {
  try {
    for (Assignment& a : assignments_) {
      if (!a.value || dict_get(a.dict.get(), a.key.get())) continue;
      set_item(a.dict.get(), a.key.get(), a.value.get(), a.ordered);
      a.is_new = true;
    }
  } catch (...) {
    for (Assignment& a : assignments_)
      if (a.is_new) delete_item(a.dict.get(), a.key.get(), a.ordered);
    throw;
  }
}

void Commit::run() {
  size_t steps_done = 0;
  try {
    // First what may fail, and can be taken back: steps, contents of unknown layout (as steps of their own), new keys.
    for (; steps_done < steps_.size(); ++steps_done) steps_[steps_done].go();
    // All are asked before the first is written: one that refuses, such as an exported buffer, ends the commit.
    for (Exchange& e : exchanges_) e.by_api = !e.kind->can_exchange(e.node.get());
    for (Exchange& e : exchanges_) {
      if (!e.by_api) continue;
      step([] {}, [node = e.node, before = e.kind->copy_items(e.node.get()),
                   kind = e.kind] { kind->replace_items(node.get(), before.get()); });
      ++steps_done;
      e.kind->replace_items(e.node.get(), e.fresh.get());
    }
    for (const Item& i : items_)
      if (i.index >= PyList_GET_SIZE(i.list.get()))  // a step above may have run code of the user
        raise_graftax("ConcurrentChangeError", "a list became shorter while its items were written");
    insert_keys();
  } catch (...) {
    while (steps_done-- > 0) steps_[steps_done].back();
    throw;
  }
  // From here on nothing can fail.
  for (Exchange& e : exchanges_)
    if (!e.by_api) e.kind->exchange(e.node.get(), e.fresh.get());
  for (Assignment& a : assignments_) {
    if (a.is_new) continue;
    a.old = Owned::borrow(dict_get(a.dict.get(), a.key.get()));
    if (a.value) set_item(a.dict.get(), a.key.get(), a.value.get(), a.ordered);
    else if (a.old) delete_item(a.dict.get(), a.key.get(), a.ordered);
  }
  for (Item& i : items_) i.exchange();
  for (SlotWrite& s : slots_) s.exchange();
}

// In the reverse order of `run`.
void Commit::take_back() {
  for (SlotWrite& s : slots_) s.exchange();
  for (Item& i : items_)
    if (i.index < PyList_GET_SIZE(i.list.get())) i.exchange();
  for (size_t n = assignments_.size(); n-- > 0;) {
    Assignment& a = assignments_[n];
    if (a.old) set_item(a.dict.get(), a.key.get(), a.old.get(), a.ordered);
    else if (a.value) delete_item(a.dict.get(), a.key.get(), a.ordered);
  }
  for (Exchange& e : exchanges_)
    if (!e.by_api) e.kind->exchange(e.node.get(), e.fresh.get());
  for (size_t n = steps_.size(); n-- > 0;) steps_[n].back();
}

}  // namespace graftax
