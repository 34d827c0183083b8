// SPDX-License-Identifier: Apache-2.0
#include "capture/judged_calls.h"

#include <optional>
#include <set>
#include <unordered_set>

#include "python/collected.h"

namespace graftax {

namespace {

// The function, and a first argument that the judgement is about, or null.
using Call = std::pair<PyObject*, PyObject*>;

// Classes, modules and functions of modules in C last, and what is done to one of them is judged for it alone.
bool is_lasting(PyObject* first) {
  if (PyType_Check(first) || PyModule_Check(first)) return true;
  return PyCFunction_CheckExact(first) && PyCFunction_GET_SELF(first) &&
         PyModule_CheckExact(PyCFunction_GET_SELF(first));
}

// What is judged of such a call; nothing where another first argument of its type may do more: one that may be called
// itself, and the name of a class that a metaclass makes.
std::optional<Call> call_of(PyObject* function, PyObject* first) {
  if (is_lasting(first)) return Call{function, first};
  const bool is_metaclass =
      PyType_Check(function) && PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(function), &PyType_Type);
  if (PyCallable_Check(first) || (PyUnicode_Check(first) && is_metaclass)) return std::nullopt;
  return Call{function, nullptr};
}

// The calls of an installed package's code that were judged to have no effect, so that they need not be heard again. A
// trace that hears such code is told of each call by the interpreter: a hundred thousand of them where it prints.
class JudgedCalls {
 public:
  explicit JudgedCalls(nb::callable on_call) : on_call_(std::move(on_call)) {}

  bool has_code(nb::handle code) const { return codes_.count(code.ptr()) > 0; }

  void add_code(nb::handle code) {
    if (codes_.insert(code.ptr()).second) held_.push(code.ptr());
  }

  bool knows(PyObject* function, PyObject* first) const {
    const auto call = call_of(function, first);
    return call && calls_.count(*call) > 0;
  }

  void add(nb::handle function, nb::handle first) {
    const auto call = call_of(function.ptr(), first.ptr());
    if (!call || !calls_.insert(*call).second) return;
    held_.push(call->first);
    held_.push(call->second);
  }

  void clear() {
    codes_.clear();
    calls_.clear();
    OwnedList gone;
    std::swap(gone, held_);
  }

  void hear(nb::handle code, nb::handle offset, nb::handle function, nb::handle first) const {
    if (!has_code(code) || !knows(function.ptr(), first.ptr())) on_call_(code, offset, function, first);
  }

  void show(Visitor& visitor) const { visitor(on_call_, held_); }
  void let_go() {
    clear();
    nb::callable gone;
    std::swap(gone, on_call_);
  }

 private:
  nb::callable on_call_;
  std::unordered_set<PyObject*> codes_;  // borrowed from `held_`, as the calls are
  std::set<Call> calls_;
  OwnedList held_;
};

void show_judged(const JudgedCalls& calls, Visitor& visitor) { calls.show(visitor); }
void clear_judged(JudgedCalls& calls) { calls.let_go(); }

}  // namespace

void bind_judged_calls(nb::module_& m) {
  nb::class_<JudgedCalls>(m, "JudgedCalls", nb::type_slots(Collected<JudgedCalls, show_judged, clear_judged>::slots),
                          nb::is_final(), "Calls of installed packages' code that were judged to have no effect.")
      .def(nb::init<nb::callable>(), nb::arg("on_call"),
           nb::sig("def __init__(self, on_call: Callable[[Any, int, Any, Any], None]) -> None"),
           "`on_call` is told of the other calls.")
      .def("has_code", &JudgedCalls::has_code, nb::arg("code"), nb::sig("def has_code(self, code: Any) -> bool"))
      .def("add_code", &JudgedCalls::add_code, nb::arg("code"), nb::sig("def add_code(self, code: Any) -> None"),
           "Its calls are judged: of those that are known, nobody is told.")
      .def(
          "knows",
          [](const JudgedCalls& calls, nb::handle function, nb::handle first) {
            return calls.knows(function.ptr(), first.ptr());
          },
          nb::arg("function"), nb::arg("first").none(), nb::sig("def knows(self, function: Any, first: Any) -> bool"),
          "Has such a call been judged?")
      .def("add", &JudgedCalls::add, nb::arg("function"), nb::arg("first").none(),
           nb::sig("def add(self, function: Any, first: Any) -> None"), "This call has no effect.")
      .def("clear", &JudgedCalls::clear, "Forgets codes and calls.")
      .def("hear", &JudgedCalls::hear, nb::arg("code"), nb::arg("offset"), nb::arg("function").none(),
           nb::arg("first").none(),
           nb::sig("def hear(self, code: Any, offset: int, function: Any, first: Any) -> None"),
           "What the interpreter calls for a call.");
}

}  // namespace graftax
