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

  // Another walk of the same objects begins, which may ask for the same parts. Only then are they indexed: most calls
  // need one walk.
  void walk_again();

  void show_held(Visitor& visit) const { visit(parts_); }
  void clear();

 private:
  OwnedList parts_;                              // node, children, aux data, and so on
  std::unordered_map<PyObject*, size_t> index_;  // from a node to its place there
  size_t indexed_ = 0;                           // so much of `parts_` is in `index_`
  bool is_indexed_ = false;                      // is this a further walk?
};

// (children, aux data) as the class's flatten gives them.
Owned open_registered(PyObject* node);

}  // namespace graftax
