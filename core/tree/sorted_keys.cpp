// SPDX-License-Identifier: Apache-2.0
#include "tree/sorted_keys.h"

#include <algorithm>
#include <array>
#include <numeric>

namespace graftax {

namespace {

// Dicts with the same keys come again and again: layers, steps of training. What was found out for one holds for the next
// whose keys are the same objects in the same order.
struct KeyOrder {
  OwnedList keys;                // as the dict has them
  Owned sorted;                  // as a tuple
  std::vector<uint32_t> places;  // of each key among the sorted ones; empty where they are sorted already
};

constexpr size_t orders = 64;
constexpr Py_ssize_t longest_key = 16384;

std::array<KeyOrder, orders>& known_orders() {
  static auto* all = new std::array<KeyOrder, orders>();
  return *all;
}

KeyOrder& order_slot(PyObject* first_key, Py_ssize_t size) {
  size_t h = (reinterpret_cast<size_t>(first_key) >> 4) * 31 + static_cast<size_t>(size);
  return known_orders()[h % orders];
}

// Takes the values where the dict has just these keys; else leaves `values` as it was.
bool take_in_order(const KeyOrder& order, PyObject* dict, OwnedList& values) {
  Py_ssize_t pos = 0;
  size_t i = 0, base = values.size();
  PyObject *key, *value;
  if (order.places.empty()) {
    while (PyDict_Next(dict, &pos, &key, &value)) {
      if (key != order.keys[i++]) {
        values.resize(base);
        return false;
      }
      values.push(value);
    }
    return true;
  }
  values.resize(base + order.keys.size());
  while (PyDict_Next(dict, &pos, &key, &value)) {
    if (key != order.keys[i]) {
      values.resize(base);
      return false;
    }
    values.set(base + order.places[i++], value);
  }
  return true;
}

enum class KeyType : uint8_t { text, integer, other };

KeyType type_of_keys(const OwnedList& keys) {
  bool text = true, integer = true;
  for (size_t i = 0; i < keys.size() && (text || integer); ++i) {
    text = text && PyUnicode_CheckExact(keys[i]);
    integer = integer && PyLong_CheckExact(keys[i]);
  }
  return text ? KeyType::text : integer ? KeyType::integer : KeyType::other;
}

int compare_integers(PyObject* a, PyObject* b) {
  int over_a = 0, over_b = 0;
  long long x = PyLong_AsLongLongAndOverflow(a, &over_a), y = PyLong_AsLongLongAndOverflow(b, &over_b);
  if (over_a == 0 && over_b == 0) return x < y ? -1 : x > y;
  return PyObject_RichCompareBool(a, b, Py_LT) == 1 ? -1 : PyObject_RichCompareBool(b, a, Py_LT) == 1;
}

// Keys of any other type: by their own order.
Owned sorted_by_themselves(PyObject* dict, OwnedList& values) {
  Owned keys = own(PyDict_Keys(dict));
  if (PyList_Sort(keys.get()) < 0) {
    // As JAX: its C++ opens dicts, its Python defaultdicts. What is no Exception stops everything, here too.
    if (!PyDict_CheckExact(dict) || !PyErr_ExceptionMatches(PyExc_Exception)) raise_python();
    nb::python_error cause;
    std::string shown = short_repr(keys.get(), 200);
    nb::raise_from(cause, PyExc_ValueError,
                   "a dict in a tree needs keys that can be sorted, and %s cannot: give them one type, "
                   "or use an OrderedDict, whose order counts as it is",
                   shown.c_str());
  }
  Owned out = own(PySequence_Tuple(keys.get()));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(out.get()); ++i) {
    PyObject* value = dict_get(dict, PyTuple_GET_ITEM(out.get(), i));
    if (!value) raise_error(PyExc_RuntimeError, "a dict changed while its keys were sorted");
    values.push(value);
  }
  return out;
}

}  // namespace

Owned sorted_items(PyObject* dict, OwnedList& values) {
  Py_ssize_t size = PyDict_GET_SIZE(dict), pos = 0;
  if (size == 0) return Owned::borrow(runtime.empty_tuple);
  PyObject *key, *value;
  PyDict_Next(dict, &pos, &key, &value);
  KeyOrder& slot = order_slot(key, size);
  if (slot.keys.size() == static_cast<size_t>(size) && take_in_order(slot, dict, values)) return slot.sorted;

  // In the order of the dict first; `order` then says where each one goes.
  OwnedList keys, unsorted;
  keys.reserve(static_cast<size_t>(size));
  unsorted.reserve(static_cast<size_t>(size));
  pos = 0;
  while (PyDict_Next(dict, &pos, &key, &value)) {
    keys.push(key);
    unsorted.push(value);
  }
  KeyType type = type_of_keys(keys);
  if (type == KeyType::other) return sorted_by_themselves(dict, values);
  auto less = [&](uint32_t a, uint32_t b) {
    return (type == KeyType::text ? PyUnicode_Compare(keys[a], keys[b]) : compare_integers(keys[a], keys[b])) < 0;
  };
  std::vector<uint32_t> order(keys.size());
  std::iota(order.begin(), order.end(), 0u);
  bool in_order = std::is_sorted(order.begin(), order.end(), less);
  if (!in_order) std::sort(order.begin(), order.end(), less);
  Owned sorted = own(PyTuple_New(size));
  for (Py_ssize_t i = 0; i < size; ++i) {
    uint32_t from = order[static_cast<size_t>(i)];
    PyTuple_SET_ITEM(sorted.get(), i, Py_NewRef(keys[from]));
    values.push(unsorted[from]);
  }
  if (type == KeyType::text && size <= longest_key) {
    KeyOrder fresh;
    fresh.sorted = sorted;
    if (!in_order) {
      fresh.places.resize(order.size());
      for (uint32_t i = 0; i < order.size(); ++i) fresh.places[order[i]] = i;
    }
    fresh.keys = std::move(keys);
    std::swap(slot, fresh);  // what it replaces is released last
  }
  return sorted;
}

}  // namespace graftax
