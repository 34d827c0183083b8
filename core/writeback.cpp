// SPDX-License-Identifier: Apache-2.0
#include "writeback.h"

#include <algorithm>
#include <unordered_map>

#include "parts.h"
#include "path.h"
#include "rows.h"
#include "static_key.h"

namespace graftax {

namespace {

bool is_context(const Program& p, uint32_t pc) {
  return p.code[pc].op == Op::stat && p.statics[p.code[pc].arg].how == How::context;
}

// What a changed node is about to be given for its context values is what it has: the caller's keep theirs.
void keep_context(const Program& p, uint32_t pc, PyObject* node, OwnedList& values, size_t first) {
  const Instr& n = p.code[pc];
  uint32_t items = n.has_extra + n.items, key = n.keys + p.item_keys(n), child = pc + 1;
  for (uint32_t i = 0; i < p.children(pc); ++i, child = p.after(child)) {
    const Instr& c = p.code[child];
    if (i < items || !is_context(p, child)) continue;
    Owned current = field_value(node, *n.kind, p.statics[p.keys[key + i - items]].obj);
    if (current && Py_TYPE(current.get()) == p.statics[c.arg].type) values.set(first + i, current.get());
  }
}

}  // namespace

Owned apply(const Outcome& outcome, PyObject* const* out_leaves, PyObject* const* in_leaves,
            PyObject* const* in_nodes) {
  const Program& p = outcome.program;
  if (outcome.writes.empty() && p.code.size() == 1) {  // one array: nothing to build
    if (p.code[0].op == Op::leaf) return Owned::borrow(out_leaves[0]);
    if (p.code[0].op == Op::forward) return Owned::borrow(in_leaves[p.code[0].arg]);
  }
  Builder builder(p, {out_leaves, in_nodes, in_leaves, nullptr});
  Owned result = builder.build(0);
  if (outcome.writes.empty()) {
    builder.drain();
    return result;
  }
  OwnedList values;
  std::vector<size_t> first;
  for (const Write& w : outcome.writes) {
    first.push_back(values.size());
    if (w.raw) values.push_stolen(builder.build(w.pc));
    else builder.build_children(w.pc, values);
    if (w.context) keep_context(p, w.pc, in_nodes[w.track], values, first.back());
  }
  builder.drain();
  // A key's own __hash__ may raise: it does so here, before the first write.
  for (const Write& w : outcome.writes) {
    const Instr& n = p.code[w.pc];
    for (uint32_t i = 0, keys = w.raw ? 0 : p.item_keys(n); i < keys; ++i) {
      Owned key = static_object(p.statics[p.keys[n.keys + i]]);
      if (key && !PyUnicode_CheckExact(key.get()) && PyObject_Hash(key.get()) == -1) raise_python();
    }
  }
  OwnedList graveyard;
  for (size_t i = 0; i < outcome.writes.size(); ++i) {
    const Write& w = outcome.writes[i];
    PyObject* node = in_nodes[w.track];
    if (!w.raw) {
      write_content(p, w.pc, node, values.data() + first[i], graveyard, in_nodes);
      continue;
    }
    const Kind& kind = kind_of(node);
    PyObject *name, *value;
    Py_ssize_t pos = 0;
    while (PyDict_Next(values[first[i]], &pos, &name, &value)) write_field(node, kind, name, value, graveyard);
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(w.deleted); ++k)
      write_field(node, kind, PyTuple_GET_ITEM(w.deleted, k), nullptr, graveyard);
  }
  return result;
}

Trace::Trace(nb::object recording) : held_(std::move(recording)), recording_(nb::inst_ptr<Recorded>(held_)) {}

nb::list Trace::leaf_paths() const {
  nb::list out;
  for (uint32_t pc = 0; pc < recording_->program().code.size(); ++pc)
    if (recording_->program().code[pc].op == Op::leaf && !(recording_->program().code[pc].flags & ALIAS))
      out.append(path_text(recording_->program(), pc, root_names()));
  return out;
}

nb::list Trace::rebuild(nb::sequence leaves) {
  const Program& p = recording_->program();
  for (nb::handle leaf : leaves) tracers_.push(leaf.ptr());
  if (tracers_.size() != p.leaves)
    raise_graftax("StructureError", "the arguments changed between the call and its trace");
  Builder builder(p, {tracers_.data(), nullptr, nullptr, recording_->live.data()});
  builder.record_built();
  nb::list out;
  uint32_t pc = 0;
  for (uint32_t r = 0; r < p.roots; ++r, pc = p.after(pc)) out.append(nb::steal(builder.build(pc).release()));
  builder.drain();
  built_ = std::move(builder.built());
  raw_.resize(p.track_pc.size());
  for (uint32_t t = 0; t < p.track_pc.size(); ++t) {
    const Instr& n = p.code[p.track_pc[t]];
    // An unflatten that makes something else leaves nothing to compare.
    if (n.kind->base == Base::registered && Py_TYPE(expected(p.track_pc[t])) == n.type)
      raw_.set(t, raw_snapshot(expected(p.track_pc[t]), *n.kind).get());
  }
  return out;
}

PyObject* Trace::expected(uint32_t pc) const {
  const Instr& n = recording_->program().code[pc];
  if (n.op == Op::node && (n.flags & HANDED)) return recording_->live[pc];
  return built_[pc] ? built_[pc] : recording_->live[pc];
}

// Does the node at `pc` no longer hold what it was built with?
bool Trace::changed(uint32_t pc) {
  const Program& p = recording_->program();
  const Instr& n = p.code[pc];
  Owned obj = Owned::borrow(expected(pc));
  if (Py_TYPE(obj.get()) != n.type)
    raise_graftax("StructureError", path_text(p, pc, root_names()) + ": its class was changed from " + n.type->tp_name +
                                        " to " + Py_TYPE(obj.get())->tp_name +
                                        " inside the traced function, which cannot be written back");
  const Kind& kind = *n.kind;
  if (kind.base == Base::set && !set_matches(p, n.keys, n.arg, obj.get())) return true;
  if (kind.base == Base::function && !payload_matches(p, n, obj.get()))
    raise_graftax("StructureError",
                  path_text(p, pc, root_names()) +
                      ": the code, the name, __doc__ or __module__ of this function was changed inside the "
                      "traced function, which cannot be written back");
  if (kind.base == Base::buffer && !payload_matches(p, n, obj.get())) return true;
  Cursor cursor(obj.get(), kind);
  uint32_t count = p.children(pc), child = pc + 1, key_at = n.keys + (kind.base == Base::set ? n.arg : 0);
  PyObject *value = nullptr, *key = nullptr;
  uint32_t i = 0;
  for (; cursor.next(value, key); ++i, child = p.after(child)) {
    if (i >= count) return true;
    if (key) {
      const Static& expected_key = p.statics[p.keys[key_at++]];
      if (expected_key.obj != key && !(expected_key.how == How::string && static_matches(p, p.keys[key_at - 1], key)))
        return true;
    }
    const Instr& c = p.code[child];
    if (value == expected(child)) {
      if (!donated_.empty() && holds_donated(child)) return true;
      continue;
    }
    if (c.op != Op::stat) return true;
    How how = p.statics[c.arg].how;
    if (how == How::context && Py_TYPE(value) == p.statics[c.arg].type) continue;
    if (how < How::integer || how > How::bytes || !static_matches(p, c.arg, value)) return true;
  }
  return i != count;
}

// Was an attribute of an immutable object replaced or deleted (below its own __setattr__)? One that was added is what
// cached_property does: it is dropped, and computed again.
void Trace::refuse_changed_frozen() {
  const Program& p = recording_->program();
  for (uint32_t pc = 0; pc < p.code.size(); ++pc) {
    const Instr& n = p.code[pc];
    if (n.op != Op::node || n.track != NONE || n.fields + n.slots == 0 || n.kind->base == Base::registered) continue;
    PyObject* obj = expected(pc);
    if (Py_TYPE(obj) != n.type) continue;
    Owned dict = n.kind->has_dict ? instance_dict(obj) : Owned();
    uint32_t child = pc + 1, first = n.has_extra + n.items, key_at = n.keys + p.item_keys(n);
    for (uint32_t i = 0; i < first; ++i) child = p.after(child);
    for (uint32_t i = 0; i < n.fields + n.slots; ++i, child = p.after(child)) {
      PyObject* name = p.statics[p.keys[key_at + i]].obj;
      PyObject* value = nullptr;
      if (i < n.fields) {
        value = dict_get(dict.get(), name);
      } else {
        for (const Slot& slot : n.kind->slots)
          if (slot.name == name) value = slot_value(obj, slot);
      }
      if (value == expected(child)) continue;
      if (value && p.code[child].op == Op::stat && static_matches(p, p.code[child].arg, value)) continue;
      raise_graftax("MutationError",
                    path_text(p, child, root_names()) + ": this attribute of an immutable " + n.type->tp_name +
                        " was changed inside the traced function. It has no identity that the change could "
                        "be brought back to: make the class mutable, or return the changed object.");
    }
  }
}

// Is a donated leaf at `pc`, or below it without another tracked node between? Then what holds it must be written.
bool Trace::holds_donated(uint32_t pc) const {
  const Program& p = recording_->program();
  for (uint32_t i = pc, end = p.after(pc); i < end;) {
    const Instr& n = p.code[i];
    if (n.op == Op::leaf && std::binary_search(donated_.begin(), donated_.end(), built_[i])) return true;
    i = n.op == Op::node && n.track != NONE ? n.next : i + 1;
  }
  return false;
}

void Trace::restore_node(uint32_t pc) {
  const Program& p = recording_->program();
  OwnedList graveyard;
  if (p.code[pc].kind->base == Base::registered) return restore_raw(p.code[pc].track, graveyard);
  std::vector<PyObject*> values;
  for (uint32_t c = pc + 1, i = 0; i < p.children(pc); ++i, c = p.after(c)) values.push_back(recording_->live[c]);
  write_content(p, pc, recording_->live[pc], values.data(), graveyard);
}

void Trace::restore() {
  const Program& p = recording_->program();
  if (raw_.size() != p.track_pc.size()) return;  // never rebuilt: the function did not run
  for (uint32_t pc = 0; pc < p.code.size(); ++pc) {
    const Instr& n = p.code[pc];
    if (n.op != Op::node || !(n.flags & HANDED) || (n.track == NONE && !n.kind->has_fields())) continue;
    PyObject* obj = recording_->live[pc];
    if (Py_TYPE(obj) != n.type) check(PyObject_SetAttrString(obj, "__class__", reinterpret_cast<PyObject*>(n.type)));
    if (n.kind->base == Base::function && !payload_matches(p, n, obj)) restore_code(p.statics[n.payload], obj);
    if ((n.track != NONE && raw_[n.track]) || changed(pc)) restore_node(pc);
  }
}

// Which tracked nodes lead to a changed one (and are changed for whoever looks at them by value).
std::vector<bool> Trace::reaches_changed(const std::vector<uint32_t>& changed_nodes) const {
  const Program& p = recording_->program();
  std::vector<bool> out(p.track_pc.size(), false);
  if (changed_nodes.empty()) return out;
  auto n = static_cast<uint32_t>(p.code.size());
  std::vector<uint32_t> parent(n, NONE), open;
  std::unordered_multimap<uint32_t, uint32_t> refs;  // tracked index -> where it is referred to
  for (uint32_t pc = 0; pc < n; ++pc) {
    while (!open.empty() && p.code[open.back()].next <= pc) open.pop_back();
    if (!open.empty()) parent[pc] = open.back();
    if (p.code[pc].op == Op::ref) refs.emplace(p.code[pc].arg, pc);
    if (p.code[pc].op == Op::node) open.push_back(pc);
  }
  std::vector<uint32_t> work(changed_nodes);
  while (!work.empty()) {
    uint32_t t = work.back();
    work.pop_back();
    if (out[t]) continue;
    out[t] = true;
    auto add_above = [&](uint32_t pc) {
      for (uint32_t up = parent[pc]; up != NONE; up = parent[up]) {
        if (p.code[up].track == NONE) continue;
        work.push_back(p.code[up].track);
        break;
      }
    };
    add_above(p.track_pc[t]);
    auto [begin, end] = refs.equal_range(t);
    for (auto it = begin; it != end; ++it) add_above(it->second);
  }
  return out;
}

// By value, which tracked nodes lead to a node that the result would have anew: a mutable one that is no function, or a
// cell that is shared with a function that leads to one.
std::vector<bool> Trace::leads_to_rebuilt() const {
  const Program& p = recording_->program();
  std::vector<uint32_t> rebuilt;
  for (uint32_t t = 0; t < p.track_pc.size(); ++t) {
    const Instr& n = p.code[p.track_pc[t]];
    if (!(n.flags & HANDED) && n.kind->base != Base::function && n.kind->base != Base::cell) rebuilt.push_back(t);
  }
  for (;;) {
    std::vector<bool> out = reaches_changed(rebuilt);
    size_t before = rebuilt.size();
    for (uint32_t t = 0; t < p.track_pc.size(); ++t) {
      uint32_t pc = p.track_pc[t];
      if (!out[t] || p.code[pc].kind->base != Base::function) continue;
      for (uint32_t c = pc + 1, i = 0; i < p.code[pc].items; ++i, c = p.after(c)) {
        uint32_t track = p.code[c].op == Op::ref ? p.code[c].arg : p.code[c].op == Op::node ? p.code[c].track : NONE;
        if (track != NONE && !out[track]) rebuilt.push_back(track);
      }
    }
    if (rebuilt.size() == before) return out;
  }
}

nb::tuple Trace::finish(nb::handle result, bool by_value, bool forward, const std::vector<bool>& donated, bool arrays) {
  const Program& p = recording_->program();
  for (size_t i = 0; i < donated.size() && i < tracers_.size(); ++i)
    if (donated[i]) donated_.push_back(tracers_[i]);
  std::sort(donated_.begin(), donated_.end());

  refuse_changed_frozen();
  struct Change {
    uint32_t track;
    Owned delta, deleted;
  };
  std::vector<Change> changes;
  std::vector<uint32_t> changed_tracks;
  nb::list paths;
  for (uint32_t t = 0; t < p.track_pc.size(); ++t) {
    uint32_t pc = p.track_pc[t];
    const Instr& n = p.code[pc];
    Change change{t, {}, {}};
    std::vector<PyObject*> donated_here;
    bool by_function = donated_.empty();  // or only because what it holds was donated?
    if (!by_function && n.kind->base != Base::registered) {
      donated_here.swap(donated_);
      by_function = changed(pc);
      donated_here.swap(donated_);
    }
    if (n.kind->base == Base::registered) {
      if (!raw_[t]) continue;
      change.delta = own(PyDict_New());
      change.deleted = own(PyList_New(0));
      if (!raw_changed(t, expected(pc), change.delta.get(), change.deleted.get())) continue;
    } else if (!changed(pc)) {
      continue;
    }
    if (by_function && !n.kind->expires && nb::len(paths) < 8) paths.append(path_text(p, pc, root_names()));
    changed_tracks.push_back(t);
    changes.push_back(std::move(change));
  }

  IdLease nodes, leaves, keys;
  for (const Static& s : p.statics)
    if (s.how == How::state) keys->insert(s.obj, 0);
  std::vector<bool> differs = by_value ? reaches_changed(changed_tracks) : std::vector<bool>();
  std::vector<bool> leads_to_new = by_value ? leads_to_rebuilt() : std::vector<bool>();
  for (uint32_t t = 0; t < p.track_pc.size(); ++t) {
    uint32_t pc = p.track_pc[t];
    bool handed = p.code[pc].flags & HANDED;
    // By value, too, a function stays the caller's own, unless it leads to something that does not.
    bool itself =
        handed || (p.code[pc].kind->base == Base::function && donated_.empty() && by_value && !leads_to_new[t]);
    if (!by_value || (itself && !differs[t])) nodes->insert(expected(pc), t);
  }
  for (uint32_t i = 0; i < tracers_.size(); ++i)
    if (forward && !std::binary_search(donated_.begin(), donated_.end(), tracers_[i])) leaves->insert(tracers_[i], i);
  Inputs inputs{&*nodes, &*leaves, &*keys, &p, arrays};
  RecordOptions options{nullptr, nullptr, &inputs, false, false, nullptr};
  opened_.walk_again();
  options.opened = &opened_;
  Recorder recorder(options);
  recorder.root(result.ptr());

  auto out = std::make_unique<Outcome>();
  out->result_leaves = recorder.leaf_count();
  bool lost = false;
  if (by_value) {
    for (uint32_t t : changed_tracks) {
      uint32_t pc = p.track_pc[t];
      lost = lost || !(p.code[pc].kind->expires || recorder.has_seen(expected(pc)));
    }
  } else {
    for (Change& c : changes) {
      uint32_t pc = recorder.position();
      PyObject* deleted = nullptr;
      if (c.delta) {
        recorder.root(c.delta.get());
        deleted = recorder.keep(own(PyList_AsTuple(c.deleted.get())));
      } else {
        recorder.content(expected(p.track_pc[c.track]));
      }
      out->writes.push_back({c.track, pc, static_cast<bool>(c.delta), deleted});
    }
  }
  Recording recorded = recorder.finish(nullptr);
  // What the caller's graph holds is alive whenever this is applied, and may lead back to the function.
  out->program = weakened_inputs(recorded.program, p);
  for (const Write& w : out->writes)
    if (w.deleted) out->program.owned.push(w.deleted);
  for (Write& w : out->writes)
    for (uint32_t c = w.pc + 1, i = 0; !w.raw && i < out->program.children(w.pc); ++i, c = out->program.after(c))
      w.context = w.context || is_context(out->program, c);
  restore();
  nb::list out_leaves;
  for (size_t i = 0; i < recorded.leaves.size(); ++i) out_leaves.append(nb::borrow(recorded.leaves[i]));
  return nb::make_tuple(nb::cast(out.release(), nb::rv_policy::take_ownership), out_leaves, paths, lost);
}

bool Trace::verify(nb::tuple roots) {
  Walk walk;
  std::vector<PyObject*> values;
  for (nb::handle h : roots) values.push_back(h.ptr());
  if (!replay(recording_->program(), values.data(), values.size(), walk)) return false;
  for (size_t i = 0; i < walk.leaves.size(); ++i)
    if (walk.leaves[i] != recording_->leaves[i]) return false;
  // What a registered flatten returns may be made anew each time: below it only values are compared.
  uint32_t made_until = 0;
  for (size_t t = 0; t < walk.nodes.size(); ++t) {
    uint32_t pc = recording_->program().track_pc[t];
    const Instr& n = recording_->program().code[pc];
    if (walk.nodes[t] && walk.nodes[t] != recording_->live[pc] && pc >= made_until) return false;
    if (n.kind->base == Base::registered) made_until = std::max(made_until, n.next);
  }
  return true;
}

void Trace::close() {
  tracers_.clear();
  built_.clear();
  raw_.clear();
  opened_.clear();
  recording_ = &Recorded::nothing();
  held_.reset();
}

// ---- binding

namespace {

int outcome_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  return nb::inst_ptr<Outcome>(self)->program.traverse(visit, arg);
}

int outcome_clear(PyObject* self) {
  if (nb::inst_ready(self)) {
    nb::inst_ptr<Outcome>(self)->writes.clear();
    nb::inst_ptr<Outcome>(self)->program.clear();
  }
  return 0;
}

PyType_Slot outcome_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(outcome_traverse)},
                               {Py_tp_clear, reinterpret_cast<void*>(outcome_clear)},
                               {0, nullptr}};

// ---- pickle

nb::tuple outcome_state(const Outcome& o) {
  nb::list writes;
  for (const Write& w : o.writes)
    writes.append(nb::make_tuple(w.track, w.pc, w.raw, w.deleted ? nb::borrow(w.deleted) : nb::none()));
  return nb::make_tuple(1, nb::steal(program_state(o.program).release()), nb::tuple(writes), o.result_leaves);
}

[[noreturn]] void malformed(const char* what) {
  raise_error(PyExc_ValueError, std::string("malformed state: ") + what);
}

bool all_strings(PyObject* tuple) {
  if (!PyTuple_CheckExact(tuple)) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i)
    if (!PyUnicode_CheckExact(PyTuple_GET_ITEM(tuple, i))) return false;
  return true;
}

// Root 0 is the result, and one root follows for each write.
Outcome outcome_from_state(nb::handle state) {
  nb::tuple fields, writes;
  uint32_t version = 0;
  Outcome out;
  if (!nb::try_cast(state, fields) || fields.size() != 4 || !nb::try_cast(fields[0], version) || version != 1)
    malformed("unknown version");
  if (!nb::try_cast(fields[2], writes) || !nb::try_cast(fields[3], out.result_leaves)) malformed("fields");
  out.program = program_from_state(nb::object(fields[1]).ptr(), true);
  Program& p = out.program;
  if (p.roots != 1 + writes.size() || out.result_leaves > p.leaves) malformed("counts");
  auto is_content = [&](uint32_t pc) {
    return p.code[pc].op == Op::node && is_shell_kind(*p.code[pc].kind) && p.code[pc].track == NONE;
  };
  if (is_content(0)) malformed("the result");
  uint32_t pc = p.after(0);
  for (nb::handle h : writes) {
    nb::tuple t;
    Write w{};
    if (!nb::try_cast(h, t) || t.size() != 4 || !nb::try_cast(t[0], w.track) || !nb::try_cast(t[1], w.pc) ||
        !nb::try_cast(t[2], w.raw) || w.track == NONE || w.pc != pc || p.code[pc].op != Op::node)
      malformed("write");
    if (w.raw) {
      const Instr& n = p.code[pc];
      PyObject* deleted = nb::object(t[3]).ptr();
      if (n.type != &PyDict_Type || n.track == NONE || !all_strings(deleted)) malformed("write");
      for (uint32_t i = 0; i < n.items; ++i)
        if (p.statics[p.keys[n.keys + i]].how != How::string) malformed("write");
      w.deleted = p.keep(Owned::borrow(deleted));
    } else if (is_shell_kind(*p.code[pc].kind) != is_content(pc)) {
      malformed("write");
    }
    out.writes.push_back(w);
    pc = p.after(pc);
  }
  return out;
}

// Do these nodes have the types that the writes are meant for? A call's own walk ensures it; a caller in Python may not.
void check_nodes(const Outcome& o, const OwnedList& nodes) {
  auto other = [](PyObject* node) {
    raise_error(PyExc_ValueError, std::string("this Outcome writes to another type than ") + Py_TYPE(node)->tp_name);
  };
  for (const Write& w : o.writes) {
    PyObject* node = nodes[w.track];
    const Instr& n = o.program.code[w.pc];
    if (!w.raw) {
      if (Py_TYPE(node) != n.type) other(node);
      if (n.kind->base == Base::function &&
          n.items !=
              2 + static_cast<uint32_t>(reinterpret_cast<PyCodeObject*>(PyFunction_GET_CODE(node))->co_nfreevars))
        other(node);
      continue;
    }
    const Kind& kind = kind_of(node);
    if (kind.base != Base::registered) other(node);
    auto has_room = [&](PyObject* name) {
      return kind.has_dict ||
             std::any_of(kind.slots.begin(), kind.slots.end(), [&](const Slot& s) { return s.name == name; });
    };
    for (uint32_t i = 0; i < n.items; ++i)
      if (!has_room(o.program.statics[o.program.keys[n.keys + i]].obj)) other(node);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(w.deleted); ++i)
      if (!has_room(PyTuple_GET_ITEM(w.deleted, i))) other(node);
  }
}

}  // namespace

void bind_writeback(nb::module_& m) {
  nb::class_<Outcome>(m, "Outcome", nb::type_slots(outcome_slots), nb::is_weak_referenceable(),
                      "What one executable gives back: the result, and what it does to the caller's nodes.")
      .def_prop_ro("result_leaves", [](const Outcome& o) { return o.result_leaves; })
      .def_prop_ro("num_leaves", [](const Outcome& o) { return o.program.leaves; })
      .def_prop_ro("num_writes", [](const Outcome& o) { return o.writes.size(); })
      .def(
          "leaf_paths", [](const Outcome& o) { return nb::steal(leaf_paths(o.program).release()); },
          nb::sig("def leaf_paths(self) -> list[tuple[Any, ...]]"))
      .def(
          "leaf_places", [](const Outcome& g) { return nb::steal(leaf_places(g.program).release()); },
          nb::sig("def leaf_places(self) -> list[tuple[int, tuple[Any, ...]]]"),
          "The place of every dynamic leaf, in order: the number of its root, and its key path from there.")
      .def(
          "apply",
          [](const Outcome& o, nb::sequence out, nb::sequence in, nb::sequence nodes) {
            OwnedList a, b, c;
            for (nb::handle h : out) a.push(h.ptr());
            for (nb::handle h : in) b.push(h.ptr());
            for (nb::handle h : nodes) c.push(h.ptr());
            uint32_t leaf_count = 0, node_count = 0;
            for (const Instr& n : o.program.code) {
              if (n.op == Op::forward) leaf_count = std::max(leaf_count, n.arg + 1);
              if (n.op == Op::input) node_count = std::max(node_count, n.arg + 1);
            }
            for (const Static& s : o.program.statics)
              if (s.how == How::input) node_count = std::max(node_count, s.first + 1);
            for (const Write& w : o.writes) node_count = std::max(node_count, w.track + 1);
            if (a.size() != o.program.leaves || b.size() < leaf_count || c.size() < node_count)
              raise_error(PyExc_ValueError, "wrong number of leaves or nodes");
            check_nodes(o, c);
            return nb::steal(apply(o, a.data(), b.data(), c.data()).release());
          },
          nb::sig("def apply(self, out_leaves: Sequence[object], in_leaves: Sequence[object], in_nodes: "
                  "Sequence[object], /) -> Any"))
      .def(
          "inputs",
          [](const Outcome& o) {
            nb::list nodes, leaves;
            for (const Instr& n : o.program.code) {
              if (n.op == Op::input) nodes.append(n.arg);
              if (n.op == Op::forward) leaves.append(n.arg);
            }
            nb::list written;
            for (const Write& w : o.writes) written.append(w.track);
            return nb::make_tuple(nodes, leaves, written);
          },
          nb::sig("def inputs(self) -> tuple[list[int], list[int], list[int]]"),
          "The input nodes and leaves that the result and the writes hold, and the nodes that are written, by index.")
      .def(
          "identities", [](const Outcome& o) { return identities(o.program); },
          nb::sig("def identities(self) -> list[Any]"), "The statics that count by identity, keys among them.")
      .def(
          "rows", [](nb::handle self) { return rows(self, nb::cast<const Outcome&>(self).program); },
          nb::sig("def rows(self) -> list[Row]"))
      .def(
          "instructions", [](const Outcome& o) { return nb::steal(instructions(o.program).release()); },
          nb::sig("def instructions(self) -> list[tuple[Any, ...]]"), "As those of a GraphDef; inputs are left out.")
      .def(
          "__reduce__", [](nb::handle self) { return nb::borrow(runtime.registry).attr("reduce_outcome")(self); },
          nb::sig("def __reduce__(self) -> tuple[Any, ...]"))
      .def("_state", &outcome_state, nb::sig("def _state(self) -> tuple[Any, ...]"))
      .def_static("_from_state", &outcome_from_state, nb::arg("state").none(),
                  nb::sig("def _from_state(state: object, /) -> Outcome"))
      .def("__repr__", [](const Outcome& o) {
        return "Outcome(" + program_repr(o.program) + ", writes=" + std::to_string(o.writes.size()) + ")";
      });

  nb::class_<Trace>(m, "Trace", "One trace: the caller's graph rebuilt around tracers, and what became of it.")
      .def(
          "__init__",
          [](Trace* self, nb::object recording) {
            if (!nb::isinstance<Recorded>(recording)) raise_error(PyExc_TypeError, "expected a Recording");
            new (self) Trace(std::move(recording));
          },
          nb::arg("recording"), nb::sig("def __init__(self, recording: Recording) -> None"))
      .def("leaf_paths", &Trace::leaf_paths, nb::sig("def leaf_paths(self) -> list[str]"))
      .def("rebuild", &Trace::rebuild, nb::sig("def rebuild(self, leaves: Sequence[object], /) -> list[Any]"))
      .def(
          "finish", &Trace::finish, nb::arg("result").none(), nb::arg("by_value"), nb::arg("forward"),
          nb::arg("donated"), nb::arg("arrays") = false,
          nb::sig(
              "def finish(self, result: object, by_value: bool, forward: bool, donated: Sequence[bool], arrays: bool = "
              "False) -> tuple[Outcome, list[Any], list[str], bool]"))
      .def("restore", &Trace::restore)
      .def("verify", &Trace::verify, nb::sig("def verify(self, roots: tuple[object, ...], /) -> bool"))
      .def("close", &Trace::close);
}

}  // namespace graftax
