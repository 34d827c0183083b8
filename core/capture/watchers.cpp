// SPDX-License-Identifier: Apache-2.0
#include "capture/watchers.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <utility>

#include "capture/class_attributes.h"
#include "capture/frame_hook.h"
#include "python/collected.h"
#include "python/hooks.h"

namespace graftax {

namespace {

uint64_t epoch = 1;  // counts changes of watched bindings; reads with a stamp of 0 are compared on every call

bool same_contents(const Reads& r) {
  for (size_t i = 0; i < r.cells.size(); ++i)
    if (PyCell_GET(r.cells[i]) != r.contents[i]) return false;
  return true;
}

// Another one after each `register` of any abstract class.
Owned abc_token() {
  static PyObject* const get =
      check(PyObject_GetAttrString(own(PyImport_ImportModule("abc")).get(), "get_cache_token"));
  return own(PyObject_CallNoArgs(get));
}

bool same_abc_token(const Reads& r) {
  return r.abstract_classes.empty() || (r.abc_token && equal(abc_token().get(), r.abc_token));
}

// The same value, for whoever reads the name? Numbers and texts may be other objects.
bool same_value(PyObject* a, PyObject* b) {
  if (a == b) return true;
  if (!a || !b || Py_TYPE(a) != Py_TYPE(b)) return false;
  PyTypeObject* type = Py_TYPE(a);
  if (type == &PyFloat_Type) {
    double x = PyFloat_AS_DOUBLE(a), y = PyFloat_AS_DOUBLE(b);
    return memcmp(&x, &y, sizeof x) == 0;
  }
  if (type != &PyLong_Type && type != &PyUnicode_Type && type != &PyBytes_Type) return false;
  return equal(a, b);
}

// Those that a class has outside of its dict; of a function also what it says of itself. Borrowed.
OwnNames names_of(PyObject* owner) {
  if (!PyFunction_Check(owner)) {
    auto* type = reinterpret_cast<PyHeapTypeObject*>(owner);
    return {type->ht_name, type->ht_qualname};
  }
  auto* function = reinterpret_cast<PyFunctionObject*>(owner);
  // Python makes a dict of the annotations when they are asked for; what is in it is a binding.
  PyObject* annotations = function->func_annotations;
  if (annotations && !PyDict_Check(annotations)) annotations = nullptr;
  return {function->func_name, function->func_qualname, function->func_doc, function->func_module, annotations};
}

// The names are compared as objects first: mostly they are the same ones.
bool same_names(const Reads& r) {
  return std::all_of(r.named.begin(), r.named.end(), [](const NamedRead& n) {
    Owned owner = weak_target(n.owner);
    if (!owner) return true;
    OwnNames now = names_of(owner.get());
    for (size_t i = 0; i < now.size(); ++i)
      if (n.names[i] && now[i] != n.names[i] && !same_value(now[i], n.names[i])) return false;
    return true;
  });
}

bool same_answers(const Reads& r) {
  return std::all_of(r.answers.begin(), r.answers.end(),
                     [](const AnswerRead& a) { return equal(own(PyObject_CallNoArgs(a.ask)).get(), a.answer); });
}

// Items are compared as objects first: mostly they are the same ones. No code of the caller's runs for the others.
bool same_items(const ContainerRead& c) {
  if (PyAnySet_Check(c.container)) {
    if (PySet_GET_SIZE(c.container) != PySet_GET_SIZE(c.items)) return false;
    return equal(c.container, c.items);
  }
  Py_ssize_t count = PyTuple_GET_SIZE(c.items);
  if (PyList_GET_SIZE(c.container) != count) return false;
  for (Py_ssize_t i = 0; i < count; ++i)
    if (!same_value(PyList_GET_ITEM(c.container, i), PyTuple_GET_ITEM(c.items, i))) return false;
  return true;
}

bool same_containers(const Reads& r) { return std::all_of(r.containers.begin(), r.containers.end(), same_items); }

Owned items_of(PyObject* container) {
  if (!PyList_CheckExact(container) && !PySet_CheckExact(container))
    raise_error(PyExc_TypeError, "expected a list or a set");
  return own(PyList_CheckExact(container) ? PyList_AsTuple(container) : PyFrozenSet_New(container));
}

// As a name in a dict: which keys it has. No variable is called so.
PyObject* of_keys() {
  static PyObject* const name = interned("*");
  return name;
}

#if PY_VERSION_HEX >= 0x030C0000
constexpr bool has_watchers = true;
int dict_watcher = -1, type_watcher = -1, function_watcher = -1;

// Names that some entry has read, by dict.
std::unordered_map<PyObject*, std::unordered_map<PyObject*, size_t>>& watched() {
  static auto* all = new std::unordered_map<PyObject*, std::unordered_map<PyObject*, size_t>>();
  return *all;
}
std::unordered_map<PyObject*, size_t>& watched_functions() {
  static auto* all = new std::unordered_map<PyObject*, size_t>();
  return *all;
}

// Runs in the middle of a change of the dict: it only counts, and calls nothing.
int on_dict(PyDict_WatchEvent event, PyObject* dict, PyObject* key, PyObject*) {
  if (event == PyDict_EVENT_DEALLOCATED) return watched().erase(dict), ++epoch, 0;
  if (event == PyDict_EVENT_CLEARED || event == PyDict_EVENT_CLONED || !key) return ++epoch, 0;
  auto names = watched().find(dict);
  if (names == watched().end()) return 0;
  // Watched names are interned, so the address tells. A key that is not may be equal to one of them.
  if (names->second.count(key) || !PyUnicode_CheckExact(key) || !PyUnicode_CHECK_INTERNED(key)) ++epoch;
  else if (event != PyDict_EVENT_MODIFIED && names->second.count(of_keys())) ++epoch;
  return 0;
}

int on_type(PyTypeObject*) { return ++epoch, 0; }

int on_function(PyFunction_WatchEvent event, PyFunctionObject* function, PyObject*) {
  if (event == PyFunction_EVENT_CREATE) {
    try {
      return function_made(reinterpret_cast<PyObject*>(function)), 0;
    } catch (const std::bad_alloc&) {  // no exception may pass the interpreter's own frames
      PyErr_NoMemory();
      return -1;
    }
  }
  if (event == PyFunction_EVENT_DESTROY) return function_gone(reinterpret_cast<PyObject*>(function)), 0;
  if (watched_functions().count(reinterpret_cast<PyObject*>(function))) ++epoch;
  return 0;
}

void watch(const Read& b) {
  if (PyType_Check(b.holder)) {
    auto* type = reinterpret_cast<PyTypeObject*>(b.holder);
    // No code can change it.
    if (type->tp_flags & Py_TPFLAGS_IMMUTABLETYPE) return;
    check(PyType_Watch(type_watcher, b.holder));
    return;
  }
  check(PyDict_Watch(dict_watcher, b.holder));
  ++watched()[b.holder][b.name];
}

void unwatch(const Read& b) {
  if (b.is_gone() || PyType_Check(b.holder)) return;
  auto names = watched().find(b.holder);
  if (names == watched().end()) return;
  auto name = names->second.find(b.name);
  if (name != names->second.end() && --name->second == 0) names->second.erase(name);
  // Other reads are of this dict.
  if (!names->second.empty()) return;
  watched().erase(names);
  if (PyDict_Unwatch(dict_watcher, b.holder) < 0) PyErr_Clear();
}

void watch_function(PyObject* f) { ++watched_functions()[f]; }
void unwatch_function(PyObject* f) {
  auto it = watched_functions().find(f);
  if (it != watched_functions().end() && --it->second == 0) watched_functions().erase(it);
}

// A type tells of one change, and of the next only once it has a version again. One that was changed too often (a
// thousand times, in 3.13) gets none, and tells nothing any more: false.
bool arm(const Read& b) {
  if (!PyType_Check(b.holder)) return true;
  auto* type = reinterpret_cast<PyTypeObject*>(b.holder);
  return type->tp_flags & Py_TPFLAGS_IMMUTABLETYPE || PyUnstable_Type_AssignVersionTag(type);
}

bool unchanged(Reads& r) {
  return r.stamp == epoch && r.is_told && same_contents(r) && same_abc_token(r) && same_names(r) && same_answers(r) &&
         same_containers(r);
}
void note_versions(Reads&) {}
uint64_t names_epoch(PyObject*) { return epoch; }

void init_watchers() {
  check(dict_watcher = PyDict_AddWatcher(on_dict));
  check(type_watcher = PyType_AddWatcher(on_type));
  check(function_watcher = PyFunction_AddWatcher(on_function));
}
#else
constexpr bool has_watchers = false;

void watch(const Read&) {}
void unwatch(const Read&) {}
void watch_function(PyObject*) {}
void unwatch_function(PyObject*) {}
void init_watchers() {}

uint64_t version(PyObject* holder) {
  if (!PyType_Check(holder)) return reinterpret_cast<PyDictObject*>(holder)->ma_version_tag;
  return reinterpret_cast<PyTypeObject*>(holder)->tp_version_tag;  // 0: it has changed, or never had one
}

uint64_t names_epoch(PyObject* dict) { return version(dict); }

// A type gets a version when something is looked up in it. One without is seen by `unchanged`.
bool arm(const Read& b) {
  if (PyType_Check(b.holder)) _PyType_Lookup(reinterpret_cast<PyTypeObject*>(b.holder), b.name);
  return true;
}

bool unchanged(Reads& r) {
  if (r.stamp != epoch || !r.held || !same_contents(r) || !same_abc_token(r) || !same_names(r) || !same_answers(r) ||
      !same_containers(r))
    return false;
  for (const Read& b : r.bindings)
    if (b.is_gone()) return false;
  for (auto [holder, was] : r.versions)
    if (was == 0 || version(holder) != was) return false;
  return std::all_of(r.functions.begin(), r.functions.end(), [](const FunctionRead& f) {
    return PyFunction_GET_CODE(f.function) == f.code && PyFunction_GET_DEFAULTS(f.function) == f.defaults &&
           PyFunction_GET_KW_DEFAULTS(f.function) == f.keywords;
  });
}

void note_versions(Reads& r) {
  r.versions.clear();
  PyObject* last = nullptr;
  for (const Read& b : r.bindings) {
    if (b.is_gone()) continue;
    if (b.holder != last) r.versions.emplace_back(b.holder, version(b.holder));
    last = b.holder;
  }
}
#endif

// The value under a name now; null where there is none.
Owned value_now(const Read& b) {
  if (!PyType_Check(b.holder)) return Owned::borrow(dict_get(b.holder, b.name));
  return inherited_attribute(reinterpret_cast<PyTypeObject*>(b.holder), b.name);
}

bool is_dunder(PyObject* name) {
  return PyUnicode_GET_LENGTH(name) > 4 && PyUnicode_READ_CHAR(name, 0) == '_' && PyUnicode_READ_CHAR(name, 1) == '_';
}

// What Python, or a library that copies or shows an object, puts into a class by itself.
bool is_of_python(PyObject* name) {
  static PyObject* const names = [] {
    PyObject* set = PyFrozenSet_New(nullptr);
    for (const char* text : {"__doc__", "__module__", "__qualname__", "__dict__", "__weakref__", "__annotations__",
                             "__annotate__", "__annotate_func__", "__annotations_cache__", "__static_attributes__",
                             "__firstlineno__", "__abstractmethods__", "__parameters__", "__orig_bases__",
                             "__type_params__", "__slotnames__", "__signature__", "_abc_impl"})
      PySet_Add(set, interned(text));
    return set;
  }();
  return PySet_Contains(names, name) == 1;
}

// Does code read all names of a class, with `vars(cls)`, or may it ask a function for an attribute?
bool is_of_names(const Read& b) {
  static PyObject* const name = interned("__dict__");
  return PyType_Check(b.holder) ? b.name == name : b.name == of_keys();
}

// Where names of a class are looked up, in this order, by address. `isinstance` and `super()` go by it, and a class that
// gets another base may have all the names that it had.
Owned order_of_classes(PyTypeObject* cls) {
  Py_ssize_t count = PyTuple_GET_SIZE(cls->tp_mro);
  Owned out = own(PyTuple_New(count));
  for (Py_ssize_t i = 0; i < count; ++i)
    PyTuple_SET_ITEM(out.get(), i, own(PyLong_FromVoidPtr(PyTuple_GET_ITEM(cls->tp_mro, i))).release());
  return out;
}

// The names that a class has, but for those that Python gives it, with the order of the classes above it; or the keys
// of a dict, but for Python's own and ours.
Owned names_now(const Read& b) {
  Owned out = own(PyFrozenSet_New(nullptr));
  bool is_class = PyType_Check(b.holder);
  Owned keys = is_class ? class_names(b.holder) : own(PyDict_Keys(b.holder));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(keys.get()); ++i) {
    PyObject* key = PyList_GET_ITEM(keys.get(), i);
    if (PyUnicode_Check(key) && (is_class ? !is_of_python(key) : !is_dunder(key) && key != runtime.tables))
      check(PySet_Add(out.get(), key));
  }
  if (is_class) check(PySet_Add(out.get(), order_of_classes(reinterpret_cast<PyTypeObject*>(b.holder)).get()));
  return out;
}

// Does the binding have the value that was read?
bool holds(const Read& b) {
  if (b.is_gone()) return false;
  if (is_of_names(b)) return b.value && equal(names_now(b).get(), b.value);
  Owned now = value_now(b);
  if (!b.guard || !b.value || !PyWeakref_CheckRefExact(b.value)) return same_value(now.get(), b.value);
  Owned was = weak_target(b.value);
  return was && was.get() == now.get();
}

// Defaults that are equal count as the same ones from now on.
bool function_holds(FunctionRead& f) {
  PyObject* defaults = PyFunction_GET_DEFAULTS(f.function);
  if (defaults != f.defaults) {
    Py_ssize_t count = defaults && f.defaults ? PyTuple_GET_SIZE(defaults) : -1;
    if (count < 0 || count != PyTuple_GET_SIZE(f.defaults)) return false;
    for (Py_ssize_t i = 0; i < count; ++i)
      if (!same_value(PyTuple_GET_ITEM(defaults, i), PyTuple_GET_ITEM(f.defaults, i))) return false;
    Py_XSETREF(f.defaults, Py_NewRef(defaults));
  }
  return PyFunction_GET_CODE(f.function) == f.code && PyFunction_GET_KW_DEFAULTS(f.function) == f.keywords;
}

// That of a class, in which nothing has changed while it is the same; 0 where it has none.
unsigned version_of(PyObject* type) { return reinterpret_cast<PyTypeObject*>(type)->tp_version_tag; }

// What is under the name now, kept alive or not as `guard` says.
void note_value(Read& b) {
  if (is_of_names(b)) {
    b.value = names_now(b).release();
    return;
  }
  Owned now = value_now(b);
  if (b.guard && now && PyType_SUPPORTS_WEAKREFS(Py_TYPE(now.get())))
    b.value = check(PyWeakref_NewRef(now.get(), nullptr));
  else b.value = now.release();
}

// Empty before anything is released: the last reference to a value may run code that asks these reads.
void let_go(Reads& r) {
  auto bindings = std::exchange(r.bindings, {});
  auto functions = std::exchange(r.functions, {});
  auto cells = std::exchange(r.cells, {}), contents = std::exchange(r.contents, {});
  auto abstract_classes = std::exchange(r.abstract_classes, {});
  auto named = std::exchange(r.named, {});
  auto answers = std::exchange(r.answers, {});
  auto containers = std::exchange(r.containers, {});
  r.versions.clear();
  r.stamp = 0;
  for (const AbstractClassRead& a : abstract_classes) {
    Py_DECREF(a.cls);
    Py_DECREF(a.registered);
  }
  Py_CLEAR(r.abc_token);
  for (const NamedRead& n : named) {
    Py_DECREF(n.owner);
    for (PyObject* name : n.names) Py_XDECREF(name);
  }
  for (const AnswerRead& a : answers) {
    Py_DECREF(a.ask);
    Py_DECREF(a.answer);
  }
  for (const ContainerRead& c : containers) {
    Py_DECREF(c.container);
    Py_DECREF(c.items);
  }
  for (const Read& b : bindings) {
    unwatch(b);
    if (!b.guard) Py_DECREF(b.holder);
    Py_XDECREF(b.guard);
    Py_DECREF(b.name);
    Py_XDECREF(b.value);
  }
  for (const FunctionRead& f : functions) {
    unwatch_function(f.function);
    Py_DECREF(f.function);
    Py_DECREF(f.code);
    Py_XDECREF(f.defaults);
    Py_XDECREF(f.keywords);
  }
  for (PyObject* c : cells) Py_DECREF(c);
  for (PyObject* c : contents) Py_XDECREF(c);
}

void show_reads(const Reads& r, Visitor& visit) {
  for (const Read& b : r.bindings) visit(b.guard ? b.guard : b.holder, b.name, b.value);
  for (const FunctionRead& f : r.functions) visit(f.function, f.code, f.defaults, f.keywords);
  visit(r.cells, r.contents);
  for (const AbstractClassRead& a : r.abstract_classes) visit(a.cls, a.registered);
  for (const NamedRead& n : r.named) visit(n.owner, n.names[0], n.names[1], n.names[2], n.names[3], n.names[4]);
  for (const AnswerRead& a : r.answers) visit(a.ask, a.answer);
  for (const ContainerRead& c : r.containers) visit(c.container, c.items);
}

// Of (a dict, a class, or a weak reference to a function for its globals, name). In a dict that is no namespace, such as
// that of a cache, the name may be a number or a tuple.
Read read_of(const nb::tuple& holder_and_name) {
  PyObject *holder = nb::object(holder_and_name[0]).ptr(), *name = nb::object(holder_and_name[1]).ptr();
  Read b{holder, name, nullptr};
  if (PyWeakref_CheckRefExact(holder)) {
    Owned function = weak_target(holder);
    if (!function || !PyFunction_Check(function.get()))
      raise_error(PyExc_TypeError, "expected a weak reference to a function");
    b.guard = holder;
    b.holder = PyFunction_GET_GLOBALS(function.get());
  }
  if (!PyDict_Check(b.holder) && !(PyType_Check(b.holder) && PyUnicode_CheckExact(name)))
    raise_error(PyExc_TypeError, "expected a dict or a class, and a name");
  Py_INCREF(b.name);
  if (PyUnicode_CheckExact(name)) PyUnicode_InternInPlace(&b.name);
  note_value(b);
  if (b.guard) Py_INCREF(b.guard);
  else Py_INCREF(b.holder);
  return b;
}

}  // namespace

Reads::~Reads() { let_go(*this); }

bool reads_hold(Reads& r) {
  if (unchanged(r)) return r.held;
  bool held = true, is_told = true;
  // Read before the comparison: a change during it is seen by the next call.
  uint64_t now = epoch;
  for (size_t i = 0; i < r.bindings.size(); ++i) {
    // A copy, and the size read again: a comparison may run code that clears the list.
    const Read b = r.bindings[i];
    if (!b.is_gone() && !arm(b)) is_told = false;
    unsigned version = is_of_names(b) && PyType_Check(b.holder) ? version_of(b.holder) : 0;
    if (version != 0 && version == b.version) continue;
    held = held && holds(b);
    if (held && i < r.bindings.size()) r.bindings[i].version = version;
  }
  for (FunctionRead& f : r.functions) held = function_holds(f) && held;
  // Cells have no watchers. One that holds an equal object by now is as good, and is compared by pointer from now on.
  for (size_t i = 0; i < r.cells.size(); ++i) {
    Owned content = Owned::borrow(PyCell_GET(r.cells[i]));
    if (content.get() == r.contents[i]) continue;
    if (!same_value(content.get(), r.contents[i])) now = 0, held = false;  // no epoch tells when it is back
    else Py_DECREF(std::exchange(r.contents[i], content.release()));
  }
  if (!same_abc_token(r)) {
    Owned token = abc_token();
    bool same = std::all_of(r.abstract_classes.begin(), r.abstract_classes.end(), [](const AbstractClassRead& a) {
      // A subset: what is registered goes only where it is collected. A token, which may stand for it, only grows.
      int same_or_less = PyObject_RichCompareBool(hooks::registered_classes(a.cls).get(), a.registered, Py_LE);
      check(same_or_less);
      return same_or_less == 1;
    });
    if (same) Py_XSETREF(r.abc_token, token.release());
    else now = 0, held = false;
  }
  if (!same_names(r) || !same_answers(r) || !same_containers(r)) now = 0, held = false;
  // Before 3.12 versions are compared. They are read last, since `arm` may have given a type its version.
  note_versions(r);
  r.stamp = now;
  r.is_told = is_told;
  return r.held = held;
}

void NameWatch::begin(PyObject* dict, PyObject* names) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i)
    if (!PyUnicode_CHECK_INTERNED(PyTuple_GET_ITEM(names, i))) return;
  dict_ = dict;
  names_ = names;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) watch({dict, PyTuple_GET_ITEM(names, i), nullptr});
}

void NameWatch::end() {
  PyObject *dict = std::exchange(dict_, nullptr), *names = std::exchange(names_, nullptr);
  for (Py_ssize_t i = 0; names && i < PyTuple_GET_SIZE(names); ++i)
    unwatch({dict, PyTuple_GET_ITEM(names, i), nullptr});
}

uint64_t NameWatch::now() const { return dict_ ? names_epoch(dict_) : 0; }

void bind_watch(nb::module_& m) {
  init_watchers();
  m.attr("has_watchers") = has_watchers;
  nb::class_<Reads>(m, "Reads", nb::type_slots(Collected<Reads, show_reads, let_go>::slots),
                    nb::is_weak_referenceable(), "Bindings that the code of a trace has read, and the values they had.")
      .def(
          "__init__",
          [](Reads* self, nb::list bindings, nb::list functions, nb::list cells, nb::list abstract_classes,
             nb::list named, nb::list answers, nb::list containers) {
            new (self) Reads();
            for (nb::handle h : bindings) {
              self->bindings.push_back(read_of(nb::cast<nb::tuple>(h)));
              watch(self->bindings.back());
            }
            for (nb::handle f : functions) {
              if (!PyFunction_Check(f.ptr())) raise_error(PyExc_TypeError, "expected a function");
              self->functions.push_back({Py_NewRef(f.ptr()), Py_NewRef(PyFunction_GET_CODE(f.ptr())),
                                         Py_XNewRef(PyFunction_GET_DEFAULTS(f.ptr())),
                                         Py_XNewRef(PyFunction_GET_KW_DEFAULTS(f.ptr()))});
              watch_function(f.ptr());
            }
            for (nb::handle c : cells) {
              if (!PyCell_Check(c.ptr())) raise_error(PyExc_TypeError, "expected a cell");
              self->cells.push_back(Py_NewRef(c.ptr()));
              self->contents.push_back(Py_XNewRef(PyCell_GET(c.ptr())));
            }
            for (nb::handle a : abstract_classes) {
              auto pair = nb::cast<nb::tuple>(a);
              self->abstract_classes.push_back({pair[0].inc_ref().ptr(), pair[1].inc_ref().ptr()});
            }
            for (nb::handle owner : named) {
              if (!PyFunction_Check(owner.ptr()) &&
                  !(PyType_Check(owner.ptr()) &&
                    PyType_HasFeature(reinterpret_cast<PyTypeObject*>(owner.ptr()), Py_TPFLAGS_HEAPTYPE)))
                raise_error(PyExc_TypeError, "expected a function, or a class that a class statement made");
              self->named.push_back({check(PyWeakref_NewRef(owner.ptr(), nullptr)), names_of(owner.ptr())});
              for (PyObject* name : self->named.back().names) Py_XINCREF(name);
            }
            for (nb::handle a : answers) {
              auto pair = nb::cast<nb::tuple>(a);
              self->answers.push_back({pair[0].inc_ref().ptr(), pair[1].inc_ref().ptr()});
            }
            for (nb::handle c : containers) {
              PyObject* items = items_of(c.ptr()).release();
              self->containers.push_back({Py_NewRef(c.ptr()), items});
            }
            reads_hold(*self);  // notes the epoch in which they were read
          },
          nb::arg("bindings"), nb::arg("functions"), nb::arg("cells"), nb::arg("abstract_classes") = nb::list(),
          nb::arg("named") = nb::list(), nb::arg("answers") = nb::list(), nb::arg("containers") = nb::list(),
          nb::sig("def __init__(self, bindings: list[tuple[Any, str]], functions: list[Any], cells: list[Any], "
                  "abstract_classes: list[tuple[type, Any]] = ..., named: list[Any] = ..., "
                  "answers: list[tuple[Callable[[], Any], Any]] = ..., containers: list[Any] = ...) -> None"))
      .def(
          "changed_cells",
          [](Reads& r) {
            nb::list out;
            for (size_t i = 0; i < r.cells.size(); ++i)
              if (!same_value(PyCell_GET(r.cells[i]), r.contents[i])) out.append(nb::borrow(r.cells[i]));
            return out;
          },
          nb::sig("def changed_cells(self) -> list[Any]"), "The cells that hold something else by now.")
      .def(
          "holds", [](Reads& r) { return reads_hold(r); }, "Do all bindings still have the values that were read?")
      .def(
          "changed",
          [](Reads& r) {
            nb::list out;
            for (const Read& b : r.bindings)
              if (!b.is_gone() && !holds(b)) out.append(nb::make_tuple(nb::borrow(b.holder), nb::borrow(b.name)));
            return out;
          },
          nb::sig("def changed(self) -> list[tuple[Any, str]]"),
          "(holder, name) of each binding that has another value.");
}

}  // namespace graftax
