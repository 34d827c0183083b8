// SPDX-License-Identifier: Apache-2.0
// The one place that knows how the interpreter lays out a frame: what an evaluation hook is given (PEP 523).
//
// The layout is private to CPython (pycore_interpframe_structs.h, before 3.14 pycore_frame.h), so nothing here is
// trusted: `frames_unknown` is empty only where this version has been written down below and a self-test at import has
// found every field in its place.
#pragma once

#include <utility>

#include "python/py.h"

namespace graftax {

#if PY_VERSION_HEX >= 0x030E0000
// A reference of the interpreter's stack, `_PyStackRef`: its lowest bit says that it is borrowed, or of an immortal
// object; a null is that bit alone.
struct StackRef {
  uintptr_t bits;
  static constexpr uintptr_t borrowed = 1, tags = 3;

  PyObject* get() const { return reinterpret_cast<PyObject*>(bits & ~tags); }
  void set(PyObject* value) {
    PyObject* before = (bits & tags) == 0 ? get() : nullptr;
    bits = reinterpret_cast<uintptr_t>(Py_NewRef(value));
    Py_XDECREF(before);
  }
};
#else
struct StackRef {
  PyObject* object;

  PyObject* get() const { return object; }
  void set(PyObject* value) { Py_XSETREF(object, Py_NewRef(value)); }
};
#endif

// Empty where the layout is the interpreter's own: written down below, and found by `probe_frames`. Otherwise the
// reason why it is not known; then no frame is ever read or hooked.
extern std::string frames_unknown;

// Sets `frames_unknown`: runs a few functions under a hook that compares what it finds in their frames.
void probe_frames();

class Frame {
 public:
  // Null where the frame has none, as one of a class body in 3.11.
  PyObject* code() const { return code_.get(); }
  PyObject* function() const { return function_.get(); }
  PyObject* globals() const { return globals_; }
  PyObject* builtins() const { return builtins_; }
  PyObject* variable(Py_ssize_t i) const { return variables_[i].get(); }
#if PY_VERSION_HEX >= 0x030C0000 && PY_VERSION_HEX < 0x030E0000
  // Where its evaluation stack begins, and where it ends at the latest. The frame has to have a code.
  std::pair<PyObject* const*, PyObject* const*> stack() const {
    auto* code = reinterpret_cast<PyCodeObject*>(code_.get());
    PyObject* const* begin = &variables_[0].object + code->co_nlocalsplus;
    return {begin, begin + code->co_stacksize};
  }
#endif
  bool is_of_generator() const { return owner_ == owned_by_generator; }

  void set_globals(PyObject* globals) { globals_ = globals; }  // borrowed
  void set_function(PyObject* function) { function_.set(function); }
  void set_variable(Py_ssize_t i, PyObject* value) { variables_[i].set(value); }

 private:
  static constexpr char owned_by_generator = 1;

#if PY_VERSION_HEX < 0x030C0000
  StackRef function_;
  PyObject* globals_;
  PyObject* builtins_;
  PyObject* locals_;
  StackRef code_;
  PyFrameObject* object_;
  void* previous_;
  void* instruction_;
  int stacktop_;
  bool is_entry_;
  char owner_;
#else
  StackRef code_;
  void* previous_;
  StackRef function_;
  PyObject* globals_;
  PyObject* builtins_;
  PyObject* locals_;
  PyFrameObject* object_;
  void* instruction_;
#if PY_VERSION_HEX < 0x030E0000
  int stacktop_;
#else
  void* stackpointer_;
#ifdef Py_GIL_DISABLED
  int32_t bytecode_of_thread_;
#endif
#endif
  uint16_t return_offset_;
  char owner_;
#if PY_VERSION_HEX >= 0x030E0000
  uint8_t visited_;
#endif
#endif
  StackRef variables_[1];
};

}  // namespace graftax
