// SPDX-License-Identifier: Apache-2.0
#include "call/kept_calls.h"

#include <algorithm>
#include <optional>

#include "call/trace.h"
#include "python/collected.h"
#include "python/hooks.h"

namespace graftax {

namespace {

bool is_paused = false;
PyObject* script = nullptr;  // the frame of the script that runs; kept for the life of the process

KeptCall& kept_call(PyObject* obj) { return *nb::inst_ptr<KeptCall>(obj); }

bool is_number(PyTypeObject* type) {
  return type == &PyFloat_Type || type == &PyLong_Type || type == &PyBool_Type || type == &PyComplex_Type;
}

bool holds_weakly(const Program& p) {
  return std::any_of(p.statics.begin(), p.statics.end(), [](const Static& s) { return s.weak || s.contents; });
}

// Reads a scalar of the host without making a NumPy array of it; nothing where its memory is elsewhere.
std::optional<bool> read_in_place(PyObject* scalar) {
  Py_buffer view;
  if (PyObject_GetBuffer(scalar, &view, PyBUF_SIMPLE) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
  bool out = view.len == 1 && *static_cast<const char*>(view.buf) != 0;
  bool is_one = view.len == 1;
  PyBuffer_Release(&view);
  return is_one ? std::optional(out) : std::nullopt;
}

bool is_ready(PyObject* array) {
  static PyObject* const name = interned("is_ready");
  return own(PyObject_CallMethodNoArgs(array, name)).get() == Py_True;
}

void show_kept(const KeptCall& k, Visitor& visit) {
  visit(k.target, k.plan, k.entry, k.graphdef, k.layout, k.host, k.leaves, k.roots, k.before, k.outputs, k.are_finite,
        k.draws, k.raised, k.refs);
}

void clear_kept(KeptCall& k) { k.clear(); }

void show_ring(const CallRing& r, Visitor& visit) {
  visit(r.observer);
  for (const Owned& call : r.calls) visit(call);
}

void clear_ring(CallRing& r) {
  auto calls = std::exchange(r.calls, {});
  r.observer = {};
}

nb::object held_or_none(const Owned& held) { return held ? nb::borrow(held.get()) : nb::none(); }

}  // namespace

CallRing* ring_of(PyObject* ring) { return ring && ring != Py_None ? nb::inst_ptr<CallRing>(ring) : nullptr; }

void KeptCall::clear() {
  // One after the other, each empty before it is released: that may run code which looks at this call.
  for (Owned* held :
       {&target, &plan, &entry, &graphdef, &layout, &host, &before, &outputs, &are_finite, &draws, &raised, &refs}) {
    Owned gone = std::move(*held);
  }
  reused_outputs.clear();
  ref_leaves.clear();
  leaves.clear();
  roots.clear();
  since_copy = 0, outcome = 0, statement = -1, is_strong = false;
}

Owned CallRing::ask(const char* method, PyObject* argument, PyObject* other) const {
  // Held: the collector may clear the ring while the observer answers.
  Owned held = observer;
  return own(other ? PyObject_CallMethod(held.get(), method, "OO", argument, other)
                   : PyObject_CallMethod(held.get(), method, "O", argument));
}

bool CallRing::read(PyObject* obj, bool waits) {
  KeptCall& kept = kept_call(obj);
  // Held: waiting for the device lets other threads in, which may drop the call.
  Owned hold = Owned::borrow(obj), scalar = kept.are_finite;
  if (!scalar) return true;
  bool is_finite;
  try {
    if (!waits && !is_ready(scalar.get())) return false;
    if (!kept.are_finite) return true;  // another thread has read it meanwhile
    kept.are_finite = {};
    std::optional<bool> in_place = is_copied_ ? std::nullopt : read_in_place(scalar.get());
    is_finite = in_place ? *in_place : ask("is_true", scalar.get()).get() == Py_True;
    is_copied_ = !in_place;
  } catch (nb::python_error& e) {  // of a callback, or of the device: the user's own code meets it, too
    if (!e.matches(PyExc_Exception)) throw;
    kept.are_finite = {};
    ask("failed", obj, e.value().ptr());
    return true;
  }
  if (!is_finite) ask("found", obj);
  return true;
}

// The oldest first, and none behind one that is not known yet: they are reported in the order of the calls.
void CallRing::read_known() {
  for (size_t i = 0; i < calls.size(); ++i) {
    Owned call = calls[i];
    // Those that have to make room for the next call are waited for.
    bool waits = i + last <= calls.size(), is_in_flight = is_copied_ && i + 1 == calls.size();
    if (!waits && is_in_flight) break;  // the copy of the newest scalar may have just begun
    if (!read(call.get(), waits)) break;
  }
}

void CallRing::make_room() {
  // One that is not read yet has ended in another thread meanwhile: the next call reads it.
  while (calls.size() >= last && !calls.empty() && !kept_call(calls.front().get()).are_finite) {
    Owned oldest = std::move(calls.front());
    calls.pop_front();
    if (Py_REFCNT(oldest.get()) != 1) continue;  // a file is being written of it, or it is what a later call was given
    kept_call(oldest.get()).clear();
    spare_ = std::move(oldest);
  }
}

// Its vectors have kept their memory: a call that takes its place allocates nothing.
Owned CallRing::take_spare() {
  if (spare_ && Py_REFCNT(spare_.get()) == 1) return std::move(spare_);
  return own(nb::cast(KeptCall{}).release().ptr());
}

void CallRing::fill(KeptCall& kept, const Beginning& call) {
  static PyObject *const target = interned("_target"), *const plan = interned("_plan");
  const Entry& entry = *nb::inst_ptr<Entry>(call.entry.get());
  kept.target = own(PyObject_GetAttr(call.caller, target));
  kept.plan = own(PyObject_GetAttr(call.caller, plan));
  kept.entry = call.entry;
  kept.layout = Owned::borrow(call.layout);
  for (size_t i = 0; i < call.walk.leaves.size(); ++i) kept.leaves.push(call.walk.leaves[i]);
  // The structure of an entry holds its statics weakly. A call on the fast path, which has recorded nothing, takes the
  // strong one of an earlier call, and where there is none keeps its roots, so that nothing of it dies.
  auto is_of_same = [&](const Owned& other) {
    return kept_call(other.get()).is_strong && kept_call(other.get()).entry.get() == call.entry.get();
  };
  auto same = std::find_if(calls.rbegin(), calls.rend(), is_of_same);
  kept.is_strong = call.recording || same != calls.rend();
  if (call.recording) kept.graphdef = Owned::borrow(nb::inst_ptr<Recording>(call.recording.get())->graphdef.ptr());
  else if (kept.is_strong) kept.graphdef = kept_call(same->get()).graphdef;
  else kept.graphdef = entry.graphdef;
  if (!kept.is_strong && holds_weakly(entry.program()))
    for (size_t i = 0; i < call.roots.size(); ++i) kept.roots.push(call.roots[i]);
  if (script) kept.statement = PyFrame_GetLasti(reinterpret_cast<PyFrameObject*>(script));
}

// Copies of NumPy arrays and Refs, and of donated arrays, where those cannot be had by making the call before again.
void CallRing::copy_what_may_change(KeptCall& kept, const Entry& entry) {
  std::vector<size_t> copied;
  for (size_t i = 0; i < kept.leaves.size(); ++i) {
    PyTypeObject* type = Py_TYPE(kept.leaves[i]);
    if (type == runtime.array_type || is_key_type(type) || is_number(type)) continue;
    copied.push_back(i);
    // A Ref: what it holds after the call is copied by `end`.
    if (type == runtime.ndarray_type) continue;
    if (!kept.refs) kept.refs = own(PyList_New(0));
    check(PyList_Append(kept.refs.get(), kept.leaves[i]));
    kept.ref_leaves.push_back(static_cast<uint32_t>(i));
  }
  // A donated leaf that the call before has returned needs no copy: that call can be made again. Every `copy_every`
  // calls one is made all the same, so that few calls have to be.
  const KeptCall* previous = calls.empty() ? nullptr : &kept_call(calls.back().get());
  bool may_refer = previous && previous->outputs && previous->since_copy + 1 < copy_every;
  PyObject* const* outputs = may_refer ? PySequence_Fast_ITEMS(previous->outputs.get()) : nullptr;
  auto count = may_refer ? static_cast<size_t>(PySequence_Fast_GET_SIZE(previous->outputs.get())) : 0;
  size_t next = 0;  // outputs come in the order of the leaves that they replace, most likely
  for (uint32_t leaf : entry.donated) {
    size_t at = next < count && outputs[next] == kept.leaves[leaf]
                    ? next
                    : static_cast<size_t>(std::find(outputs, outputs + count, kept.leaves[leaf]) - outputs);
    if (at < count) {
      kept.reused_outputs.emplace_back(leaf, static_cast<uint32_t>(at));
      next = at + 1;
    } else {
      copied.push_back(leaf);
    }
  }
  if (!kept.reused_outputs.empty()) {
    kept.before = calls.back();
    kept.since_copy = previous->since_copy + 1;
  }
  if (copied.empty()) return;
  Owned originals = own(PyList_New(0));
  for (size_t i : copied) check(PyList_Append(originals.get(), kept.leaves[i]));
  // Runs Python: nothing that was borrowed from the call before is used after it.
  Owned copies = ask("copies", originals.get());
  if (!PyList_Check(copies.get()) || static_cast<size_t>(PyList_GET_SIZE(copies.get())) != copied.size())
    raise_error(PyExc_SystemError, "the copies of leaves are no list");
  for (size_t i = 0; i < copied.size(); ++i)
    kept.leaves.set(copied[i], PyList_GET_ITEM(copies.get(), static_cast<Py_ssize_t>(i)));
}

Owned CallRing::begin(const Beginning& call) {
  // A direct call is in no trace, so that only others have to ask.
  if (is_paused || (!call.is_direct && hooks::outside_of_traces().get() != Py_True)) return {};
  make_room();
  Owned out = take_spare();
  KeptCall& kept = kept_call(out.get());
  fill(kept, call);
  copy_what_may_change(kept, *nb::inst_ptr<Entry>(call.entry.get()));
  if (draws_in_calls) kept.draws = ask("draws", out.get());
  calls.push_back(out);
  return out;
}

void CallRing::end(PyObject* obj, PyObject* outputs, size_t outcome, const Owned& host, PyObject* are_finite,
                   bool traced) {
  KeptCall& kept = kept_call(obj);
  kept.outcome = outcome;
  kept.host = host;
  kept.outputs = Owned::borrow(outputs);
  kept.are_finite = Owned::borrow(are_finite);
  if (are_finite && is_copied_) ask("copy_to_host", are_finite);
  if (kept.refs) kept.refs = ask("copies", kept.refs.get());
  bool is_kept = std::any_of(calls.rbegin(), calls.rend(), [&](const Owned& call) { return call.get() == obj; });
  if (!is_kept) calls.push_back(Owned::borrow(obj));  // other threads have made many calls meanwhile
  if (traced) ask("traced", obj);
}

void CallRing::fail(PyObject* obj, PyObject* error) {
  Owned hold = Owned::borrow(obj);
  if (error) {
    ask("failed", obj, error);
    return;
  }
  auto at = std::find_if(calls.begin(), calls.end(), [&](const Owned& call) { return call.get() == obj; });
  if (at == calls.end()) return;
  Owned gone = std::move(*at);
  calls.erase(at);
}

void bind_kept_calls(nb::module_& m) {
  nb::class_<KeptCall>(m, "KeptCall", nb::type_slots(Collected<KeptCall, show_kept, clear_kept>::slots),
                       "A call of a recorder: references to what it was given and gave.")
      .def_prop_ro(
          "target", [](const KeptCall& k) { return held_or_none(k.target); }, nb::sig("def target(self) -> Any"))
      .def_prop_ro(
          "plan", [](const KeptCall& k) { return held_or_none(k.plan); }, nb::sig("def plan(self) -> Any"))
      .def_prop_ro(
          "entry", [](const KeptCall& k) { return held_or_none(k.entry); }, nb::sig("def entry(self) -> Entry"))
      .def_prop_ro(
          "graphdef", [](const KeptCall& k) { return held_or_none(k.graphdef); },
          nb::sig("def graphdef(self) -> GraphDef"))
      .def_prop_ro(
          "layout", [](const KeptCall& k) { return held_or_none(k.layout); },
          nb::sig("def layout(self) -> tuple[Any, ...]"))
      .def_prop_ro(
          "leaves", [](const KeptCall& k) { return nb::steal(list_of(k.leaves).release()); },
          nb::sig("def leaves(self) -> list[Any]"), "The inputs before the call. Those in `given` may be deleted.")
      .def_prop_ro(
          "before", [](const KeptCall& k) { return held_or_none(k.before); },
          nb::sig("def before(self) -> KeptCall | None"), "The call whose outputs some of its donated leaves are.")
      .def_prop_ro(
          "given", [](const KeptCall& k) { return k.reused_outputs; },
          nb::sig("def given(self) -> list[tuple[int, int]]"),
          "These leaves: (the leaf, which output of `before` it is).")
      .def_prop_ro(
          "refs",
          [](const KeptCall& k) {
            nb::list out;
            for (size_t i = 0; k.outputs && i < k.ref_leaves.size(); ++i)
              out.append(nb::make_tuple(k.ref_leaves[i], nb::borrow(k.refs.get())[i]));
            return out;
          },
          nb::sig("def refs(self) -> list[tuple[int, Any]]"),
          "Copies of the Refs after the call: (the leaf, the copy).")
      .def_prop_ro(
          "outcome", [](const KeptCall& k) { return k.outcome; }, "The number of the Outcome.")
      .def_prop_ro(
          "outputs",
          [](const KeptCall& k) -> nb::object {
            if (!k.outputs) return nb::none();
            const Entry& e = *nb::inst_ptr<Entry>(k.entry.get());
            if (k.outcome >= static_cast<size_t>(PyList_GET_SIZE(e.outcomes.get()))) return nb::none();
            const auto& outcome =
                *nb::inst_ptr<Outcome>(PyList_GET_ITEM(e.outcomes.get(), static_cast<Py_ssize_t>(k.outcome)));
            std::vector<PyObject*> all = with_numbers(outcome, PySequence_Fast_ITEMS(k.outputs.get()),
                                                      outcome.program.leaves - outcome.numbers.size(), k.host.get());
            return nb::steal(list_of(all.data(), static_cast<uint32_t>(all.size())).release());
          },
          nb::sig("def outputs(self) -> list[Any] | None"),
          "The output leaves, for the Outcome; None of a call that has raised.")
      .def(
          "arguments",
          [](const KeptCall& k, nb::list leaves) {
            const Entry& e = *nb::inst_ptr<Entry>(k.entry.get());
            OwnedList values;
            for (nb::handle leaf : leaves) values.push(leaf.ptr());
            OwnedList all = k.host ? e.without_numbers(values) : std::move(values);
            OwnedList vectors = e.vectors(k.host.get());
            for (size_t i = 0; i < vectors.size(); ++i) all.push(vectors[i]);
            Owned flat = tuple_of(all);
            return nb::steal(e.tupled ? own(PyTuple_Pack(1, flat.get())).release() : flat.release());
          },
          nb::arg("leaves"), nb::sig("def arguments(self, leaves: list[Any]) -> tuple[Any, ...]"),
          "What the program of the entry is called with for these leaves.")
      .def_prop_ro(
          "statement", [](const KeptCall& k) { return k.statement; },
          "The offset in the code of the script's frame; -1 without a script.")
      .def_prop_rw(
          "draws", [](const KeptCall& k) { return held_or_none(k.draws); },
          [](KeptCall& k, nb::object draws) { k.draws = Owned::borrow(draws.ptr()); },
          nb::for_getter(nb::sig("def draws(self) -> Any")),
          nb::for_setter(nb::sig("def draws(self, draws: Any, /) -> None")), "Random states, by who draws.")
      .def_prop_rw(
          "raised", [](const KeptCall& k) { return held_or_none(k.raised); },
          [](KeptCall& k, nb::object raised) { k.raised = Owned::borrow(raised.ptr()); },
          nb::for_getter(nb::sig("def raised(self) -> str | None")),
          nb::for_setter(nb::sig("def raised(self, raised: str, /) -> None")), "What the call has raised.");
  nb::class_<CallRing>(m, "CallRing", nb::type_slots(Collected<CallRing, show_ring, clear_ring>::slots),
                       "The last calls of a recorder.")
      .def(nb::init<Py_ssize_t, Py_ssize_t, nb::object>(), nb::arg("last"), nb::arg("copy_every"), nb::arg("observer"),
           nb::sig("def __init__(self, last: int, copy_every: int, observer: Any) -> None"))
      .def_prop_ro(
          "calls",
          [](const CallRing& r) {
            nb::list out;
            for (const Owned& call : r.calls) out.append(nb::borrow(call.get()));
            return out;
          },
          nb::sig("def calls(self) -> list[KeptCall]"), "Those that are kept, the oldest first.")
      .def_rw("draws_in_calls", &CallRing::draws_in_calls, "Do calls draw random numbers?")
      .def(
          "flush",
          [](CallRing& r) {
            std::deque<Owned> calls = r.calls;
            for (const Owned& call : calls) r.read(call.get(), true);
          },
          nb::sig("def flush(self) -> None"),
          "Waits for the calls, and tells the observer of results that are not finite.");
  m.def(
      "pause_recorders", [](bool paused) { return std::exchange(is_paused, paused); }, nb::arg("paused"),
      nb::sig("def pause_recorders(paused: bool) -> bool"),
      "While they are paused, recorders only call their functions. Returns what was so before.");
  m.def(
      "use_script", [](nb::handle frame) { Py_XSETREF(script, Py_NewRef(frame.ptr())); }, nb::arg("frame"),
      nb::sig("def use_script(frame: types.FrameType) -> None"),
      "The frame of the script: recorded calls note where it is.");
}

}  // namespace graftax
