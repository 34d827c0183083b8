// SPDX-License-Identifier: Apache-2.0
// JAX's own frames that run nobody else's code: what is below such a frame need not be heard of, and runs as fast as if
// there were no hook. Which these are is Python's to say (`inner_frames` in `_jax/inner_frames.py`).
#pragma once

#include <unordered_map>

#include "capture/frame_layout.h"

namespace graftax {

struct InnerFrames {
  nb::object bind;      // the code of a primitive's method (self, *args, **params) that runs it
  nb::object apply;     // the code of what JAX's jitted functions run on a call (*args, **kwargs); or None
  Py_ssize_t applied;   // which of its closure's cells holds the function
  nb::tuple of_jaxprs;  // codes of functions that run or cut a jaxpr, their first argument
  nb::str owner;        // how the names of JAX's own modules begin
  nb::tuple modules;    // how those begin whose functions call nothing but what they are given
  nb::tuple jaxprs;     // types of jaxprs
  nb::tuple inert;      // types of what can be called, and does not call
  nb::tuple leaves;     // types of what such a function may be given
  nb::callable owns;    // (primitive) -> are its rules JAX's own?

  bool may_be(const Frame& frame) const;
};

// What one trace has found of primitives and jaxprs.
class Inside {
 public:
  explicit Inside(const InnerFrames* frames) : frames_(frames) {}

  const InnerFrames* frames() const { return frames_; }  // null where somebody else's code may be below any frame
  bool holds(const Frame& frame);  // is nothing below this frame, one of `frames`, anybody else's?
  bool equation_stays(nb::handle equation);

 private:
  bool is_own(PyObject* primitive);
  bool has_leaves_alone(const Frame& frame);
  bool is_given_leaves(PyObject* value);
  bool values_stay(PyObject* params);
  bool stays(PyObject* value);
  bool remember(PyObject* value, bool answer);

  const InnerFrames* frames_;
  std::unordered_map<PyObject*, bool> known_;  // borrowed from `held_`
  OwnedList held_;
};

void bind_inner_frames(nb::module_& m);

}  // namespace graftax
