// SPDX-License-Identifier: Apache-2.0
#include "commit.h"

#include <algorithm>
#include <cstring>

#include "exchange.h"
#include "parts.h"
#include "rebuild.h"

namespace graftax {

namespace {

PyObject* field_name(const Program& p, const Instr& n, uint32_t i) {
  return p.statics[p.keys[n.keys + p.item_keys(n) + i]].obj;
}

bool has_name(PyObject* names, PyObject* name) {
  for (Py_ssize_t i = 0; names && i < PyTuple_GET_SIZE(names); ++i)
    if (PyTuple_GET_ITEM(names, i) == name) return true;
  return false;
}

// The same content through public functions: for a layout that is not known.
void replace_by_api(PyObject* node, PyObject* content, Base base) {
  auto call = [&](PyTypeObject* type, const char* method, PyObject* arg) {
    auto* cls = reinterpret_cast<PyObject*>(type);
    Owned(own(arg ? PyObject_CallMethod(cls, method, "OO", node, arg) : PyObject_CallMethod(cls, method, "O", node)));
  };
  switch (base) {
    case Base::odict: call(runtime.odict_type, "clear", nullptr); return call(runtime.odict_type, "update", content);
    case Base::deque: call(runtime.deque_type, "clear", nullptr); return call(runtime.deque_type, "extend", content);
    case Base::dict:
    case Base::defaultdict: PyDict_Clear(node); return check(PyDict_Update(node, content));
    default:
      check(PySequence_DelSlice(node, 0, PySequence_Size(node)));
      call(runtime.array_array_type, "extend", content);
  }
}

Owned copy_of(PyObject* node, Base base) {
  switch (base) {
    case Base::odict:
      return own(PyObject_CallMethod(reinterpret_cast<PyObject*>(runtime.odict_type), "copy", "O", node));
    case Base::deque:
      return own(PyObject_CallMethod(reinterpret_cast<PyObject*>(runtime.deque_type), "copy", "O", node));
    case Base::dict:
    case Base::defaultdict: return own(PyDict_Copy(node));
    default: return own(PySequence_GetSlice(node, 0, PySequence_Size(node)));
  }
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

void Commit::assign(PyObject* dict, PyObject* key, PyObject* value, bool ordered) {
  assignments_.push_back({Owned::borrow(dict), Owned::borrow(key), Owned::borrow(value), ordered, {}});
}

void Commit::field(PyObject* obj, const Kind& kind, PyObject* name, PyObject* value) {
  for (const Slot& slot : kind.slots)
    if (slot.name == name) return slots_.push_back({Owned::borrow(obj), slot.offset, Owned::borrow(value)});
  assign(instance_dict(obj).get(), name, value);
}

void Commit::move_fields(PyObject* from, PyObject* to, const Kind& kind) {
  if (kind.has_dict) {
    Owned dict = instance_dict(from), into = instance_dict(to);
    PyObject *name, *value;
    for (Py_ssize_t pos = 0; PyDict_Next(dict.get(), &pos, &name, &value);) assign(into.get(), name, value);
  }
  for (const Slot& slot : kind.slots)
    slots_.push_back({Owned::borrow(to), slot.offset, Owned::borrow(slot_value(from, slot))});
}

void Commit::content(const Program& p, uint32_t pc, PyObject* node, PyObject* const* values, PyObject* const* inputs,
                     const Touched* given) {
  static const Touched whole;
  const Touched& touched = given ? *given : whole;
  const Instr& n = p.code[pc];
  const Kind& kind = *n.kind;
  items(p, pc, node, values, inputs, touched);
  if (kind.base == Base::registered) return;
  PyObject* const* of_fields = values + n.has_extra + n.items;
  if (kind.base == Base::function) {
    if (reinterpret_cast<PyFunctionObject*>(node)->func_dict || n.fields)
      fields(p, n, instance_dict(node).get(), of_fields, touched);
  } else if (kind.has_dict && !(n.flags & OWN_DICT)) {
    fields(p, n, instance_dict(node).get(), of_fields, touched);
  }
  if (!kind.slots.empty()) slots(p, n, node, of_fields + n.fields, touched);
}

void Commit::items(const Program& p, uint32_t pc, PyObject* node, PyObject* const* values, PyObject* const* inputs,
                   const Touched& touched) {
  const Instr& n = p.code[pc];
  PyObject* const* items = values + n.has_extra;
  switch (n.kind->base) {
    case Base::list: return list_items(n, node, items, touched);
    case Base::defaultdict: {
      slots_.push_back({Owned::borrow(node), default_factory_offset(), Owned::borrow(values[0])});
      [[fallthrough]];
    }
    case Base::dict:
    case Base::odict: return dict_items(p, n, node, items, inputs, touched);
    case Base::deque: return fresh(p, n, node, items, inputs);
    case Base::set:
      if (n.kind->solid == &PySet_Type) fresh(p, n, node, items, inputs);
      return;
    case Base::buffer: return buffer(p, n, node);
    case Base::function:
      return undoable(node, n, items, [](PyObject* f, const Instr& at, PyObject* const* v, OwnedList& old) {
        write_function(f, at, v, old);
      });
    case Base::exception:
      return undoable(node, n, items, [](PyObject* e, const Instr&, PyObject* const* v, OwnedList& old) {
        write_exception(e, v, old);
      });
    case Base::partial:
      return undoable(node, n, items,
                      [](PyObject* f, const Instr&, PyObject* const* v, OwnedList& old) { write_partial(f, v, old); });
    case Base::cell: {
      auto offset = static_cast<Py_ssize_t>(offsetof(PyCellObject, ob_ref));
      return slots_.push_back({Owned::borrow(node), offset, Owned::borrow(n.items ? items[0] : nullptr)});
    }
    default: return;
  }
}

void Commit::list_items(const Instr& n, PyObject* list, PyObject* const* items, const Touched& touched) {
  if (touched.items || PyList_GET_SIZE(list) != static_cast<Py_ssize_t>(n.items)) {
    Owned fresh = own(PyList_New(n.items));
    for (uint32_t i = 0; i < n.items; ++i) PyList_SET_ITEM(fresh.get(), i, Py_NewRef(items[i]));
    exchanges_.push_back({Owned::borrow(list), std::move(fresh), Base::list});
    return;
  }
  for (uint32_t i : touched.children)
    if (i < n.items) items_.push_back({Owned::borrow(list), static_cast<Py_ssize_t>(i), Owned::borrow(items[i])});
}

void Commit::dict_items(const Program& p, const Instr& n, PyObject* dict, PyObject* const* items,
                        PyObject* const* inputs, const Touched& touched) {
  bool ordered = n.kind->base == Base::odict;
  if (touched.items) return fresh(p, n, dict, items, inputs);
  for (uint32_t i = 0; i < n.items; ++i)
    if (touched.has(n.has_extra + i)) assign(dict, key_object(p, p.keys[n.keys + i], inputs).get(), items[i], ordered);
  for (Py_ssize_t i = 0; touched.dropped && i < PyTuple_GET_SIZE(touched.dropped); ++i)
    assign(dict, PyTuple_GET_ITEM(touched.dropped, i), nullptr, ordered);
}

// A builtin container with the new content, whose place it will take. Hashing keys may run user code: here, not later.
void Commit::fresh(const Program& p, const Instr& n, PyObject* node, PyObject* const* items, PyObject* const* inputs) {
  Owned made = new_items(p, n, items, inputs);
  exchanges_.push_back({Owned::borrow(node), std::move(made), n.kind->base});
}

// Of the same size, the memory is written, and whoever looks at it sees that.
void Commit::buffer(const Program& p, const Instr& n, PyObject* node) {
  PyObject* content = p.statics[n.payload].obj;
  if (PyObject_TypeCheck(node, runtime.ndarray_type)) {
    auto write = [node = Owned::borrow(node)](const Owned& value) {
      Owned(own(PyObject_CallMethod(runtime.statics, "write_text_array", "OO", node.get(), value.get())));
    };
    Owned before = own(PyObject_CallOneArg(n.kind->reduce, node)), after = Owned::borrow(content);
    steps_.push_back({[write, after] { write(after); }, [write, before] { write(before); }});
    return;
  }
  Owned made = new_items(p, n, nullptr, nullptr);
  Py_buffer to, from;
  check(PyObject_GetBuffer(node, &to, PyBUF_SIMPLE | PyBUF_WRITABLE));
  Py_ssize_t size = to.len;
  PyBuffer_Release(&to);
  check(PyObject_GetBuffer(made.get(), &from, PyBUF_SIMPLE));
  bool same_size = from.len == size;
  PyBuffer_Release(&from);
  if (!same_size) {
    exchanges_.push_back({Owned::borrow(node), std::move(made), Base::buffer});
    return;
  }
  Owned before = own(PyBytes_FromObject(node));
  auto copy = [node = Owned::borrow(node)](PyObject* source) {
    Py_buffer a, b;
    check(PyObject_GetBuffer(node.get(), &a, PyBUF_SIMPLE | PyBUF_WRITABLE));
    if (PyObject_GetBuffer(source, &b, PyBUF_SIMPLE) < 0) {
      PyBuffer_Release(&a);
      raise_python();
    }
    if (a.len == b.len) memcpy(a.buf, b.buf, static_cast<size_t>(a.len));
    PyBuffer_Release(&a);
    PyBuffer_Release(&b);
  };
  steps_.push_back({[copy, made] { copy(made.get()); }, [copy, before] { copy(before.get()); }});
}

// What is set through functions of the interpreter that check their arguments: before the others, with a way back.
void Commit::undoable(PyObject* node, const Instr& n, PyObject* const* items,
                      void (*write)(PyObject*, const Instr&, PyObject* const*, OwnedList&)) {
  auto after = std::make_shared<OwnedList>(), before = std::make_shared<OwnedList>();
  for (uint32_t i = 0; i < n.items; ++i) after->push(items[i]);
  Cursor cursor(node, *n.kind);
  PyObject *child, *key;
  while (cursor.next(child, key) && cursor.stage() == Cursor::Stage::items) before->push(child);
  if (before->size() != n.items)
    raise_error(PyExc_RuntimeError, "a function or an exception has other parts than were recorded");
  auto put = [node = Owned::borrow(node), &n, write](const std::shared_ptr<OwnedList>& values) {
    OwnedList old;
    write(node.get(), n, values->data(), old);
  };
  steps_.push_back({[put, after] { put(after); }, [put, before] { put(before); }});
}

void Commit::fields(const Program& p, const Instr& n, PyObject* dict, PyObject* const* values, const Touched& touched) {
  if (touched.fields) return all_fields(p, n, dict, values);
  uint32_t first = n.has_extra + n.items;
  for (uint32_t i : touched.children)
    if (i >= first && i < first + n.fields) assign(dict, field_name(p, n, i - first), values[i - first]);
  for (Py_ssize_t i = 0; touched.deleted && i < PyTuple_GET_SIZE(touched.deleted); ++i)
    assign(dict, PyTuple_GET_ITEM(touched.deleted, i), nullptr);
}

// Names that are there stay where they are, others go or are added at the end. Where that would not give the order that
// was recorded, the whole content is exchanged.
void Commit::all_fields(const Program& p, const Instr& n, PyObject* dict, PyObject* const* values) {
  Owned wanted = own(PyDict_New());
  for (uint32_t i = 0; i < n.fields; ++i) check(PyDict_SetItem(wanted.get(), field_name(p, n, i), values[i]));
  OwnedList gone;
  PyObject *name, *value;
  uint32_t next = 0;
  bool in_order = true;
  for (Py_ssize_t pos = 0; in_order && PyDict_Next(dict, &pos, &name, &value);) {
    if (name == runtime.tables) continue;  // what is compiled for a function is no attribute of the user's
    if (next < n.fields && equal(field_name(p, n, next), name)) ++next;
    else if (!dict_get(wanted.get(), name)) gone.push(name);
    else in_order = n.kind->by_name;
  }
  if (!in_order) {
    if (PyObject* tables = dict_get(dict, runtime.tables)) check(PyDict_SetItem(wanted.get(), runtime.tables, tables));
    exchanges_.push_back({Owned::borrow(dict), std::move(wanted), Base::dict});
    return;
  }
  for (uint32_t i = 0; i < n.fields; ++i)
    if (dict_get(dict, field_name(p, n, i)) != values[i]) assign(dict, field_name(p, n, i), values[i]);
  for (size_t i = 0; i < gone.size(); ++i) assign(dict, gone[i], nullptr);
}

void Commit::slots(const Program& p, const Instr& n, PyObject* node, PyObject* const* values, const Touched& touched) {
  uint32_t filled = 0, first = n.has_extra + n.items + n.fields;
  for (const Slot& slot : n.kind->slots) {
    PyObject* next = filled < n.slots ? field_name(p, n, n.fields + filled) : nullptr;
    bool present = next && (next == slot.name || PyUnicode_Compare(next, slot.name) == 0);
    bool asked = touched.fields || (present ? touched.has(first + filled) : has_name(touched.deleted, slot.name));
    PyObject* value = present ? values[filled++] : nullptr;
    if (asked && slot_value(node, slot) != value)
      slots_.push_back({Owned::borrow(node), slot.offset, Owned::borrow(value)});
  }
}

// Keys that are new need memory: they are added first. Deleting them again needs none.
void Commit::insert_keys() {
  size_t at = 0;
  std::vector<Assignment*> inserted;
  inserted.reserve(assignments_.size());
  try {
    for (; at < assignments_.size(); ++at) {
      Assignment& a = assignments_[at];
      if (!a.value || dict_get(a.dict.get(), a.key.get())) continue;
      set_item(a.dict.get(), a.key.get(), a.value.get(), a.ordered);
      inserted.push_back(&a);
    }
  } catch (...) {
    for (Assignment* a : inserted) delete_item(a->dict.get(), a->key.get(), a->ordered);
    throw;
  }
}

void Commit::run() {
  size_t done = 0;
  try {
    for (; done < steps_.size(); ++done) steps_[done].go();
    for (Exchange& e : exchanges_) e.by_api = !can_exchange(e.node.get(), e.base);
    for (Exchange& e : exchanges_) {
      if (!e.by_api) continue;
      Owned before = copy_of(e.node.get(), e.base);
      steps_.push_back(
          {[] {}, [node = e.node, before, base = e.base] { replace_by_api(node.get(), before.get(), base); }});
      ++done;
      replace_by_api(e.node.get(), e.fresh.get(), e.base);
    }
    for (const Item& i : items_)
      if (i.index >= PyList_GET_SIZE(i.list.get()))
        raise_graftax("ConcurrentChangeError", "a list became shorter while its items were written");
    insert_keys();
  } catch (...) {
    while (done-- > 0) steps_[done].back();
    throw;
  }
  // From here on nothing can fail.
  for (Exchange& e : exchanges_)
    if (!e.by_api) exchange(e.node.get(), e.fresh.get(), e.base);
  for (Assignment& a : assignments_) {
    a.old = Owned::borrow(dict_get(a.dict.get(), a.key.get()));
    if (a.value) set_item(a.dict.get(), a.key.get(), a.value.get(), a.ordered);
    else if (a.old) delete_item(a.dict.get(), a.key.get(), a.ordered);
  }
  for (Item& i : items_) {
    PyObject* old = PyList_GET_ITEM(i.list.get(), i.index);
    PyList_SET_ITEM(i.list.get(), i.index, i.value.release());
    i.value = Owned::steal(old);
  }
  for (SlotWrite& s : slots_) {
    auto** place = reinterpret_cast<PyObject**>(reinterpret_cast<char*>(s.obj.get()) + s.offset);
    s.value = Owned::steal(std::exchange(*place, s.value.release()));
  }
}

}  // namespace graftax
