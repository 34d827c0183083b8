// SPDX-License-Identifier: Apache-2.0
// Sets and frozensets: their elements are keys, and hold no arrays. What is compared is their content; where the order of
// iteration counts, their tables are.
#include "graph/commit.h"
#include "graph/rebuild.h"
#include "graph/static_equality.h"
#include "graph/swap_contents.h"

namespace graftax {

namespace {

// The elements of a set that has the table which was recorded.
bool elements_match(const Program& p, const Instr& n, const SetTable& table, PyObject* obj) {
  auto* set = reinterpret_cast<PySetObject*>(obj);
  for (uint32_t i = 0; i < n.arg; ++i) {
    if (set->mask != table.mask) return false;  // user code was asked, and changed it
    const setentry& entry = set->table[table.slots[i]];
    if (!entry.key || entry.hash != table.hashes[i]) return false;
    uint32_t id = p.keys[n.node->keys + i];
    if (matches_at_once(p.statics[id], entry.key)) continue;
    Owned element = Owned::borrow(entry.key);
    if (!static_matches(p, id, element.get())) return false;
  }
  return true;
}

// The set that was recorded, with what counts as equal of `before` in place of its own elements. Empty where its table is
// not known, or its elements hash otherwise here.
Owned as_recorded(const Content& c, PyObject* before = nullptr) {
  const SetTable* table = c.program.set_table(c.n);
  if (!table) return {};
  Owned own_elements = own(PyDict_New());
  if (before) {
    Owned elements = list_items(before, &PySet_Type);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(elements.get()); ++i)
      check(PyDict_SetItem(own_elements.get(), PyList_GET_ITEM(elements.get(), i), PyList_GET_ITEM(elements.get(), i)));
  }
  OwnedList elements;
  for (uint32_t i = 0; i < c.n.arg; ++i) {
    Owned element = c.key(i);
    Owned equal_element = Owned::borrow(dict_get(own_elements.get(), element.get()));
    bool stays = equal_element && static_matches(c.program, c.program.keys[c.n.node->keys + i], equal_element.get());
    elements.push_stolen(stays ? std::move(equal_element) : std::move(element));
  }
  return table->make(elements.data());
}

void add_all(const Content& c, PyObject* set) {
  for (uint32_t i = 0; i < c.n.arg; ++i) check(PySet_Add(set, c.key(i).get()));
}

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
    SetTable table = SetTable::of(obj);
    if (table.slots.size() == static_cast<size_t>(count))  // else it was changed meanwhile
      p.set_tables.emplace_back(static_cast<uint32_t>(p.code.size()), std::move(table));
    refuse_lost_keys(obj, PySequence_Fast_ITEMS(elements.get()), count);
    for (Py_ssize_t i = 0; i < count; ++i) ids.push_back(add_key(p, PyList_GET_ITEM(elements.get(), i)));
    return static_cast<uint32_t>(count);
  }
  bool content_matches(const Program& p, const Instr& n, PyObject* obj) const override {
    return set_matches(p, n.node->keys, n.arg, obj);
  }
  bool content_in_order(const Program& p, const Instr& n, PyObject* obj, Order order) const override {
    if (PySet_GET_SIZE(obj) != static_cast<Py_ssize_t>(n.arg)) return false;
    const SetTable* table = p.set_table(n);
    if (table && table->is_of(obj)) return elements_match(p, n, *table, obj);
    // Another table: the elements one by one, in the order in which both iterate.
    Owned elements = list_items(obj, &PySet_Type);
    for (uint32_t i = 0; i < n.arg; ++i)
      if (!static_matches(p, p.keys[n.node->keys + i], PyList_GET_ITEM(elements.get(), i)))
        return set_matches(p, n.node->keys, n.arg, obj) &&
               hash_apart(p, n.node->keys, PySequence_Fast_ITEMS(elements.get()), n.arg);
    return !table || serves(*table, SetTable::of(obj), order);
  }
  bool content_changed(const Program& p, const Instr& n, PyObject* obj) const override {
    return !set_matches(p, n.node->keys, n.arg, obj);
  }
  bool holds_otherwise(const Program& p, const Instr& n, PyObject* obj) const override {
    const SetTable* table = p.set_table(n);
    return table && !table->is_of(obj);
  }
  std::string content_text(const Program& p, const Instr& n) const override {
    std::string out;
    for (uint32_t i = 0; i < n.arg; ++i) out += (i ? ", " : "") + static_text(p, p.keys[n.node->keys + i]);
    return out;
  }

  void fill(const Content& c, PyObject* shell) const override {
    Owned content = as_recorded(c);
    if (content) exchange_sets(shell, content.get());
    else add_all(c, shell);
  }
  void write(Commit& commit, const Content& c, PyObject* set, const Touched&) const override {
    Owned content = as_recorded(c, set);
    // Where the recorded table cannot be had: the elements that went are discarded, and the others added.
    if (!content) {
      Owned wanted = new_items(c), before = list_items(set, &PySet_Type);
      content = SetTable::of(set).make(PySequence_Fast_ITEMS(before.get()));
      if (!content) content = own(PySet_New(set));
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(before.get()); ++i) {
        PyObject* element = PyList_GET_ITEM(before.get(), i);
        int stays = PySet_Contains(wanted.get(), element);
        check(stays);
        if (!stays) check(PySet_Discard(content.get(), element));
      }
      add_all(c, content.get());
    }
    commit.exchange(*this, set, std::move(content));
  }
  Owned new_items(const Content& c) const override {
    Owned out = own(PySet_New(nullptr));
    add_all(c, out.get());
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
    Owned out = own(PyFrozenSet_Type.tp_new(c.n.node->type, args.get(), nullptr));
    Owned content = c.n.arg ? as_recorded(c) : Owned();  // an empty one may be shared
    if (content) exchange_sets(out.get(), content.get());
    return out;
  }
  void fill(const Content&, PyObject*) const override {}
  void write(Commit&, const Content&, PyObject*, const Touched&) const override {}
};

const SetKind set_kind;
const FrozenSetKind frozenset_kind;

}  // namespace

}  // namespace graftax
