// SPDX-License-Identifier: Apache-2.0
// Sets and frozensets: their elements are keys, in no order, and hold no arrays.
#include <algorithm>

#include "commit.h"
#include "exchange.h"
#include "rebuild.h"
#include "static_key.h"

namespace graftax {

namespace {

struct SetKind : NodeKind {
  SetKind() : NodeKind("set", Items::none) {
    keys = Keys::elements;
    has_content = is_leaf_for_jax = true;
    brackets = "{}";
  }

  bool is_of(PyTypeObject* solid) const override { return solid == &PySet_Type; }

  uint32_t add_elements(Program& p, PyObject* obj, std::vector<uint32_t>& ids) const override {
    Owned elements = list_items(obj, &PySet_Type);
    Py_ssize_t count = PyList_GET_SIZE(elements.get());
    for (Py_ssize_t i = 0; i < count; ++i) ids.push_back(add_key(p, PyList_GET_ITEM(elements.get(), i)));
    return static_cast<uint32_t>(count);
  }
  bool content_matches(const Program& p, const Instr& n, PyObject* obj) const override {
    return set_matches(p, n.node->keys, n.arg, obj);
  }
  bool content_in_order(const Program& p, const Instr& n, PyObject* obj) const override {
    if (PySet_GET_SIZE(obj) != static_cast<Py_ssize_t>(n.arg)) return false;
    Owned elements = list_items(obj, &PySet_Type);
    for (uint32_t i = 0; i < n.arg; ++i)
      if (!static_matches(p, p.keys[n.node->keys + i], PyList_GET_ITEM(elements.get(), i)))
        return set_matches(p, n.node->keys, n.arg, obj) &&
               hash_apart(p, n.node->keys, PySequence_Fast_ITEMS(elements.get()), n.arg);
    return true;
  }
  void take_order(PyObject* made, PyObject* model) const override {
    Owned a = list_items(made, &PySet_Type), b = list_items(model, &PySet_Type);
    if (PyList_GET_SIZE(a.get()) != PyList_GET_SIZE(b.get())) return;
    PyObject **first = PySequence_Fast_ITEMS(a.get()), **second = PySequence_Fast_ITEMS(b.get());
    std::vector<PyObject*> x(first, first + PyList_GET_SIZE(a.get())), y(second, second + PyList_GET_SIZE(b.get()));
    std::sort(x.begin(), x.end());
    std::sort(y.begin(), y.end());
    if (x != y) return;  // elements that were rebuilt
    Owned fresh = set_like(model);
    exchange_sets(made, fresh.get());
  }
  bool content_changed(const Program& p, const Instr& n, PyObject* obj) const override {
    return !set_matches(p, n.node->keys, n.arg, obj);
  }
  std::string content_text(const Program& p, const Instr& n) const override {
    std::string out;
    for (uint32_t i = 0; i < n.arg; ++i) out += (i ? ", " : "") + static_text(p, p.keys[n.node->keys + i]);
    return out;
  }

  void fill(const Content& c, PyObject* shell) const override {
    for (uint32_t i = 0; i < c.n.arg; ++i) check(PySet_Add(shell, c.key(i).get()));
  }
  void write(Commit& commit, const Content& c, PyObject* set, const Touched&) const override {
    // Elements are taken out and added as the function did, so that the set iterates as it does after the function.
    Owned wanted = new_items(c), fresh = set_like(set), before = list_items(set, &PySet_Type);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(before.get()); ++i) {
      PyObject* element = PyList_GET_ITEM(before.get(), i);
      int stays = PySet_Contains(wanted.get(), element);
      check(stays);
      if (!stays) check(PySet_Discard(fresh.get(), element));
    }
    fill(c, fresh.get());
    commit.exchange(*this, set, std::move(fresh));
  }
  Owned new_items(const Content& c) const override {
    Owned out = own(PySet_New(nullptr));
    fill(c, out.get());
    return out;
  }
  bool can_exchange(PyObject*) const override { return true; }
  void exchange(PyObject* a, PyObject* b) const override { exchange_sets(a, b); }
};

struct FrozenSetKind final : SetKind {
  FrozenSetKind() { is_whole = true; }

  bool is_of(PyTypeObject* solid) const override { return solid == &PyFrozenSet_Type; }
  Owned make(const Content& c) const override {
    OwnedList elements;
    for (uint32_t i = 0; i < c.n.arg; ++i) elements.push_stolen(c.key(i));
    Owned args = own(PyTuple_Pack(1, list_of(elements.data(), c.n.arg).get()));
    return own(PyFrozenSet_Type.tp_new(c.n.node->type, args.get(), nullptr));
  }
  void fill(const Content&, PyObject*) const override {}
  void write(Commit&, const Content&, PyObject*, const Touched&) const override {}
};

const SetKind set_kind;
const FrozenSetKind frozenset_kind;

}  // namespace

}  // namespace graftax
