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
  return Py_TYPE(expected(pc)) == n.node->type ? raw_snapshot(expected(pc), *n.node->kind) : Owned();
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
  const Kind& kind = *recording_->program().code[pc].node->kind;
  Owned now = raw_snapshot(expected(pc), kind);
  auto part = [](PyObject* snapshot, Py_ssize_t i) { return PyTuple_GET_ITEM(snapshot, i); };
  refuse_new_attributes(pc, part(now.get(), 0),
                        [&](PyObject* name) { return dict_get(part(before, 0), name) != nullptr; });
  auto look = [&](PyObject* name, PyObject* was, PyObject* is) {
    if (was == is || (!(is_part(pc, was) && kind_of(was).is_node()) && !is_made_otherwise(pc))) return;
    raise_graftax("MutationError", path_text(recording_->program(), pc, root_names()) + ": the attribute " +
                                       short_repr(name) + " of an immutable " + Py_TYPE(expected(pc))->tp_name +
                                       " was changed inside the traced function. It has no identity that the change "
                                       "could be brought back to: make the class mutable, or return the changed "
                                       "object.");
  };
  PyObject *name, *value;
  for (Py_ssize_t at = 0; PyDict_Next(part(before, 0), &at, &name, &value);)
    look(name, value, dict_get(part(now.get(), 0), name));
  for (size_t i = 0; i < kind.slots.size(); ++i) {
    auto at = static_cast<Py_ssize_t>(i);
    look(kind.slots[i].name, part(part(before, 1), at), part(part(now.get(), 1), at));
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
class Before {
 public:
  Before(const Program& p, uint32_t first_key, uint32_t count, const uint32_t* children)
      : program_(p), first_key_(first_key), children_(children), number_(own(PyDict_New())) {
    for (uint32_t i = 0; i < count; ++i)
      check(PyDict_SetItem(number_.get(), p.statics[p.keys[first_key + i]].obj, own(PyLong_FromUnsignedLong(i)).get()));
  }

  // The instruction of the child that was under this key, which counts as met; NONE for a new one. One that is only
  // equal (1.0 where 1 was) is new, and cannot be set while the old one is there: all items are.
  uint32_t meet(PyObject* key) {
    PyObject* found = dict_get(number_.get(), key);
    if (!found) return any_new_ = true, NONE;
    auto i = static_cast<uint32_t>(PyLong_AsUnsignedLong(found));
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
  bool is_dict =
      n.node->kind->node->keys == Keys::items && all_simple(p, n.node->keys, n.node->items) && all_simple(obj);
  bool is_list = n.node->kind->items == Items::list && PyList_GET_SIZE(obj) == static_cast<Py_ssize_t>(n.node->items);
  std::vector<uint32_t> children;
  for (uint32_t c = pc + 1, i = 0; i < p.children(pc); ++i, c = p.after(c)) children.push_back(c);
  const uint32_t* first = children.data() + n.node->has_extra;
  uint32_t names = n.node->keys + p.item_keys(n);
  Before items(p, n.node->keys, is_dict ? n.node->items : 0, first),
      fields(p, names, n.node->fields, first + n.node->items);
  Before slots(p, names + n.node->fields, n.node->slots, first + n.node->items + n.node->fields);
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
  bool ordered = n.node->kind->items == Items::keyed;
  out.items = !is_list && !(is_dict && (ordered ? items.same_keys() : items.in_order()));
  out.fields = !fields.in_order() && !n.node->kind->by_name;
  if (is_dict) out.dropped = recorder.keep(items.gone());
  Owned gone = own(PySequence_Concat(fields.gone().get(), slots.gone().get()));
  out.deleted = recorder.keep(std::move(gone));
  return out;
}

// ---- nodes that are registered with JAX: their raw attributes are compared with a snapshot

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

bool Trace::is_part(uint32_t pc, PyObject* value) const {
  const Program& p = recording_->program();
  uint32_t child = pc + 1;
  for (uint32_t i = 0; i < 1 + p.code[pc].node->items; ++i, child = p.after(child))
    if (value == expected(child)) return true;
  return false;
}

// What is behind the attributes of a registered node as it was rebuilt, where its class's flatten may look: a list of
// what containers hold that are none of its children. Where other objects are there, the flatten says (a tuple). Null
// where nothing is.
Owned Trace::behind(uint32_t pc, PyObject* attributes) const {
  constexpr Py_ssize_t most = 10000;
  Owned out = own(PyList_New(0));
  std::vector<PyObject*> todo;
  std::unordered_set<PyObject*> seen;
  PyObject *name, *value, *key;
  for (Py_ssize_t pos = 0; PyDict_Next(attributes, &pos, &name, &value);) todo.push_back(value);
  bool any = false, listed = true;
  while (listed && !todo.empty()) {
    PyObject* obj = todo.back();
    todo.pop_back();
    bool builtin = PyList_CheckExact(obj) || PyTuple_CheckExact(obj) || PyDict_CheckExact(obj);
    const Kind* kind = builtin ? &kind_of(obj) : known_kind(Py_TYPE(obj));
    if ((kind && !kind->is_node()) || is_part(pc, obj) || !seen.insert(obj).second) continue;
    any = any || !PyTuple_CheckExact(obj);  // a tuple itself does not change
    listed = builtin && PyList_GET_SIZE(out.get()) < most;
    if (!listed) break;
    Cursor cursor(obj, *kind);
    while (cursor.next(value, key)) {
      if (key) check(PyList_Append(out.get(), key));
      check(PyList_Append(out.get(), value));
      todo.push_back(value);
    }
  }
  if (!any) return {};
  if (listed) return out;
  Cursor cursor(expected(pc), *recording_->program().code[pc].node->kind);
  return own(PySequence_Tuple(cursor.materialised()));
}

// Does a registered node flatten to other leaves than when it was rebuilt? Usually those that it was made of say so;
// where its unflatten makes others of them, `before` does.
bool Trace::flattens_otherwise(uint32_t pc, PyObject* obj, PyObject* attributes, PyObject* before) {
  const Program& p = recording_->program();
  const Instr& n = p.code[pc];
  Cursor now(obj, *n.node->kind, &opened_);
  if (now.items() != static_cast<Py_ssize_t>(n.node->items)) return true;
  auto is_other = [](PyObject* was, PyObject* is) { return was != is && kind_of(was).is_leaf(); };
  auto item = [&](Py_ssize_t i) { return PySequence_Fast_GET_ITEM(now.materialised(), i); };
  bool other = false;
  uint32_t child = p.after(pc + 1);
  for (uint32_t i = 0; i < n.node->items; ++i, child = p.after(child))
    other = other || is_other(expected(child), item(i));
  if (!other) return false;
  if (PyTuple_Check(before)) {
    other = PyTuple_GET_SIZE(before) != now.items();
    for (Py_ssize_t i = 0; !other && i < now.items(); ++i) other = is_other(PyTuple_GET_ITEM(before, i), item(i));
    return other;
  }
  Owned held = behind(pc, attributes);
  if (!held || !PyList_Check(held.get())) return true;
  if (PyList_GET_SIZE(held.get()) != PyList_GET_SIZE(before)) return true;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(before); ++i)
    if (PyList_GET_ITEM(held.get(), i) != PyList_GET_ITEM(before, i)) return true;
  return false;
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
  if (!behind_[track] || !flattens_otherwise(pc, obj, part(now.get(), 0), behind_[track])) return false;
  pos = 0;
  while (PyDict_Next(part(now.get(), 0), &pos, &name, &value))
    if (kind_of(value).is_node()) note(name, value), any = true;
  return any;
}

// Gives a registered node the attributes back that its snapshot holds.
void Trace::restore_raw(uint32_t pc, Commit& commit) {
  PyObject* obj = recording_->live[pc];
  const Kind& kind = kind_of(obj);
  uint32_t track = recording_->program().code[pc].node->track;
  PyObject* snapshot = track != NONE ? raw_[track] : unflattened_[pc];
  PyObject *before = PyTuple_GET_ITEM(snapshot, 0), *name, *value;
  if (kind.has_dict) {
    Owned now = own(PyDict_Copy(instance_dict(obj).get()));
    Py_ssize_t pos = 0;
    while (PyDict_Next(now.get(), &pos, &name, &value))
      if (!dict_get(before, name)) commit.field(obj, kind, name, nullptr);
    pos = 0;
    while (PyDict_Next(before, &pos, &name, &value)) commit.field(obj, kind, name, value);
  }
  for (size_t i = 0; i < kind.slots.size(); ++i) {
    PyObject* old = PyTuple_GET_ITEM(PyTuple_GET_ITEM(snapshot, 1), static_cast<Py_ssize_t>(i));
    commit.field(obj, kind, kind.slots[i].name, old == Py_NotImplemented ? nullptr : old);
  }
}

}  // namespace graftax
