// SPDX-License-Identifier: Apache-2.0
// From an instruction to its key path, only when somebody asks.
#pragma once

#include "graph/graphdef.h"

namespace graftax {

// One step from a node to a child.
struct Step {
  Cursor::Stage stage;
  const NodeKind* node;
  Py_ssize_t index;
  PyObject* key;  // borrowed; null for sequence items
  Owned entry;    // as a JAX key entry, once it was asked for
};

Step step_of(const Cursor& cursor);                             // to the child that it returned last
Step step_to(const Program& program, uint32_t pc, uint32_t i);  // from node `pc` to its child number `i`
Owned key_entry(const Step& step);  // as JAX's SequenceKey, DictKey, GetAttrKey or FlattenedIndexKey
std::string step_text(const Step& step, size_t longest = 60);  // "[0]", "['a']", ".w"; a key's text up to so many bytes

// A place is always (the number of its root, the key path from there: a tuple of JAX key entries).
Owned place_of_steps(uint32_t root, std::vector<Step>& steps);
Owned place_of(const Program& program, uint32_t pc);
std::string path_text(const Program& program, uint32_t pc, PyObject* root_names);

nb::list leaf_places(const Program& program);                              // of every dynamic leaf, in order
nb::list leaf_names(const Program& program, const nb::tuple& root_names);  // the texts of these places
Owned node_place(const Program& program, uint32_t track);                  // of a tracked node

}  // namespace graftax
