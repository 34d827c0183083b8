// SPDX-License-Identifier: Apache-2.0
#include "call/call.h"

#include <structmember.h>

#include <algorithm>
#include <optional>

#include "call/arguments.h"
#include "call/cache.h"
#include "call/call_stack.h"
#include "call/kept_calls.h"
#include "capture/caller_stack.h"
#include "capture/frame_hook.h"
#include "capture/watchers.h"
#include "python/hooks.h"
#include "python/jax_registry.h"
#include "python/jax_settings.h"

namespace graftax {

namespace {

// ---- Caller: the callable

struct CallerObject {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* weakrefs;
  PyObject* function;  // the Python function that runs
  PyObject* prefix;    // tuple: arguments that come before the caller's (self of a bound method, a partial's)
  PyObject* table;     // Table
  PyObject* binding;   // Binding
  PyObject* ring;      // CallRing of a recorder; else null
  PyObject* method;    // of a callable object, the first of the prefix: what its class had as __call__; else null
};

// What the class of a callable object has as __call__ now; borrowed, null where it has none.
PyObject* method_of(PyObject* prefix) {
  static PyObject* const call = interned("__call__");
  return _PyType_Lookup(Py_TYPE(PyTuple_GET_ITEM(prefix, 0)), call);
}

bool layout_matches(const Program& program, PyObject* layout) {
  if (program.layout == layout) return true;
  return program.layout && equal(program.layout, layout);
}

constexpr int max_restarts = 300;  // as in _capture/read_set.py
PyObject* new_reads = nullptr;     // what a trace gives up with; kept for the life of the process

// Out of a call whose entry is no longer for it.
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
  ~HostLock() {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    Py_XDECREF(PyObject_CallMethod(lock_.get(), "release", nullptr));
    PyErr_Restore(type, value, traceback);
  }

 private:
  Owned lock_;
};

Owned finish(const Returned& returned, PyObject* outcomes, const Walk& walk, const Entry& entry, PyObject* host) {
  PyObject* const* outputs = PySequence_Fast_ITEMS(returned.outputs.get());
  size_t count = returned.count, number = returned.outcome;
  PyObject* obj = number < static_cast<size_t>(PyList_GET_SIZE(outcomes))
                      ? PyList_GET_ITEM(outcomes, static_cast<Py_ssize_t>(number))
                      : nullptr;
  if (!obj) raise_error(PyExc_SystemError, "no Outcome for this executable");
  Owned hold = Owned::borrow(obj);
  const Outcome& outcome = *nb::inst_ptr<Outcome>(obj);
  std::vector<PyObject*> all;
  if (!outcome.numbers.empty()) {
    for (auto [_, at] : outcome.numbers)
      if (!host || host_outputs + at >= PyTuple_GET_SIZE(host))
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

// Is this call one of the entry's? Then the walk has its leaves, and `host` what the host computes of its numbers.
bool serves(const Entry& e, const Roots& roots, PyObject* context, Walk& walk, Owned& host) {
  bool same_context =
      e.context.get() == context || (e.context && PyObject_RichCompareBool(e.context.get(), context, Py_EQ) == 1);
  if (!same_context || !layout_matches(e.program(), roots.layout.get())) return false;
  if (e.spoiled || (e.reads && !reads_hold(*nb::inst_ptr<Reads>(e.reads.get())))) return false;
  try {
    if (replay(e.program(), roots.values.data(), roots.values.size(), walk) &&
        e.has_identities([&](uint32_t track) { return walk.nodes[track]; }) &&
        (!walk.has_numpy || e.takes_numpy(walk.leaves)) && e.has_alike(walk.leaves) &&
        (e.symbols.empty() || (host = e.host_values(walk.leaves))))
      return true;
  } catch (nb::python_error& raised) {  // by user code: a recording meets it again and knows where
    if (!PyErr_GivenExceptionMatches(raised.value().ptr(), PyExc_Exception)) throw;
  }
  walk.clear();
  walk.opened->walk_again();
  return false;
}

constexpr int max_hinted = 4;   // one after the other: each may differ in another static
constexpr size_t unhinted = 3;  // where what was missed has no hint, it is likely new: so many recent ones are tried

// The entry for these roots, and their walk; with `recording` what was recorded, where no recent entry fitted.
Owned find_or_record(CallerObject* self, Table& table, const Binding& binding, const Roots& roots, PyObject* context,
                     Walk& walk, Owned& recording, Owned& host) {
  Opened opened;
  walk.opened = &opened;
  walk.order = Order::in_a_trace;
  size_t missed = 0;  // what was met on the way, where the newest entry is not the right one
  auto is_right = [&](const Owned& entry) {
    walk.missed = 0;
    if (!serves(*nb::inst_ptr<Entry>(entry.get()), roots, context, walk, host)) return false;
    ++table.hits;
    table.promote(entry.get());
    table.hint(missed, entry.get());
    walk.opened = nullptr;
    return true;
  };
  size_t tried = table.recent.size();
  for (size_t i = 0; i < std::min(tried, table.recent.size()); ++i) {
    Owned hold = table.recent[i];
    if (is_right(hold)) return hold;
    if (i > 0) continue;
    missed = walk.missed;
    Owned hinted = table.hinted(missed);
    if (missed != 0 && !hinted) tried = unhinted;
    for (int hops = 0; hinted && hops < max_hinted; ++hops) {
      if (is_right(hinted)) return hinted;
      missed = walk.missed == 0 ? 0 : missed * 31 + walk.missed;
      hinted = table.hinted(missed);
    }
  }
  walk.opened = nullptr;
  nb::object asked = nb::cast(std::move(opened));
  Owned all = tuple_of(roots.values);
  Owned found = own(PyObject_CallMethod(reinterpret_cast<PyObject*>(self), jitted::entry, "OOOOO", all.get(),
                                        roots.layout.get(), context, asked.ptr(), nb::find(binding).ptr()));
  if (!PyTuple_Check(found.get()) || PyTuple_GET_SIZE(found.get()) != 2 ||
      !nb::isinstance<Entry>(nb::handle(PyTuple_GET_ITEM(found.get(), 0))) ||
      !nb::isinstance<Recording>(nb::handle(PyTuple_GET_ITEM(found.get(), 1))))
    raise_error(PyExc_TypeError, "_entry() must return an Entry and a Recording");
  if (binding.generation != table.generation) begin_anew();  // other roots: another thread's trace has met more
  Owned entry = Owned::borrow(PyTuple_GET_ITEM(found.get(), 0));
  recording = Owned::borrow(PyTuple_GET_ITEM(found.get(), 1));
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
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.get())), raised.get());
  raise_python();
}

// Has the function other code or defaults than its signature was read from, or the class another __call__?
bool has_changed(const CallerObject* self) {
  if (self->method && method_of(self->prefix) != self->method) return true;
  return PyFunction_Check(self->function) && !was_read_from(*nb::inst_ptr<Binding>(self->binding), self->function);
}

void rebind_changed_function(CallerObject* self) {
  if (has_changed(self)) Owned(own(PyObject_CallMethod(reinterpret_cast<PyObject*>(self), jitted::rebind, nullptr)));
}

// Gives an entry that was traced what it depends on, also where the computation has failed since: it is found again.
void tell_reads(CallerObject* self, Entry& entry, PyObject* obj) {
  std::optional<nb::python_error> raised;
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
  Owned one = entry.tupled ? tuple_of(leaves) : Owned();
  return Owned::steal(one ? PyObject_CallOneArg(compiled, one.get())
                          : PyObject_Vectorcall(compiled, leaves.data(), leaves.size(), nullptr));
}

// With `donate="auto"`: lets the Direct of this call choose a program, which may be compiled here. A first call is traced
// here, so that one program is compiled and not two. False with the error set.
bool choose_program(const Entry& entry, const OwnedList& leaves, PyObject* host, const CallReferences& references,
                    Shared<Direct>& direct, const Shared<Direct>& seen) {
  try {
    if (direct) direct->prepare_donation(entry, leaves, host, references);
    else if (seen && !host && Shared<Direct>(seen)->prepare_donation(entry, leaves, host, references)) direct = seen;
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

PyObject* call_once(CallerObject* self, const Shared<SettingsNow>& now, PyObject* const* args, Py_ssize_t nargs,
                    PyObject* kwnames, Owned& recorded) {
  rebind_changed_function(self);
  if (registry_has_grown()) follow_registry();
  Owned kept = Owned::borrow(self->binding);
  const Binding& binding = *nb::inst_ptr<Binding>(kept.get());
  Owned table = Owned::borrow(self->table);
  if (binding.generation != nb::inst_ptr<Table>(table.get())->generation) begin_anew();
  Roots roots;
  if (!bind(self->prefix, binding, args, nargs, kwnames, roots)) {
    // The function's own TypeError, raised before its body runs.
    Owned result = Owned::steal(call_plain(self, args, nargs, kwnames));
    if (result) raise_error(PyExc_SystemError, "the arguments could not be bound, yet the function took them");
    return nullptr;
  }
  Lease<Walk> lent;
  Walk& walk = *lent;
  Owned recording, host;
  Owned held = find_or_record(self, *nb::inst_ptr<Table>(table.get()), binding, roots, now->context.get(), walk,
                              recording, host);
  Entry& entry = *nb::inst_ptr<Entry>(held.get());
  Owned compiled = entry.compiled, outcomes = entry.outcomes;
  Shared<Direct> direct, seen;
  Owned flat_result;
  std::optional<HostLock> lock;
  bool failed = false, donated = false;
  {
    ActiveScope scope({reinterpret_cast<PyObject*>(self), &roots.values, outcomes.get(), recording.get()});
    OwnedList numberless;
    if (host) numberless = entry.without_numbers(walk.leaves);
    const OwnedList& given = host ? numberless : walk.leaves;
    if (!entry.refused && direct_takes(given.size() + (host ? 2 : 0)))
      direct = entry.find_direct(given, host.get(), now, seen,
                                 recording && !host ? &nb::inst_ptr<Recording>(recording.get())->looks : nullptr);
    if (direct && !knows(host.get(), direct->outcome())) direct = nullptr;
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
      failed = !choose_program(entry, given, host.get(), references, direct, seen);
    }
    if (direct && !failed) {
      flat_result =
          direct->run(given, host.get(), [&] { return tuple_of(entry.vectors(host.get())); }, references, donated);
      if (!flat_result && !PyErr_Occurred()) {
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
  bool traced = PyList_GET_SIZE(outcomes.get()) != entry.told;
  if (traced) {
    tell_reads(self, entry, held.get());
    if (host && flat_result && !(host = entry.host_values(walk.leaves)))
      raise_error(PyExc_SystemError, "the guards of a trace do not hold for it");
  }
  lock.reset();
  if (flat_result && entry.waits)
    flat_result = Owned::steal(PyObject_CallOneArg(hooks::block_until_ready.get(), flat_result.get()));
  if (!flat_result) raise_explained(self, roots, traced ? held.get() : Py_None);
  if (seen) entry.remember(std::move(seen));
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
  return result.release();
}

// A trace that meets code which reads what is no root yet gives up, and the call begins anew with more roots.
PyObject* call(CallerObject* self, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  if (self->table == Py_None || self->binding == Py_None)
    raise_error(PyExc_TypeError, "this callable was never set up, or has been cleared");
  // While another call is traced, what this function captures is part of that one.
  bool as_plain = is_watched() && nb::inst_ptr<Table>(self->table)->as_plain;
  for (int tries = 0;; ++tries) {
    Shared<SettingsNow> now = settings_now();
    if (as_plain || now->as_plain) return call_unjitted(self, args, nargs, kwnames);
    Owned recorded, ring = Owned::borrow(self->ring);
    try {
      if (ring) ring_of(ring.get())->read_known();
      return call_once(self, now, args, nargs, kwnames, recorded);
    } catch (nb::python_error& e) {
      bool begins_anew = new_reads && e.matches(new_reads);
      if (recorded) ring_of(ring.get())->fail(recorded.get(), begins_anew ? nullptr : e.value().ptr());
      if (!begins_anew) throw;
      if (tries == max_restarts)
        raise_graftax(
            "GraftaxError",
            "what the function reads outside of its arguments is something else each time that it is traced: "
            "globals, classes or functions that its code makes anew. Make them once, or pass them as arguments.");
    }
    Owned(own(PyObject_CallMethod(reinterpret_cast<PyObject*>(self), jitted::rebind, nullptr)));
  }
}

// ---- the type

PyObject* caller_vectorcall(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  try {
    return call(reinterpret_cast<CallerObject*>(self), args, PyVectorcall_NARGS(nargsf), kwnames);
  } catch (nb::python_error& e) {
    e.restore();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_SystemError, e.what());
  }
  return nullptr;
}

PyObject* caller_new(PyTypeObject* type, PyObject*, PyObject*) {
  auto* self = reinterpret_cast<CallerObject*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  self->vectorcall = caller_vectorcall;
  self->function = Py_NewRef(Py_None);
  self->prefix = Py_NewRef(runtime.empty_tuple);
  self->table = Py_NewRef(Py_None);
  self->binding = Py_NewRef(Py_None);
  return reinterpret_cast<PyObject*>(self);
}

PyObject* caller_configure(PyObject* obj, PyObject* args) {
  PyObject *function, *prefix, *table, *binding;
  int is_method = 0;
  if (!PyArg_ParseTuple(args, "OO!OO|p", &function, &PyTuple_Type, &prefix, &table, &binding, &is_method))
    return nullptr;
  if (!nb::isinstance<Table>(nb::handle(table)) || !nb::isinstance<Binding>(nb::handle(binding))) {
    PyErr_SetString(PyExc_TypeError, "expected a Table and a Binding");
    return nullptr;
  }
  auto* self = reinterpret_cast<CallerObject*>(obj);
  Py_XSETREF(self->function, Py_NewRef(function));
  Py_XSETREF(self->prefix, Py_NewRef(prefix));
  Py_XSETREF(self->table, Py_NewRef(table));
  Py_XSETREF(self->binding, Py_NewRef(binding));
  Py_XSETREF(self->method, is_method && PyTuple_GET_SIZE(prefix) ? Py_XNewRef(method_of(prefix)) : nullptr);
  Py_RETURN_NONE;
}

PyObject* caller_record_in(PyObject* obj, PyObject* ring) {
  if (!nb::isinstance<CallRing>(nb::handle(ring))) {
    PyErr_SetString(PyExc_TypeError, "expected a CallRing");
    return nullptr;
  }
  auto* self = reinterpret_cast<CallerObject*>(obj);
  Py_XSETREF(self->ring, Py_NewRef(ring));
  Py_RETURN_NONE;
}

PyObject* caller_has_changed(PyObject* obj, PyObject*) {
  auto* self = reinterpret_cast<CallerObject*>(obj);
  try {
    return PyBool_FromLong(self->binding != Py_None && has_changed(self));
  } catch (nb::python_error& e) {
    e.restore();
    return nullptr;
  }
}

int caller_traverse(PyObject* obj, visitproc visit, void* arg) {
  auto* self = reinterpret_cast<CallerObject*>(obj);
  Py_VISIT(Py_TYPE(obj));
  Py_VISIT(self->function);
  Py_VISIT(self->prefix);
  Py_VISIT(self->table);
  Py_VISIT(self->binding);
  Py_VISIT(self->ring);
  Py_VISIT(self->method);
  return 0;
}

int caller_clear(PyObject* obj) {
  auto* self = reinterpret_cast<CallerObject*>(obj);
  Py_XSETREF(self->function, Py_NewRef(Py_None));
  Py_XSETREF(self->table, Py_NewRef(Py_None));
  Py_CLEAR(self->ring);
  Py_CLEAR(self->method);
  return 0;
}

void caller_dealloc(PyObject* obj) {
  auto* self = reinterpret_cast<CallerObject*>(obj);
  PyTypeObject* type = Py_TYPE(obj);
  PyObject_GC_UnTrack(obj);
  if (self->weakrefs) PyObject_ClearWeakRefs(obj);
  Py_CLEAR(self->function);
  Py_CLEAR(self->prefix);
  Py_CLEAR(self->table);
  Py_CLEAR(self->binding);
  Py_CLEAR(self->ring);
  Py_CLEAR(self->method);
  type->tp_free(obj);
  Py_DECREF(type);
}

PyMethodDef caller_methods[] = {
    {"_configure", caller_configure, METH_VARARGS, "_configure(function, prefix, table, binding, is_method=False)"},
    {"_record_in", caller_record_in, METH_O, "_record_in(ring): keeps what each call is given"},
    {"_has_changed", caller_has_changed, METH_NOARGS,
     "_has_changed(): has the function other code or defaults than its signature was read from?"},
    {nullptr, nullptr, 0, nullptr}};

PyMemberDef caller_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(CallerObject, vectorcall), READONLY, nullptr},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(CallerObject, weakrefs), READONLY, nullptr},
    {"_function", T_OBJECT, offsetof(CallerObject, function), READONLY, nullptr},
    {"_prefix", T_OBJECT, offsetof(CallerObject, prefix), READONLY, nullptr},
    {"_table", T_OBJECT, offsetof(CallerObject, table), READONLY, nullptr},
    {"_binding", T_OBJECT, offsetof(CallerObject, binding), READONLY, nullptr},
    {"_method", T_OBJECT, offsetof(CallerObject, method), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyType_Slot caller_slots[] = {{Py_tp_doc, const_cast<char*>("The callable that graftax.jit returns: its C++ part.")},
                              {Py_tp_new, reinterpret_cast<void*>(caller_new)},
                              {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                              {Py_tp_traverse, reinterpret_cast<void*>(caller_traverse)},
                              {Py_tp_clear, reinterpret_cast<void*>(caller_clear)},
                              {Py_tp_dealloc, reinterpret_cast<void*>(caller_dealloc)},
                              {Py_tp_methods, caller_methods},
                              {Py_tp_members, caller_members},
                              {0, nullptr}};

PyType_Spec caller_spec = {"graftax._core.Caller", sizeof(CallerObject), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
                           caller_slots};

}  // namespace

void bind_call(nb::module_& m) {
  bind_binding(m);
  bind_table(m);
  bind_kept_calls(m);
  nb::object caller = nb::steal(check(PyType_FromSpec(&caller_spec)));
  m.attr("Caller") = caller;

  m.def(
      "use_new_reads", [](nb::object type) { new_reads = type.release().ptr(); }, nb::arg("type"),
      nb::sig("def use_new_reads(type: type[BaseException]) -> None"),
      "What a trace gives up with that has met code which reads what is no root yet.");
  m.def(
      "active_call",
      [](nb::handle outcomes) -> nb::object {
        if (active().empty() || active().back().outcomes != outcomes.ptr()) return nb::none();
        const Active& a = active().back();
        nb::object recording = a.recording ? nb::borrow(a.recording) : nb::none();
        nb::object numbers = a.numbers ? nb::borrow(a.numbers) : nb::none();
        return nb::make_tuple(nb::borrow(a.caller), nb::steal(tuple_of(*a.roots).release()), recording, numbers);
      },
      nb::arg("outcomes"),
      nb::sig("def active_call(outcomes: list[Outcome]) -> tuple[Any, tuple[Any, ...], Recording | None, "
              "tuple[Any, ...] | None] | None"),
      "The call that this thread is in, when it runs the entry with these outcomes: (caller, roots, their recording, "
      "where the call has made one, what the host has computed of its numbers).");
  m.def(
      "running_call",
      []() -> nb::object {
        if (active().empty() || active().back().caller == Py_None) return nb::none();
        const Active& a = active().back();
        return nb::make_tuple(nb::borrow(a.caller), nb::steal(tuple_of(*a.roots).release()), nb::borrow(a.outcomes));
      },
      nb::sig("def running_call() -> tuple[Any, tuple[Any, ...], list[Outcome]] | None"),
      "The call that this thread is in: (caller, roots, the Outcomes of its entry).");
  m.def(
      "run_active",
      [](nb::handle caller, nb::tuple roots, nb::list outcomes, nb::handle recording, nb::handle f, nb::args args) {
        OwnedList values;
        for (nb::handle h : roots) values.push(h.ptr());
        bool recorded = nb::isinstance<Recording>(recording);
        ActiveScope scope({caller.ptr(), &values, outcomes.ptr(), recorded ? recording.ptr() : nullptr});
        return nb::steal(check(PyObject_CallObject(f.ptr(), args.ptr())));
      },
      nb::arg("caller").none(), nb::arg("roots"), nb::arg("outcomes"), nb::arg("recording").none(), nb::arg("f"),
      nb::arg("args"),
      nb::sig("def run_active(caller: Caller | None, roots: tuple[object, ...], outcomes: list[Outcome], recording: "
              "Recording | None, f: Callable[..., Any], /, *args: object) -> Any"),
      "f(*args) while this call is the active one: for lower, trace and eval_shape.");
  m.def(
      "run_rebuilt",
      [](nb::handle f, nb::list rebuilt) {
        if (active().empty()) raise_error(PyExc_SystemError, "no call is active");
        size_t at = active().size() - 1;
        struct Scope {
          size_t at;
          PyObject* before;
          ~Scope() { active()[at].rebuilt = before; }
        } scope{at, std::exchange(active()[at].rebuilt, rebuilt.ptr())};
        return nb::steal(check(PyObject_CallOneArg(f.ptr(), rebuilt.ptr())));
      },
      nb::sig("def run_rebuilt(f: Callable[[list[Any]], Any], rebuilt: list[Any], /) -> Any"),
      "f(rebuilt), while these are what the active call's trace has rebuilt its roots as.");
  m.def(
      "running_traces",
      []() {
        nb::list out;
        for (const Active& a : active())
          if (a.rebuilt) out.append(nb::make_tuple(nb::steal(tuple_of(*a.roots).release()), nb::borrow(a.rebuilt)));
        return out;
      },
      nb::sig("def running_traces() -> list[tuple[tuple[Any, ...], list[Any]]]"),
      "(the caller's roots, the rebuilt ones) of each trace that this thread is in, the outermost first.");
  m.def(
      "decode", [](nb::tuple code) { return decode(code.ptr()); }, nb::arg("code"),
      nb::sig("def decode(code: tuple[object, ...]) -> int"),
      "The number of an Outcome from its code: None is 0, () is 1, lowest bit first.");
}

}  // namespace graftax
