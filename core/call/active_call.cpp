// SPDX-License-Identifier: Apache-2.0
// The stack of calls in progress, as Python sees it.
#include "call/call_stack.h"
#include "call/caller.h"

namespace graftax {

void bind_active_call(nb::module_& m) {
  m.def(
      "active_call",
      [](nb::handle outcomes) -> nb::object {
        // Only of the innermost call, and only to its own entry: a trace cannot read the roots of another call.
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
        // By number: calls inside of this one move the vector to other memory.
        size_t number = active().size() - 1;
        struct Scope {
          size_t number;
          PyObject* before;
          ~Scope() { active()[number].rebuilt = before; }
        } scope{number, std::exchange(active()[number].rebuilt, rebuilt.ptr())};
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
}

}  // namespace graftax
