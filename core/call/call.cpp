// SPDX-License-Identifier: Apache-2.0
#include "call/call.h"

#include <algorithm>
#include <optional>

#include "call/arguments.h"
#include "call/cache.h"
#include "call/call_stack.h"
#include "call/caller.h"
#include "call/kept_calls.h"
#include "capture/caller_stack.h"
#include "capture/frame_hook.h"
#include "capture/watchers.h"
#include "python/hooks.h"
#include "python/jax_registry.h"
#include "python/jax_settings.h"

namespace graftax {

namespace {

bool layout_matches(const Program& program, PyObject* layout) {
  if (program.layout == layout) return true;
  return program.layout && equal(program.layout, layout);
}

constexpr int max_restarts = 300;  // as in _capture/retrace_signals.py
PyObject* new_reads = nullptr;     // what a trace gives up with; kept for the life of the process

// Leaves a call whose entry does not serve it any more: `call` begins it again, with the roots that are known by then.
[[noreturn]] void begin_anew() {
  PyErr_SetNone(new_reads);
  raise_python();
}

// Own copies of NumPy arguments: the executable may read them after the call has returned.
void copy_numpy(const OwnedList& leaves, OwnedList& out) {
  static PyObject* const copy = interned("copy");
  for (size_t i = 0; i < leaves.size(); ++i) {
    const Kind& kind = kind_of(leaves[i]);
    if (kind.leaf == Leaf::numpy) out.push_stolen(own(PyObject_CallMethodNoArgs(leaves[i], copy)));
    else out.push(leaves[i]);
  }
}

// The number of the Outcome, coded as a tuple of None (0) and () (1), lowest bit first: no leaves, no user node. Behind
// it may stand a scalar: are the results finite?
size_t decode(PyObject* code) {
  size_t out = 0;
  for (Py_ssize_t i = PyTuple_GET_SIZE(code) - 1; i >= 0; --i) {
    PyObject* bit = PyTuple_GET_ITEM(code, i);
    if (bit == Py_None || PyTuple_Check(bit)) out = 2 * out + (bit != Py_None);
  }
  return out;
}

// What a program has returned.
struct Returned {
  Owned outputs;  // a list or a tuple
  size_t count = 0, outcome = 0;
  PyObject* are_finite = nullptr;  // a scalar, where the program checks

  // Of an executable: the scalar comes after the outputs.
  static Returned by_executable(Owned list, size_t outcome, PyObject* outcomes) {
    Returned out{std::move(list), 0, outcome};
    out.count = static_cast<size_t>(PyList_GET_SIZE(out.outputs.get()));
    if (outcome >= static_cast<size_t>(PyList_GET_SIZE(outcomes))) return out;
    const Outcome& o = *nb::inst_ptr<Outcome>(PyList_GET_ITEM(outcomes, static_cast<Py_ssize_t>(outcome)));
    // One output more than the Outcome has leaves: the program checks its results.
    if (out.count != o.program.leaves - o.numbers.size() + 1) return out;
    out.are_finite = PyList_GET_ITEM(out.outputs.get(), static_cast<Py_ssize_t>(--out.count));
    return out;
  }
  // Of jax.jit: (result leaves, write-back leaves, number of the Outcome).
  static Returned by_jit(PyObject* flat) {
    if (!PyTuple_Check(flat) || PyTuple_GET_SIZE(flat) != 3)
      raise_error(PyExc_SystemError, "the flat function returned something else");
    PyObject *first = PyTuple_GET_ITEM(flat, 0), *second = PyTuple_GET_ITEM(flat, 1), *code = PyTuple_GET_ITEM(flat, 2);
    Returned out{PyTuple_GET_SIZE(second) == 0 ? Owned::borrow(first) : own(PySequence_Concat(first, second)), 0,
                 decode(code)};
    out.count = static_cast<size_t>(PyTuple_GET_SIZE(out.outputs.get()));
    PyObject* last = PyTuple_GET_SIZE(code) ? PyTuple_GET_ITEM(code, PyTuple_GET_SIZE(code) - 1) : Py_None;
    if (last != Py_None && !PyTuple_Check(last)) out.are_finite = last;
    return out;
  }
};

// Was this computed by a program that knew of an Outcome?
bool knows(PyObject* host, size_t outcome) {
  return !host || PyLong_AsSize_t(PyTuple_GET_ITEM(host, host_inputs)) > outcome;
}

// While a thread calls the jit object of an entry with symbols, which may trace it, others wait: what the host has to
// compute, and which numbers the entry is for, is known after that.
class HostLock {
 public:
  explicit HostLock(const Entry& entry) : lock_(own(attribute(entry.host.get(), "lock"))) {
    Owned(own(PyObject_CallMethod(lock_.get(), "acquire", nullptr)));
  }
  HostLock(const HostLock&) = delete;
  HostLock& operator=(const HostLock&) = delete;
  // Also on the way out of an error, which has to survive the call of `release`.
  ~HostLock() {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    Py_XDECREF(PyObject_CallMethod(lock_.get(), "release", nullptr));
    PyErr_Restore(type, value, traceback);
  }

 private:
  Owned lock_;
};

// The result of the function, after the caller's objects have got what its Outcome writes to them.
Owned finish(const Returned& returned, PyObject* outcomes, const Walk& walk, const Entry& entry, PyObject* host) {
  PyObject* const* outputs = PySequence_Fast_ITEMS(returned.outputs.get());
  size_t count = returned.count, number = returned.outcome;
  PyObject* obj = number < static_cast<size_t>(PyList_GET_SIZE(outcomes))
                      ? PyList_GET_ITEM(outcomes, static_cast<Py_ssize_t>(number))
                      : nullptr;
  if (!obj) raise_error(PyExc_SystemError, "no Outcome for this executable");
  Owned hold = Owned::borrow(obj);  // applying it may run user code, which may drop the entry
  const Outcome& outcome = *nb::inst_ptr<Outcome>(obj);
  std::vector<PyObject*> all;
  if (!outcome.numbers.empty()) {
    for (auto [_, output] : outcome.numbers)
      if (!host || host_outputs + output >= PyTuple_GET_SIZE(host))
        raise_error(PyExc_SystemError, "a number of the result was not computed");
    all = with_numbers(outcome, outputs, count, host);
    outputs = all.data();
    count = all.size();
  }
  if (count != outcome.program.leaves) raise_error(PyExc_SystemError, "the Outcome does not fit this executable");
  uint32_t seen_only = NONE;
  if (!active().empty() && !outcome.writes.empty()) {
    // Inside the trace of another call: what this function captures are the caller's own objects, not that trace's.
    uint32_t captured = seen_only = entry.captured_from();
    for (const Write& w : outcome.writes)
      if (w.track >= captured && !w.unseen)
        raise_graftax("MutationError",
                      "a jitted function that is called inside another one changes an object that it captures (its "
                      "closure or a global). Pass that object to both as an argument.");
  }
  return apply(outcome, outputs, walk.leaves.data(), walk.nodes.data(), seen_only);
}

PyObject* call_plain(CallerObject* self, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  Py_ssize_t skip = PyTuple_GET_SIZE(self->prefix);
  Py_ssize_t nkw = kwnames ? PyTuple_GET_SIZE(kwnames) : 0;
  std::vector<PyObject*> all;
  for (Py_ssize_t i = 0; i < skip; ++i) all.push_back(PyTuple_GET_ITEM(self->prefix, i));
  all.insert(all.end(), args, args + nargs + nkw);
  return PyObject_Vectorcall(self->function, all.data(), static_cast<size_t>(skip + nargs), kwnames);
}

PyObject* call_unjitted(CallerObject* self, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  Owned plain = own(attribute(reinterpret_cast<PyObject*>(self), jitted::plain));
  return PyObject_Vectorcall(plain.get(), args, static_cast<size_t>(nargs), kwnames);
}

// Does the entry serve this call? Then the walk has its leaves, and `host` what the host computes of its numbers.
bool serves(const Entry& e, const Binding& b, const Roots& roots, PyObject* context, Walk& walk, Owned& host) {
  // From the cheapest question to the most expensive one: settings and layout, bindings outside, and then the walk.
  bool same_context =
      e.context.get() == context || (e.context && PyObject_RichCompareBool(e.context.get(), context, Py_EQ) == 1);
  if (!same_context || !layout_matches(e.program(), roots.layout.get())) return false;
  if (e.spoiled || (e.reads && !reads_hold(*nb::inst_ptr<Reads>(e.reads.get())))) return false;
  const bool are_settled =
      roots.globals_epoch != 0 && e.globals.epoch == roots.globals_epoch && e.globals.scope == b.globals.ptr();
  walk.first_settled = roots.first_global;
  walk.settled = are_settled && e.globals.are_all ? roots.globals : 0;
  try {
    if (replay(e.program(), roots.values.data(), roots.values.size(), walk) &&
        e.has_identities([&](uint32_t track) { return walk.nodes[track]; }) &&
        (!walk.has_numpy || e.takes_numpy(walk.leaves)) && e.has_alike(walk.leaves) &&
        (e.symbols.empty() || (host = e.host_values(walk.leaves)))) {
      if (!are_settled && roots.globals_epoch != 0)
        e.globals = {b.globals.ptr(), roots.globals_epoch,
                     match_for_good(e.program(), roots.first_global, roots.globals)};
      return true;
    }
  } catch (nb::python_error& raised) {  // by user code: a recording meets it again and knows where
    if (!PyErr_GivenExceptionMatches(raised.value().ptr(), PyExc_Exception)) throw;
  }
  // What was opened is not opened again by the next walk of this call.
  walk.clear();
  walk.opened->walk_again();
  return false;
}

constexpr int max_hinted = 4;   // one after the other: each may differ in another static
constexpr size_t unhinted = 3;  // where what was missed has no hint, it is likely new: so many recent ones are tried

// The entry for these roots, and their walk; with `recording` what was recorded, where no recent entry fitted.
Owned find_or_record(CallerObject* self, Table& table, const Binding& binding, const Roots& roots, PyObject* context,
                     Walk& walk, Owned& recording, Owned& host, bool is_counted) {
  Opened opened;
  walk.opened = &opened;
  walk.order = Order::in_a_trace;
  size_t missed = 0;  // where the newest entry is not the right one: a hash of what the walks met instead
  auto is_right = [&](const Owned& entry) {
    walk.missed = 0;
    if (!serves(*nb::inst_ptr<Entry>(entry.get()), binding, roots, context, walk, host)) return false;
    if (!is_counted) ++table.hits;
    table.promote(entry.get());
    table.hint(missed, entry.get());
    walk.opened = nullptr;
    return true;
  };
  // The entries that were used last, the newest first; after the first miss the one that a hint names.
  size_t tried = table.recent.size();
  for (size_t i = 0; i < std::min(tried, table.recent.size()); ++i) {
    Owned hold = table.recent[i];
    if (is_right(hold)) return hold;
    if (i > 0) continue;
    // Each hinted entry that fails leads on to another hint: what it missed becomes part of the key.
    missed = walk.missed;
    Owned hinted = table.hinted(missed);
    if (missed != 0 && !hinted) tried = unhinted;
    for (int hops = 0; hinted && hops < max_hinted; ++hops) {
      if (is_right(hinted)) return hinted;
      missed = walk.missed == 0 ? 0 : missed * 31 + walk.missed;
      hinted = table.hinted(missed);
    }
  }
  // A miss: Python records the roots, and finds the entry of their structure or builds one.
  walk.opened = nullptr;
  nb::object memo = nb::cast(std::move(opened));
  Owned all = tuple_of(roots.values);
  Owned answer = own(PyObject_CallMethod(reinterpret_cast<PyObject*>(self), jitted::entry, "OOOOO", all.get(),
                                         roots.layout.get(), context, memo.ptr(), nb::find(binding).ptr()));
  if (!PyTuple_Check(answer.get()) || PyTuple_GET_SIZE(answer.get()) != 2 ||
      !nb::isinstance<Entry>(nb::handle(PyTuple_GET_ITEM(answer.get(), 0))) ||
      !nb::isinstance<Recording>(nb::handle(PyTuple_GET_ITEM(answer.get(), 1))))
    raise_error(PyExc_TypeError, "_entry() must return an Entry and a Recording");
  if (binding.generation != table.generation) begin_anew();  // other roots: another thread's trace has met more
  Owned entry = Owned::borrow(PyTuple_GET_ITEM(answer.get(), 0));
  recording = Owned::borrow(PyTuple_GET_ITEM(answer.get(), 1));
  nb::inst_ptr<Recording>(recording.get())->walk(walk);
  const Entry& e = *nb::inst_ptr<Entry>(entry.get());
  if (!e.symbols.empty() && !(host = e.host_values(walk.leaves)))
    raise_error(PyExc_SystemError, "the numbers of this call are not those of its entry");
  table.promote(entry.get());
  table.hint(missed, entry.get());
  return entry;
}

// Lets Python put key paths into an error that speaks of flat leaves. `traced` is the entry, where this call has traced it.
[[noreturn]] void raise_explained(CallerObject* self, const Roots& roots, PyObject* traced = Py_None) {
  nb::python_error error;  // takes the error that is set
  nb::object exc = nb::borrow(error.value());
  error.restore();
  PyErr_Clear();
  Owned all = tuple_of(roots.values);
  Owned raised = own(PyObject_CallMethod(reinterpret_cast<PyObject*>(self), jitted::explain, "OOOO", exc.ptr(),
                                         all.get(), roots.layout.get(), traced));
  set_error(raised.get());
  raise_python();
}

// Has the function other code or defaults than its signature was read from, or the class another __call__?
void rebind_changed_function(CallerObject* self) {
  if (has_changed(self)) Owned(own(PyObject_CallMethod(reinterpret_cast<PyObject*>(self), jitted::rebind, nullptr)));
}

// Gives an entry that was traced what it depends on, also where the computation has failed since: it is found again.
void tell_reads(CallerObject* self, Entry& entry, PyObject* obj) {
  std::optional<nb::python_error> raised;  // Python may not run while an error is set
  if (PyErr_Occurred()) raised.emplace();
  entry.note_traces();
  entry.reads = own(PyObject_CallMethod(reinterpret_cast<PyObject*>(self), jitted::reads, "O", obj));
  if (entry.reads.get() == Py_None) entry.reads = {};
  if (raised) raised->restore();
}

// A call through the jit object, which may trace: that fills in `vectors`.
Owned call_compiled(const Entry& entry, PyObject* compiled, const Walk& walk, const OwnedList& vectors) {
  OwnedList copies, with_host;
  if (walk.has_numpy) copy_numpy(walk.leaves, copies);
  if (entry.host) {
    with_host = entry.without_numbers(walk.has_numpy ? copies : walk.leaves);
    for (size_t i = 0; i < vectors.size(); ++i) with_host.push(vectors[i]);
  }
  const OwnedList& leaves = entry.host ? with_host : walk.has_numpy ? copies : walk.leaves;
  Owned leaves_as_one = entry.tupled ? tuple_of(leaves) : Owned();
  return Owned::steal(leaves_as_one ? PyObject_CallOneArg(compiled, leaves_as_one.get())
                                    : PyObject_Vectorcall(compiled, leaves.data(), leaves.size(), nullptr));
}

// With `donate="auto"`: lets the Direct of this call choose a program, which may be compiled here. A first call is traced
// here, so that one program is compiled and not two. False with the error set.
bool choose_program(const Entry& entry, const OwnedList& leaves, PyObject* host, const CallReferences& references,
                    Shared<Direct>& direct, const Shared<Direct>& to_remember) {
  try {
    if (direct) direct->prepare_donation(entry, leaves, host, references);
    else if (to_remember && !host && Shared<Direct>(to_remember)->prepare_donation(entry, leaves, host, references))
      direct = to_remember;
    return true;
  } catch (nb::python_error& e) {
    e.restore();
    return false;
  }
}

// What this call refers to of what it was given.
CallReferences references_of(const Roots& roots, const Walk& walk, const Owned& recording, const Owned& host) {
  CallReferences out;
  out.roots = &roots.values;
  out.each_leaf = host ? 2 : 1;  // the walk, and what is in the place of numbers
  out.nodes = &walk.nodes;
  if (recording) {
    const Recording& recorded = *nb::inst_ptr<Recording>(recording.get());
    out.recorded_leaves = &recorded.leaves;
    out.recorded_objects = &recorded.live;
  }
  return out;
}

// What the decisions of a trace on numbers did not choose may be traced now, behind the call that has made them.
void trace_branches(CallerObject* self, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  Owned positional = own(PyTuple_New(nargs)), keywords = own(PyDict_New());
  for (Py_ssize_t i = 0; i < nargs; ++i) PyTuple_SET_ITEM(positional.get(), i, Py_NewRef(args[i]));
  for (Py_ssize_t i = 0; kwnames && i < PyTuple_GET_SIZE(kwnames); ++i)
    check(PyDict_SetItem(keywords.get(), PyTuple_GET_ITEM(kwnames, i), args[nargs + i]));
  Owned(own(PyObject_CallMethod(reinterpret_cast<PyObject*>(self), jitted::trace_branches, "OO", positional.get(),
                                keywords.get())));
}

PyObject* call_once(CallerObject* self, const Shared<SettingsNow>& now, PyObject* const* args, Py_ssize_t nargs,
                    PyObject* kwnames, Owned& recorded, bool is_counted) {
  // Binding and table are held: `_configure` may replace both while user code runs. They have to be of one generation.
  rebind_changed_function(self);
  if (registry_has_grown()) follow_registry();
  Owned held_binding = Owned::borrow(self->binding);
  const Binding& binding = *nb::inst_ptr<Binding>(held_binding.get());
  Owned table = Owned::borrow(self->table);
  if (binding.generation != nb::inst_ptr<Table>(table.get())->generation) begin_anew();
  Roots roots;
  if (!bind(self->prefix, binding, args, nargs, kwnames, roots)) {
    // The function's own TypeError, raised before its body runs.
    Owned result = Owned::steal(call_plain(self, args, nargs, kwnames));
    if (result) raise_error(PyExc_SystemError, "the arguments could not be bound, yet the function took them");
    return nullptr;
  }
  // Lookup. The walk owns the leaves and the nodes of the call until it returns.
  Lease<Walk> lent;
  Walk& walk = *lent;
  Owned recording, host;
  Owned held = find_or_record(self, *nb::inst_ptr<Table>(table.get()), binding, roots, now->context.get(), walk,
                              recording, host, is_counted);
  Entry& entry = *nb::inst_ptr<Entry>(held.get());
  Owned compiled = entry.compiled, outcomes = entry.outcomes;
  Shared<Direct> direct, to_remember;
  Owned flat_result;
  std::optional<HostLock> lock;
  bool failed = false, donated = false;
  {
    // A trace that begins below reads the roots of this call from here.
    ActiveScope scope({reinterpret_cast<PyObject*>(self), &roots.values, outcomes.get(), recording.get()});
    OwnedList numberless;
    if (host) numberless = entry.without_numbers(walk.leaves);
    const OwnedList& leaves = host ? numberless : walk.leaves;
    // Is there an executable for such leaves? What the host has computed has to be what its Outcome takes.
    if (!entry.refused && direct_takes(leaves.size() + (host ? 2 : 0)))
      direct = entry.find_direct(leaves, host.get(), now, to_remember,
                                 recording && !host ? &nb::inst_ptr<Recording>(recording.get())->looks : nullptr);
    if (direct && !knows(host.get(), direct->outcome())) direct = nullptr;
    // graftax.record notes what the call is given before anything is donated.
    if (CallRing* ring = ring_of(self->ring))
      recorded = ring->begin({reinterpret_cast<PyObject*>(self), held, recording, roots.values, roots.layout.get(),
                              walk, static_cast<bool>(direct)});
    CallReferences references;
    if (entry.donor) {
      references = references_of(roots, walk, recording, host);
      if (stack_owns_arguments(reinterpret_cast<PyObject*>(self), args)) {
        references.arguments = args;
        references.argument_count = nargs + (kwnames ? PyTuple_GET_SIZE(kwnames) : 0);
      }
      failed = !choose_program(entry, leaves, host.get(), references, direct, to_remember);
    }
    if (direct && !failed) {
      flat_result =
          direct->run(leaves, host.get(), [&] { return tuple_of(entry.vectors(host.get())); }, references, donated);
      if (!flat_result && !PyErr_Occurred()) {  // the one program that is compiled donates what somebody has
        direct = nullptr;
      } else if (!flat_result) {
        nb::python_error error;
        if (!error.matches(PyExc_Exception) ||
            ((direct->donates() || donated) &&
             !nothing_has_run(error.value().ptr()))) {  // what was donated may be gone
          error.restore();
          raise_explained(self, roots);
        }  // else jax.jit raises with a better message
        direct = nullptr;
        donated = false;
      }
    }
    // Otherwise through jax.jit, which may trace. With symbolic numbers one thread at a time.
    if (!direct && !failed) {
      OwnedList vectors;
      Owned both;
      if (host) {
        lock.emplace(entry);
        auto traces = static_cast<size_t>(PyList_GET_SIZE(outcomes.get()));
        bool has_all = traces == 0 || knows(host.get(), traces - 1);
        if (!has_all && !(host = entry.host_values(walk.leaves)))
          begin_anew();  // another thread has traced it meanwhile
        vectors = entry.vectors(host.get());
        both = tuple_of(vectors);
        active().back().numbers = both.get();
      }
      flat_result = call_compiled(entry, compiled.get(), walk, vectors);
    }
  }
  // A trace has told what the entry depends on, and may have added to what the host computes.
  bool traced = PyList_GET_SIZE(outcomes.get()) != entry.outcomes_read;
  if (traced) {
    tell_reads(self, entry, held.get());
    if (host && flat_result && !(host = entry.host_values(walk.leaves)))
      raise_error(PyExc_SystemError, "the guards of a trace do not hold for it");
  }
  lock.reset();
  // Failed or not, by here the call has run: errors are explained, and what the leaves looked like is remembered.
  if (flat_result && entry.waits)
    flat_result = Owned::steal(PyObject_CallOneArg(hooks::block_until_ready.get(), flat_result.get()));
  if (!flat_result) raise_explained(self, roots, traced ? held.get() : Py_None);
  if (to_remember) entry.remember(std::move(to_remember));
  // The result, and what changes in the caller's objects.
  Owned result;
  try {
    Returned returned = direct ? Returned::by_executable(std::move(flat_result), direct->outcome(), outcomes.get())
                               : Returned::by_jit(flat_result.get());
    result = finish(returned, outcomes.get(), walk, entry, host.get());
    if (recorded)
      ring_of(self->ring)
          ->end(recorded.get(), returned.outputs.get(), returned.outcome, host, returned.are_finite, traced);
  } catch (nb::python_error& e) {
    if (!donated) throw;
    e.restore();
    raise_explained(self, roots);  // which arrays are gone
  }
  if (direct && direct->donation() && direct->donation()->should_warn())
    Owned(own(PyObject_CallMethod(reinterpret_cast<PyObject*>(self), jitted::warn_of_kept, nullptr)));
  give_back(binding, roots);
  if (traced && host) trace_branches(self, args, nargs, kwnames);
  return result.release();
}

}  // namespace

bool has_changed(const CallerObject* self) {
  if (self->method && method_of(self->prefix) != self->method) return true;
  return PyFunction_Check(self->function) && !was_read_from(*nb::inst_ptr<Binding>(self->binding), self->function);
}

// A trace that meets code which reads what is no root yet gives up, and the call begins anew with more roots.
PyObject* call(CallerObject* self, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  if (self->table == Py_None || self->binding == Py_None)
    raise_error(PyExc_TypeError, "this callable was never set up, or has been cleared");
  // While another call is traced, what this function captures is part of that one.
  bool as_plain = is_watched() && nb::inst_ptr<Table>(self->table)->as_plain;
  bool is_counted = false;  // has a trace of this call begun?
  for (int tries = 0;; ++tries) {
    uint64_t restarts = nb::inst_ptr<Table>(self->table)->restarts;
    Shared<SettingsNow> now = settings_now();
    if (as_plain || now->as_plain) return call_unjitted(self, args, nargs, kwnames);
    Owned recorded, ring = Owned::borrow(self->ring);  // held: another recorder may take its place during the call
    try {
      if (ring) ring_of(ring.get())->read_known();
      return call_once(self, now, args, nargs, kwnames, recorded, is_counted);
    } catch (nb::python_error& e) {
      bool begins_anew = new_reads && e.matches(new_reads);
      if (recorded) ring_of(ring.get())->fail(recorded.get(), begins_anew ? nullptr : e.value().ptr());
      if (!begins_anew) throw;
      is_counted = is_counted || nb::inst_ptr<Table>(self->table)->restarts != restarts;
      if (tries == max_restarts)
        raise_graftax(
            "GraftaxError",
            "what the function reads outside of its arguments is something else each time that it is traced: "
            "globals, classes or functions that its code makes anew. Make them once, or pass them as arguments.");
    }
    Owned(own(PyObject_CallMethod(reinterpret_cast<PyObject*>(self), jitted::rebind, nullptr)));
  }
}

void bind_call(nb::module_& m) {
  bind_binding(m);
  bind_table(m);
  bind_kept_calls(m);
  m.def(
      "use_new_reads", [](nb::object type) { new_reads = type.release().ptr(); }, nb::arg("type"),
      nb::sig("def use_new_reads(type: type[BaseException]) -> None"),
      "What a trace gives up with that has met code which reads what is no root yet.");
  m.def(
      "decode", [](nb::tuple code) { return decode(code.ptr()); }, nb::arg("code"),
      nb::sig("def decode(code: tuple[object, ...]) -> int"),
      "The number of an Outcome from its code: None is 0, () is 1, lowest bit first.");
}

}  // namespace graftax
