// SPDX-License-Identifier: Apache-2.0
// Lists, tuples and deques.
#include "graph/commit.h"
#include "graph/rebuild.h"
#include "graph/static_equality.h"
#include "graph/swap_contents.h"

namespace graftax {

namespace {

struct ListKind final : NodeKind {
  ListKind() : NodeKind("list", Items::list) {
    items_are_all = true;
    brackets = "[]";
  }

  bool is_of(PyTypeObject* solid) const override { return solid == &PyList_Type; }
  bool is_opened_by_jax(const Kind&, PyTypeObject* type) const override { return type == &PyList_Type; }
  Owned new_items(const Content& c) const override { return list_of(c.items(), c.n.node->items); }
  void fill(const Content& c, PyObject* shell) const override { exchange(shell, new_items(c).get()); }
  bool can_exchange(PyObject*) const override { return true; }
  void exchange(PyObject* a, PyObject* b) const override { exchange_lists(a, b); }

  void write(Commit& commit, const Content& c, PyObject* list, const Touched& touched) const override {
    // Item by item while the length is the recorded one, so that what others wrote to the rest meanwhile stays.
    if (touched.items || PyList_GET_SIZE(list) != static_cast<Py_ssize_t>(c.n.node->items))
      return commit.exchange(*this, list, new_items(c));
    for (uint32_t i : touched.children)
      if (i < c.n.node->items) commit.list_item(list, static_cast<Py_ssize_t>(i), c.items()[i]);
  }
};

struct TupleKind final : NodeKind {
  TupleKind() : NodeKind("tuple", Items::tuple) {
    is_whole = true;
    brackets = "()";
  }

  bool is_of(PyTypeObject* solid) const override { return solid == &PyTuple_Type; }
  bool is_opened_by_jax(const Kind&, PyTypeObject* type) const override {
    return type == &PyTuple_Type || PyObject_HasAttrString(reinterpret_cast<PyObject*>(type), "_fields");
  }
  std::string closing_text(const Program&, const Instr& n) const override {
    return n.node->items == 1 && n.node->type == &PyTuple_Type ? ",)" : ")";
  }

  Owned make(const Content& c) const override {
    Owned items = tuple_of(c.items(), c.n.node->items);
    if (c.n.node->type == &PyTuple_Type) return items;
    // The __new__ of a named tuple or another subclass takes other arguments, and may call anything.
    return own(PyTuple_Type.tp_new(c.n.node->type, own(PyTuple_Pack(1, items.get())).get(), nullptr));
  }
};

struct DequeKind final : NodeKind {
  DequeKind() : NodeKind("deque", Items::listed) {
    has_content = true;
    brackets = "[]";
  }

  bool is_of(PyTypeObject* solid) const override { return solid == runtime.deque_type; }

  Listed open(PyObject* obj, const Kind& kind, Opened*) const override {
    Owned items = list_items(obj, kind.solid);
    Py_ssize_t size = PyList_GET_SIZE(items.get());
    return {std::move(items), {}, size};
  }

  // Its payload is maxlen; without maxlen it has none.
  static Owned maxlen(PyObject* obj) { return own(attribute(obj, "maxlen")); }
  uint32_t add_payload(Program& p, PyObject* obj, const Kind&) const override {
    Owned most = maxlen(obj);
    return most.get() == Py_None ? NONE : add_static(p, most.get(), kind_of(most.get()));
  }
  bool content_matches(const Program& p, const Instr& n, PyObject* obj) const override {
    Owned most = maxlen(obj);
    return n.node->payload == NONE ? most.get() == Py_None : static_matches(p, n.node->payload, most.get());
  }
  std::string closing_text(const Program& p, const Instr& n) const override {
    return n.node->payload == NONE ? "]" : "], maxlen=" + static_text(p, n.node->payload);
  }

  void fill(const Content& c, PyObject* shell) const override {
    Owned items = list_of(c.items(), c.n.node->items);
    Owned args = c.n.node->payload == NONE
                     ? own(PyTuple_Pack(1, items.get()))
                     : own(PyTuple_Pack(2, items.get(), c.program.statics[c.n.node->payload].obj));
    // The base type's own: maxlen can be set nowhere else.
    check(runtime.deque_type->tp_init(shell, args.get(), nullptr));
  }
  void write(Commit& commit, const Content& c, PyObject* deque, const Touched&) const override {
    commit.exchange(*this, deque, new_items(c));
  }

  Owned new_items(const Content& c) const override {
    Owned out = own(runtime.deque_type->tp_new(runtime.deque_type, runtime.empty_tuple, nullptr));
    fill(c, out.get());
    return out;
  }
  bool can_exchange(PyObject*) const override { return knows_deques(); }
  void exchange(PyObject* a, PyObject* b) const override { exchange_deques(a, b); }
  Owned copy_items(PyObject* deque) const override { return list_items(deque, runtime.deque_type); }
  void replace_items(PyObject* deque, PyObject* source) const override {
    call_base(runtime.deque_type, "clear", deque);
    call_base(runtime.deque_type, "extend", deque, source);
  }
};

const ListKind list_kind;
const TupleKind tuple_kind;
const DequeKind deque_kind;

}  // namespace

}  // namespace graftax
