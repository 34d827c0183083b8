// SPDX-License-Identifier: Apache-2.0
#include "call/cache.h"

#include "call/recording.h"
#include "call/trace.h"
#include "capture/watchers.h"

#include <algorithm>

namespace graftax {

namespace {

// A call tries these in turn before it records anything: each costs a walk up to the first difference.
constexpr size_t max_recent = 8;
constexpr size_t max_hints = 1024;
constexpr size_t hints_of_one_hash = 4;

size_t first_hint(size_t missed) { return (missed >> 20) % (max_hints / hints_of_one_hash) * hints_of_one_hash; }

void show_entry(const Entry& e, Visitor& visit) {
  visit(e.context, e.compiled, e.reads, e.outcomes, e.host, e.evaluate, e.donor, e.graphdef);
}

// The list of its Outcomes stays: the collector clears that by itself, and calls count what is in it.
void clear_entry(Entry& e) {
  for (Owned* held : {&e.context, &e.compiled, &e.reads, &e.host, &e.evaluate, &e.donor}) *held = {};
  e.graphdef_program = &Recording::nothing().program();
  e.graphdef = {};
}

void show_table(const Table& t, Visitor& visit) {
  for (const Owned& e : t.recent) visit(e);
  for (const Table::Hint& h : t.hints) visit(h.entry);
}

// Emptied before anything is released: the last reference to an entry may run code that uses the table.
void clear_table(Table& t) {
  auto dead = std::exchange(t.recent, {});
  auto hints = std::exchange(t.hints, {});
}

// How an entry looks for the executable that fits: the one used last first. Where most calls find none (more shapes than
// are kept, in turn), looking at the leaves is in vain, and left for a while.
constexpr size_t max_directs = 16;
constexpr int most_misses = 64;  // calls that found none, less those that found one
constexpr int pause_calls = 1024;

// Empty before the first of them is released: that may let another thread in.
void forget_directs(Entry& entry) { auto gone = std::exchange(entry.directs, {}); }

// Null where none fits; one that is not ready yet where it is too early to ask for its executable.
Shared<Direct> fitting_direct(Entry& entry, const OwnedList& leaves, PyObject* host_values,
                              const TraceContext& trace_context) {
  // After jax.clear_caches() nothing that was compiled before may run.
  if (entry.cleared != caches_cleared()) {
    entry.cleared = caches_cleared();
    forget_directs(entry);
  }
  if (entry.directs.empty()) return nullptr;
  int waits = entry.donor ? 0 : direct_waits(leaves.size() + (host_values ? 2 : 0));
  for (size_t i = 0; i < entry.directs.size(); ++i) {
    // Held: what is asked of it may run Python code, during which another thread empties the list.
    Shared<Direct> direct = entry.directs[i];
    if (!direct->fits(leaves, trace_context)) continue;
    if (i > 0 && i < entry.directs.size()) std::swap(entry.directs[0], entry.directs[i]);
    if (direct->ready() || direct->calls++ < waits) return direct;
    Owned compiled = entry.compiled;
    entry.refused = !direct->prepare(compiled.get(), leaves, entry.vectors(host_values), entry.tupled);
    return entry.refused ? nullptr : direct;
  }
  return nullptr;
}

// Of each executable that may donate, the last one first.
nb::list donations(const Entry& entry) {
  nb::list out;
  for (const Shared<Direct>& direct : entry.directs) {
    const Donation* donation = direct->donation();
    if (!donation) continue;
    nb::list candidates;
    for (const Donation::Candidate& c : donation->candidates)
      candidates.append(nb::make_tuple(c.leaf, c.bytes, c.is_donated, static_cast<int>(c.holder),
                                       nb::borrow(c.held ? c.held.get() : Py_None)));
    out.append(nb::make_tuple(donation->calls_donated, donation->calls_kept, donation->has_donated, candidates));
  }
  return out;
}

}  // namespace

Owned Entry::host_values(const OwnedList& leaves) const {
  std::vector<PyObject*> numbers;
  for (auto [leaf, type] : symbols) {
    if (Py_TYPE(leaves[leaf]) != type) return {};
    numbers.push_back(leaves[leaf]);
  }
  // Held, as the program of the host may be replaced while it runs.
  Owned f = evaluate;
  Owned out = Owned::steal(PyObject_Vectorcall(f.get(), numbers.data(), numbers.size(), nullptr));
  if (!out) {  // the arithmetic raises for these: so does the function, in a trace of its own
    if (!PyErr_ExceptionMatches(PyExc_Exception)) raise_python();
    PyErr_Clear();
    return {};
  }
  if (out.get() == Py_None) return {};
  return out;
}

uint32_t Entry::captured_from() const {
  uint32_t pc = 0, track = 0;
  const Program& p = program();
  for (uint32_t r = 0; r < arguments && r < p.roots; ++r) pc = p.after(pc);
  while (track < p.track_pc.size() && p.track_pc[track] < pc) ++track;
  return track;
}

OwnedList Entry::without_numbers(const OwnedList& leaves) const {
  // The program takes no number here, but what the host computes of all of them: one scalar stands in each place.
  static PyObject* const nothing = nb::module_::import_("numpy").attr("int32")(0).release().ptr();
  OwnedList out;
  for (size_t i = 0; i < leaves.size(); ++i) out.push(leaves[i]);
  for (auto [leaf, _] : symbols) out.set(leaf, nothing);
  return out;
}

OwnedList Entry::vectors(PyObject* host_values) const {
  static PyObject* const name = interned("vectors");
  OwnedList out;
  if (!host_values) return out;
  Owned program = host;
  Owned both = own(PyObject_CallMethodObjArgs(program.get(), name, PyTuple_GET_ITEM(host_values, 0),
                                              PyTuple_GET_ITEM(host_values, 1), nullptr));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(both.get()); ++i) out.push(PyTuple_GET_ITEM(both.get(), i));
  return out;
}

Shared<Direct> Entry::find_direct(const OwnedList& leaves, PyObject* host_values, const Shared<SettingsNow>& now,
                                  Shared<Direct>& to_remember, std::vector<LeafLook>* looks) {
  Shared<Direct> out;
  if (pause > 0 && --pause > 0) return nullptr;
  try {
    if (!now->direct || !gate_is_open()) return nullptr;
    TraceContext trace_context = trace_context_now(now);
    out = fitting_direct(*this, leaves, host_values, trace_context);
    if (!out && !refused) to_remember = Direct::look(leaves, std::move(trace_context), looks);
    if (to_remember) to_remember->after_looks = remembered;  // see `remember`
  } catch (nb::python_error& e) {
    // Something of JAX is not as it was when it was probed.
    if (!PyErr_GivenExceptionMatches(e.value().ptr(), PyExc_Exception)) throw;
    refused = true;
  }
  miss_balance = std::max(0, miss_balance + (out ? -1 : 1));
  if (miss_balance > most_misses) {
    miss_balance = 0;
    pause = pause_calls;
    to_remember = nullptr;
  }
  if (refused || pause > 0) forget_directs(*this);
  if (out && !out->ready()) out = nullptr;
  return out;
}

bool Entry::has_alike(const OwnedList& leaves) const {
  std::vector<PyObject*> arrays;
  for (const AlikeLeaves& groups : alike) {
    arrays.clear();
    for (const std::vector<uint32_t>& group : groups) {
      arrays.push_back(leaves[group.front()]);
      for (uint32_t leaf : group)
        if (leaves[leaf] != arrays.back()) return false;
    }
    // `<` has no meaning for pointers of different objects, std::less has.
    std::sort(arrays.begin(), arrays.end(), std::less<>());
    if (std::adjacent_find(arrays.begin(), arrays.end()) != arrays.end()) return false;
  }
  return true;
}

bool Entry::takes_numpy(const OwnedList& leaves) const {
  if (!numpy_leaves) return true;
  for (size_t i = 0; i < leaves.size(); ++i)
    if (kind_of(leaves[i]).leaf == Leaf::numpy && !(i < numpy_leaves->size() && (*numpy_leaves)[i])) return false;
  return true;
}

// What goes is released on return, when the list is whole again.
void Entry::remember(Shared<Direct> direct) {
  if (direct->after_looks != remembered) return;  // of another thread meanwhile, which may have met leaves like these
  ++remembered;
  Shared<Direct> last;
  if (directs.size() >= max_directs) {
    last = std::move(directs.back());
    directs.pop_back();
  }
  directs.insert(directs.begin(), std::move(direct));
}

void Entry::note_traces() {
  for (Py_ssize_t count = PyList_GET_SIZE(outcomes.get()); outcomes_read < count; ++outcomes_read) {
    const auto& outcome = *nb::inst_ptr<Outcome>(PyList_GET_ITEM(outcomes.get(), outcomes_read));
    for (const auto& [pc, table] : outcome.changed_sets) {
      const SetTable* own = pc < program().code.size() ? program().set_table(program().code[pc]) : nullptr;
      if (!own) continue;
      // Traced with another table than the entry is for, a change of the set may end otherwise in its calls.
      if (*own == table) own->is_changed = true;
      else spoiled = spoiled || own->hashes == table.hashes;
    }
  }
  outcomes_read = PyList_GET_SIZE(outcomes.get());  // the collector may have cleared the list
}

void Table::promote(PyObject* entry) {
  nb::inst_ptr<Entry>(entry)->used = ++clock;
  if (!recent.empty() && recent.front().get() == entry) return;
  auto it = std::find_if(recent.begin(), recent.end(), [&](const Owned& e) { return e.get() == entry; });
  Owned last;  // released on return, when the list is whole
  Owned held = Owned::borrow(entry);
  if (it != recent.end()) recent.erase(it);
  else if (recent.size() >= max_recent) {
    last = std::move(recent.back());
    recent.pop_back();
  }
  recent.insert(recent.begin(), std::move(held));
}

Owned Table::hinted(size_t missed) const {
  if (missed == 0 || hints.empty()) return {};
  for (size_t i = first_hint(missed), end = i + hints_of_one_hash; i < end; ++i)
    if (hints[i].missed == missed) return Owned::borrow(hints[i].entry.get());
  return {};
}

void Table::hint(size_t missed, PyObject* entry) {
  if (missed == 0) return;
  if (hints.empty()) hints.resize(max_hints);
  size_t first = first_hint(missed), at = first;
  // Its own place, the first free one, or the last of the row.
  while (at < first + hints_of_one_hash - 1 && hints[at].missed != missed && hints[at].entry) ++at;
  if (hints[at].entry.get() == entry && hints[at].missed == missed) return;
  Hint before = std::exchange(hints[at], {missed, Owned::borrow(entry)});
  std::swap(hints[first], hints[at]);  // of a full row the one that was first goes next
}

void bind_table(nb::module_& m) {
  nb::class_<Entry>(m, "Entry", nb::type_slots(Collected<Entry, show_entry, clear_entry>::slots),
                    nb::is_weak_referenceable(), "What is compiled for one structure of one function.")
      .def(
          "__init__",
          [](Entry* self, nb::handle_t<GraphDef> graphdef, nb::object context, nb::object compiled, nb::list outcomes,
             uint32_t arguments, bool tupled) {
            auto* e = new (self) Entry{};
            e->graphdef = Owned::borrow(graphdef.ptr());
            e->graphdef_program = &nb::inst_ptr<GraphDef>(graphdef)->program;
            e->context = Owned::borrow(context.ptr());
            e->compiled = Owned::borrow(compiled.ptr());
            e->outcomes = Owned::borrow(outcomes.ptr());
            e->tupled = tupled;
            e->arguments = arguments;
          },
          nb::arg("graphdef"), nb::arg("context").none(), nb::arg("compiled"), nb::arg("outcomes"),
          nb::arg("arguments"), nb::arg("tupled"),
          nb::sig("def __init__(self, graphdef: GraphDef, context: object, compiled: Any, outcomes: list[Outcome], "
                  "arguments: int, tupled: bool) -> None"))
      .def_prop_ro(
          "graphdef", [](const Entry& e) { return nb::borrow(e.graphdef ? e.graphdef.get() : Py_None); },
          nb::sig("def graphdef(self) -> GraphDef"), "What it was made with: a structure whose statics are weak.")
      .def_prop_ro(
          "direct",
          [](const Entry& e) -> nb::object {
            if (e.refused) return nb::none();
            return nb::int_(std::count_if(e.directs.begin(), e.directs.end(), [](auto& d) { return d->ready(); }));
          },
          nb::sig("def direct(self) -> int | None"),
          "How many of its executables are run directly; None where none can be.")
      .def(
          "serves",
          [](const Entry& e, const Recording& r) {
            if (e.spoiled || (e.reads && !reads_hold(*nb::inst_ptr<Reads>(e.reads.get())))) return false;
            const Program& p = r.program();
            bool serves = e.has_identities([&](uint32_t track) { return r.live[p.track_pc[track]]; }) &&
                          e.takes_numpy(r.leaves) && e.has_alike(r.leaves) && same_order(e.program(), p) &&
                          (e.symbols.empty() || e.host_values(r.leaves));
            // That a trace changes a set is noted in the entry's tables. A trace of this recording has to know it too.
            for (const auto& [pc, table] : e.program().set_tables)
              if (const SetTable* own = serves ? p.set_table(p.code[pc]) : nullptr)
                own->is_changed = own->is_changed || table.is_changed;
            return serves;
          },
          nb::arg("recording"), nb::sig("def serves(self, recording: Recording) -> bool"),
          "Of an equal structure: do sets iterate in the same order and do the same when they are changed, are objects "
          "whose id() was asked for the same, are NumPy arrays where its code changes arrays in place, are arrays one "
          "where it asked for that, "
          "have the bindings that it depends on the values they had, and do the guards of its numbers hold?")
      .def(
          "use_numbers",
          [](Entry& e, std::vector<std::pair<uint32_t, nb::object>> symbols, nb::object host) {
            for (auto& [leaf, type] : symbols)
              e.symbols.emplace_back(
                  leaf, type.ptr() == reinterpret_cast<PyObject*>(&PyLong_Type) ? &PyLong_Type : &PyFloat_Type);
            e.host = Owned::borrow(host.ptr());
          },
          nb::arg("symbols"), nb::arg("host"),
          nb::sig("def use_numbers(self, symbols: list[tuple[int, type]], host: Any) -> None"),
          "Which leaves are symbolic numbers, and their HostProgram.")
      .def_prop_rw(
          "evaluate", [](const Entry& e) { return nb::borrow(e.evaluate ? e.evaluate.get() : Py_None); },
          [](Entry& e, nb::object f) { e.evaluate = Owned::borrow(f.ptr()); },
          nb::for_getter(nb::sig("def evaluate(self) -> Any")),
          nb::for_setter(nb::sig("def evaluate(self, f: Any, /) -> None")),
          "The numbers of a call -> what the host computes of them; None where a guard fails.")
      .def_prop_rw(
          "donor", [](const Entry& e) { return nb::borrow(e.donor ? e.donor.get() : Py_None); },
          [](Entry& e, nb::object donor) { e.donor = Owned::borrow(donor.ptr()); },
          nb::for_getter(nb::sig("def donor(self) -> Any")),
          nb::for_setter(nb::sig("def donor(self, donor: Any, /) -> None")),
          "With `donate='auto'`: makes the programs that donate.")
      .def(
          "donations", &donations, nb::sig("def donations(self) -> list[tuple[Any, ...]]"),
          "Of each executable that may donate: (calls that donated, calls that did not, did the last one?, and of each "
          "candidate: the leaf, its bytes, whether the program donates it, who else had it in the last call, a weak "
          "reference to it).")
      .def_prop_ro(
          "host", [](const Entry& e) { return nb::borrow(e.host ? e.host.get() : Py_None); },
          nb::sig("def host(self) -> Any"))
      .def(
          "note_identities",
          [](Entry& e, nb::dict ids) {
            for (auto [track, id] : ids)
              e.identities.emplace_back(nb::cast<uint32_t>(track),
                                        reinterpret_cast<PyObject*>(nb::cast<uintptr_t>(id)));
          },
          nb::arg("found"), nb::sig("def note_identities(self, found: dict[int, int]) -> None"),
          "More ids of objects that its code asked for, by tracked index.")
      .def_prop_rw(
          "alike", [](const Entry& e) { return e.alike; },
          [](Entry& e, std::vector<AlikeLeaves> alike) { e.alike = std::move(alike); },
          nb::for_getter(nb::sig("def alike(self) -> list[list[list[int]]]")),
          nb::for_setter(nb::sig("def alike(self, alike: list[list[list[int]]], /) -> None")),
          "Its code asked which of these leaves are one array: they were in these groups.")
      .def_prop_rw(
          "numpy_leaves",
          [](const Entry& e) -> nb::object {
            if (!e.numpy_leaves) return nb::none();
            nb::list out;
            for (bool was_numpy : *e.numpy_leaves) out.append(was_numpy);
            return out;
          },
          [](Entry& e, std::vector<bool> leaves) { e.numpy_leaves = std::move(leaves); },
          nb::for_getter(nb::sig("def numpy_leaves(self) -> list[bool] | None")),
          nb::for_setter(nb::sig("def numpy_leaves(self, leaves: list[bool], /) -> None")),
          "Where its code changes arrays in place: which leaves were NumPy arrays in the trace. No others may be.")
      .def_rw("donated", &Entry::donated, "Leaves that each call deletes.")
      .def_rw("waits", &Entry::waits,
              "Does a call wait for the computation, so that its errors are raised by the call?")
      .def_prop_ro(
          "untold", [](const Entry& e) { return PyList_GET_SIZE(e.outcomes.get()) != e.outcomes_read; },
          "Was it traced since it was told last what it depends on?")
      .def(
          "tell",
          [](Entry& e, nb::handle reads) {
            if (!reads.is_none() && !nb::isinstance<Reads>(reads)) raise_error(PyExc_TypeError, "expected Reads");
            e.note_traces();
            Owned before = std::exchange(e.reads, reads.is_none() ? Owned() : Owned::borrow(reads.ptr()));
          },
          nb::arg("reads").none(), nb::sig("def tell(self, reads: Reads | None) -> None"), "What its traces depend on.")
      .def(
          "holds", [](const Entry& e) { return !e.reads || reads_hold(*nb::inst_ptr<Reads>(e.reads.get())); },
          "Have the bindings that it depends on the values they had?")
      .def_ro("tupled", &Entry::tupled, "Does `compiled` take the leaves as one tuple?")
      .def_prop_ro(
          "used", [](const Entry& e) { return e.used; }, "The table's clock at the last call.")
      .def_prop_ro(
          "compiled", [](const Entry& e) { return nb::borrow(e.compiled ? e.compiled.get() : Py_None); },
          nb::sig("def compiled(self) -> Any"))
      .def_prop_ro(
          "outcomes", [](const Entry& e) { return nb::borrow<nb::list>(e.outcomes.get()); },
          nb::sig("def outcomes(self) -> list[Outcome]"));

  nb::class_<Table>(m, "Table", nb::type_slots(Collected<Table, show_table, clear_table>::slots),
                    nb::is_weak_referenceable(), "The entries used last; a subclass holds them all.")
      .def(nb::init<>())
      .def_ro("hits", &Table::hits)
      .def_rw("restarts", &Table::restarts)
      .def_rw("as_plain", &Table::as_plain)
      .def_rw("generation", &Table::generation)
      .def(
          "_promote",
          [](Table& t, nb::handle entry) {
            if (!nb::isinstance<Entry>(entry)) raise_error(PyExc_TypeError, "expected an Entry");
            t.promote(entry.ptr());
          },
          nb::arg("entry"), nb::sig("def _promote(self, entry: Entry) -> None"), "Makes this entry the newest.")
      .def(
          "_forget",
          [](Table& t, nb::handle entry) {
            // Both are released on return, when the table does not mention the entry any more.
            std::vector<Table::Hint> gone;
            for (Table::Hint& h : t.hints)
              if (h.entry.get() == entry.ptr()) gone.push_back(std::exchange(h, {}));
            auto it =
                std::find_if(t.recent.begin(), t.recent.end(), [&](const Owned& e) { return e.get() == entry.ptr(); });
            if (it == t.recent.end()) return;
            Owned dead = std::move(*it);
            t.recent.erase(it);
          },
          nb::arg("entry"))
      .def("_forget_all", [](Table& t) {
        clear_table(t);
        t.hits = 0;
      });
}

}  // namespace graftax
