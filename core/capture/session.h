// SPDX-License-Identifier: Apache-2.0
// What the frames of one trace are to see and to tell, and what is known of their code.
#pragma once

#include "capture/jax_frames.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace graftax {

// Cached for frames that nobody has to be told of, by their code and globals: what is done with them. JAX's own frames
// are thousands a trace, and a lookup in each table of the session costs as much as many of them do.
struct FrameDecision {
  PyObject* code = nullptr;
  PyObject* globals = nullptr;
  PyObject* shadow = nullptr;
  bool replaced = false;    // some function with this code runs with the parts of another one
  bool inner = false;       // it may be one that runs nobody else's code
  bool method = false;      // it may be one of an object of the graph
  bool answerable = false;  // it may be answered
  bool interrupts = false;  // it is the handler of a signal, which is no part of the trace
};

// A trace that is running in this thread.
struct Session {
  PyObject* enter;  // (code, globals, function, first argument) -> what to do
  // Code that was met before, borrowed from `held`, with the globals that it ran with; a null stands for any.
  std::unordered_map<PyObject*, std::vector<PyObject*>> known_code;
  std::unordered_set<PyObject*> known_functions;  // where others of the same code are to be heard of; in `held`
  OwnedList held;
  std::unordered_map<PyObject*, PyObject*> functions;  // function -> the rebuilt one that runs in its place; borrowed
  std::unordered_map<PyObject*, PyObject*> shadows;    // globals -> what its frames see; both borrowed from the caller
  std::unordered_map<PyObject*, PyObject*> originals;  // a copy of a function or of globals -> what it stands for
  std::unordered_set<PyObject*> made_functions;        // those that this thread has made since; not owned
  std::unordered_set<PyObject*> replaced;              // code of `functions`
  std::vector<FrameDecision> decisions =
      std::vector<FrameDecision>(1024);              // by the code's address; all of it is known, and so held
  Inside inside{nullptr};                            // which frames it need not hear of
  bool quiet = false;                                // it hears of frames, and is no trace that others are part of
  bool busy = false;                                 // `enter` itself is running
  bool collecting = false;                           // the collector runs, and what it calls is nobody's
  bool in_handler = false;                           // the handler of a signal runs
  bool inside_jax = false;                           // a frame runs that runs no code but JAX's own
  PyObject* method_self = nullptr;                   // what the method that runs is called on; not owned
  std::unordered_map<PyObject*, PyObject*> refused;  // code -> what was raised in place of its frame; both in `held`
  int raised_again = 0;                              // how often that was raised once more
  PyObject* telling = nullptr;                       // classes of exceptions that are kept; not owned, or none
  PyObject* raised = nullptr;                        // a list of those that a frame ended with; not owned
  Owned answer;                                      // what may answer calls in the place of their frames, if anything
  std::unordered_set<PyObject*> answered_codes;      // the code of these; in `held`
  bool answers_methods = false;                      // all methods are among these
  int answers_after = -1;                            // all other functions are among these, after as many calls
  std::unordered_map<PyObject*, int> calls;          // of code: how many there were, or not_answered; in `held`
  PyObject* unanswered_code = nullptr;               // the next frame of this code runs itself; not owned
  Owned noted;                                       // a list that gets the code of each frame, if any
  std::unordered_set<PyObject*> noted_codes;         // what is in it

  void note(PyObject* code) {
    if (noted && !noted_codes.insert(code).second) return;
    if (noted && PyList_Append(noted.get(), code) < 0) PyErr_Clear();
  }
  bool knows(PyObject* code, PyObject* globals) const {
    auto scopes = known_code.find(code);
    if (scopes == known_code.end()) return false;
    return std::any_of(scopes->second.begin(), scopes->second.end(),
                       [own = original(globals)](PyObject* scope) { return !scope || scope == own; });
  }
  // A copy may itself have been copied.
  PyObject* original(PyObject* copy) const {
    for (auto found = originals.find(copy); found != originals.end(); found = originals.find(copy))
      copy = found->second;
    return copy;
  }
  PyObject* shadow(PyObject* globals) const {
    auto found = shadows.find(globals);
    return found == shadows.end() ? globals : found->second;
  }
  PyObject* twin(PyObject* function) const {
    auto found = functions.find(function);
    return found == functions.end() ? function : found->second;
  }
  void sees(nb::list scopes, nb::list twins) {
    for (nb::handle pair : scopes) {
      PyObject *scope = nb::object(pair[0]).ptr(), *seen = nb::object(pair[1]).ptr();
      shadows[scope] = seen;
      stands_for(seen, scope);
    }
    for (nb::handle pair : twins) {
      PyObject *function = nb::object(pair[0]).ptr(), *twin = nb::object(pair[1]).ptr();
      functions[function] = twin;
      if (PyFunction_Check(function)) replaced.insert(PyFunction_GET_CODE(function));
      stands_for(twin, function);
    }
    for (FrameDecision& decision : decisions) decision.code = nullptr;  // made without these
  }
  void stands_for(PyObject* copy, PyObject* original) {
    if (copy == original || !originals.emplace(copy, original).second) return;
    held.push(copy);
    held.push(original);
  }
};

}  // namespace graftax
