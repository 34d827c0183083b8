// SPDX-License-Identifier: Apache-2.0
// While a function is traced, a method of an object of its graph runs in a `jax.named_scope` of the object's key path:
// what it computes has that name in dumps and profiles.
#pragma once

#include <unordered_map>

#include "capture/frame_layout.h"
#include "graph/graphdef.h"

namespace graftax {

// The objects that methods are called on, in one rebuilt graph: they are searched from when they are given to the thread
// until `leave`.
class Named {
 public:
  Named() = default;
  Named(const Named&) = delete;
  Named& operator=(const Named&) = delete;
  ~Named() { leave(); }

  // All three are borrowed until `leave`. `built`: by instruction, what is rebuilt; null elsewhere.
  void enter(const Program& program, const OwnedList& built, PyObject* root_names);
  void leave();
  // There is more in the graph by now.
  void renew(const Program& program, PyObject* root_names);
  // The key path of an object of the graph, borrowed; null where it is none of them.
  PyObject* path(PyObject* obj);

 private:
  void find();

  const Program* program_ = nullptr;
  const OwnedList* built_ = nullptr;
  PyObject* root_names_ = nullptr;
  bool is_found_ = false;                           // only a trace in which methods run asks for them
  std::unordered_map<PyObject*, uint32_t> places_;  // not owned
  std::unordered_map<uint32_t, Owned> paths_;
};

// Is it the code of a method, whose first argument says what it is called on? By its name, `self`: libraries put what
// they like around methods, so that a class is no witness.
bool is_of_method(PyCodeObject* code);

// The `jax.named_scope`, entered, of a method of `obj` in this thread; none where `obj` is in no graph that is traced.
Owned enter_scope(PyThreadState* thread, PyObject* obj);
// Leaves it. An exception that is set stays; false where an interrupt has taken its place.
bool leave_scope(const Owned& scope);

}  // namespace graftax
