// SPDX-License-Identifier: Apache-2.0
// What shows another object: a weak reference shows its referent, a mappingproxy or a view of a dict its mapping.
#include "graph/rebuild.h"

namespace graftax {

namespace {

// (referent,) or (referent, callback) of a weak reference that is alive, else ().
Owned referent_of(PyObject* ref) {
  Owned referent = weak_target(ref);
  if (!referent) return Owned::borrow(runtime.empty_tuple);
  PyObject* callback = reinterpret_cast<PyWeakReference*>(ref)->wr_callback;
  if (!callback || !PyWeakref_CheckRef(ref)) return own(PyTuple_Pack(1, referent.get()));
  return own(PyTuple_Pack(2, referent.get(), callback));
}

// (mapping,) of a mappingproxy or a view of a dict. Neither gives the dict itself, but its tp_traverse visits it.
Owned mapping_of(PyObject* proxy) {
  PyObject* mapping = nullptr;
  visitproc take = [](PyObject* visited, void* out) {
    if (!PyType_Check(visited)) *static_cast<PyObject**>(out) = visited;
    return 0;
  };
  Py_TYPE(proxy)->tp_traverse(proxy, take, &mapping);
  if (!mapping) raise_error(PyExc_RuntimeError, "a mappingproxy without a mapping");
  return own(PyTuple_Pack(1, mapping));
}

bool is_weak_proxy(PyTypeObject* type) {
  return type == &_PyWeakref_ProxyType || type == &_PyWeakref_CallableProxyType;
}

// A reference to an object that is gone when this returns. Whether that can be called decides the type of a proxy.
Owned dead_reference(PyTypeObject* type) {
  static PyMethodDef nothing = {"nothing", [](PyObject*, PyObject*) { return Py_NewRef(Py_None); }, METH_NOARGS,
                                nullptr};
  Owned nobody =
      type == &_PyWeakref_CallableProxyType ? own(PyCFunction_New(&nothing, nullptr)) : own(PySet_New(nullptr));
  if (is_weak_proxy(type)) return own(PyWeakref_NewProxy(nobody.get(), nullptr));
  return own(_PyWeakref_RefType.tp_new(type, own(PyTuple_Pack(1, nobody.get())).get(), nullptr));
}

const char* const weakref_names[] = {"referent", "__callback__", nullptr};

struct WeakrefKind final : NodeKind {
  WeakrefKind() : NodeKind("weakref", Items::listed) {
    is_whole = is_weak = true;
    item_names = weakref_names;
  }

  bool is_of(PyTypeObject* solid) const override { return solid == &_PyWeakref_RefType || is_weak_proxy(solid); }
  Owned empty_arguments() const override { return own(PyTuple_Pack(1, own(PySet_New(nullptr)).get())); }
  Listed open(PyObject* obj, const Kind&, Opened*) const override {
    Owned parts = referent_of(obj);
    Py_ssize_t size = PyTuple_GET_SIZE(parts.get());
    return {std::move(parts), {}, size};
  }
  bool is_valid(const Program&, const Instr& n) const override { return n.node->items <= 2; }

  Owned make(const Content& c) const override {
    if (c.n.node->items == 0) return dead_reference(c.n.node->type);
    if (is_weak_proxy(c.n.node->type)) return own(PyWeakref_NewProxy(c.items()[0], nullptr));
    return own(_PyWeakref_RefType.tp_new(c.n.node->type, tuple_of(c.items(), c.n.node->items).get(), nullptr));
  }
};

bool is_dict_view(PyTypeObject* type) {
  return type == &PyDictKeys_Type || type == &PyDictValues_Type || type == &PyDictItems_Type ||
         type == &PyODictKeys_Type || type == &PyODictValues_Type || type == &PyODictItems_Type;
}

const char* const proxy_names[] = {"mapping", nullptr};

struct ProxyKind final : NodeKind {
  ProxyKind() : NodeKind("proxy", Items::listed) {
    is_whole = true;
    item_names = proxy_names;
    nameless = &PyDictProxy_Type;
  }

  bool is_of(PyTypeObject* solid) const override { return solid == &PyDictProxy_Type || is_dict_view(solid); }
  Listed open(PyObject* obj, const Kind&, Opened*) const override { return {mapping_of(obj), {}, 1}; }
  bool is_valid(const Program&, const Instr& n) const override { return n.node->items == 1; }

  Owned make(const Content& c) const override {
    PyTypeObject* type = c.n.node->type;
    if (type == &PyDictProxy_Type) return own(PyDictProxy_New(c.items()[0]));
    bool ordered = type == &PyODictKeys_Type || type == &PyODictValues_Type || type == &PyODictItems_Type;
    bool keys = type == &PyDictKeys_Type || type == &PyODictKeys_Type;
    bool values = type == &PyDictValues_Type || type == &PyODictValues_Type;
    return call_base(ordered ? runtime.odict_type : &PyDict_Type,
                     keys     ? "keys"
                     : values ? "values"
                              : "items",
                     c.items()[0]);
  }
};

const WeakrefKind weakref_kind;
const ProxyKind proxy_kind;

}  // namespace

}  // namespace graftax
