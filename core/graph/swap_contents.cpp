// SPDX-License-Identifier: Apache-2.0
#include "graph/swap_contents.h"

#include <algorithm>
#include <cstring>

namespace graftax {

namespace {

// The layouts that no header tells: of an OrderedDict here, of deques and arrays below. A self-test at import says
// whether they hold.
struct OrderedDictLayout {
  PyDictObject dict;
  void* first;
  void* last;
  void** fast_nodes;
  Py_ssize_t fast_nodes_size;
  void* resize_sentinel;
  size_t state;
  PyObject* attributes;
  PyObject* weakrefs;
};

constexpr size_t deque_state = sizeof(PyVarObject) + 4 * sizeof(void*);  // after the two blocks and their indices

bool known_dict = true, known_odict = false, known_deque = false, known_array = false;

// What lies between the header and the weak references.
void exchange_body(PyObject* a, PyObject* b, PyTypeObject* type) {
  std::swap(reinterpret_cast<PyVarObject*>(a)->ob_size, reinterpret_cast<PyVarObject*>(b)->ob_size);
  auto *x = reinterpret_cast<char*>(a), *y = reinterpret_cast<char*>(b);
  std::swap_ranges(x + sizeof(PyVarObject), x + type->tp_weaklistoffset, y + sizeof(PyVarObject));
}

#if PY_VERSION_HEX < 0x030E0000
// The version goes with the content; the watchers stay with the dict.
void exchange_versions(uint64_t& a, uint64_t& b) {
#if PY_VERSION_HEX >= 0x030C0000
  constexpr uint64_t watchers = (1u << 12) - 1;
#else
  constexpr uint64_t watchers = 0;
#endif
  uint64_t of_a = a & watchers, of_b = b & watchers;
  std::swap(a, b);
  a = (a & ~watchers) | of_a;
  b = (b & ~watchers) | of_b;
}

uint64_t& version_tag(PyDictObject* dict) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  return dict->ma_version_tag;
#pragma GCC diagnostic pop
}
#endif

size_t& state_of_deque(PyObject* deque) {
  return *reinterpret_cast<size_t*>(reinterpret_cast<char*>(deque) + deque_state);
}

// A table that shares its keys with other instances becomes one of its own. Adding what is no attribute name does it.
bool unshare(PyObject* dict) {
  if (!reinterpret_cast<PyDictObject*>(dict)->ma_values) return true;
  static PyObject* const other = own(PyObject_CallNoArgs(reinterpret_cast<PyObject*>(&PyBaseObject_Type))).release();
  check(PyDict_SetItem(dict, other, Py_None));
  check(PyDict_DelItem(dict, other));
  return !reinterpret_cast<PyDictObject*>(dict)->ma_values;
}

bool is_watched(PyObject* dict) {
#if PY_VERSION_HEX >= 0x030E0000
  return reinterpret_cast<PyDictObject*>(dict)->_ma_watcher_tag & 0xFF;
#elif PY_VERSION_HEX >= 0x030C0000
  return version_tag(reinterpret_cast<PyDictObject*>(dict)) & 0xFF;
#else
  (void)dict;
  return false;
#endif
}

}  // namespace

void exchange_dicts(PyObject* a, PyObject* b) {
  auto *x = reinterpret_cast<PyDictObject*>(a), *y = reinterpret_cast<PyDictObject*>(b);
  // The keys, and with them the values: neither dict shares its keys with instances.
  std::swap(x->ma_used, y->ma_used);
  std::swap(x->ma_keys, y->ma_keys);
#if PY_VERSION_HEX < 0x030E0000
  exchange_versions(version_tag(x), version_tag(y));
#endif
  // A dict of plain values is not known to the collector until it holds more.
  bool of_a = PyObject_GC_IsTracked(a), of_b = PyObject_GC_IsTracked(b);
  if (of_b && !of_a) PyObject_GC_Track(a);
  if (of_a && !of_b) PyObject_GC_Track(b);
}

void exchange_lists(PyObject* a, PyObject* b) {
  auto *x = reinterpret_cast<PyListObject*>(a), *y = reinterpret_cast<PyListObject*>(b);
  std::swap(x->ob_item, y->ob_item);
  std::swap(x->allocated, y->allocated);
  std::swap(x->ob_base.ob_size, y->ob_base.ob_size);
}

void exchange_sets(PyObject* a, PyObject* b) {
  auto *x = reinterpret_cast<PySetObject*>(a), *y = reinterpret_cast<PySetObject*>(b);
  bool small_x = x->table == x->smalltable, small_y = y->table == y->smalltable;
  std::swap(x->fill, y->fill);
  std::swap(x->used, y->used);
  std::swap(x->mask, y->mask);
  std::swap(x->table, y->table);
  std::swap(x->finger, y->finger);
  std::swap(x->smalltable, y->smalltable);
  // A small set has its table in itself: the pointer has to lead to its own.
  if (small_y) x->table = x->smalltable;
  if (small_x) y->table = y->smalltable;
}

void exchange_odicts(PyObject* a, PyObject* b) {
  auto *x = reinterpret_cast<OrderedDictLayout*>(a), *y = reinterpret_cast<OrderedDictLayout*>(b);
  size_t later = std::max(x->state, y->state) + 1;  // so that a running iterator notices
  exchange_dicts(a, b);
  std::swap(x->first, y->first);
  std::swap(x->last, y->last);
  std::swap(x->fast_nodes, y->fast_nodes);
  std::swap(x->fast_nodes_size, y->fast_nodes_size);
  std::swap(x->resize_sentinel, y->resize_sentinel);
  x->state = y->state = later;
}

void exchange_bytearrays(PyObject* a, PyObject* b) {
  auto *x = reinterpret_cast<PyByteArrayObject*>(a), *y = reinterpret_cast<PyByteArrayObject*>(b);
  std::swap(x->ob_base.ob_size, y->ob_base.ob_size);
  std::swap(x->ob_alloc, y->ob_alloc);
  std::swap(x->ob_bytes, y->ob_bytes);
  std::swap(x->ob_start, y->ob_start);
#if PY_VERSION_HEX >= 0x030F0000
  std::swap(x->ob_bytes_object, y->ob_bytes_object);  // owns the memory
#endif
}

void exchange_deques(PyObject* a, PyObject* b) {
  size_t later = std::max(state_of_deque(a), state_of_deque(b)) + 1;  // so that a running iterator notices
  exchange_body(a, b, runtime.deque_type);
  state_of_deque(a) = state_of_deque(b) = later;
}

void exchange_arrays(PyObject* a, PyObject* b) { exchange_body(a, b, runtime.array_array_type); }

Py_ssize_t exports_of_array(PyObject* array) {
  return *reinterpret_cast<Py_ssize_t*>(reinterpret_cast<char*>(array) + runtime.array_array_type->tp_weaklistoffset +
                                        sizeof(PyObject*));
}

bool can_exchange_dict(PyObject* dict) { return known_dict && !is_watched(dict) && unshare(dict); }
bool can_exchange_odict(PyObject* dict) { return known_odict && !is_watched(dict); }
bool knows_deques() { return known_deque; }
bool knows_arrays() { return known_array; }

namespace {

// ---- is each layout as it is written above?

// The value of an expression, in which T is this type.
Owned evaluated(PyTypeObject* type, const char* text) {
  nb::dict scope;
  scope["T"] = nb::borrow(reinterpret_cast<PyObject*>(type));
  return Owned::borrow(nb::eval(nb::str(text), scope).ptr());
}

bool equal_to(PyObject* obj, PyTypeObject* type, const char* text) { return equal(obj, evaluated(type, text).get()); }

// A watcher has to be told of each change, and an exchange tells nobody.
bool sees_watchers() {
#if PY_VERSION_HEX >= 0x030C0000
  int watcher = PyDict_AddWatcher([](PyDict_WatchEvent, PyObject*, PyObject*, PyObject*) { return 0; });
  if (watcher < 0) return PyErr_Clear(), false;  // all of them are taken
  Owned dict = own(PyDict_New());
  bool sees_none = !is_watched(dict.get());
  check(PyDict_Watch(watcher, dict.get()));
  bool sees_one = is_watched(dict.get());
  check(PyDict_Unwatch(watcher, dict.get()));
  check(PyDict_ClearWatcher(watcher));
  return sees_none && sees_one;
#else
  return true;
#endif
}

// Each of these exchanges two objects of different sizes, and then changes and reads both.
bool dict_holds() {
  if (!sees_watchers()) return false;
  Owned a = evaluated(&PyDict_Type, "{i: i for i in range(20)}"), b = evaluated(&PyDict_Type, "{'b': 2}");
  exchange_dicts(a.get(), b.get());
  Owned key = own(PyLong_FromLong(7));
  check(PyDict_DelItem(b.get(), key.get()));
  check(PyDict_SetItem(a.get(), key.get(), Py_None));
  return equal_to(a.get(), &PyDict_Type, "{'b': 2, 7: None}") &&
         equal_to(b.get(), &PyDict_Type, "{i: i for i in range(20) if i != 7}");
}

bool odict_holds() {
  PyTypeObject* type = runtime.odict_type;
  if (type->tp_basicsize != sizeof(OrderedDictLayout)) return false;
  if (type->tp_weaklistoffset != offsetof(OrderedDictLayout, weakrefs)) return false;
  Owned a = evaluated(type, "T((i, i) for i in range(20))"), b = evaluated(type, "T(b=2)");
  exchange_odicts(a.get(), b.get());
  Owned key = own(PyLong_FromLong(7));
  check(PyODict_DelItem(b.get(), key.get()));
  check(PyODict_SetItem(a.get(), key.get(), Py_None));
  return equal_to(a.get(), type, "T([('b', 2), (7, None)])") &&
         equal_to(b.get(), type, "T((i, i) for i in range(20) if i != 7)");
}

bool deque_holds() {
  PyTypeObject* type = runtime.deque_type;
  if (type->tp_weaklistoffset <= static_cast<Py_ssize_t>(deque_state)) return false;
  Owned a = evaluated(type, "T(range(200), 150)"), b = evaluated(type, "T('x', 150)");
  size_t before = state_of_deque(a.get());
  Owned(own(PyObject_CallMethod(a.get(), "append", "i", 200)));
  if (state_of_deque(a.get()) != before + 1 && state_of_deque(a.get()) != before + 2)
    return false;  // one left, one came
  exchange_deques(a.get(), b.get());
  Owned(own(PyObject_CallMethod(a.get(), "append", "i", 7)));
  Owned(own(PyObject_CallMethod(b.get(), "appendleft", "i", 7)));
  return equal_to(a.get(), type, "T(['x', 7])") && equal_to(b.get(), type, "T([7, *range(51, 200)])");
}

bool array_holds() {
  PyTypeObject* type = runtime.array_array_type;
  if (type->tp_basicsize < static_cast<Py_ssize_t>(type->tp_weaklistoffset + 2 * sizeof(void*))) return false;
  Owned a = evaluated(type, "T('i', range(20))"), b = evaluated(type, "T('i', [7])");
  if (exports_of_array(a.get()) != 0) return false;
  {
    Owned view = own(PyMemoryView_FromObject(a.get()));
    if (exports_of_array(a.get()) != 1) return false;
  }
  exchange_arrays(a.get(), b.get());
  Owned(own(PyObject_CallMethod(a.get(), "append", "i", 8)));
  return equal_to(a.get(), type, "T('i', [7, 8])") && equal_to(b.get(), type, "T('i', range(20))");
}

}  // namespace

void bind_exchange(nb::module_& m) {
  auto use = [](bool known) {
    known_dict = known && dict_holds();
    known_odict = known_dict && odict_holds();
    known_deque = known && deque_holds();
    known_array = known && array_holds();
  };
  use(true);
  m.def("use_layouts", use, nb::arg("known"), nb::sig("def use_layouts(known: bool) -> None"),
        "False: contents are replaced by calls, as where this Python has a layout that is not known.");
}

}  // namespace graftax
