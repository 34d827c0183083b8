// SPDX-License-Identifier: Apache-2.0
#include "tree/treekind.h"

#include <array>

#include "tree/plan.h"

namespace graftax {

PyObject* jax_registry = nullptr;
Py_ssize_t registered_types = 0;

namespace {

using TreeKinds = TypeTable<TreeKind>;

std::vector<PyObject*> interned(PyObject* names) {
  std::vector<PyObject*> out;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) {
    PyObject* name = Py_NewRef(PyTuple_GET_ITEM(names, i));
    PyUnicode_InternInPlace(&name);
    out.push_back(name);
  }
  return out;
}

// Is each of the names an instance attribute that nothing of the type comes before?
bool found_in_dict(PyTypeObject* type, const TreeKind& kind) {
  if (type->tp_getattro != PyObject_GenericGetAttr || type->tp_dictoffset == 0) return false;
  for (const auto* names : {&kind.children, &kind.others}) {
    for (PyObject* name : *names) {
      PyObject* found = _PyType_Lookup(type, name);
      if (found && Py_TYPE(found)->tp_descr_set) return false;
    }
  }
  return true;
}

// Asks _trees.describe for (shape, flatten, unflatten, names of children, names of the rest, order of
// assignment, absent value, number of attributes, flatten with keys, what gives the layout of instances).
std::shared_ptr<TreeKind> resolve(PyTypeObject* type) {
  auto kind = std::make_shared<TreeKind>();
  kind->type = type;
  auto* cls = reinterpret_cast<PyObject*>(type);
  Owned describe = own(PyObject_GetAttrString(runtime.trees, "describe"));
  Owned answer = own(PyObject_CallOneArg(describe.get(), cls));
  PyObject* a = answer.get();
  if (!PyTuple_Check(a) || PyTuple_GET_SIZE(a) != 10)
    raise_error(PyExc_TypeError, "_trees.describe() must return a tuple of ten");
  auto at = [a](Py_ssize_t i) { return PyTuple_GET_ITEM(a, i); };
  std::string shape = utf8(at(0));
  if (shape == "leaf") return kind;
  kind->flatten = Owned::borrow(at(1));
  kind->unflatten = Owned::borrow(at(2));
  if (at(8) != Py_None) kind->with_keys = Owned::borrow(at(8));
  if (shape == "node") {
    if (type == Py_TYPE(Py_None)) kind->shape = Shape::none;
    else if (type == &PyList_Type) kind->shape = Shape::list;
    else if (type == &PyTuple_Type) kind->shape = Shape::tuple;
    else if (type == &PyDict_Type) kind->shape = Shape::dict;
    else if (type == runtime.odict_type) kind->shape = Shape::odict;
    else if (type == runtime.defaultdict_type) kind->shape = Shape::defaultdict;
    else if (at(1) == Py_None) kind->shape = Shape::namedtuple;
    else kind->shape = Shape::registered;
    if (kind->shape < Shape::namedtuple) {  // one for ever: structures do not hold it
      static std::array<std::shared_ptr<TreeKind>, static_cast<size_t>(Shape::namedtuple)> builtin;
      std::shared_ptr<TreeKind>& known = builtin[static_cast<size_t>(kind->shape)];
      if (!known) known = std::move(kind);
      return known;
    }
    kind->children = interned(at(3));
    if (at(9) != Py_None && type->tp_dictoffset != 0) {
      _PyType_Lookup(type,
                     runtime.tables);  // a type has no version before; one that was changed too often, none any more
      kind->version = type->tp_version_tag;
      kind->by_version = kind->version != 0;
      if (kind->by_version) {
        kind->plans = std::make_shared<TreePlans>();
        kind->plans->layout = Owned::borrow(at(9));
      }
    }
    return kind;
  }
  kind->shape = Shape::fields;
  kind->children = interned(at(3));
  kind->others = interned(at(4));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(at(5)); ++i)
    kind->order.push_back(static_cast<uint32_t>(PyLong_AsUnsignedLong(PyTuple_GET_ITEM(at(5), i))));
  if (at(6) != Py_None) kind->absent = Owned::borrow(at(6));
  if (kind->others.empty())
    kind->no_data = kind->absent ? own(PyTuple_Pack(1, kind->absent.get())) : Owned::borrow(runtime.empty_tuple);
  kind->size = PyLong_AsSsize_t(at(7));
  if (PyErr_Occurred()) raise_python();
  // Where a field may be absent, it is the instance dictionary that says so.
  kind->in_dict = kind->absent ? type->tp_dictoffset != 0 : found_in_dict(type, *kind);
  kind->by_version = true;
  kind->version = type->tp_version_tag;
  return kind;
}

}  // namespace

const TreeKind& find_out_tree_kind(PyTypeObject* type) {
  std::shared_ptr<TreeKind> kind = resolve(type);
  TreeKinds::forget(type);
  return TreeKinds::remember(type, std::move(kind));
}

void set_jax_registry(PyObject* registry) {
  jax_registry = registry;
  registered_types = registry ? PyDict_GET_SIZE(registry) : 0;
}

void follow_registry() {
  if (!jax_registry) {  // no way to tell
    TreeKinds::forget_all();
    return;
  }
  if (!registry_has_grown()) return;
  PyObject *type, *functions;
  Py_ssize_t pos = 0, seen = 0;
  OwnedList fresh;
  while (PyDict_Next(jax_registry, &pos, &type, &functions))
    if (seen++ >= registered_types && PyType_Check(type)) fresh.push(type);
  registered_types = seen;
  for (size_t i = 0; i < fresh.size(); ++i) {
    auto* t = reinterpret_cast<PyTypeObject*>(fresh[i]);
    TreeKinds::forget(t);
    forget_kind(t);
  }
}

}  // namespace graftax
