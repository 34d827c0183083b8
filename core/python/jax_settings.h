// SPDX-License-Identifier: Apache-2.0
// What a call depends on of JAX's settings. Where JAX reports each change, they are read once, and again after a
// change. See docs/internals/direct.md.
#pragma once

#include <vector>

#include "python/py.h"

namespace graftax {

// How to read one value: `ask` is a function of `subject` (or of nothing, where that is null), or the name of an
// attribute of it. Lives as long as the process.
struct Question {
  PyObject* ask = nullptr;
  PyObject* subject = nullptr;
  PyObject* answer = nullptr;  // the only one that lets a call through; null where it has to be the same as before

  // Of a tuple of two, or of three with an answer.
  static Question of_parts(nb::handle tuple);
  Owned now() const {
    if (subject && PyUnicode_CheckExact(ask)) return own(PyObject_GetAttr(subject, ask));
    return own(subject ? PyObject_CallOneArg(ask, subject) : PyObject_CallNoArgs(ask));
  }
};

// Does each question have its one answer?
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
