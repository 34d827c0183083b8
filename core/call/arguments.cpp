// SPDX-License-Identifier: Apache-2.0
#include "call/arguments.h"

#include <algorithm>

#include "capture/class_attributes.h"
#include "python/collected.h"

namespace graftax {

namespace {

PyObject* no_layout = nullptr;  // ()

// What stands under the name of an origin, or null.
Owned value_at(PyObject* holder, PyObject* name) {
  return PyType_Check(holder) ? class_attribute(holder, name) : Owned::borrow(dict_get(holder, name));
}

bool same_name(PyObject* a, PyObject* b) {
  return a == b || (PyUnicode_GET_LENGTH(a) == PyUnicode_GET_LENGTH(b) && PyUnicode_Compare(a, b) == 0);
}

constexpr Py_ssize_t few_names = 4;  // so few are looked up as fast as a watch is asked

void push_globals(const Binding& b, Roots& roots) {
  OwnedList& out = roots.values;
  uint64_t epoch = roots.globals_epoch = b.watch.now();
  roots.first_global = out.size();
  roots.globals = static_cast<size_t>(PyTuple_GET_SIZE(b.global_names.ptr()));
  if (epoch != 0 && epoch == b.global_epoch) {
    for (PyObject* value : b.global_values) out.push(value);
    return;
  }
  std::vector<PyObject*> values;  // a lookup may run code that calls this function
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(b.global_names.ptr()); ++i) {
    PyObject* value = dict_get(b.globals.ptr(), PyTuple_GET_ITEM(b.global_names.ptr(), i));
    out.push(value ? value : b.missing.ptr());
    if (epoch != 0) values.push_back(out.back());
  }
  b.global_values = std::move(values);
  b.global_epoch = epoch;
}

void show_binding(const Binding& b, Visitor& visit) {
  visit(b.names, b.defaults, b.missing, b.positional_defaults, b.code, b.cells, b.globals, b.global_names, b.origins);
}

void clear_binding(Binding& b) {
  b.watch.end();  // it has borrowed the names
  b.global_values.clear();
  b.global_epoch = 0;
  for (nb::object* held : {&b.defaults, &b.names, &b.cells, &b.global_names, &b.origins})
    *held = nb::steal(PyTuple_New(0));
  b.positional = b.positional_only = 0;
}

}  // namespace

bool bind(PyObject* prefix, const Binding& b, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames, Roots& out) {
  Py_ssize_t skip = PyTuple_GET_SIZE(prefix), total = skip + nargs;
  Py_ssize_t count = PyTuple_GET_SIZE(b.names.ptr());
  auto positional_at = [&](Py_ssize_t i) { return i < skip ? PyTuple_GET_ITEM(prefix, i) : args[i - skip]; };
  if (total > b.positional && !b.var_positional) return false;
  Py_ssize_t nkw = kwnames ? PyTuple_GET_SIZE(kwnames) : 0;
  Py_ssize_t captured =
      PyTuple_GET_SIZE(b.cells.ptr()) + PyTuple_GET_SIZE(b.global_names.ptr()) + PyTuple_GET_SIZE(b.origins.ptr());
  out.values.reserve(static_cast<size_t>(count + total + nkw + captured));
  for (Py_ssize_t i = 0; i < b.positional; ++i) out.values.push(i < total ? positional_at(i) : nullptr);
  Py_ssize_t extra = std::max<Py_ssize_t>(0, total - b.positional);
  for (Py_ssize_t i = 0; i < extra; ++i) out.values.push(positional_at(b.positional + i));
  for (Py_ssize_t i = b.positional; i < count; ++i) out.values.push(nullptr);
  // `*args` stand behind the positional parameters: the keyword-only ones move up by their number.
  auto place = [&](Py_ssize_t i) { return static_cast<size_t>(i < b.positional ? i : i + extra); };
  // Keyword arguments: each fills a place that is still empty, or goes to `**kwargs`.
  std::vector<Py_ssize_t> more;
  for (Py_ssize_t k = 0; k < nkw; ++k) {
    PyObject* name = PyTuple_GET_ITEM(kwnames, k);
    Py_ssize_t i = b.positional_only;
    while (i < count && !same_name(PyTuple_GET_ITEM(b.names.ptr(), i), name)) ++i;
    if (i == count) {
      if (!b.var_keyword) return false;
      more.push_back(k);
      continue;
    }
    if (out.values[place(i)]) return false;
    out.values.set(place(i), args[nargs + k]);
  }
  // Defaults: so each spelling of a call has the same roots.
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (out.values[place(i)]) continue;
    PyObject* value = PyTuple_GET_ITEM(b.defaults.ptr(), i);
    if (value == b.missing.ptr()) return false;
    out.values.set(place(i), value);
  }
  if (extra == 0 && more.empty()) {
    out.layout = Owned::borrow(no_layout);
  } else {
    out.layout = own(PyTuple_New(1 + static_cast<Py_ssize_t>(more.size())));
    PyTuple_SET_ITEM(out.layout.get(), 0, check(PyLong_FromSsize_t(extra)));
    for (size_t k = 0; k < more.size(); ++k) {
      PyTuple_SET_ITEM(out.layout.get(), 1 + static_cast<Py_ssize_t>(k), Py_NewRef(PyTuple_GET_ITEM(kwnames, more[k])));
      out.values.push(args[nargs + more[k]]);
    }
  }
  // What the function captures comes last: cells, globals, and names in other scopes that its traces have read.
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(b.cells.ptr()); ++i) out.values.push(PyTuple_GET_ITEM(b.cells.ptr(), i));
  push_globals(b, out);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(b.origins.ptr()); ++i) {
    PyObject *origin = PyTuple_GET_ITEM(b.origins.ptr(), i), *holder = PyTuple_GET_ITEM(origin, 0);
    PyObject* name = PyTuple_GET_ITEM(origin, 1);
    if (name == Py_None) {
      out.values.push(holder);
      continue;
    }
    Owned value = value_at(holder, name);
    if (!value || value.get() == b.missing.ptr()) value = Owned();
    PyObject* value_or_missing = value ? value.get() : b.missing.ptr();
    if (PyTuple_GET_ITEM(origin, 2) == Py_True) {  // the code assigns it: see `give_back`
      out.assigned.push(value_or_missing);
      out.values.push_stolen(own(PyCell_New(value.get())));
      continue;
    }
    out.values.push(value_or_missing);
  }
  return true;
}

bool was_read_from(const Binding& b, PyObject* function) {
  PyObject *defaults = PyFunction_GET_DEFAULTS(function), *keywords = PyFunction_GET_KW_DEFAULTS(function);
  if ((defaults ? defaults : Py_None) != b.positional_defaults.ptr()) return false;
  if (b.code.is_none()) return true;
  if (PyFunction_GET_CODE(function) != b.code.ptr()) return false;
  Py_ssize_t count = PyTuple_GET_SIZE(b.names.ptr());
  for (Py_ssize_t i = b.positional; i < count; ++i) {
    PyObject* value = keywords ? dict_get(keywords, PyTuple_GET_ITEM(b.names.ptr(), i)) : nullptr;
    if ((value ? value : b.missing.ptr()) != PyTuple_GET_ITEM(b.defaults.ptr(), i)) return false;
  }
  return true;
}

void give_back(const Binding& b, const Roots& roots) {
  if (roots.assigned.size() == 0) return;
  Py_ssize_t count = PyTuple_GET_SIZE(b.origins.ptr());
  size_t first = roots.values.size() - static_cast<size_t>(count), at = 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* origin = PyTuple_GET_ITEM(b.origins.ptr(), i);
    if (PyTuple_GET_ITEM(origin, 2) != Py_True) continue;
    PyObject *holder = PyTuple_GET_ITEM(origin, 0), *name = PyTuple_GET_ITEM(origin, 1), *before = roots.assigned[at++];
    // Held: setting a class attribute may run user code, which may write to the cell.
    Owned now = Owned::borrow(PyCell_GET(roots.values[first + static_cast<size_t>(i)]));
    if (now ? now.get() == before : before == b.missing.ptr()) continue;
    if (PyType_Check(holder)) {
      set_class_attribute(holder, name, now.get());
    } else if (now) {
      check(PyDict_SetItem(holder, name, now.get()));
    } else if (PyDict_DelItem(holder, name) < 0) {
      if (!PyErr_ExceptionMatches(PyExc_KeyError)) raise_python();
      PyErr_Clear();
    }
  }
}

void bind_binding(nb::module_& m) {
  no_layout = PyTuple_New(0);
  nb::class_<Binding>(m, "Binding", nb::type_slots(Collected<Binding, show_binding, clear_binding>::slots),
                      "How the arguments of a signature become roots.")
      .def(
          "__init__",
          [](Binding* self, nb::tuple names, nb::tuple defaults, nb::object missing, nb::object given,
             Py_ssize_t positional, Py_ssize_t positional_only, bool var_positional, bool var_keyword, nb::tuple cells,
             nb::object globals, nb::tuple global_names, nb::tuple origins, nb::object code) {
            for (nb::handle origin : origins)
              if (!PyTuple_Check(origin.ptr()) || PyTuple_GET_SIZE(origin.ptr()) != 3)
                raise_error(PyExc_ValueError, "inconsistent binding");
            if (names.size() != defaults.size() || positional > static_cast<Py_ssize_t>(names.size()) ||
                positional_only > positional || (global_names.size() && !nb::isinstance<nb::dict>(globals)))
              raise_error(PyExc_ValueError, "inconsistent binding");
            new (self)
                Binding{names,        defaults, missing,    given,           code,           cells,       globals,
                        global_names, origins,  positional, positional_only, var_positional, var_keyword, 0};
            if (static_cast<Py_ssize_t>(global_names.size()) > few_names)
              self->watch.begin(globals.ptr(), global_names.ptr());
          },
          nb::arg("names"), nb::arg("defaults"), nb::arg("missing"), nb::arg("given").none(), nb::arg("positional"),
          nb::arg("positional_only"), nb::arg("var_positional"), nb::arg("var_keyword"), nb::arg("cells"),
          nb::arg("globals").none(), nb::arg("global_names"), nb::arg("origins") = nb::tuple(),
          nb::arg("code") = nb::none(),
          nb::sig(
              "def __init__(self, names: tuple[str, ...], defaults: tuple[Any, ...], missing: object, given: "
              "object, positional: int, "
              "positional_only: int, var_positional: bool, var_keyword: bool, cells: tuple[Any, ...], "
              "globals: dict[str, Any] | None, global_names: tuple[str, ...], "
              "origins: tuple[tuple[Any, str | None, bool], ...] = (), code: types.CodeType | None = None) -> None"))
      .def_rw("generation", &Binding::generation, "Which roots it gives: those of a table in its generation.")
      .def(
          "was_read_from",
          [](const Binding& b, nb::handle f) { return PyFunction_Check(f.ptr()) && was_read_from(b, f.ptr()); },
          nb::arg("function"), nb::sig("def was_read_from(self, function: Any, /) -> bool"),
          "Has the function the code and the defaults that it had when this was read?")
      .def(
          "bind",
          [](const Binding& b, nb::tuple args, nb::dict kwargs, nb::tuple prefix) -> nb::object {
            std::vector<PyObject*> values;  // as in a vectorcall: those of the keyword arguments last
            for (nb::handle h : args) values.push_back(h.ptr());
            Owned names = own(PyTuple_New(static_cast<Py_ssize_t>(kwargs.size())));
            PyObject *name, *value;
            Py_ssize_t at = 0;
            for (Py_ssize_t pos = 0; PyDict_Next(kwargs.ptr(), &pos, &name, &value);) {
              PyTuple_SET_ITEM(names.get(), at++, Py_NewRef(name));
              values.push_back(value);
            }
            Roots roots;
            if (!bind(prefix.ptr(), b, values.data(), static_cast<Py_ssize_t>(args.size()), names.get(), roots))
              return nb::none();
            return nb::steal(check(PyTuple_Pack(2, tuple_of(roots.values).get(), roots.layout.get())));
          },
          nb::arg("args"), nb::arg("kwargs"), nb::arg("prefix") = nb::tuple(),
          nb::sig("def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any], prefix: tuple[Any, ...] = ()) -> "
                  "tuple[tuple[Any, ...], tuple[Any, ...]] | None"),
          "(roots, layout) of these arguments, `prefix` before them; None where the function would raise TypeError.");
}

}  // namespace graftax
