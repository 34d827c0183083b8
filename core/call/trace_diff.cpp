// SPDX-License-Identifier: Apache-2.0
// What a traced function changed: every node is compared with what was built for it.
#include <algorithm>
#include <unordered_set>

#include "call/trace.h"
#include "graph/key_path.h"
#include "graph/static_equality.h"

namespace graftax {

// Is `value` what the child at `pc` was built as?
bool Trace::is_as_built(PyObject* value, uint32_t pc) const {
  const Program& p = recording_->program();
  const Instr& c = p.code[pc];
  if (value == expected(pc)) return donated_.empty() || !holds_donated(pc);
  if (c.op != Op::stat) return false;
  How how = p.statics[c.arg].how;
  if (how == How::context) return context_matches(p.statics[c.arg], value);
  return how >= How::integer && how <= How::bytes && static_matches(p, c.arg, value);
}

// Does the node at `pc` no longer hold what it was built with?
bool Trace::changed(uint32_t pc) const {
  const Program& p = recording_->program();
  const Instr& n = p.code[pc];
  Owned obj = Owned::borrow(expected(pc));
  if (Py_TYPE(obj.get()) != n.node->type)
    raise_graftax("StructureError", path_text(p, pc, root_names()) + ": its class was changed from " +
                                        n.node->type->tp_name + " to " + Py_TYPE(obj.get())->tp_name +
                                        " inside the traced function, which cannot be written back");
  const Kind& kind = *n.node->kind;
  if (kind.node->is_function && !kind.node->content_matches(p, n, obj.get()))
    raise_graftax("StructureError",
                  path_text(p, pc, root_names()) +
                      ": the code, the name, __doc__ or __module__ of this function was changed inside the "
                      "traced function, which cannot be written back");
  if (kind.node->content_changed(p, n, obj.get())) return true;
  // Child by child: mostly the very objects that it was built with.
  Cursor cursor(obj.get(), kind);
  uint32_t count = p.children(pc), child = pc + 1, key_at = p.child_keys(n);
  PyObject *value = nullptr, *key = nullptr;
  uint32_t i = 0;
  for (; cursor.next(value, key); ++i, child = p.after(child)) {
    if (i >= count) return true;
    if (key && !is_key(key, key_at++)) return true;
    if (!is_as_built(value, child)) return true;
  }
  return i != count;
}

bool Trace::holds_otherwise(uint32_t pc) const {
  const Instr& n = recording_->program().code[pc];
  return n.op == Op::node && Py_TYPE(expected(pc)) == n.node->type &&
         n.node->kind->node->holds_otherwise(recording_->program(), n, expected(pc));
}

bool Trace::is_key(PyObject* key, uint32_t at) const {
  const Program& p = recording_->program();
  const Static& recorded = p.statics[p.keys[at]];
  return recorded.obj == key || (recorded.how == How::string && static_matches(p, p.keys[at], key));
}

// An object's attributes, where it is immutable and a registered class says what it holds; null elsewhere.
Owned Trace::unflattened(uint32_t pc) const {
  const Instr& n = recording_->program().code[pc];
  if (n.op != Op::node || n.node->track != NONE || !n.node->kind->node->is_registered) return {};
  return Py_TYPE(expected(pc)) == n.node->type ? attributes_of(expected(pc), *n.node->kind) : Owned();
}

// An attribute of a name that the class has too is a cache (cached_property): it is dropped, and computed again.
void Trace::refuse_new_attributes(uint32_t pc, PyObject* dict, const std::function<bool(PyObject*)>& is_known) const {
  PyObject *name, *value;
  for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &name, &value);) {
    if (is_known(name) || name == runtime.tables || _PyType_Lookup(Py_TYPE(expected(pc)), name)) continue;
    raise_graftax("MutationError", path_text(recording_->program(), pc, root_names()) + ": the attribute " +
                                       short_repr(name) + " was added to an immutable " +
                                       Py_TYPE(expected(pc))->tp_name +
                                       " inside the traced function. It has no identity that the change could be "
                                       "brought back to: make the class mutable, or return the changed object.");
  }
}

// The same for an attribute that a registered class has already, unless it flattens to what it was made of: then it is
// a cache, too.
void Trace::refuse_changed_registered(uint32_t pc, PyObject* before) {
  Owned now = attributes_of(expected(pc), *recording_->program().code[pc].node->kind);
  refuse_new_attributes(pc, now.get(), [&](PyObject* name) { return dict_get(before, name) != nullptr; });
  PyObject *name, *was;
  for (Py_ssize_t at = 0; PyDict_Next(before, &at, &name, &was);) {
    if (was == dict_get(now.get(), name)) continue;
    if (!(is_part(pc, was) && kind_of(was).is_node()) && !is_made_otherwise(pc)) continue;
    raise_graftax("MutationError", path_text(recording_->program(), pc, root_names()) + ": the attribute " +
                                       short_repr(name) + " of an immutable " + Py_TYPE(expected(pc))->tp_name +
                                       " was changed inside the traced function. It has no identity that the change "
                                       "could be brought back to: make the class mutable, or return the changed "
                                       "object.");
  }
}

// Does a registered class flatten an immutable object to other values, or with other aux data, than it was made of?
bool Trace::is_made_otherwise(uint32_t pc) {
  const Program& p = recording_->program();
  Cursor now(expected(pc), *p.code[pc].node->kind, &opened_);
  uint32_t child = pc + 1, i = 0;
  PyObject *value, *key;
  for (; now.next(value, key); ++i, child = p.after(child)) {
    if (i == p.children(pc)) return true;
    if (now.stage() == Cursor::Stage::extra ? !equal(value, expected(child))
                                            : p.code[child].op != Op::node && !is_as_built(value, child))
      return true;
  }
  return i != p.children(pc);
}

// Was an attribute of an immutable object replaced, deleted or added (below its own __setattr__)?
void Trace::refuse_changed_frozen() {
  const Program& p = recording_->program();
  for (uint32_t pc = 0; pc < p.code.size(); ++pc) {
    const Instr& n = p.code[pc];
    if (n.op != Op::node || n.node->track != NONE || Py_TYPE(expected(pc)) != n.node->type) continue;
    PyObject* obj = expected(pc);
    if (n.node->kind->node->is_registered) {
      refuse_changed_registered(pc, unflattened_[pc]);
      continue;
    }
    Owned dict = n.node->kind->has_dict ? instance_dict(obj) : Owned();
    uint32_t child = pc + 1, first = n.node->has_extra + n.node->items, key_at = n.node->keys + p.item_keys(n);
    if (dict)
      refuse_new_attributes(pc, dict.get(), [&p, &n, key_at](PyObject* name) {
        for (uint32_t i = 0; i < n.node->fields; ++i)
          if (equal(p.statics[p.keys[key_at + i]].obj, name)) return true;
        return false;
      });
    for (uint32_t i = 0; i < first; ++i) child = p.after(child);
    for (uint32_t i = 0; i < n.node->fields + n.node->slots; ++i, child = p.after(child)) {
      PyObject* name = p.statics[p.keys[key_at + i]].obj;
      PyObject* value = nullptr;
      if (i < n.node->fields) {
        value = dict_get(dict.get(), name);
      } else {
        for (const Slot& slot : n.node->kind->slots)
          if (slot.name == name) value = slot_value(obj, slot);
      }
      if (value == expected(child)) continue;
      if (value && p.code[child].op == Op::stat && static_matches(p, p.code[child].arg, value)) continue;
      raise_graftax("MutationError",
                    path_text(p, child, root_names()) + ": this attribute of an immutable " + n.node->type->tp_name +
                        " was changed inside the traced function. It has no identity that the change could "
                        "be brought back to: make the class mutable, or return the changed object.");
    }
  }
}

// Is a donated leaf at `pc`, or below it with no tracked node between? Then what holds it must be written.
bool Trace::holds_donated(uint32_t pc) const {
  const Program& p = recording_->program();
  for (uint32_t i = pc, end = p.after(pc); i < end;) {
    const Instr& n = p.code[i];
    if (n.op == Op::leaf && std::binary_search(donated_.begin(), donated_.end(), built_[i])) return true;
    i = n.op == Op::node && n.node->track != NONE ? n.node->next : i + 1;
  }
  return false;
}

namespace {

// By key or name, which child of a recorded node it was.
class RecordedKeys {
 public:
  RecordedKeys(const Program& p, uint32_t first_key, uint32_t count, const uint32_t* children)
      : program_(p), first_key_(first_key), children_(children), number_(own(PyDict_New())) {
    for (uint32_t i = 0; i < count; ++i)
      check(PyDict_SetItem(number_.get(), p.statics[p.keys[first_key + i]].obj, own(PyLong_FromUnsignedLong(i)).get()));
  }

  // The instruction of the child that was under this key, which counts as met; NONE for a new one. One that is only
  // equal (1.0 where 1 was) is new, and cannot be set while the old one is there: all items are.
  uint32_t meet(PyObject* key) {
    PyObject* number = dict_get(number_.get(), key);
    if (!number) return any_new_ = true, NONE;
    auto i = static_cast<uint32_t>(PyLong_AsUnsignedLong(number));
    if (!static_matches(program_, program_.keys[first_key_ + i], key)) return any_new_ = true, in_order_ = false, NONE;
    if (any_new_ || (met_ && i < last_)) in_order_ = false;
    last_ = i, ++met_;
    check(PyDict_DelItem(number_.get(), key));
    return children_[i];
  }

  // Do the keys that stayed stand in their old order, and new ones after them?
  bool in_order() const { return in_order_; }
  bool same_keys() const { return in_order_ && !any_new_ && PyDict_GET_SIZE(number_.get()) == 0; }
  Owned gone() const { return own(PyList_AsTuple(own(PyDict_Keys(number_.get())).get())); }

 private:
  const Program& program_;
  uint32_t first_key_;
  const uint32_t* children_;
  Owned number_;
  uint32_t last_ = 0, met_ = 0;
  bool any_new_ = false, in_order_ = true;
};

bool all_simple(const Program& p, uint32_t first, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) {
    const Static& key = p.statics[p.keys[first + i]];
    if (!key.obj || key.how == How::tuple || !is_simple_key(key.obj)) return false;
  }
  return true;
}

bool all_simple(PyObject* dict) {
  PyObject *key, *value;
  for (Py_ssize_t pos = 0; PyDict_Next(dict, &pos, &key, &value);)
    if (!is_simple_key(key)) return false;
  return true;
}

}  // namespace

// Which parts of a changed node are others now.
Touched Trace::touched_parts(uint32_t pc, Recorder& recorder) const {
  const Program& p = recording_->program();
  const Instr& n = p.code[pc];
  PyObject* obj = expected(pc);
  // Only keys whose comparison runs no user code are written one by one.
  bool is_dict =
      n.node->kind->node->keys == Keys::items && all_simple(p, n.node->keys, n.node->items) && all_simple(obj);
  bool is_list = n.node->kind->items == Items::list && PyList_GET_SIZE(obj) == static_cast<Py_ssize_t>(n.node->items);
  std::vector<uint32_t> children;
  for (uint32_t c = pc + 1, i = 0; i < p.children(pc); ++i, c = p.after(c)) children.push_back(c);
  const uint32_t* first = children.data() + n.node->has_extra;
  uint32_t names = n.node->keys + p.item_keys(n);
  RecordedKeys items(p, n.node->keys, is_dict ? n.node->items : 0, first),
      fields(p, names, n.node->fields, first + n.node->items);
  RecordedKeys slots(p, names + n.node->fields, n.node->slots, first + n.node->items + n.node->fields);
  Touched out;
  Cursor cursor(obj, *n.node->kind);
  PyObject *value, *key;
  for (uint32_t i = 0; cursor.next(value, key); ++i) {
    uint32_t before = NONE;
    switch (cursor.stage()) {
      case Cursor::Stage::extra: before = pc + 1; break;
      case Cursor::Stage::items: before = is_list ? first[i] : is_dict ? items.meet(key) : NONE; break;
      case Cursor::Stage::fields: before = fields.meet(key); break;
      default: before = slots.meet(key);
    }
    if (before == NONE || !is_as_built(value, before)) out.children.push_back(i);
  }
  // A dict whose order would not come out right is written as a whole; an OrderedDict with any other key, too.
  bool ordered = n.node->kind->items == Items::keyed;
  out.items = !is_list && !(is_dict && (ordered ? items.same_keys() : items.in_order()));
  out.fields = !fields.in_order() && !n.node->kind->by_name;
  if (is_dict) out.dropped = recorder.keep(items.gone());
  Owned gone = own(PySequence_Concat(fields.gone().get(), slots.gone().get()));
  out.deleted = recorder.keep(std::move(gone));
  return out;
}

// ---- nodes that are registered with JAX: their raw attributes are compared with a snapshot

// A dict of the attributes and slots of a registered node, to see later what changed.
Owned Trace::attributes_of(PyObject* obj, const Kind& kind) const {
  Owned out = kind.has_dict ? own(PyDict_Copy(instance_dict(obj).get())) : own(PyDict_New());
  for (const Slot& slot : kind.slots)
    if (PyObject* value = slot_value(obj, slot)) check(PyDict_SetItem(out.get(), slot.name, value));
  return out;
}

bool Trace::is_part(uint32_t pc, PyObject* value) const {
  const Program& p = recording_->program();
  uint32_t child = pc + 1;
  for (uint32_t i = 0; i < 1 + p.code[pc].node->items; ++i, child = p.after(child))
    if (value == expected(child)) return true;
  return false;
}

namespace {

// The bytes of a buffer, where they are few.
void add_bytes(PyObject* list, PyObject* obj) {
  constexpr Py_ssize_t most = 1000000;
  Py_buffer view;
  if (PyObject_GetBuffer(obj, &view, PyBUF_CONTIG_RO)) return PyErr_Clear();
  Owned bytes = view.len <= most ? Owned::steal(PyBytes_FromStringAndSize(static_cast<const char*>(view.buf), view.len))
                                 : Owned::borrow(Py_None);
  PyBuffer_Release(&view);
  check(PyList_Append(list, check(bytes.get())));
}

// Is each object of one list that of the other? Bytes and sets stand for what held them.
bool holds_the_same(PyObject* before, PyObject* now) {
  if (!now || PyList_GET_SIZE(before) != PyList_GET_SIZE(now)) return false;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(before); ++i) {
    PyObject *was = PyList_GET_ITEM(before, i), *is = PyList_GET_ITEM(now, i);
    if (was == is) continue;
    bool is_content = Py_TYPE(was) == Py_TYPE(is) && (PyBytes_CheckExact(was) || PyFrozenSet_CheckExact(was));
    if (!is_content || !equal(was, is)) return false;
  }
  return true;
}

bool flattens_alike(const Cursor& a, const Cursor& b) {
  if (a.items() != b.items() || !equal(a.extra(), b.extra())) return false;
  PyObject **items = PySequence_Fast_ITEMS(a.materialised()), **others = PySequence_Fast_ITEMS(b.materialised());
  return std::equal(items, items + a.items(), others);
}

}  // namespace

// What the attributes of a registered node lead to, as it was rebuilt: by name, a list of what containers and objects
// hold that are not nodes of their own. Null where they lead to nothing that can change. `backups`, if any, gets a
// backup of each.
Owned Trace::attribute_contents(uint32_t pc, PyObject* attributes, OwnedList* backups) const {
  constexpr Py_ssize_t most = 10000;  // of each attribute: a larger structure is compared in part
  const Program& p = recording_->program();
  std::unordered_set<PyObject*> nodes;  // that are compared by themselves
  Owned out;
  PyObject *name, *attribute, *value, *key;
  for (Py_ssize_t at = 0; PyDict_Next(attributes, &at, &name, &attribute);) {
    if (!(kind_of(attribute).is_node() || kind_of(attribute).leaf == Leaf::numpy) || is_part(pc, attribute)) continue;
    // Listed once, and only where an attribute asks for it.
    for (uint32_t c = nodes.empty() ? 0 : static_cast<uint32_t>(p.code.size()); c < p.code.size(); ++c)
      if (p.code[c].op == Op::node && expected(c)) nodes.insert(expected(c));
    Owned held = own(PyList_New(0));
    std::vector<PyObject*> todo{attribute};
    std::unordered_set<PyObject*> seen;
    bool changes = false;  // can anything behind it change?
    while (!todo.empty() && PyList_GET_SIZE(held.get()) < most) {
      PyObject* obj = todo.back();
      todo.pop_back();
      const Kind& kind = kind_of(obj);
      if (kind.leaf == Leaf::numpy || PyByteArray_Check(obj)) {
        changes = true;
        add_bytes(held.get(), obj);
        if (backups && kind.leaf == Leaf::numpy) backups->push_stolen(backup_of(obj, kind));
      }
      if (!kind.is_node() || kind.node->is_registered || nodes.count(obj) || !seen.insert(obj).second) continue;
      changes = changes || !PyTuple_CheckExact(obj);
      if (PySet_Check(obj)) check(PyList_Append(held.get(), own(PyFrozenSet_New(obj)).get()));
      if (backups) backups->push_stolen(backup_of(obj, kind));
      Cursor cursor(obj, kind);
      while (cursor.next(value, key)) {
        if (key) check(PyList_Append(held.get(), key));
        check(PyList_Append(held.get(), value));
        todo.push_back(value);
      }
    }
    if (!changes) continue;
    if (!out) out = own(PyDict_New());
    check(PyDict_SetItem(out.get(), name, held.get()));
  }
  return out;
}

// The name of an attribute that leads to something which was changed in place; null where there is none.
PyObject* Trace::attribute_with_changed_contents(uint32_t track) const {
  uint32_t pc = recording_->program().track_pc[track];
  if (!attribute_contents_[track]) return nullptr;
  Owned now = attribute_contents(pc, raw_[track]);
  PyObject *name, *held;
  for (Py_ssize_t at = 0; PyDict_Next(attribute_contents_[track], &at, &name, &held);)
    if (!holds_the_same(held, now ? dict_get(now.get(), name) : nullptr)) return name;
  return nullptr;
}

// Does a registered node flatten to other leaves, or with other aux data, than those that it was made of?
bool Trace::flattens_otherwise(uint32_t pc, const Cursor& now) const {
  const Program& p = recording_->program();
  const Instr& n = p.code[pc];
  if (now.items() != static_cast<Py_ssize_t>(n.node->items)) return true;
  uint32_t child = p.after(pc + 1);
  for (uint32_t i = 0; i < n.node->items; ++i, child = p.after(child)) {
    PyObject *was = expected(child), *is = PySequence_Fast_GET_ITEM(now.materialised(), i);
    if (was != is && kind_of(was).is_leaf()) return true;
  }
  return !equal(now.extra(), expected(pc + 1));
}

bool Trace::raw_changed(uint32_t track, PyObject* obj, PyObject* delta, PyObject* deleted) {
  uint32_t pc = recording_->program().track_pc[track];
  const Kind& kind = kind_of(obj);
  Owned now = attributes_of(obj, kind);
  PyObject *before = raw_[track], *name, *value;
  bool any = false;
  auto note = [&](PyObject* name, PyObject* value) {
    if (value) check(PyDict_SetItem(delta, name, value));
    else check(PyList_Append(deleted, name));
    any = true;
  };
  auto held = [&](PyObject* v) {  // an attribute that holds a donated array is written, although it did not change
    return !donated_.empty() && (PyTuple_Check(v) || std::binary_search(donated_.begin(), donated_.end(), v));
  };
  for (Py_ssize_t at = 0; PyDict_Next(now.get(), &at, &name, &value);)
    if (dict_get(before, name) != value || held(value)) note(name, value);
  for (Py_ssize_t at = 0; PyDict_Next(before, &at, &name, &value);)
    if (!dict_get(now.get(), name)) note(name, nullptr);
  // The same attributes, yet the class flattens to something else: a container in an attribute was changed.
  if (any || !attribute_with_changed_contents(track)) return any;
  if (!flattens_otherwise(pc, Cursor(obj, kind, &opened_))) return false;
  for (Py_ssize_t at = 0; PyDict_Next(now.get(), &at, &name, &value);)
    if (kind_of(value).is_node()) note(name, value);
  return any;
}

void Trace::restore_attributes(PyObject* obj, PyObject* before, Commit& commit) const {
  const Kind& kind = kind_of(obj);
  PyObject *name, *value;
  Owned now = attributes_of(obj, kind);
  for (Py_ssize_t at = 0; PyDict_Next(now.get(), &at, &name, &value);)
    if (!dict_get(before, name)) commit.field(obj, kind, name, nullptr);
  for (Py_ssize_t at = 0; PyDict_Next(before, &at, &name, &value);) commit.field(obj, kind, name, value);
}

// (the object, a copy of its items or None, its attributes): for `restore_backup`.
Owned Trace::backup_of(PyObject* obj, const Kind& kind) const {
  auto* type = reinterpret_cast<PyObject*>(kind.solid);
  Owned items = Owned::borrow(Py_None), attributes = own(PyDict_New());
  if (kind.leaf == Leaf::numpy) items = own(PyObject_CallMethod(obj, "copy", nullptr));
  else if (!kind.node->is_whole && type && PyObject_HasAttrString(type, "copy"))
    items = call_base(kind.solid, "copy", obj);
  if (kind.is_node() && kind.has_fields()) attributes = attributes_of(obj, kind);
  return own(PyTuple_Pack(3, obj, items.get(), attributes.get()));
}

void Trace::restore_backup(PyObject* backup, Commit& commit) const {
  PyObject *obj = PyTuple_GET_ITEM(backup, 0), *items = PyTuple_GET_ITEM(backup, 1);
  const Kind& kind = kind_of(obj);
  if (kind.leaf == Leaf::numpy) {
    Owned now = own(PyObject_CallMethod(obj, "copy", nullptr));
    auto put = [array = Owned::borrow(obj)](const Owned& values) {
      check(PyObject_SetItem(array.get(), Py_Ellipsis, values.get()));
    };
    commit.step([put, before = Owned::borrow(items)] { put(before); }, [put, now] { put(now); });
  } else if (items != Py_None) {
    commit.exchange(*kind.node, obj, own(PyObject_CallMethod(items, "copy", nullptr)));
  }
  if (kind.is_node() && kind.has_fields()) restore_attributes(obj, PyTuple_GET_ITEM(backup, 2), commit);
}

// Gives a registered node back what its snapshot holds: its attributes, and what they lead to.
void Trace::restore_raw(uint32_t pc, Commit& commit) {
  uint32_t track = recording_->program().code[pc].node->track;
  restore_attributes(recording_->live[pc], track != NONE ? raw_[track] : unflattened_[pc], commit);
  auto backups = backups_.find(track);
  for (size_t i = 0; backups != backups_.end() && i < backups->second.size(); ++i)
    restore_backup(backups->second[i], commit);
}

// What a registered node flattens to with these of its attributes as they were when it was rebuilt.
Cursor Trace::opened_with(uint32_t pc, PyObject* names) const {
  PyObject *obj = expected(pc), *before = raw_[recording_->program().code[pc].node->track], *name, *ignored;
  const Kind& kind = kind_of(obj);
  Commit commit;
  for (Py_ssize_t at = 0; PyDict_Next(names, &at, &name, &ignored);)
    commit.field(obj, kind, name, dict_get(before, name));
  commit.run();
  try {
    Cursor out(obj, kind);
    commit.take_back();
    return out;
  } catch (...) {
    commit.take_back();
    throw;
  }
}

// The attributes of one node that `left_out` gives: name -> was it changed in place, and not replaced?
nb::dict Trace::left_out_of(uint32_t track) {
  uint32_t pc = recording_->program().track_pc[track];
  PyObject *obj = expected(pc), *before = raw_[track], *name, *was;
  const Kind& kind = kind_of(obj);
  Owned now = attributes_of(obj, kind);
  nb::dict out;
  OwnedList changed;
  bool is_as_before = true;
  for (Py_ssize_t at = 0; PyDict_Next(before, &at, &name, &was);) {
    if (dict_get(now.get(), name) == was) continue;
    is_as_before = false;
    if (!is_part(pc, was)) changed.push(name);
  }
  for (Py_ssize_t at = 0; PyDict_Next(now.get(), &at, &name, &was);)  // a cached_property computes it anew
    if (!dict_get(before, name) && !_PyType_Lookup(Py_TYPE(obj), name)) changed.push(name);
  // Most nodes have one such attribute, and it shows: what they were made of tells without their class.
  const bool shows = changed.size() == 1 && flattens_otherwise(pc, Cursor(obj, kind, &opened_));
  for (size_t i = 0; i < changed.size() && !shows; ++i) {
    Owned name_alone = own(PyDict_New());
    check(PyDict_SetItem(name_alone.get(), changed[i], Py_None));
    if (flattens_alike(Cursor(obj, kind, &opened_), opened_with(pc, name_alone.get())))
      out[nb::handle(changed[i])] = false;
  }
  name = attribute_with_changed_contents(track);
  if (name && !flattens_otherwise(pc, is_as_before ? Cursor(obj, kind, &opened_) : opened_with(pc, before)))
    out[name] = true;
  return out;
}

nb::list Trace::left_out() {
  const Program& p = recording_->program();
  opened_.walk_again();
  nb::list out;
  for (uint32_t t = 0; t < raw_.size(); ++t) {
    uint32_t pc = p.track_pc[t];
    if (!raw_[t] || Py_TYPE(expected(pc)) != p.code[pc].node->type) continue;
    try {
      for (auto [name, in_place] : left_out_of(t))
        out.append(nb::make_tuple(path_text(p, pc, root_names()), nb::borrow(expected(pc)).type(), name, in_place));
    } catch (nb::python_error&) {  // the class cannot be opened as it was
      continue;
    }
  }
  return out;
}

}  // namespace graftax
