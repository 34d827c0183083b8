// SPDX-License-Identifier: Apache-2.0
// The references that an object of the core holds, as Python's garbage collector sees them.
#pragma once

#include "python/py.h"

namespace graftax {

// Shows references to the collector, until it says that it has seen enough.
class Visitor {
 public:
  Visitor(visitproc visit, void* arg) : visit_(visit), arg_(arg) {}

  template <typename... Held>
  void operator()(const Held&... held) {
    (show(held), ...);
  }
  int stopped() const { return stopped_; }

 private:
  void show(PyObject* p) {
    if (p && stopped_ == 0) stopped_ = visit_(p, arg_);
  }
  void show(const Owned& p) { show(p.get()); }
  void show(const nb::object& p) { show(p.ptr()); }
  void show(const OwnedList& list) {
    for (size_t i = 0; i < list.size(); ++i) show(list[i]);
  }
  void show(const std::vector<PyObject*>& list) {
    for (PyObject* p : list) show(p);
  }

  visitproc visit_;
  void* arg_;
  int stopped_ = 0;
};

// The slots of a type whose instances are part of cycles: `show_held` shows what one holds, `let_go` releases it. An
// instance that was made without its constructor holds nothing.
template <typename T, void (*show_held)(const T&, Visitor&), void (*let_go)(T&)>
struct Collected {
  static int traverse(PyObject* self, visitproc visit, void* arg) {
    // An instance of a heap type owns a reference to its type.
    Py_VISIT(Py_TYPE(self));
    Visitor visitor(visit, arg);
    if (nb::inst_ready(self)) show_held(*nb::inst_ptr<T>(self), visitor);
    return visitor.stopped();
  }
  static int clear(PyObject* self) {
    if (nb::inst_ready(self)) let_go(*nb::inst_ptr<T>(self));
    return 0;
  }
  static inline PyType_Slot slots[] = {
      {Py_tp_traverse, reinterpret_cast<void*>(traverse)}, {Py_tp_clear, reinterpret_cast<void*>(clear)}, {0, nullptr}};
};

}  // namespace graftax
