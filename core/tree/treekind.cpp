// SPDX-License-Identifier: Apache-2.0
#include "tree/treekind.h"

#include <array>

#include "python/hooks.h"
#include "tree/attribute_schema.h"

namespace graftax {

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
bool are_in_dict(PyTypeObject* type, const TreeKind& kind) {
  if (type->tp_getattro != PyObject_GenericGetAttr || type->tp_dictoffset == 0) return false;
  for (const auto* names : {&kind.children, &kind.others}) {
    for (PyObject* name : *names) {
      PyObject* in_class = _PyType_Lookup(type, name);
      if (in_class && Py_TYPE(in_class)->tp_descr_set) return false;  // a data descriptor
    }
  }
  return true;
}

// Of a type that JAX opens by itself, or by functions that were given to it; a named tuple has none.
Role role_of_node(PyTypeObject* type, PyObject* flatten) {
  if (type == Py_TYPE(Py_None)) return Role::none;
  if (type == &PyList_Type) return Role::list;
  if (type == &PyTuple_Type) return Role::tuple;
  if (type == &PyDict_Type) return Role::dict;
  if (type == runtime.odict_type) return Role::odict;
  if (type == runtime.defaultdict_type) return Role::defaultdict;
  return flatten == Py_None ? Role::namedtuple : Role::registered;
}

std::shared_ptr<TreeKind> resolve(PyTypeObject* type) {
  auto kind = std::make_shared<TreeKind>();
  kind->type = type;
  auto* cls = reinterpret_cast<PyObject*>(type);
  Owned answer = hooks::describe_tree(cls);
  auto field = [&](const char* name) { return own(attribute(answer.get(), name)); };
  auto if_any = [&](const char* name) {
    Owned value = field(name);
    return value.get() == Py_None ? Owned() : value;
  };
  std::string role = utf8(field("role").get());
  if (role == "leaf") return kind;
  kind->flatten = field("flatten");
  kind->unflatten = field("unflatten");
  kind->with_keys = if_any("with_keys");
  if (role == "node") {
    kind->role = role_of_node(type, kind->flatten.get());
    if (kind->role < Role::namedtuple) {  // one for ever: structures do not hold it
      static std::array<std::shared_ptr<TreeKind>, static_cast<size_t>(Role::namedtuple)> builtin;
      std::shared_ptr<TreeKind>& first = builtin[static_cast<size_t>(kind->role)];
      if (!first) first = std::move(kind);
      return first;
    }
    kind->children = interned(field("children").get());
    Owned schema = if_any("schema");
    if (schema && type->tp_dictoffset != 0) {
      // A type gets its version at a lookup, of any name. One that was changed too often has none any more.
      _PyType_Lookup(type, runtime.tables);
      kind->version = type->tp_version_tag;
      kind->by_version = kind->version != 0;
      if (kind->by_version) {
        kind->schemas = std::make_shared<Schemas>();
        kind->schemas->by_names = std::move(schema);
      }
    }
    return kind;
  }
  // A class whose fields are read and written by name, in place of calls of its functions.
  kind->role = Role::fields;
  kind->children = interned(field("children").get());
  kind->others = interned(field("others").get());
  Owned order = field("order");
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(order.get()); ++i)
    kind->order.push_back(static_cast<uint32_t>(PyLong_AsUnsignedLong(PyTuple_GET_ITEM(order.get(), i))));
  kind->absent = if_any("absent");
  // Without static fields all instances have the same node data.
  if (kind->others.empty())
    kind->no_data = kind->absent ? own(PyTuple_Pack(1, kind->absent.get())) : Owned::borrow(runtime.empty_tuple);
  kind->size = PyLong_AsSsize_t(field("size").get());
  if (PyErr_Occurred()) raise_python();
  // Where a field may be absent, it is the instance dictionary that says so.
  kind->in_dict = kind->absent ? type->tp_dictoffset != 0 : are_in_dict(type, *kind);
  kind->by_version = true;
  kind->version = type->tp_version_tag;
  return kind;
}

}  // namespace

const TreeKind& find_out_tree_kind(PyTypeObject* type) {
  std::shared_ptr<TreeKind> kind = resolve(type);
  TreeKinds::forget(type);  // what was known of an earlier version of the class
  return TreeKinds::remember(type, std::move(kind));
}

}  // namespace graftax
