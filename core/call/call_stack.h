// SPDX-License-Identifier: Apache-2.0
// The stack of calls in progress in this thread: what a trace reads its live objects from.
#pragma once

#include "python/py.h"

namespace graftax {

struct Active {
  PyObject* caller;
  const OwnedList* roots;
  PyObject* outcomes;             // the list of the entry that is running
  PyObject* recording = nullptr;  // a Recording of the roots, where this call has made one
  PyObject* numbers = nullptr;    // the arrays of what the host has computed for this call: a tuple
  PyObject* rebuilt = nullptr;    // while the function runs on tracers: the list of the rebuilt roots
};

inline std::vector<Active>& active() {
  thread_local std::vector<Active> calls;
  return calls;
}

class ActiveScope {
 public:
  explicit ActiveScope(Active a) { active().push_back(a); }
  ActiveScope(const ActiveScope&) = delete;
  ActiveScope& operator=(const ActiveScope&) = delete;
  ~ActiveScope() { active().pop_back(); }
};

}  // namespace graftax
