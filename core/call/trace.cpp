// SPDX-License-Identifier: Apache-2.0
#include "call/trace.h"

#include <algorithm>

#include "graph/key_path.h"
#include "graph/kinds/function.h"
#include "graph/static_equality.h"
#include "python/hooks.h"

namespace graftax {

Trace::Trace(nb::object recording)
    : recording_object_(std::move(recording)), recording_(nb::inst_ptr<Recording>(recording_object_)) {}

nb::list Trace::leaf_names() const {
  nb::list out;
  for (uint32_t pc = 0; pc < recording_->program().code.size(); ++pc)
    if (recording_->program().code[pc].op == Op::leaf && !(recording_->program().code[pc].flags & ALIAS))
      out.append(path_text(recording_->program(), pc, root_names()));
  return out;
}

// By address, as Python's id() tells it: code under a trace that asks for one gets the caller's.
nb::dict Trace::identities() const {
  const Program& p = recording_->program();
  nb::dict out;
  for (uint32_t t = 0; t < p.track_pc.size(); ++t)
    out[nb::int_(reinterpret_cast<uintptr_t>(expected(p.track_pc[t])))] =
        nb::make_tuple(t, reinterpret_cast<uintptr_t>(recording_->live[p.track_pc[t]]));
  return out;
}

bool Trace::leaves_ids_of_copies(const Outcome& outcome) const {
  if (!holds_ids(outcome.program)) return false;
  std::vector<PyObject*> copies;
  for (uint32_t pc : recording_->program().track_pc)
    if (expected(pc) != recording_->live[pc]) copies.push_back(expected(pc));
  return holds_ids_of(outcome.program, std::move(copies));
}

nb::object Trace::original(nb::handle rebuilt) const {
  const Program& p = recording_->program();
  for (uint32_t pc : p.track_pc)
    if (expected(pc) == rebuilt.ptr() && recording_->live[pc] != rebuilt.ptr()) return nb::borrow(recording_->live[pc]);
  return nb::none();
}

nb::list Trace::functions() const {
  const Program& p = recording_->program();
  nb::list out;
  for (uint32_t pc = 0; pc < p.code.size(); ++pc)
    if (p.code[pc].op == Op::node && p.code[pc].node->type == &PyFunction_Type) out.append(nb::borrow(expected(pc)));
  return out;
}

nb::list Trace::rebuild(nb::sequence leaves) {
  for (nb::handle leaf : leaves) tracers_.push(leaf.ptr());
  if (tracers_.size() != recording_->program().leaves)
    raise_graftax("ConcurrentChangeError", "the arguments changed between the call and its trace");
  nb::list out = build_roots(0);
  named_.enter(recording_->program(), built_, root_names());
  return out;
}

bool Trace::begins(nb::handle recording) const {
  if (!nb::isinstance<Recording>(recording)) raise_error(PyExc_TypeError, "expected a Recording");
  const Recording& longer = *nb::inst_ptr<Recording>(recording);
  const Program& p = recording_->program();
  if (!begins_with(longer.program(), p)) return false;
  for (size_t i = 0; i < recording_->leaves.size(); ++i)
    if (recording_->leaves[i] != longer.leaves[i]) return false;
  for (uint32_t pc : p.track_pc)
    if (recording_->live[pc] != longer.live[pc]) return false;
  return true;
}

nb::list Trace::extend(nb::object recording, nb::sequence leaves) {
  if (!begins(recording)) raise_graftax("ConcurrentChangeError", "the arguments changed while the function was traced");
  const Recording &shorter = *recording_, &longer = *nb::inst_ptr<Recording>(recording);
  if (nb::len(leaves) != longer.program().leaves) raise_error(PyExc_ValueError, "expected one value a leaf");
  // The shorter recording is held until nothing can fail any more.
  nb::object before = std::exchange(recording_object_, std::move(recording));
  recording_ = &longer;
  size_t traced = tracers_.size(), nodes = built_.size(), tracked = raw_.size();
  try {
    for (size_t i = traced; i < longer.program().leaves; ++i) tracers_.push(nb::object(leaves[i]).ptr());
    nb::list out = build_roots(shorter.program().roots);
    named_.renew(longer.program(), root_names());
    return out;
  } catch (...) {  // the trace is what it was
    recording_object_ = std::move(before);
    recording_ = &shorter;
    tracers_.resize(traced), built_.resize(nodes), unflattened_.resize(nodes);
    raw_.resize(tracked), attribute_contents_.resize(tracked);
    throw;
  }
}

// Builds the roots from this one on, and notes what they look like.
nb::list Trace::build_roots(uint32_t first_root) {
  const Program& p = recording_->program();
  auto first_pc = static_cast<uint32_t>(built_.size()), first_track = static_cast<uint32_t>(raw_.size());
  // Stand-ins for what is ignored or refused.
  OwnedList stand_ins;
  std::vector<PyObject*> replaced;  // by instruction, borrowed from `stand_ins`; empty where there is none
  for (uint32_t t = first_track; t < p.track_pc.size(); ++t) {
    uint32_t pc = p.track_pc[t];
    if (!p.code[pc].node->kind->node->is_ignored) continue;
    Owned path = own(PyUnicode_FromString(path_text(p, pc, root_names()).c_str()));
    PyObject* live = recording_->live[pc];
    Owned why = Owned::borrow(Py_None);
    if (p.code[pc].flags & REFUSED)
      why = own(PyUnicode_FromFormat("%s: %s", Py_TYPE(live)->tp_name, kind_of(live).reason.c_str()));
    stand_ins.push_stolen(hooks::ignored(path.get(), why.get()));
    replaced.resize(p.code.size());
    replaced[pc] = stand_ins.back();
  }
  // The roots. What an earlier build has made is in `built_`, and is used again.
  Sources sources{tracers_.data(), nullptr, nullptr, recording_->live.data()};
  if (!replaced.empty()) sources.replaced = replaced.data();
  sources.built = &built_;
  Builder builder(p, sources);
  builder.record_built();
  nb::list out;
  uint32_t pc = 0;
  for (uint32_t r = 0; r < p.roots; ++r, pc = p.after(pc))
    if (r >= first_root) out.append(nb::steal(builder.build(pc).release()));
  builder.drain();
  OwnedList built = std::move(builder.built());
  // Of the roots before it keeps the objects that the function has seen already.
  for (uint32_t at = 0; at < first_pc; ++at) built.set(at, built_[at]);
  built_ = std::move(built);
  // Snapshots of registered nodes: their attributes, what these lead to, and the same of immutable ones.
  raw_.resize(p.track_pc.size());
  for (uint32_t t = first_track; t < p.track_pc.size(); ++t) {
    const Instr& n = p.code[p.track_pc[t]];
    // Where unflatten makes an instance of another class there is nothing to compare.
    if (n.node->kind->node->is_registered && Py_TYPE(expected(p.track_pc[t])) == n.node->type)
      raw_.set(t, attributes_of(expected(p.track_pc[t]), *n.node->kind).get());
  }
  attribute_contents_.resize(p.track_pc.size());
  for (uint32_t t = first_track; t < p.track_pc.size(); ++t)
    if (raw_[t]) {
      bool is_handed_over = p.code[p.track_pc[t]].flags & HANDED_OVER;
      attribute_contents_.replace(t,
                                  attribute_contents(p.track_pc[t], raw_[t], is_handed_over ? &backups_[t] : nullptr));
    }
  unflattened_.resize(p.code.size());
  for (uint32_t c = first_pc; c < p.code.size(); ++c) unflattened_.set(c, unflattened(c).get());
  return out;
}

PyObject* Trace::expected(uint32_t pc) const {
  return built_[pc] ? built_[pc] : recording_->live[pc];  // what is handed over was not built
}

void Trace::restore_node(uint32_t pc, Commit& commit) {
  const Program& p = recording_->program();
  if (p.code[pc].node->kind->node->is_registered) {
    restore_raw(pc, commit);
  } else {
    std::vector<PyObject*> values;
    for (uint32_t c = pc + 1, i = 0; i < p.children(pc); ++i, c = p.after(c)) values.push_back(recording_->live[c]);
    commit.content(p, pc, recording_->live[pc], values.data());
  }
}

bool Trace::has_another_type_or_code(uint32_t pc) const {
  const Program& p = recording_->program();
  const Instr& n = p.code[pc];
  PyObject* obj = recording_->live[pc];
  return Py_TYPE(obj) != n.node->type ||
         (n.node->kind->node->is_function && !n.node->kind->node->content_matches(p, n, obj));
}

void Trace::each_changed_in_place(const std::function<void(uint32_t)>& f) {
  const Program& p = recording_->program();
  if (raw_.size() != p.track_pc.size()) return;  // never rebuilt: the function did not run
  for (uint32_t pc = 0; pc < p.code.size(); ++pc) {
    const Instr& n = p.code[pc];
    // An immutable node without fields cannot have changed.
    if (n.op != Op::node || !(n.flags & HANDED_OVER) || (n.node->track == NONE && !n.node->kind->has_fields()))
      continue;
    if (has_another_type_or_code(pc) || (n.node->track != NONE && raw_[n.node->track]) || changed(pc) ||
        holds_otherwise(pc))
      f(pc);
  }
}

void Trace::restore() {
  each_changed_in_place([&](uint32_t pc) {
    const Program& p = recording_->program();
    const Instr& n = p.code[pc];
    PyObject* obj = recording_->live[pc];
    // The class and the code first: content is compared and written as that of the node's own type.
    if (Py_TYPE(obj) != n.node->type)
      check(PyObject_SetAttrString(obj, "__class__", reinterpret_cast<PyObject*>(n.node->type)));
    if (n.node->kind->node->is_function && !n.node->kind->node->content_matches(p, n, obj))
      restore_code(p.statics[n.node->payload], obj);
    if (!((n.node->track != NONE && raw_[n.node->track]) || changed(pc) || holds_otherwise(pc))) return;
    Commit commit;
    restore_node(pc, commit);
    commit.run();
  });
}

bool Trace::has_changed() {
  for (uint32_t t = 0; t < recording_->program().track_pc.size(); ++t) {
    Change change{t, {}, {}};
    if (holds_otherwise(recording_->program().track_pc[t]) || find_change(change)) return true;
  }
  return false;
}

nb::object Trace::as_begun(nb::handle f) {
  std::vector<std::unique_ptr<Commit>> commits;
  auto take_back = [&] {
    // In reverse, as a later commit found what an earlier one had written.
    for (; !commits.empty(); commits.pop_back()) commits.back()->take_back();
  };
  bool can_set_aside = true;
  try {
    each_changed_in_place([&](uint32_t pc) {
      if (!can_set_aside || has_another_type_or_code(pc)) {
        can_set_aside = false;
        return;
      }
      auto commit = std::make_unique<Commit>();
      restore_node(pc, *commit);
      commit->run();
      commits.push_back(std::move(commit));
    });
    nb::object out = can_set_aside ? nb::steal(check(PyObject_CallNoArgs(f.ptr()))) : nb::none();
    take_back();
    return out;
  } catch (...) {
    take_back();
    throw;
  }
}

// Which tracked nodes lead to a changed one (and are changed for whoever looks at them by value).
std::vector<bool> Trace::reaches_changed(const std::vector<uint32_t>& changed_nodes) const {
  const Program& p = recording_->program();
  std::vector<bool> out(p.track_pc.size(), false);
  if (changed_nodes.empty()) return out;
  std::vector<uint32_t> parent = p.parents();
  std::unordered_multimap<uint32_t, uint32_t> refs;  // tracked index -> where it is referred to
  for (uint32_t pc = 0; pc < p.code.size(); ++pc)
    if (p.code[pc].op == Op::ref) refs.emplace(p.code[pc].arg, pc);
  std::vector<uint32_t> work(changed_nodes);
  while (!work.empty()) {
    uint32_t t = work.back();
    work.pop_back();
    if (out[t]) continue;
    out[t] = true;
    // Only a tracked node is referred to from elsewhere: the next one above stands for all in between.
    auto add_above = [&](uint32_t pc) {
      for (uint32_t up = parent[pc]; up != NONE; up = parent[up]) {
        if (p.code[up].node->track == NONE) continue;
        work.push_back(p.code[up].node->track);
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
    const NodeKind& node = *n.node->kind->node;
    if (!(n.flags & HANDED_OVER) && !node.is_function && !node.is_cell && !node.is_ignored) rebuilt.push_back(t);
  }
  for (;;) {
    // Until nothing is added: a cell that is rebuilt takes along all functions that share it, and these have cells.
    std::vector<bool> out = reaches_changed(rebuilt);
    size_t before = rebuilt.size();
    for (uint32_t t = 0; t < p.track_pc.size(); ++t) {
      uint32_t pc = p.track_pc[t];
      if (!out[t] || !p.code[pc].node->kind->node->is_function) continue;
      for (uint32_t c = pc + 1, i = 0; i < p.code[pc].node->items; ++i, c = p.after(c)) {
        uint32_t track = p.code[c].op == Op::ref    ? p.code[c].arg
                         : p.code[c].op == Op::node ? p.code[c].node->track
                                                    : NONE;
        if (track != NONE && !out[track]) rebuilt.push_back(track);
      }
    }
    if (rebuilt.size() == before) return out;
  }
}

bool Trace::find_change(Change& change) {
  uint32_t pc = recording_->program().track_pc[change.track];
  if (!recording_->program().code[pc].node->kind->node->is_registered) return changed(pc);
  if (!raw_[change.track]) return false;
  change.delta = own(PyDict_New());
  change.deleted = own(PyList_New(0));
  return raw_changed(change.track, expected(pc), change.delta.get(), change.deleted.get());
}

// Did the function change it, or is it written only because its arrays were donated?
bool Trace::changed_by_function(uint32_t track) {
  if (donated_.empty()) return true;
  // Asked again as if nothing had been donated.
  std::vector<PyObject*> donated = std::exchange(donated_, {});
  Change alone{track, {}, {}};
  bool answer = find_change(alone);
  donated_ = std::move(donated);
  return answer;
}

nb::tuple Trace::finish(nb::handle result, bool by_value, bool forward, const std::vector<bool>& donated, bool arrays,
                        bool numbers, bool share, bool numpy) {
  const Program& p = recording_->program();
  for (size_t i = 0; i < donated.size() && i < tracers_.size(); ++i)
    if (donated[i]) donated_.push_back(tracers_[i]);
  // For binary searches: each attribute is looked for.
  std::sort(donated_.begin(), donated_.end());

  // Which nodes has the function changed?
  refuse_changed_frozen();
  auto out = std::make_unique<Outcome>();
  std::vector<Change> changes, unseen;
  std::vector<uint32_t> changed_tracks;
  nb::list paths;
  for (uint32_t t = 0; t < p.track_pc.size(); ++t) {
    uint32_t pc = p.track_pc[t];
    Change change{t, {}, {}};
    bool otherwise = holds_otherwise(pc);
    if (otherwise) {
      const SetTable* table = p.set_table(p.code[pc]);
      table->is_changed = true;
      out->changed_sets.emplace_back(pc, *table);
    }
    if (!find_change(change)) {
      if (otherwise) unseen.push_back({t, {}, {}, true});
      continue;
    }
    if (changed_by_function(t) && !p.code[pc].node->kind->expires && nb::len(paths) < 8)
      paths.append(path_text(p, pc, root_names()));
    changed_tracks.push_back(t);
    changes.push_back(std::move(change));
  }

  // What the result may hold of the caller's own: nodes that stay themselves, and leaves that are forwarded.
  IdLease nodes, leaves, keys;
  for (const Static& s : p.statics)
    if (s.how == How::contents) keys->insert(s.obj, 0);
  std::vector<bool> differs = by_value ? reaches_changed(changed_tracks) : std::vector<bool>();
  std::vector<bool> leads_to_new = by_value ? leads_to_rebuilt() : std::vector<bool>();
  for (uint32_t t = 0; t < p.track_pc.size(); ++t) {
    uint32_t pc = p.track_pc[t];
    bool handed = p.code[pc].flags & HANDED_OVER || p.code[pc].node->kind->node->is_ignored;
    // By value, too, a function stays the caller's own, unless it leads to something that does not.
    bool itself =
        handed || (p.code[pc].node->kind->node->is_function && donated_.empty() && by_value && !leads_to_new[t]);
    if (!by_value || (itself && !differs[t])) nodes->insert(expected(pc), t);
  }
  for (uint32_t i = 0; i < tracers_.size(); ++i)
    if (forward && (numpy || kind_of(recording_->leaves[i]).leaf != Leaf::numpy) &&
        !std::binary_search(donated_.begin(), donated_.end(), tracers_[i]))
      leaves->insert(tracers_[i], i);
  // One recording for all: root 0 is the result, and one root follows for each write.
  Inputs inputs{&*nodes, &*leaves, &*keys, &p, arrays, numbers, numpy};
  RecordOptions options{nullptr, nullptr, &inputs, forward || share, false, nullptr};
  opened_.walk_again();
  options.opened = &opened_;
  Recorder recorder(options);
  recorder.root(result.ptr());

  out->result_leaves = recorder.leaf_count();
  bool lost = false;
  if (by_value) {  // nothing is written: a change is lost unless the result shows it
    for (uint32_t t : changed_tracks) {
      uint32_t pc = p.track_pc[t];
      lost = lost || !(p.code[pc].node->kind->expires || recorder.has_seen(expected(pc)));
    }
  } else {
    std::move(unseen.begin(), unseen.end(), std::back_inserter(changes));
    for (Change& c : changes) {
      uint32_t pc = recorder.position();
      Touched touched;
      if (c.delta) {
        recorder.root(c.delta.get());
        touched.deleted = recorder.keep(own(PyList_AsTuple(c.deleted.get())));
      } else {
        // Without `forward` an untouched leaf is an output too, which has to reach its place.
        if (forward) touched = touched_parts(p.track_pc[c.track], recorder);
        recorder.content(expected(p.track_pc[c.track]));
      }
      out->writes.push_back({c.track, pc, static_cast<bool>(c.delta), std::move(touched), false, c.unseen});
    }
  }
  RecordedGraph recorded = recorder.finish(nullptr);
  // Weakly: what the caller's graph holds is alive whenever this is applied, and may lead back to the function.
  out->program = weakened_inputs(recorded.program, p);
  // The copy holds what its statics name, and not yet what the writes name.
  for (const Write& w : out->writes)
    for (PyObject* names : {w.touched.dropped, w.touched.deleted})
      if (names) out->program.owned.push(names);
  for (Write& w : out->writes)
    for (uint32_t c = w.pc + 1, i = 0; !w.raw && i < out->program.children(w.pc); ++i, c = out->program.after(c))
      w.context = w.context || is_context(out->program, c);
  find_readers(*out);
  restore();
  nb::list out_leaves;
  for (size_t i = 0; i < recorded.leaves.size(); ++i) out_leaves.append(nb::borrow(recorded.leaves[i]));
  return nb::make_tuple(nb::cast(out.release(), nb::rv_policy::take_ownership), out_leaves, paths, lost);
}

bool Trace::verify(nb::tuple roots) {
  const Program& p = recording_->program();
  Walk walk, second;
  std::vector<PyObject*> values;
  for (nb::handle h : roots) values.push_back(h.ptr());
  if (!replay(p, values.data(), values.size(), walk)) return false;
  // What a registered flatten returns may be new objects each time: below it, values are compared.
  std::vector<uint32_t> recomputed;  // leaves that are other objects now
  uint32_t recomputed_until = 0, code = static_cast<uint32_t>(p.code.size());
  for (uint32_t pc = 0; pc < code; ++pc) {
    const Instr& n = p.code[pc];
    bool below = pc < recomputed_until;
    if (n.op == Op::leaf && !(n.flags & ALIAS) && walk.leaves[n.arg] != recording_->leaves[n.arg] &&
        !std::binary_search(recording_->assumed.begin(), recording_->assumed.end(), n.arg)) {
      if (!below) return false;
      recomputed.push_back(n.arg);
    }
    if (n.op != Op::node) continue;
    PyObject* now = n.node->track == NONE ? nullptr : walk.nodes[n.node->track];
    if (!below && now && now != recording_->live[pc] && !n.node->kind->node->is_ignored) return false;
    if (n.node->kind->node->is_registered) recomputed_until = std::max(recomputed_until, n.node->next);
  }
  if (recomputed.empty()) return true;
  // One that is the same object the next time is kept somewhere, where another stood when the trace began.
  if (!replay(p, values.data(), values.size(), second)) return false;
  return std::all_of(recomputed.begin(), recomputed.end(), [&](uint32_t i) {
    return second.leaves[i] != walk.leaves[i] &&
           hooks::equal_leaves(recording_->leaves[i], walk.leaves[i]).get() == Py_True;
  });
}

void Trace::close() {
  named_.leave();
  tracers_.clear();
  built_.clear();
  raw_.clear();
  attribute_contents_.clear();
  backups_.clear();
  opened_.clear();
  // It points into `recording_object_`, and goes first.
  recording_ = &Recording::nothing();
  recording_object_.reset();
}

void bind_trace(nb::module_& m) {
  nb::class_<Trace>(m, "Trace", "One trace: the caller's graph rebuilt around tracers, and what became of it.")
      .def(
          "__init__",
          [](Trace* self, nb::object recording) {
            if (!nb::isinstance<Recording>(recording)) raise_error(PyExc_TypeError, "expected a Recording");
            new (self) Trace(std::move(recording));
          },
          nb::arg("recording"), nb::sig("def __init__(self, recording: Recording) -> None"))
      .def("leaf_names", &Trace::leaf_names, nb::sig("def leaf_names(self) -> list[str]"))
      .def("identities", &Trace::identities, nb::sig("def identities(self) -> dict[int, tuple[int, int]]"),
           "Of each node with an identity: id of the rebuilt one -> (tracked index, id of the caller's).")
      .def("leaves_ids_of_copies", &Trace::leaves_ids_of_copies, nb::arg("outcome"),
           nb::sig("def leaves_ids_of_copies(self, outcome: Outcome) -> bool"),
           "Does the Outcome hold the id() of a rebuilt node, which is another object than the caller's?")
      .def("original", &Trace::original, nb::sig("def original(self, rebuilt: object, /) -> Any"),
           "The caller's object that a rebuilt one stands for; None of anything else.")
      .def("functions", &Trace::functions, nb::sig("def functions(self) -> list[Any]"),
           "The functions of the graph as the traced function sees them.")
      .def("rebuild", &Trace::rebuild, nb::sig("def rebuild(self, leaves: Sequence[object], /) -> list[Any]"))
      .def("as_begun", &Trace::as_begun, nb::arg("f"), nb::sig("def as_begun(self, f: Callable[[], Any]) -> Any"),
           "f(), while the nodes that were handed over are as they were when the trace began; None where that cannot "
           "be.")
      .def("has_changed", &Trace::has_changed, nb::sig("def has_changed(self) -> bool"),
           "Has the function changed anything so far?")
      .def(
          "left_out", &Trace::left_out, nb::sig("def left_out(self) -> list[tuple[str, type[Any], str, bool]]"),
          "What the function has changed by now and the flatten of a registered class leaves out: path, class, name of "
          "the attribute, and whether what is behind it was changed in place.")
      .def("begins", &Trace::begins, nb::arg("recording"), nb::sig("def begins(self, recording: Recording) -> bool"),
           "Is it the recording of the same roots, of which nothing has changed, and of more behind them?")
      .def("extend", &Trace::extend, nb::arg("recording"), nb::arg("leaves"),
           nb::sig("def extend(self, recording: Recording, leaves: Sequence[object]) -> list[Any]"),
           "Goes on with that recording and all of its leaves; the new roots, rebuilt.")
      .def("finish", &Trace::finish, nb::arg("result").none(), nb::arg("by_value"), nb::arg("forward"),
           nb::arg("donated"), nb::arg("arrays") = false, nb::arg("numbers") = false, nb::arg("share") = false,
           nb::arg("numpy") = true,
           nb::sig("def finish(self, result: object, by_value: bool, forward: bool, donated: Sequence[bool], arrays: "
                   "bool = False, numbers: bool = False, share: bool = False, numpy: bool = True) -> tuple[Outcome, "
                   "list[Any], list[str], bool]"))
      .def("restore", &Trace::restore)
      .def("verify", &Trace::verify, nb::sig("def verify(self, roots: tuple[object, ...], /) -> bool"))
      .def("close", &Trace::close);
}

}  // namespace graftax
