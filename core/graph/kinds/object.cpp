// SPDX-License-Identifier: Apache-2.0
// Plain objects, which are their fields, and classes that are registered with JAX.
#include "graph/flatten_memo.h"
#include "graph/graphdef.h"
#include "python/hooks.h"

namespace graftax {

namespace {

struct ObjectKind final : NodeKind {
  ObjectKind() : NodeKind("object", Items::none) {}

  bool is_of(PyTypeObject* solid) const override {
    return solid == &PyBaseObject_Type || solid == runtime.namespace_type || solid == runtime.local_type;
  }
  bool is_opened_by_jax(const Kind& kind, PyTypeObject*) const override {
    return !kind.handed && kind.solid == &PyBaseObject_Type;
  }
};

// The Builder makes them: unflatten needs the aux data, which may be rebuilt too.
struct RegisteredKind final : NodeKind {
  RegisteredKind() : NodeKind("registered", Items::listed) {
    is_registered = reads_children = true;
    extra = "aux_data";
    brackets = "[]";
  }

  bool is_opened_by_jax(const Kind&, PyTypeObject*) const override { return true; }
  Listed open(PyObject* obj, const Kind&, Opened* opened) const override {
    Owned pair = opened ? Owned() : open_registered(obj);
    Opened::Parts parts =
        opened ? opened->of(obj) : Opened::Parts{PyTuple_GET_ITEM(pair.get(), 0), PyTuple_GET_ITEM(pair.get(), 1)};
    return {Owned::borrow(parts.children), Owned::borrow(parts.aux), PySequence_Fast_GET_SIZE(parts.children)};
  }
};

// A Jaxpr with constants: they are its children, and the Jaxpr without them is the aux data. JAX sees one leaf.
struct JaxprKind final : NodeKind {
  JaxprKind() : NodeKind("jaxpr", Items::listed) {
    is_registered = reads_children = is_leaf_for_jax = true;
    extra = "jaxpr";
    brackets = "[]";
  }

  bool is_opened_by_jax(const Kind&, PyTypeObject*) const override { return false; }
  bool is_itself(PyObject* obj) const override {
    Owned pair = hooks::open_jaxpr(obj);
    return PyTuple_GET_ITEM(pair.get(), 1) == obj;
  }
  Listed open(PyObject* obj, const Kind&, Opened*) const override {
    Owned pair = hooks::open_jaxpr(obj);
    Owned consts = Owned::borrow(PyTuple_GET_ITEM(pair.get(), 0));
    return {consts, Owned::borrow(PyTuple_GET_ITEM(pair.get(), 1)), PySequence_Fast_GET_SIZE(consts.get())};
  }
};

const ObjectKind object_kind;
const RegisteredKind registered_kind;
const JaxprKind jaxpr_kind;

}  // namespace

}  // namespace graftax
