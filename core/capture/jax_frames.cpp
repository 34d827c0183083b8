// SPDX-License-Identifier: Apache-2.0
#include "capture/jax_frames.h"

namespace graftax {

namespace {

// By identity, which PySequence_Contains is not: codes of equal text are equal, whosever they are.
bool is_in(PyObject* value, const nb::tuple& values) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(values.ptr()); ++i)
    if (PyTuple_GET_ITEM(values.ptr(), i) == value) return true;
  return false;
}

bool is_one_of(PyObject* value, const nb::tuple& types) {
  return is_in(reinterpret_cast<PyObject*>(Py_TYPE(value)), types);
}

// The name of the module with these globals, or null. Borrowed.
PyObject* module_name(PyObject* globals) {
  static PyObject* const name = interned("__name__");
  PyObject* module = dict_get(globals, name);
  return module && PyUnicode_Check(module) ? module : nullptr;
}

bool begins_with(PyObject* text, nb::handle start) {
  return text && PyUnicode_Tailmatch(text, start.ptr(), 0, PY_SSIZE_T_MAX, -1) == 1;
}

// Is it a function of one of the owner's modules? What it has closed over may be anybody's: `vmap(f)` is one too.
bool is_own_function(PyObject* function, const nb::str& owner) {
  return function && PyFunction_Check(function) && !PyFunction_GET_CLOSURE(function) &&
         begins_with(module_name(PyFunction_GET_GLOBALS(function)), owner);
}

bool holds_own_function(PyObject* closure, Py_ssize_t at, const nb::str& owner) {
  return closure && at < PyTuple_GET_SIZE(closure) && is_own_function(PyCell_GET(PyTuple_GET_ITEM(closure, at)), owner);
}

}  // namespace

bool InnerFrames::may_be(const Frame& frame) const {
  if (frame.code() == bind.ptr() || frame.code() == apply.ptr() || is_in(frame.code(), of_jaxprs)) return true;
  constexpr int stays = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR;  // what these are given may be gone
  if (reinterpret_cast<PyCodeObject*>(frame.code())->co_flags & stays) return false;
  PyObject* module = module_name(frame.globals());
  if (!begins_with(module, owner)) return false;
  for (nb::handle start : modules)
    if (begins_with(module, start)) return true;
  return false;
}

// Of a primitive's bind: its primitive and all parameters. Of a jitted function's call: what it is given, and the
// function. Of what runs a jaxpr: the jaxpr. Of other functions of JAX: everything that they are given.
bool Inside::holds(const Frame& frame) {
  if (frame.code() != frames_->bind.ptr() && frame.code() != frames_->apply.ptr() &&
      !is_in(frame.code(), frames_->of_jaxprs))
    return has_leaves_alone(frame);
  if (!frame.variable(0)) return false;  // deleted, or not assigned yet
  if (is_in(frame.code(), frames_->of_jaxprs)) return stays(frame.variable(0));
  if (frame.code() == frames_->apply.ptr()) {
    PyObject* function = frame.function();
    return holds_own_function(PyFunction_GET_CLOSURE(function), frames_->applied, frames_->owner) &&
           is_given_leaves(frame.variable(0)) && is_given_leaves(frame.variable(1));
  }
  return is_own(frame.variable(0)) && is_given_leaves(frame.variable(1)) && frame.variable(2) &&
         values_stay(frame.variable(2));
}

// Is it given nothing that could call, and has it closed over nothing else?
bool Inside::has_leaves_alone(const Frame& frame) {
  auto* code = reinterpret_cast<PyCodeObject*>(frame.code());
  int parameters = code->co_argcount + code->co_kwonlyargcount + !!(code->co_flags & CO_VARARGS) +
                   !!(code->co_flags & CO_VARKEYWORDS);
  for (int i = 0; i < parameters; ++i)
    if (!is_given_leaves(frame.variable(i))) return false;
  PyObject* function = frame.function();
  PyObject* closure = function && PyFunction_Check(function) ? PyFunction_GET_CLOSURE(function) : nullptr;
  if (!closure) return function != nullptr;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(closure); ++i) {
    PyObject* value = PyCell_GET(PyTuple_GET_ITEM(closure, i));
    if (!is_given_leaves(value) && !is_own_function(value, frames_->owner)) return false;
  }
  return true;
}

bool Inside::equation_stays(nb::handle equation) {
  static PyObject *const primitive = interned("primitive"), *const params = interned("params");
  return is_own(own(PyObject_GetAttr(equation.ptr(), primitive)).get()) &&
         values_stay(own(PyObject_GetAttr(equation.ptr(), params)).get());
}

// Held as long as it is known: another object may not come to have its address.
bool Inside::remember(PyObject* value, bool answer) {
  if (known_.emplace(value, answer).second) held_.push(value);
  return answer;
}

bool Inside::is_own(PyObject* primitive) {
  auto answer = known_.find(primitive);
  if (answer != known_.end()) return answer->second;
  return remember(primitive, nb::cast<bool>(frames_->owns(nb::handle(primitive))));
}

// Only the exact types are opened: a subclass may call when it is read.
bool Inside::is_given_leaves(PyObject* value) {
  if (!value) return false;
  if (PyTuple_CheckExact(value) || PyList_CheckExact(value)) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i)
      if (!is_given_leaves(PySequence_Fast_GET_ITEM(value, i))) return false;
    return true;
  }
  if (PyDict_CheckExact(value)) {
    PyObject *key, *item;
    Py_ssize_t at = 0;
    while (PyDict_Next(value, &at, &key, &item))
      if (!PyUnicode_CheckExact(key) || !is_given_leaves(item)) return false;
    return true;
  }
  return is_one_of(value, frames_->leaves);
}

bool Inside::values_stay(PyObject* params) {
  if (!PyDict_CheckExact(params)) return false;
  PyObject *key, *value;
  Py_ssize_t at = 0;
  while (PyDict_Next(params, &at, &key, &value))
    if (!stays(value)) return false;
  return true;
}

// Does nothing in this parameter of an equation call anybody's code? A jaxpr does where one of its equations does.
bool Inside::stays(PyObject* value) {
  if (PyTuple_Check(value)) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i)
      if (!stays(PyTuple_GET_ITEM(value, i))) return false;
    return true;
  }
  if (!is_one_of(value, frames_->jaxprs)) return !PyCallable_Check(value) || is_one_of(value, frames_->inert);
  auto answer = known_.find(value);
  if (answer != known_.end()) return answer->second;
  bool all = true;
  for (nb::handle equation : nb::list(nb::steal(check(attribute(value, "eqns")))))
    all = all && equation_stays(equation);
  return remember(value, all);
}

void bind_inner_frames(nb::module_& m) {
  nb::class_<InnerFrames>(m, "InnerFrames", "JAX's own frames that run nobody else's code.")
      .def(
          "__init__",
          [](InnerFrames* self, nb::object bind, nb::object apply, Py_ssize_t applied, nb::tuple of_jaxprs,
             nb::str owner, nb::tuple modules, nb::tuple jaxprs, nb::tuple inert, nb::tuple leaves, nb::callable owns) {
            new (self) InnerFrames{std::move(bind),   std::move(apply),   applied,           std::move(of_jaxprs),
                                   std::move(owner),  std::move(modules), std::move(jaxprs), std::move(inert),
                                   std::move(leaves), std::move(owns)};
          },
          nb::arg("bind"), nb::arg("apply").none(), nb::arg("applied"), nb::arg("of_jaxprs"), nb::arg("owner"),
          nb::arg("modules"), nb::arg("jaxprs"), nb::arg("inert"), nb::arg("leaves"), nb::arg("owns"),
          nb::sig("def __init__(self, bind: Any, apply: Any, applied: int, of_jaxprs: tuple[Any, ...], owner: str, "
                  "modules: tuple[str, ...], jaxprs: tuple[type, ...], inert: tuple[type, ...], leaves: tuple[type, "
                  "...], owns: Callable[[Any], bool]) -> None"),
          "Codes of JAX's: `bind` of a primitive's method (self, *args, **params) that runs it; `apply` of what its "
          "jitted functions run on a call (*args, **kwargs), whose closure holds the function in the cell number "
          "`applied`, or None; `of_jaxprs` of functions that run or cut a jaxpr, their first argument. `owner` is how "
          "the names of JAX's own modules begin, `modules` those of its modules whose functions call nothing but what "
          "they are given. `jaxprs` are types of jaxprs, `inert` types of what can be called and does not call, "
          "`leaves` those of what such functions may be given. "
          "`owns(primitive)` says whether its rules are JAX's own.")
      .def(
          "add_leaf",
          [](InnerFrames& self, nb::handle type) {
            self.leaves = nb::tuple(nb::steal(check(PySequence_Concat(self.leaves.ptr(), nb::make_tuple(type).ptr()))));
          },
          nb::arg("type"), nb::sig("def add_leaf(self, type: type) -> None"),
          "They may be given values of this class, too.");
  m.def(
      "outside",
      [](nb::list noted, const InnerFrames* inner) {
        Inside inside(inner);
        nb::list equations;
        for (nb::handle holder : noted) {
          Owned equation = Owned::borrow(holder.ptr());
          if (PyWeakref_CheckRef(holder.ptr())) equation = weak_target(holder.ptr());
          else if (PyFunction_Check(holder.ptr())) equation = own(PyObject_CallNoArgs(holder.ptr()));
          if (equation && equation.get() != Py_None && !(inner && inside.equation_stays(equation.get())))
            equations.append(nb::handle(equation.get()));
        }
        return equations;
      },
      nb::arg("noted"), nb::arg("inner").none(),
      nb::sig("def outside(noted: list[Any], inner: InnerFrames | None) -> list[Any]"),
      "Those of the equations, each given itself or by what holds it, in which somebody else's code may be called; all "
      "that are still there, where nothing is known of JAX's own.");
}

}  // namespace graftax
