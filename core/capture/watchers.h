// SPDX-License-Identifier: Apache-2.0
// What a compiled entry depends on besides its roots: bindings that the code under its trace names. The interpreter
// says when one changes (dict, type and function watchers, 3.12 and later); before that versions are compared.
#pragma once

#include <array>
#include <vector>

#include "python/py.h"

namespace graftax {

// One name of a module's dict or of a class, and the value that was read; null where there was none.
struct Read {
  PyObject* holder;  // a dict or a type
  PyObject* name;
  PyObject* value;            // a weak reference to it where there is a guard, and it can be referred to
  PyObject* guard = nullptr;  // a weak reference to a function: its globals, the holder, are kept alive by it alone
  unsigned version = 0;       // of a class whose names are read: that in which they were seen to be the same
  bool is_gone() const { return guard && !weak_target(guard); }
};

// A function that ran, and what it consisted of.
struct FunctionRead {
  PyObject* function;
  PyObject* code;
  PyObject* defaults;  // null where it has none
  PyObject* keywords;  // the dict of its keyword defaults, whose values are bindings; the same
};

// An abstract class that code asks `isinstance` about, and what had been registered with it.
struct AbstractClassRead {
  PyObject* cls;
  PyObject* registered;  // what the hook `registered_classes` gives
};

using OwnNames = std::array<PyObject*, 5>;

// A class or a function whose own names code reads: nobody is told when these change.
struct NamedRead {
  PyObject* owner;  // a weak reference
  OwnNames names;
};

// What code asked the interpreter for, and what it was told: it is asked again on every call.
struct AnswerRead {
  PyObject* ask;
  PyObject* answer;
};

// A list or a set that a package keeps, and what was in it: nobody is told when that changes.
struct ContainerRead {
  PyObject* container;
  PyObject* items;  // a tuple, or a frozenset
};

struct Reads {
  Reads() = default;
  Reads(const Reads&) = delete;
  Reads& operator=(const Reads&) = delete;
  ~Reads();

  std::vector<Read> bindings;                       // strong
  std::vector<FunctionRead> functions;              // strong
  std::vector<PyObject*> cells, contents;           // strong, side by side: compared on every call
  std::vector<AbstractClassRead> abstract_classes;  // strong
  std::vector<NamedRead> named;                     // strong
  std::vector<AnswerRead> answers;                  // strong
  std::vector<ContainerRead> containers;            // strong
  // Strong; the interpreter's token of registrations, which is another one after each; null: not asked for.
  PyObject* abc_token = nullptr;
  uint64_t stamp = 0;  // the epoch in which they were seen to hold, or not
  bool held = false;
  bool is_told = true;                                   // false: the values are compared on every call
  std::vector<std::pair<PyObject*, uint64_t>> versions;  // before 3.12: of holders, borrowed from `bindings`
};

// Do all bindings still have the values that were read? One comparison where none was changed since it was asked last.
bool reads_hold(Reads& reads);

// Some names of one dict, both borrowed from the owner: while it says the same, each name stands for what it did.
class NameWatch {
 public:
  NameWatch() = default;
  NameWatch(const NameWatch&) = delete;
  NameWatch& operator=(const NameWatch&) = delete;
  ~NameWatch() { end(); }

  void begin(PyObject* dict, PyObject* names);  // a tuple of strings
  void end();
  // Another number after each change; 0 where changes are not heard.
  uint64_t now() const;

 private:
  PyObject *dict_ = nullptr, *names_ = nullptr;
};

void bind_watch(nb::module_& m);

}  // namespace graftax
