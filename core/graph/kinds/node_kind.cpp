// SPDX-License-Identifier: Apache-2.0
#include "graph/kinds/node_kind.h"

#include "graph/commit.h"
#include "graph/graphdef.h"
#include "graph/rebuild.h"

namespace graftax {

namespace {

// Made on first use: the kinds in other files are constructed in an order that nobody knows.
std::vector<const NodeKind*>& all_kinds() {
  static auto* all = new std::vector<const NodeKind*>();
  return *all;
}

template <class Test>
const NodeKind* first_kind(Test test) {
  for (const NodeKind* kind : all_kinds())
    if (test(*kind)) return kind;
  return nullptr;
}

}  // namespace

const NodeKind leaf_node("leaf", Items::none, false);

NodeKind::NodeKind(const char* name, Items items, bool in_list) : name(name), items(items) {
  if (in_list) all_kinds().push_back(this);
}

const NodeKind* node_kind_of(PyTypeObject* solid) {
  return first_kind([&](const NodeKind& kind) { return kind.is_of(solid); });
}

const NodeKind* node_kind_named(const std::string& name) {
  return first_kind([&](const NodeKind& kind) { return kind.name == name; });
}

PyTypeObject* nameless_type(const std::string& name) {
  const NodeKind* kind = first_kind([&](const NodeKind& k) { return k.nameless && k.nameless->tp_name == name; });
  return kind ? kind->nameless : nullptr;
}

Owned list_items(PyObject* obj, PyTypeObject* base) {
  Owned iterator = own(base->tp_iter(obj));
  return own(PySequence_List(iterator.get()));
}

Listed open_attributes(PyObject* obj, const char* const* names) {
  Listed out;
  while (names[out.size]) ++out.size;
  out.items = own(PyTuple_New(out.size));
  for (Py_ssize_t i = 0; i < out.size; ++i) PyTuple_SET_ITEM(out.items.get(), i, check(attribute(obj, names[i])));
  return out;
}

// ---- what a plain object does

bool NodeKind::is_of(PyTypeObject*) const { return false; }
Owned NodeKind::empty_arguments() const { return Owned::borrow(runtime.empty_tuple); }
bool NodeKind::is_opened_by_jax(const Kind&, PyTypeObject*) const { return false; }
bool NodeKind::is_itself(PyObject*) const { return false; }

Listed NodeKind::open(PyObject* obj, const Kind&, Opened*) const { return open_attributes(obj, item_names); }
Py_ssize_t NodeKind::size(PyObject*) const { return 0; }
PyObject* NodeKind::item(PyObject*, Py_ssize_t) const { return nullptr; }
std::string NodeKind::item_name(Py_ssize_t i, PyObject*) const { return item_names ? item_names[i] : ""; }

uint32_t NodeKind::add_payload(Program&, PyObject*, const Kind&) const { return NONE; }
uint32_t NodeKind::add_elements(Program&, PyObject*, std::vector<uint32_t>&) const { return 0; }
bool NodeKind::content_matches(const Program&, const Instr&, PyObject*) const { return true; }
bool NodeKind::content_changed(const Program&, const Instr&, PyObject*) const { return false; }
bool NodeKind::holds_otherwise(const Program&, const Instr&, PyObject*) const { return false; }
bool NodeKind::is_valid(const Program&, const Instr&) const { return true; }
std::string NodeKind::content_text(const Program&, const Instr&) const { return ""; }
std::string NodeKind::closing_text(const Program&, const Instr&) const { return brackets ? brackets + 1 : ""; }

bool NodeKind::can_hold_arrays(const Kind&) const { return true; }

Owned NodeKind::shell(const Program&, const Instr& n, PyObject*) const {
  Owned out = make_shell(*n.node->kind, n.node->type);
  if (n.flags & OWN_DICT) check(PyObject_GenericSetDict(out.get(), out.get(), nullptr));
  return out;
}

Owned NodeKind::make(const Content&) const { raise_error(PyExc_SystemError, "this node is not made from its items"); }
void NodeKind::fill(const Content&, PyObject*) const {}
void NodeKind::write(Commit&, const Content&, PyObject*, const Touched&) const {}
void NodeKind::set_parts(PyObject*, PyObject* const*, Py_ssize_t) const {}

Owned NodeKind::new_items(const Content&) const { return {}; }
bool NodeKind::can_exchange(PyObject*) const { return false; }
void NodeKind::exchange(PyObject*, PyObject*) const {}
Owned NodeKind::copy_items(PyObject*) const { return {}; }
void NodeKind::replace_items(PyObject*, PyObject*) const {}

}  // namespace graftax
