// SPDX-License-Identifier: Apache-2.0
#include "capture/caller_stack.h"

#include "capture/frame_layout.h"

namespace graftax {

#if PY_VERSION_HEX < 0x030C0000 || PY_VERSION_HEX >= 0x030E0000

// 3.11 packs the arguments into a tuple for a class that is made in Python. From 3.14 on they may be borrowed from
// variables of the caller, and are handed over in a copy of its stack.
bool stack_owns_arguments(PyObject*, PyObject* const*) { return false; }

#else

namespace {

Frame* running_frame() {
#if PY_VERSION_HEX >= 0x030D0000
  return reinterpret_cast<Frame*>(PyThreadState_Get()->current_frame);
#else
  return reinterpret_cast<Frame*>(PyThreadState_Get()->cframe->current_frame);
#endif
}

}  // namespace

// The callable lies below the arguments; from 3.13 on with a null between them. Where a callable in C passes on what it
// was given, on the same stack, it is that one which lies there.
bool stack_owns_arguments(PyObject* callable, PyObject* const* args) {
  if (!frames_unknown.empty()) return false;
  Frame* frame = running_frame();
  if (!frame || !frame->code() || !PyCode_Check(frame->code())) return false;
  auto [begin, end] = frame->stack();
  if (args <= begin || args >= end) return false;
  if (args[-1]) return args[-1] == callable;
  return PY_VERSION_HEX >= 0x030D0000 && args - 1 > begin && args[-2] == callable;
}

#endif

}  // namespace graftax
