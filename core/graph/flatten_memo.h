// SPDX-License-Identifier: Apache-2.0
// What registered classes gave when their instances were opened. Several walks of one call's arguments ask each once:
// a class's flatten is the user's Python code.
#pragma once

#include <unordered_map>

#include "python/collected.h"

namespace graftax {

class Opened {
 public:
  struct Parts {
    PyObject* children;  // a list or a tuple; like the aux data held by this
    PyObject* aux;
  };

  // The parts of an instance of a registered class: those of a walk before, or what its flatten gives now.
  Parts of(PyObject* node);

  // Another walk of the same objects begins. Only then are the parts indexed: most calls need one walk.
  void walk_again();

  void show_held(Visitor& visit) const { visit(parts_); }
  void clear();

 private:
  OwnedList parts_;                           // node, children, aux data, and so on
  std::unordered_map<PyObject*, size_t> at_;  // from a node to its place there
  size_t known_ = 0;                          // so much of `parts_` is in `at_`
  bool again_ = false;
};

// (children, aux data) as the class's flatten gives them.
Owned open_registered(PyObject* node);

}  // namespace graftax
