// SPDX-License-Identifier: Apache-2.0
// Dicts, ordered dicts and default dicts: the order of the keys is part of the structure.
#include "graph/commit.h"

#include <structmember.h>

#include "graph/rebuild.h"
#include "graph/swap_contents.h"

namespace graftax {

namespace {

struct DictKind : NodeKind {
  explicit DictKind(const char* name = "dict", Items items = Items::dict) : NodeKind(name, items) {
    keys = Keys::items;
    items_are_all = true;
    brackets = "{}";
  }

  bool is_of(PyTypeObject* solid) const override { return solid == &PyDict_Type; }
  bool is_opened_by_jax(const Kind&, PyTypeObject* type) const override { return is_of(type); }

  void fill(const Content& c, PyObject* shell) const override {
    for (uint32_t i = 0; i < c.n.node->items; ++i) check(PyDict_SetItem(shell, c.key(i).get(), c.items()[i]));
  }

  void write(Commit& commit, const Content& c, PyObject* dict, const Touched& touched) const override {
    // Item by item where that gives the right order, so that other changes that were made meanwhile stay.
    if (touched.items) return commit.exchange(*this, dict, new_items(c));
    bool ordered = items == Items::keyed;
    for (uint32_t i = 0; i < c.n.node->items; ++i)
      if (touched.has(c.n.node->has_extra + i)) commit.assign(dict, c.key(i).get(), c.items()[i], ordered);
    for (Py_ssize_t i = 0; touched.dropped && i < PyTuple_GET_SIZE(touched.dropped); ++i)
      commit.assign(dict, PyTuple_GET_ITEM(touched.dropped, i), nullptr, ordered);
  }

  Owned new_items(const Content& c) const override {
    Owned out = own(PyDict_New());
    DictKind::fill(c, out.get());
    return out;
  }
  bool can_exchange(PyObject* dict) const override { return can_exchange_dict(dict); }
  void exchange(PyObject* a, PyObject* b) const override { exchange_dicts(a, b); }
  // PyDict_Copy asks a subclass that has an __iter__ of its own.
  Owned copy_items(PyObject* dict) const override {
    if (Py_TYPE(dict)->tp_iter == PyDict_Type.tp_iter) return own(PyDict_Copy(dict));
    Owned out = own(PyDict_New()), keys = list_items(dict, &PyDict_Type);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(keys.get()); ++i) {
      PyObject* key = PyList_GET_ITEM(keys.get(), i);
      if (Owned value = Owned::borrow(dict_get(dict, key))) check(PyDict_SetItem(out.get(), key, value.get()));
    }
    return out;
  }
  void replace_items(PyObject* dict, PyObject* source) const override {
    PyDict_Clear(dict);
    check(PyDict_Update(dict, source));
  }
};

struct OrderedDictKind final : DictKind {
  OrderedDictKind() : DictKind("odict", Items::keyed) {}

  bool is_of(PyTypeObject* solid) const override { return solid == runtime.odict_type; }

  Listed open(PyObject* obj, const Kind& kind, Opened*) const override {
    Owned keys = list_items(obj, kind.solid);
    Py_ssize_t size = PyList_GET_SIZE(keys.get());
    return {std::move(keys), {}, size};
  }
  Py_ssize_t size(PyObject* obj) const override { return PyDict_GET_SIZE(obj); }

  void fill(const Content& c, PyObject* shell) const override {
    for (uint32_t i = 0; i < c.n.node->items; ++i) check(PyODict_SetItem(shell, c.key(i).get(), c.items()[i]));
  }
  Owned new_items(const Content& c) const override {
    Owned out = own(PyODict_New());
    fill(c, out.get());
    return out;
  }
  bool can_exchange(PyObject* dict) const override { return can_exchange_odict(dict); }
  void exchange(PyObject* a, PyObject* b) const override { exchange_odicts(a, b); }
  // By the base type's own methods, which a subclass may have overridden.
  Owned copy_items(PyObject* dict) const override {
    Owned out = own(PyODict_New());
    add_items(out.get(), dict);
    return out;
  }
  void replace_items(PyObject* dict, PyObject* source) const override {
    call_base(runtime.odict_type, "clear", dict);
    add_items(dict, source);
  }
  static void add_items(PyObject* to, PyObject* from) {
    Owned keys = list_items(from, runtime.odict_type);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(keys.get()); ++i) {
      PyObject* key = PyList_GET_ITEM(keys.get(), i);
      if (Owned value = Owned::borrow(dict_get(from, key))) check(PyODict_SetItem(to, key, value.get()));
    }
  }
};

struct DefaultDictKind final : DictKind {
  DefaultDictKind() : DictKind("defaultdict") {
    items_are_all = false;
    extra = "default_factory";
  }

  bool is_of(PyTypeObject* solid) const override { return solid == runtime.defaultdict_type; }

  Listed open(PyObject* obj, const Kind&, Opened*) const override {
    static PyObject* const factory = interned("default_factory");
    return {{}, own(PyObject_GenericGetAttr(obj, factory)), PyDict_GET_SIZE(obj)};
  }

  // A member of the C struct is set there: a subclass may have an attribute of that name.
  static Py_ssize_t factory_offset() {
    static const Py_ssize_t offset = [] {
      Owned member = own(attribute(reinterpret_cast<PyObject*>(runtime.defaultdict_type), "default_factory"));
      return reinterpret_cast<PyMemberDescrObject*>(member.get())->d_member->offset;
    }();
    return offset;
  }

  void fill(const Content& c, PyObject* shell) const override {
    auto** place = reinterpret_cast<PyObject**>(reinterpret_cast<char*>(shell) + factory_offset());
    Owned old = Owned::steal(std::exchange(*place, Py_NewRef(c.values[0])));  // released when the dict is whole
    DictKind::fill(c, shell);
  }
  void write(Commit& commit, const Content& c, PyObject* dict, const Touched& touched) const override {
    commit.slot(dict, factory_offset(), c.values[0]);
    DictKind::write(commit, c, dict, touched);
  }
};

const DictKind dict_kind;
const OrderedDictKind odict_kind;
const DefaultDictKind defaultdict_kind;

}  // namespace

const NodeKind& dict_node = dict_kind;

}  // namespace graftax
