// SPDX-License-Identifier: Apache-2.0
// What a call depends on of JAX's settings. Where JAX tells of each change, they are asked for once, and again after one.
// See docs/internals/direct.md.
#pragma once

#include <vector>

#include "python/py.h"

namespace graftax {

// One zero-argument question: a callable or the name of an attribute, and the one object it is asked of (or none). Lives
// as long as the process.
struct Question {
  PyObject* ask = nullptr;
  PyObject* of = nullptr;
  PyObject* answer = nullptr;  // the only one that lets a call through; null where it has to be the same as before

  // Of a tuple of two, or of three with an answer.
  static Question of_parts(nb::handle parts);
  Owned now() const {
    if (of && PyUnicode_CheckExact(ask)) return own(PyObject_GetAttr(of, ask));
    return own(of ? PyObject_CallOneArg(ask, of) : PyObject_CallNoArgs(ask));
  }
};

// Has each its answer?
bool answered(const std::vector<Question>& questions);

// What the settings are in one thread.
struct SettingsNow {
  Owned context;          // what a trace depends on and JAX's own key does not show: part of the key of an entry
  bool as_plain = false;  // does JAX run functions as they are?
  bool direct = false;    // may an executable be run by itself?
  OwnedList in_jits_key;  // what jax.jit has in its key beside the trace context
};

Shared<SettingsNow> settings_now();

void bind_settings(nb::module_& m);

}  // namespace graftax
