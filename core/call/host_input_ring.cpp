// SPDX-License-Identifier: Apache-2.0
#include "call/host_input_ring.h"

#include <algorithm>
#include <cstdint>

namespace graftax {

std::unique_ptr<Ring> Ring::of(PyObject* description) {
  if (description == Py_None) return nullptr;
  PyObject *witnesses, *slots, *elements;
  if (!PyArg_ParseTuple(description, "O!O!O!", &PyTuple_Type, &witnesses, &PyList_Type, &slots, &PyList_Type,
                        &elements))
    raise_python();
  auto out = std::make_unique<Ring>();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(witnesses); ++i) {
    size_t at = PyLong_AsSize_t(PyTuple_GET_ITEM(witnesses, i));
    if (PyErr_Occurred()) raise_python();
    out->witnesses_.push_back(at);
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(elements); ++i) {
    Element element{};
    int floating;
    if (!PyArg_ParseTuple(PyList_GET_ITEM(elements, i), "pnn", &floating, &element.bytes, &element.count))
      raise_python();
    element.floating = floating != 0;
    out->elements_.push_back(element);
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(slots); ++i) {
    PyObject* inputs = PyList_GET_ITEM(slots, i);
    if (!PyList_CheckExact(inputs) || static_cast<size_t>(PyList_GET_SIZE(inputs)) != out->elements_.size())
      raise_error(PyExc_ValueError, "expected a list with an array for each input");
    auto slot = std::make_shared<Slot>();
    for (Py_ssize_t k = 0; k < PyList_GET_SIZE(inputs); ++k) {
      PyObject *array, *address;
      if (!PyArg_ParseTuple(PyList_GET_ITEM(inputs, k), "OO", &array, &address)) raise_python();
      slot->arrays.push_back(Owned::borrow(array));
      slot->memory.push_back(PyLong_AsVoidPtr(address));
      if (PyErr_Occurred()) raise_python();
    }
    out->slots_.push_back(std::move(slot));
  }
  return out;
}

// Its witness was deleted or donated, so nobody can say when the memory is free: neither is used again.
void Ring::lose(const std::shared_ptr<Slot>& slot) {
  if (!witnesses_.empty() && slot->result == witnesses_[0]) witnesses_.erase(witnesses_.begin());
  auto place = std::find(slots_.begin(), slots_.end(), slot);  // the caller holds it: nothing is released here
  if (place != slots_.end()) slots_.erase(place);
}

std::shared_ptr<Ring::Slot> Ring::claim() {
  static PyObject* const is_ready = interned("is_ready");
  if (slots_.empty() || witnesses_.empty()) return nullptr;
  used_ = std::min(used_, slots_.size());
  // In turn: the one that was used longest ago is free most likely.
  std::shared_ptr<Slot> slot = slots_[next_++ % used_];
  bool is_free = !slot->busy;
  if (is_free && slot->witness) {
    Owned ready = Owned::steal(PyObject_CallMethodNoArgs(slot->witness.get(), is_ready));
    if (!ready) {  // a deleted array raises
      PyErr_Clear();
      lose(slot);
      return nullptr;
    }
    is_free = ready.get() == Py_True && !slot->busy;  // another thread may have claimed it meanwhile
  }
  if (!is_free) {
    // A further one only where the device is behind, so that few of them stay in the cache of the processor.
    if (used_ >= slots_.size()) return nullptr;
    slot = slots_[used_++];
  }
  // From here on it is this call's alone, whatever other threads do until `give_back`.
  slot->busy = true;
  return slot;
}

void Ring::write(Slot& slot, size_t input, PyObject* numbers) const {
  const Element& element = elements_[input];
  Py_ssize_t count = std::min(PyTuple_GET_SIZE(numbers), element.count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* number = PyTuple_GET_ITEM(numbers, i);
    auto put = [&](auto value) { static_cast<decltype(value)*>(slot.memory[input])[i] = value; };
    if (element.floating) {
      double value = PyFloat_AsDouble(number);
      if (element.bytes == 8) put(value);
      else put(static_cast<float>(value));
    } else {
      int64_t value = PyLong_AsLongLong(number);
      if (element.bytes == 8) put(value);
      else put(static_cast<int32_t>(value));
    }
  }
  if (PyErr_Occurred()) raise_python();
}

// Without a witness the slot stays busy: nobody would know when the executable has read it.
void Ring::give_back(Slot& slot, PyObject* outputs) const {
  if (witnesses_.empty() || witnesses_[0] >= static_cast<size_t>(PyList_GET_SIZE(outputs))) return;
  slot.result = witnesses_[0];
  slot.witness = Owned::borrow(PyList_GET_ITEM(outputs, static_cast<Py_ssize_t>(witnesses_[0])));
  slot.busy = false;
}

}  // namespace graftax
