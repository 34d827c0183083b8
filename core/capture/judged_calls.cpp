// SPDX-License-Identifier: Apache-2.0
#include "capture/judged_calls.h"

#include <optional>
#include <set>
#include <tuple>
#include <unordered_set>

#include "python/collected.h"

namespace graftax {

namespace {

// What a judgement is about: what is called, and its first argument, each as itself or by a class that stands for all
// of its objects. A bound method is new each time that it is asked for, so the object is never part of it.
struct Call {
  enum class Part : char { none, itself, its_class, class_of_self };  // the last one: of what it is bound to
  PyObject* callee;
  PyObject* first = nullptr;
  Part callee_is = Part::itself;
  Part first_is = Part::none;

  bool operator<(const Call& other) const {
    return std::tie(callee, first, callee_is, first_is) <
           std::tie(other.callee, other.first, other.callee_is, other.first_is);
  }
};

// Classes, modules and functions of modules in C last, and what is done to one of them is judged for it alone.
bool is_lasting(PyObject* first) {
  if (PyType_Check(first) || PyModule_Check(first)) return true;
  return PyCFunction_CheckExact(first) && PyCFunction_GET_SELF(first) &&
         PyModule_CheckExact(PyCFunction_GET_SELF(first));
}

PyObject* class_of(PyObject* object) { return reinterpret_cast<PyObject*>(Py_TYPE(object)); }

// The class of a method in C that is bound to its object.
PyObject* method_wrapper() {
  static PyObject* const type = nb::object(nb::module_::import_("types").attr("MethodWrapperType")).release().ptr();
  return type;
}

// What is judged of such a call; nothing where a metaclass makes a class, whose name decides.
std::optional<Call> call_of(PyObject* function, PyObject* first) {
  while (PyMethod_Check(function)) function = PyMethod_GET_FUNCTION(function);
  Call call{function};
  PyObject* self = PyCFunction_CheckExact(function) ? PyCFunction_GET_SELF(function) : nullptr;
  if (class_of(function) == method_wrapper()) {
    Owned descriptor_class = Owned::steal(PyObject_GetAttrString(function, "__objclass__"));
    if (!descriptor_class) return PyErr_Clear(), std::nullopt;
    call.callee = descriptor_class.get();  // which the method keeps alive
    call.callee_is = Call::Part::its_class;
  } else if (self && !is_lasting(self)) {
    call.callee = class_of(self);
    call.callee_is = Call::Part::class_of_self;
  }
  if (PyFunction_Check(function)) return call;  // what its code does with the argument is heard when it runs
  if (is_lasting(first)) {
    call.first = first;
    call.first_is = Call::Part::itself;
  } else if (PyCallable_Check(first)) {
    call.first = class_of(first);
    call.first_is = Call::Part::its_class;
  } else if (PyUnicode_Check(first) && PyType_Check(function) &&
             PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(function), &PyType_Type)) {
    return std::nullopt;
  }
  return call;
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
    held_.push(call->callee);
    held_.push(call->first);
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
           nb::sig("def add(self, function: Any, first: Any) -> None"),
           "This call has no effect, whichever the object is of which a method is called, or, among those of a class "
           "whose "
           "objects can be called, the first argument.")
      .def("clear", &JudgedCalls::clear, "Forgets codes and calls.")
      .def("hear", &JudgedCalls::hear, nb::arg("code"), nb::arg("offset"), nb::arg("function").none(),
           nb::arg("first").none(),
           nb::sig("def hear(self, code: Any, offset: int, function: Any, first: Any) -> None"),
           "What the interpreter calls for a call.");
}

}  // namespace graftax
