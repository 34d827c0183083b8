// SPDX-License-Identifier: Apache-2.0
// The Outcome: applied to the caller's objects, pickled, shown to Python.
#include <algorithm>

#include "call/trace.h"
#include "graph/key_path.h"
#include "graph/kinds/function.h"
#include "graph/program_rows.h"
#include "graph/static_equality.h"
#include "python/hooks.h"

namespace graftax {

bool is_context(const Program& p, uint32_t pc) {
  return p.code[pc].op == Op::stat && p.statics[p.code[pc].arg].how == How::context;
}

namespace {

// Does a text look like a tracer's, as `f"{x}"` makes it? They are "JitTracer(float32[])" or "Traced<float32[]>with<...".
bool names_tracer(PyObject* text) {
  static PyObject* const parts[] = {interned("Tracer("), interned("Traced<")};
  for (PyObject* part : parts) {
    int contains = PyUnicode_Contains(text, part);
    check(contains);
    if (contains) return true;
  }
  return false;
}

// May others refer to what is at `pc`, or to something in it?
bool is_target(const Program& p, uint32_t pc) {
  return std::any_of(p.code.begin() + pc, p.code.begin() + p.after(pc),
                     [](const Instr& n) { return n.op == Op::node && (n.node->track != NONE || n.flags & TARGET); });
}

// The children of a changed node. What stays as it is in the caller's node is not made, unless others refer to it.
// Context values are those that the caller's node has: it keeps them.
void build_written(Builder& builder, const Program& p, const Write& w, PyObject* node, OwnedList& values) {
  const Instr& n = p.code[w.pc];
  uint32_t items = n.node->has_extra + n.node->items, key = n.node->keys + p.item_keys(n), child = w.pc + 1;
  auto touched = w.touched.children.begin();
  for (uint32_t i = 0; i < p.children(w.pc); ++i, child = p.after(child)) {
    bool as_a_whole = i < n.node->has_extra || (i < items ? w.touched.items : w.touched.fields);
    bool written = touched != w.touched.children.end() && *touched == i;
    touched += written;
    if (!as_a_whole && !written && !is_target(p, child)) {
      values.push(Py_None);
      continue;
    }
    values.push_stolen(builder.build(child));
    if (!w.context || i < items || !is_context(p, child)) continue;
    Owned current = field_value(node, *n.node->kind, p.statics[p.keys[key + i - items]].obj);
    if (current && Py_TYPE(current.get()) == p.statics[p.code[child].arg].type)
      values.set(values.size() - 1, current.get());
  }
}

// Puts the first of those outputs of each group that were made of the same arrays in the place of the others.
void tie(const Outcome& outcome, PyObject* const* in_leaves, std::vector<PyObject*>& out_leaves) {
  for (const auto& group : outcome.alike) {
    IdLease first;  // the first input of an output -> the number of that output in the group
    for (uint32_t i = 0; i < group.size(); ++i) {
      const auto& inputs = group[i].second;
      if (first->insert(in_leaves[inputs[0]], i)) continue;
      auto is_same = [&](uint32_t one, uint32_t other) { return in_leaves[one] == in_leaves[other]; };
      auto is_one = [&](const auto& other) {
        return std::equal(inputs.begin(), inputs.end(), other.second.begin(), other.second.end(), is_same);
      };
      auto end = group.begin() + i;
      auto same = std::find_if(group.begin() + *first->find(in_leaves[inputs[0]]), end, is_one);
      if (same != end) out_leaves[group[i].first] = out_leaves[same->first];
    }
    // Inside of a trace the inputs are tracers: which arrays are one is known in the call of that trace.
    if (Py_TYPE(out_leaves[group[0].first]) == runtime.array_type) continue;
    nb::list outputs;
    for (const auto& [leaf, inputs] : group) {
      nb::list operands;
      for (uint32_t input : inputs) operands.append(nb::borrow(in_leaves[input]));
      outputs.append(nb::make_tuple(nb::tuple(operands), nb::borrow(out_leaves[leaf])));
    }
    hooks::record_alias_sources(outputs.ptr());
  }
}

// What was written is there now: what an unflatten has read of it is read again, by the objects that it has made.
void read_again(const Outcome& outcome, Builder& builder) {
  const Program& p = outcome.program;
  // From below: an outer instance reads the inner ones, which have to be right by then.
  for (auto pc = outcome.readers.rbegin(); pc != outcome.readers.rend(); ++pc) {
    Owned instance = Owned::borrow(builder.built()[*pc]);
    if (!instance || Py_TYPE(instance.get()) != p.code[*pc].node->type) continue;
    Owned fresh = builder.made_again(*pc);
    if (Py_TYPE(fresh.get()) != p.code[*pc].node->type || fresh.get() == instance.get()) continue;
    Commit commit;
    commit.move_fields(fresh.get(), instance.get(), *p.code[*pc].node->kind);
    commit.run();
  }
}

}  // namespace

void find_readers(Outcome& outcome) {
  const Program& p = outcome.program;
  outcome.readers.clear();
  if (outcome.writes.empty()) return;
  std::vector<uint32_t> parent = p.parents();
  std::vector<bool> holds_input(p.code.size());
  for (uint32_t pc = 0; pc < p.code.size(); ++pc) {
    if (p.code[pc].op != Op::input && p.code[pc].op != Op::ref) continue;  // what is referred to may hold one
    for (uint32_t up = parent[pc]; up != NONE && !holds_input[up]; up = parent[up]) holds_input[up] = true;
  }
  for (uint32_t pc = 0; pc < p.code.size(); ++pc)
    // Only instances that are attributes and nothing else: what is read anew moves into them attribute by attribute.
    if (holds_input[pc] && p.code[pc].node->kind->node->is_registered &&
        p.code[pc].node->kind->solid == &PyBaseObject_Type)
      outcome.readers.push_back(pc);
}

std::vector<PyObject*> with_numbers(const Outcome& outcome, PyObject* const* outputs, size_t count, PyObject* host) {
  std::vector<PyObject*> out;
  auto next = outcome.numbers.begin();
  for (size_t i = 0; i < count + outcome.numbers.size(); ++i)
    if (next != outcome.numbers.end() && next->first == i)
      out.push_back(PyTuple_GET_ITEM(host, host_outputs + (next++)->second));
    else out.push_back(*outputs++);
  return out;
}

Owned apply(const Outcome& outcome, PyObject* const* out_leaves, PyObject* const* in_leaves, PyObject* const* in_nodes,
            uint32_t seen_only) {
  const Program& p = outcome.program;
  // First the output leaves that are one object: ties, arrays of equal inputs, new Refs.
  OwnedList new_refs;
  std::vector<PyObject*> shared;
  if (!outcome.refs.empty() || !outcome.ties.empty() || !outcome.alike.empty()) {
    shared.assign(out_leaves, out_leaves + p.leaves);
    for (auto [leaf, first] : outcome.ties) shared[leaf] = out_leaves[first];
    tie(outcome, in_leaves, shared);
    for (auto [leaf, first] : outcome.refs) {
      // A Ref that the function made is made again for each call, once for all its places.
      if (leaf == first) new_refs.push_stolen(hooks::new_ref(out_leaves[leaf]));
      shared[leaf] = leaf == first ? new_refs.back() : shared[first];
    }
    out_leaves = shared.data();
  }
  if (outcome.writes.empty() && p.code.size() == 1) {  // one array: nothing to build
    if (p.code[0].op == Op::leaf) return Owned::borrow(out_leaves[0]);
    if (p.code[0].op == Op::forward) return Owned::borrow(in_leaves[p.code[0].arg]);
  }
  Builder builder(p, {out_leaves, in_nodes, in_leaves, nullptr});
  if (!outcome.readers.empty()) builder.record_built();
  Owned result = builder.build(0);
  if (outcome.writes.empty()) {
    builder.drain();
    return result;
  }
  // Everything is built before the first write: building may run user code, and may raise.
  OwnedList values;
  std::vector<size_t> first;
  auto is_left_out = [&](const Write& w) {  // what an exported program has captured is not there
    return w.unseen && (w.track >= seen_only || Py_TYPE(in_nodes[w.track]) != p.code[w.pc].node->type);
  };
  for (const Write& w : outcome.writes) {
    first.push_back(values.size());
    if (is_left_out(w)) continue;
    if (w.raw) values.push_stolen(builder.build(w.pc));
    else build_written(builder, p, w, in_nodes[w.track], values);
  }
  builder.drain();
  // Then all writes, as a whole or not at all.
  Commit commit;
  for (size_t i = 0; i < outcome.writes.size(); ++i) {
    const Write& w = outcome.writes[i];
    PyObject* node = in_nodes[w.track];
    if (is_left_out(w)) continue;
    if (!w.raw) {
      commit.content(p, w.pc, node, values.data() + first[i], in_nodes, &w.touched);
      continue;
    }
    const Kind& kind = kind_of(node);
    PyObject *name, *value;
    for (Py_ssize_t pos = 0; PyDict_Next(values[first[i]], &pos, &name, &value);) commit.field(node, kind, name, value);
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(w.touched.deleted); ++k)
      commit.field(node, kind, PyTuple_GET_ITEM(w.touched.deleted, k), nullptr);
  }
  commit.run();
  if (!outcome.readers.empty()) read_again(outcome, builder);
  return result;
}

// ---- binding

namespace {

void show_outcome(const Outcome& outcome, Visitor& visit) { outcome.program.show_held(visit); }

// Writes first: they point into the program.
void clear_outcome(Outcome& outcome) {
  outcome.writes.clear();
  outcome.program.clear();
}

// ---- pickle

nb::tuple outcome_state(const Outcome& o) {
  nb::list writes;
  for (const Write& w : o.writes)
    writes.append(nb::make_tuple(w.track, w.pc, w.raw, nb::cast(w.touched.items), nb::cast(w.touched.fields),
                                 nb::tuple(nb::cast(w.touched.children)), or_none(w.touched.dropped),
                                 or_none(w.touched.deleted), nb::cast(w.unseen)));
  return nb::make_tuple(5, nb::steal(program_state(o.program).release()), nb::tuple(writes), o.result_leaves,
                        nb::cast(o.refs), nb::cast(o.ties), nb::cast(o.alike));
}

template <class Test>
bool is_tuple_of(nb::handle obj, Test test) {
  if (!PyTuple_CheckExact(obj.ptr())) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(obj.ptr()); ++i)
    if (!test(PyTuple_GET_ITEM(obj.ptr(), i))) return false;
  return true;
}

// One field of the state of an Outcome. A write of version 1 has four fields: in it all parts were touched.
Write write_from_state(nb::handle state, Program& p) {
  nb::tuple t;
  Write w{};
  if (!read_as(state, t) || (t.size() != 4 && t.size() != 8 && t.size() != 9) || !read_as(t[0], w.track) ||
      !read_as(t[1], w.pc) || !read_as(t[2], w.raw) || w.track == NONE || w.pc >= p.code.size() ||
      p.code[w.pc].op != Op::node)
    malformed_state("write");
  const Instr& n = p.code[w.pc];
  Touched& parts = w.touched;
  nb::object dropped = nb::none(), deleted = t[t.size() == 4 ? 3 : 7];
  if (t.size() >= 8) {
    if (!read_as(t[3], parts.items) || !read_as(t[4], parts.fields) || !read_as(t[5], parts.children))
      malformed_state("write");
    dropped = t[6];
  }
  if (t.size() == 9 && !read_as(t[8], w.unseen)) malformed_state("write");
  if (!std::is_sorted(parts.children.begin(), parts.children.end())) malformed_state("write");
  if (!parts.children.empty() && parts.children.back() >= p.children(w.pc)) malformed_state("write");
  if (!dropped.is_none() && !is_tuple_of(dropped, is_simple_key)) malformed_state("write");
  auto is_string = [](PyObject* name) { return PyUnicode_CheckExact(name); };
  if (!deleted.is_none() && !is_tuple_of(deleted, is_string)) malformed_state("write");
  if (w.raw) {
    if (n.node->type != &PyDict_Type || n.node->track == NONE || deleted.is_none()) malformed_state("write");
    for (uint32_t i = 0; i < n.node->items; ++i)
      if (p.statics[p.keys[n.node->keys + i]].how != How::string) malformed_state("write");
  }
  if (!dropped.is_none()) parts.dropped = p.keep(Owned::borrow(dropped.ptr()));
  if (!deleted.is_none()) parts.deleted = p.keep(Owned::borrow(deleted.ptr()));
  return w;
}

// Root 0 is the result, and one root follows for each write.
// A pickle may come from anywhere: each index is checked here, and trusted where the Outcome is applied.
Outcome outcome_from_state(nb::handle state) {
  nb::tuple fields, writes;
  uint32_t version = 0;
  Outcome out;
  if (!read_as(state, fields) || fields.size() == 0 || !read_as(fields[0], version) || version < 1 || version > 5 ||
      fields.size() != std::max(version + 2, 4u))
    malformed_state("unknown version");
  if (version > 2 && !read_as(fields[4], out.refs)) malformed_state("refs");
  if (version > 3 && !read_as(fields[5], out.ties)) malformed_state("ties");
  if (version > 4 && !read_as(fields[6], out.alike)) malformed_state("ties");
  if (!read_as(fields[2], writes) || !read_as(fields[3], out.result_leaves)) malformed_state("fields");
  out.program = program_from_state(nb::object(fields[1]).ptr(), true);
  Program& p = out.program;
  if (p.roots != 1 + writes.size() || out.result_leaves > p.leaves) malformed_state("counts");
  for (auto [leaf, first] : out.refs)
    if (leaf >= p.leaves || first > leaf) malformed_state("refs");
  for (auto [leaf, first] : out.ties)
    if (leaf >= p.leaves || first >= leaf) malformed_state("ties");
  for (const auto& group : out.alike) {
    if (group.empty()) malformed_state("ties");
    for (const auto& [leaf, inputs] : group)
      if (leaf >= p.leaves || inputs.empty()) malformed_state("ties");
  }
  auto is_content = [&](uint32_t pc) {
    return p.code[pc].op == Op::node && is_shell_kind(*p.code[pc].node->kind) && p.code[pc].node->track == NONE;
  };
  if (is_content(0)) malformed_state("the result");
  uint32_t pc = p.after(0);
  for (nb::handle h : writes) {
    Write w = write_from_state(h, p);
    if (w.pc != pc || (!w.raw && is_shell_kind(*p.code[pc].node->kind) != is_content(pc))) malformed_state("write");
    out.writes.push_back(std::move(w));
    pc = p.after(pc);
  }
  find_readers(out);
  return out;
}

// Do these nodes have the types that the writes are meant for? A call's own walk ensures it; a caller in Python may not.
void check_nodes(const Outcome& o, const OwnedList& nodes) {
  auto refuse = [](PyObject* node) {
    raise_error(PyExc_ValueError, std::string("this Outcome writes to another type than ") + Py_TYPE(node)->tp_name);
  };
  for (const Write& w : o.writes) {
    PyObject* node = nodes[w.track];
    const Instr& n = o.program.code[w.pc];
    if (!w.raw) {
      if (Py_TYPE(node) != n.node->type && !w.unseen) refuse(node);
      if (n.node->kind->node->is_function &&
          n.node->items !=
              2 + static_cast<uint32_t>(reinterpret_cast<PyCodeObject*>(PyFunction_GET_CODE(node))->co_nfreevars))
        refuse(node);
      continue;
    }
    const Kind& kind = kind_of(node);
    if (!kind.node->is_registered) refuse(node);
    auto has_room = [&](PyObject* name) {
      return kind.has_dict ||
             std::any_of(kind.slots.begin(), kind.slots.end(), [&](const Slot& s) { return s.name == name; });
    };
    for (uint32_t i = 0; i < n.node->items; ++i)
      if (!has_room(o.program.statics[o.program.keys[n.node->keys + i]].obj)) refuse(node);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(w.touched.deleted); ++i)
      if (!has_room(PyTuple_GET_ITEM(w.touched.deleted, i))) refuse(node);
  }
}

}  // namespace

void bind_outcome(nb::module_& m) {
  nb::class_<Outcome>(m, "Outcome", nb::type_slots(Collected<Outcome, show_outcome, clear_outcome>::slots),
                      nb::is_weak_referenceable(),
                      "What one executable gives back: the result, and what it does to the caller's nodes.")
      .def_prop_ro("result_leaves", [](const Outcome& o) { return o.result_leaves; })
      .def_prop_rw(
          "numbers", [](const Outcome& o) { return o.numbers; },
          [](Outcome& o, std::vector<std::pair<uint32_t, uint32_t>> numbers) { o.numbers = std::move(numbers); },
          nb::for_getter(nb::sig("def numbers(self) -> list[tuple[int, int]]")),
          nb::for_setter(nb::sig("def numbers(self, arg: list[tuple[int, int]], /) -> None")),
          "Output leaves that are Python numbers, in order: (the leaf, which output of the host it is).")
      .def_prop_rw(
          "refs", [](const Outcome& o) { return o.refs; },
          [](Outcome& o, std::vector<std::pair<uint32_t, uint32_t>> refs) { o.refs = std::move(refs); },
          nb::for_getter(nb::sig("def refs(self) -> list[tuple[int, int]]")),
          nb::for_setter(nb::sig("def refs(self, arg: list[tuple[int, int]], /) -> None")),
          "Output leaves that are the content of a new jax.Ref, in order: (the leaf, the first one of the same Ref).")
      .def_prop_rw(
          "ties", [](const Outcome& o) { return o.ties; },
          [](Outcome& o, std::vector<std::pair<uint32_t, uint32_t>> ties) { o.ties = std::move(ties); },
          nb::for_getter(nb::sig("def ties(self) -> list[tuple[int, int]]")),
          nb::for_setter(nb::sig("def ties(self, arg: list[tuple[int, int]], /) -> None")),
          "Output leaves that are one array, in order: (the leaf, the first one, which stands in the place of both).")
      .def_prop_rw(
          "alike", [](const Outcome& o) { return o.alike; },
          [](Outcome& o, std::vector<std::vector<std::pair<uint32_t, std::vector<uint32_t>>>> alike) {
            o.alike = std::move(alike);
          },
          nb::for_getter(nb::sig("def alike(self) -> list[list[tuple[int, list[int]]]]")),
          nb::for_setter(nb::sig("def alike(self, arg: list[list[tuple[int, list[int]]]], /) -> None")),
          "Output leaves that are one array where the input leaves that they were made of are: groups of (output, "
          "inputs).")
      .def_prop_ro("num_leaves", [](const Outcome& o) { return o.program.leaves; })
      .def_prop_ro("num_writes",
                   [](const Outcome& o) {
                     return std::count_if(o.writes.begin(), o.writes.end(), [](const Write& w) { return !w.unseen; });
                   })
      .def(
          "leaf_places", [](const Outcome& o) { return leaf_places(o.program); },
          nb::sig("def leaf_places(self) -> list[tuple[int, tuple[Any, ...]]]"))
      .def(
          "apply",
          [](const Outcome& o, nb::sequence out, nb::sequence in, nb::sequence nodes) {
            OwnedList out_leaves, in_leaves, in_nodes;
            for (nb::handle h : out) out_leaves.push(h.ptr());
            for (nb::handle h : in) in_leaves.push(h.ptr());
            for (nb::handle h : nodes) in_nodes.push(h.ptr());
            // `apply` reads by index: there have to be as many leaves and nodes as the program names.
            uint32_t leaf_count = 0, node_count = 0;
            for (const Instr& n : o.program.code) {
              if (n.op == Op::forward) leaf_count = std::max(leaf_count, n.arg + 1);
              if (n.op == Op::input) node_count = std::max(node_count, n.arg + 1);
            }
            for (const Static& s : o.program.statics)
              if (s.how == How::input) node_count = std::max(node_count, s.first + 1);
            for (const Write& w : o.writes) node_count = std::max(node_count, w.track + 1);
            for (const auto& group : o.alike)
              for (const auto& [_, inputs] : group)
                leaf_count = std::max(leaf_count, *std::max_element(inputs.begin(), inputs.end()) + 1);
            if (out_leaves.size() != o.program.leaves || in_leaves.size() < leaf_count || in_nodes.size() < node_count)
              raise_error(PyExc_ValueError, "wrong number of leaves or nodes");
            check_nodes(o, in_nodes);
            return nb::steal(apply(o, out_leaves.data(), in_leaves.data(), in_nodes.data()).release());
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
            for (const Write& w : o.writes)
              if (!w.unseen) written.append(w.track);
            return nb::make_tuple(nodes, leaves, written);
          },
          nb::sig("def inputs(self) -> tuple[list[int], list[int], list[int]]"),
          "The input nodes and leaves that the result and the writes hold, and the nodes that are written, by index.")
      .def(
          "identities", [](const Outcome& o) { return identities(o.program); },
          nb::sig("def identities(self) -> list[Any]"), "The statics that count by identity, keys among them.")
      .def_prop_ro(
          "holds_ids", [](const Outcome& o) { return holds_ids(o.program); },
          "Is there a number among its statics that may be the id() of an object?")
      .def_prop_ro(
          "classes",
          [](const Outcome& o) {
            nb::set out;
            for (const Instr& n : o.program.code)
              if (n.op == Op::node && n.node->type->tp_flags & Py_TPFLAGS_HEAPTYPE)
                out.add(nb::borrow(reinterpret_cast<PyObject*>(n.node->type)));
            for (const Static& s : o.program.statics)
              if (s.obj && PyType_Check(s.obj) &&
                  reinterpret_cast<PyTypeObject*>(s.obj)->tp_flags & Py_TPFLAGS_HEAPTYPE)
                out.add(nb::borrow(s.obj));
            return out;
          },
          nb::sig("def classes(self) -> set[type]"), "The classes of its nodes, and those that are values in it.")
      .def_prop_ro(
          "texts_of_tracers",
          [](const Outcome& o) {
            nb::list out;
            for (const Static& s : o.program.statics)
              if (s.obj && !s.weak && PyUnicode_Check(s.obj) && names_tracer(s.obj)) out.append(nb::borrow(s.obj));
            return out;
          },
          nb::sig("def texts_of_tracers(self) -> list[str]"),
          "Strings in it that JAX has made of a tracer, most likely.")
      .def("rows", &rows_of<Outcome>, nb::sig("def rows(self) -> list[Row]"))
      .def(
          "__reduce__", [](nb::handle self) { return hooks::reduce_outcome.object()(self); },
          nb::sig("def __reduce__(self) -> tuple[Any, ...]"))
      .def("_state", &outcome_state, nb::sig("def _state(self) -> tuple[Any, ...]"))
      .def_static("_from_state", &outcome_from_state, nb::arg("state").none(),
                  nb::sig("def _from_state(state: object, /) -> Outcome"))
      .def("__repr__", [](const Outcome& o) {
        return "Outcome(" + program_repr(o.program) + ", writes=" + std::to_string(o.writes.size()) + ")";
      });
}

}  // namespace graftax
