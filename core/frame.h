// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "py.h"

namespace graftax {

// The head of an interpreter's frame (pycore_frame.h): what an evaluation hook is given (PEP 523).
#if PY_VERSION_HEX >= 0x030E0000
inline constexpr bool known_frames = false;
#else
inline constexpr bool known_frames = true;
#endif

struct Frame {
#if PY_VERSION_HEX < 0x030C0000
  PyFunctionObject* function;
  PyObject* globals;
  PyObject* builtins;
  PyObject* locals;
  PyObject* code;
  PyFrameObject* object;
  Frame* previous;
  void* instruction;
  int stacktop;
  bool is_entry;
  char owner;
#else
  PyObject* code;
  Frame* previous;
  PyObject* function;
  PyObject* globals;
  PyObject* builtins;
  PyObject* locals;
  PyFrameObject* object;
  void* instruction;
  int stacktop;
  uint16_t return_offset;
  char owner;
#endif
  PyObject* variables[1];
};

inline constexpr char owned_by_generator = 1;

}  // namespace graftax
