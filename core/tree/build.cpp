// SPDX-License-Identifier: Apache-2.0
#include "tree/build.h"

#include "tree/attribute_schema.h"

namespace graftax {

namespace {

Owned build_dict(const TreeNode& n, PyObject* const* items) {
  Owned out;
  PyObject* keys = keys_of(n);
  if (n.role == Role::dict) {
    out = own(_PyDict_NewPresized(n.arity));
  } else if (n.role == Role::odict) {
    out = own(PyObject_CallNoArgs(reinterpret_cast<PyObject*>(runtime.odict_type)));
    for (uint32_t i = 0; i < n.arity; ++i) check(PyObject_SetItem(out.get(), PyTuple_GET_ITEM(keys, i), items[i]));
    return out;
  } else {
    out = own(PyObject_CallOneArg(reinterpret_cast<PyObject*>(runtime.defaultdict_type), PyTuple_GET_ITEM(n.data, 0)));
  }
  for (uint32_t i = 0; i < n.arity; ++i) check(PyDict_SetItem(out.get(), PyTuple_GET_ITEM(keys, i), items[i]));
  return out;
}

Owned build_fields(const TreeNode& n, PyObject* const* items) {
  const TreeKind& kind = *n.kind;
  Py_ssize_t first = kind.absent ? 1 : 0;
  // Where the class has a plain constructor and the data have the form that it gave; others are asked themselves.
  bool direct = !kind.order.empty() &&
                PyTuple_GET_SIZE(n.data) == first + static_cast<Py_ssize_t>(kind.others.size()) &&
                (!first || PyTuple_GET_ITEM(n.data, 0) == kind.absent.get());
  if (!direct) {
    Owned children = tuple_of(items, n.arity);
    return own(PyObject_CallFunctionObjArgs(kind.unflatten.get(), n.data, children.get(), nullptr));
  }
  Owned out = own(kind.type->tp_alloc(kind.type, 0));
  for (uint32_t k : kind.order) {
    bool child = k < n.arity;
    PyObject* value = child ? items[k] : PyTuple_GET_ITEM(n.data, first + static_cast<Py_ssize_t>(k - n.arity));
    if (value == kind.absent.get()) continue;  // the object had no such attribute
    PyObject* name = child ? kind.children[k] : kind.others[k - n.arity];
    check(PyObject_GenericSetAttr(out.get(), name, value));  // cheaper than by way of the instance dictionary
  }
  return out;
}

}  // namespace

Owned build_tree_node(const TreeNode& n, PyObject* const* items) {
  switch (n.role) {
    case Role::none: return Owned::borrow(Py_None);
    case Role::list: {
      Owned out = own(PyList_New(n.arity));
      for (uint32_t i = 0; i < n.arity; ++i) PyList_SET_ITEM(out.get(), i, Py_NewRef(items[i]));
      return out;
    }
    case Role::tuple: return tuple_of(items, n.arity);
    case Role::dict:
    case Role::odict:
    case Role::defaultdict: return build_dict(n, items);
    case Role::namedtuple: {
      if (n.kind->unflatten.get() != Py_True)  // its class has a __new__ of its own
        return own(PyObject_Vectorcall(reinterpret_cast<PyObject*>(n.kind->type), items, n.arity, nullptr));
      Owned out = own(n.kind->type->tp_alloc(n.kind->type, n.arity));
      for (uint32_t i = 0; i < n.arity; ++i) PyTuple_SET_ITEM(out.get(), i, Py_NewRef(items[i]));
      return out;
    }
    case Role::fields: return build_fields(n, items);
    case Role::registered: {
      if (n.kind->schemas)
        if (Owned instance = build_by_schema(*n.kind, n.data, items, n.arity)) return instance;
      Owned children = tuple_of(items, n.arity);
      return own(PyObject_CallFunctionObjArgs(n.kind->unflatten.get(), n.data, children.get(), nullptr));
    }
    default: raise_error(PyExc_SystemError, "a leaf is not built");
  }
}

}  // namespace graftax
