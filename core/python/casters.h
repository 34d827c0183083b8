// SPDX-License-Identifier: Apache-2.0
// Strings, pairs and vectors as arguments and results. nanobind's own casters of these may not throw, so an allocation
// that fails in one ends the process; these raise MemoryError.
#pragma once

#include <Python.h>

#include <string>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/detail/nb_list.h>

namespace nanobind::detail {

template <>
struct type_caster<std::string> {
  NB_TYPE_CASTER(std::string, const_name("str"))

  bool from_python(handle src, uint32_t, cleanup_list*) {
    if (!PyUnicode_Check(src.ptr())) return false;
    Py_ssize_t size;
    const char* text = PyUnicode_AsUTF8AndSize(src.ptr(), &size);
    if (!text) return PyErr_Clear(), false;  // half of a surrogate pair
    value.assign(text, static_cast<size_t>(size));
    return true;
  }

  static handle from_cpp(const std::string& text, rv_policy, cleanup_list*) noexcept {
    return PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size()));
  }
};

template <typename T>
bool read_part(T& out, PyObject* part, uint32_t flags, cleanup_list* cleanup) {
  make_caster<T> caster;
  if (!caster.from_python(part, flags_for_local_caster<T>(flags), cleanup)) return false;
  if (!caster.template can_cast<T>()) return false;
  out = caster.operator cast_t<T>();
  return true;
}

// Makes a pair of values: no argument is a pair of references.
template <typename First, typename Second>
struct type_caster<std::pair<First, Second>> {
  using Pair = std::pair<First, Second>;
  NB_TYPE_CASTER(Pair,
                 const_name("tuple[") + concat(make_caster<First>::Name, make_caster<Second>::Name) + const_name("]"))

  bool from_python(handle src, uint32_t flags, cleanup_list* cleanup) {
    if (!PyTuple_Check(src.ptr()) || PyTuple_GET_SIZE(src.ptr()) != 2) return false;
    return read_part(value.first, PyTuple_GET_ITEM(src.ptr(), 0), flags, cleanup) &&
           read_part(value.second, PyTuple_GET_ITEM(src.ptr(), 1), flags, cleanup);
  }

  static handle from_cpp(const Pair& pair, rv_policy policy, cleanup_list* cleanup) noexcept {
    object first = steal(make_caster<First>::from_cpp(pair.first, policy, cleanup));
    object second = first ? steal(make_caster<Second>::from_cpp(pair.second, policy, cleanup)) : object();
    return second ? PyTuple_Pack(2, first.ptr(), second.ptr()) : nullptr;
  }
};

// Takes lists and tuples.
template <typename T>
struct type_caster<std::vector<T>> : list_caster<std::vector<T>, T> {
  bool from_python(handle src, uint32_t flags, cleanup_list* cleanup) {
    if (!PyList_Check(src.ptr()) && !PyTuple_Check(src.ptr())) return false;
    this->value.clear();
    this->value.reserve(static_cast<size_t>(PySequence_Fast_GET_SIZE(src.ptr())));
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(src.ptr()); ++i) {
      // Held, and the size read again each time: reading an item may run code that shortens the list.
      object item = borrow(PySequence_Fast_GET_ITEM(src.ptr(), i));
      T part{};
      if (!read_part(part, item.ptr(), flags, cleanup)) return false;
      this->value.push_back(std::move(part));
    }
    return true;
  }
};

}  // namespace nanobind::detail

namespace graftax {

// Whether an object is a T: as `nanobind::try_cast`, which may not throw either.
template <typename T>
bool read_as(nanobind::handle src, T& out) {
  return nanobind::detail::read_part(out, src.ptr(), static_cast<uint8_t>(nanobind::detail::cast_flags::convert),
                                     nullptr);
}

}  // namespace graftax
