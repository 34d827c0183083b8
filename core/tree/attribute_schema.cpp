// SPDX-License-Identifier: Apache-2.0
#include "tree/attribute_schema.h"

namespace graftax {

namespace {

constexpr size_t most_schemas = 16;            // of one class: instances with ever new names are not worth it
constexpr size_t most_data_kept = 16;          // node data of one schema
constexpr Py_ssize_t longest_data_kept = 256;  // characters, bytes or elements that are kept alive for it

std::vector<uint32_t> numbers(PyObject* tuple, size_t below) {
  std::vector<uint32_t> out;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
    auto n = PyLong_AsUnsignedLong(PyTuple_GET_ITEM(tuple, i));
    if (PyErr_Occurred()) raise_python();
    // They index arrays without a check from here on.
    if (n >= below) raise_error(PyExc_SystemError, "a schema names an attribute that is not there");
    out.push_back(static_cast<uint32_t>(n));
  }
  return out;
}

// Is the name one that an instance dictionary holds, and nothing of the class comes before it?
bool is_plain(PyTypeObject* type, PyObject* name) {
  if (!PyUnicode_CheckExact(name) || !PyUnicode_CHECK_INTERNED(name)) return false;
  // A data descriptor of the class comes before the dictionary.
  PyObject* in_class = _PyType_Lookup(type, name);
  return !in_class || !Py_TYPE(in_class)->tp_descr_set;
}

// Asks Python what is done with instances that have the attributes of this dict. False where nothing is to be kept of it.
bool learn(const TreeKind& kind, PyObject* dict) {
  Schemas& schemas = *kind.schemas;
  if (schemas.schemas.size() >= most_schemas || PyDict_GET_SIZE(dict) > static_cast<Py_ssize_t>(most_attributes))
    return false;
  Owned names = own(PySequence_Tuple(dict));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names.get()); ++i)
    if (!is_plain(kind.type, PyTuple_GET_ITEM(names.get(), i))) return false;
  Owned answer = own(PyObject_CallOneArg(schemas.by_names.get(), names.get()));
  PyObject *data, *aux, *entries, *children, *others, *assigned;
  if (!PyArg_ParseTuple(answer.get(), "OOO!O!O!O!", &data, &aux, &PyTuple_Type, &entries, &PyTuple_Type, &children,
                        &PyTuple_Type, &others, &PyTuple_Type, &assigned))
    raise_python();
  auto schema = std::make_unique<Schema>();
  auto n = static_cast<size_t>(PyTuple_GET_SIZE(names.get()));
  schema->children = numbers(children, n);
  schema->others = numbers(others, n);
  schema->assigned = numbers(assigned, n);
  schema->data = Owned::borrow(data);
  schema->entries = Owned::borrow(entries);
  for (size_t i = 0; i < n; ++i)
    schema->attributes.push_back(Py_NewRef(PyTuple_GET_ITEM(names.get(), static_cast<Py_ssize_t>(i))));
  for (const auto* part : {&schema->children, &schema->others})
    for (uint32_t i : *part) schema->names.push_back(schema->attributes[i]);
  schemas.aux = Owned::borrow(aux);
  schemas.schemas.push_back(std::move(schema));
  return true;
}

bool fits(const Schema& schema, PyObject* dict, AttributeValues& values) {
  if (PyDict_GET_SIZE(dict) != static_cast<Py_ssize_t>(schema.attributes.size())) return false;
  PyObject *key, *value;
  Py_ssize_t pos = 0;
  for (size_t i = 0; i < schema.attributes.size(); ++i) {
    if (!PyDict_Next(dict, &pos, &key, &value) || key != schema.attributes[i]) return false;
    values[i] = value;
  }
  return true;
}

// The schema that fits an instance dictionary, beginning with the one that fitted last; null where none does.
Schema* fitting(Schemas& schemas, PyObject* dict, AttributeValues& values) {
  size_t n = schemas.schemas.size();
  for (size_t k = 0, i = schemas.recent; k < n; ++k, i = i + 1 < n ? i + 1 : 0) {
    if (!fits(*schemas.schemas[i], dict, values)) continue;
    schemas.recent = i;
    return schemas.schemas[i].get();
  }
  return nullptr;
}

// Is this object the same value for ever?
bool never_changes(PyObject* p, int depth = 4) {
  if (p == Py_None || PyBool_Check(p) || PyLong_CheckExact(p) || PyFloat_CheckExact(p) || PyComplex_CheckExact(p))
    return true;
  if (PyType_Check(p)) return true;
  if (PyCFunction_Check(p)) return !PyCFunction_GET_SELF(p) || PyModule_Check(PyCFunction_GET_SELF(p));
  if (PyUnicode_CheckExact(p)) return PyUnicode_GET_LENGTH(p) <= longest_data_kept;
  if (PyBytes_CheckExact(p)) return PyBytes_GET_SIZE(p) <= longest_data_kept;
  if (!PyTuple_CheckExact(p) || depth == 0 || PyTuple_GET_SIZE(p) > longest_data_kept) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(p); ++i)
    if (!never_changes(PyTuple_GET_ITEM(p, i), depth - 1)) return false;
  return true;
}

bool same_node_data(PyObject* before, PyObject* p) {
  if (before == p) return true;
  return PyUnicode_CheckExact(before) && PyUnicode_CheckExact(p) && PyUnicode_Compare(before, p) == 0;
}

// The schema and the values of node data; null where they are of another class's making.
const Schema* schema_of_data(const Schemas& schemas, PyObject* data, Owned& others) {
  for (const auto& schema : schemas.schemas) {
    if (schema->others.empty() && schema->data.get() == data) return schema.get();
    for (const Schema::Kept& kept : schema->kept) {
      if (kept.data.get() != data) continue;
      others = Owned::borrow(kept.others.get());
      return schema.get();
    }
  }
  if (reinterpret_cast<PyObject*>(Py_TYPE(data)) != schemas.aux.get()) return nullptr;
  Owned schema_data = own(attribute(data, "schema"));
  others = own(attribute(data, "values"));
  for (const auto& schema : schemas.schemas)
    if (schema->data.get() == schema_data.get()) return schema.get();
  return nullptr;
}

}  // namespace

Schema* schema_of(PyObject* obj, const TreeKind& kind, AttributeValues& values) {
  Owned dict = instance_dict(obj);
  if (Schema* schema = fitting(*kind.schemas, dict.get(), values)) return schema;
  return learn(kind, dict.get()) ? fitting(*kind.schemas, dict.get(), values) : nullptr;
}

Owned data_by_schema(const TreeKind& kind, Schema& schema, const AttributeValues& values) {
  if (schema.others.empty()) return Owned::borrow(schema.data.get());
  for (const Schema::Kept& kept : schema.kept) {
    bool same = true;
    for (size_t i = 0; same && i < schema.others.size(); ++i)
      same = same_node_data(PyTuple_GET_ITEM(kept.others.get(), static_cast<Py_ssize_t>(i)), values[schema.others[i]]);
    if (same) return Owned::borrow(kept.data.get());
  }
  OwnedList held;  // a new tuple may run the collector
  for (uint32_t i : schema.others) held.push(values[i]);
  Owned others = own(PyTuple_New(static_cast<Py_ssize_t>(held.size())));
  for (size_t i = 0; i < held.size(); ++i) PyTuple_SET_ITEM(others.get(), static_cast<Py_ssize_t>(i), held.release(i));
  Owned data = own(PyObject_CallFunctionObjArgs(kind.schemas->aux.get(), schema.data.get(), others.get(), nullptr));
  if (!never_changes(others.get())) return data;
  Schema::Kept fresh{Owned::borrow(others.get()), Owned::borrow(data.get())};
  if (schema.kept.size() < most_data_kept) schema.kept.push_back(std::move(fresh));
  else std::swap(schema.kept[schema.replaced++ % most_data_kept], fresh);  // what it replaces is released last
  return data;
}

Owned build_by_schema(const TreeKind& kind, PyObject* data, PyObject* const* items, uint32_t arity) {
  PyTypeObject* type = kind.type;
  // A class that was changed since may have other descriptors, or an abstract method.
  if (!data || kind.version != type->tp_version_tag || type->tp_flags & Py_TPFLAGS_IS_ABSTRACT) return {};
  Owned others;
  const Schema* schema = schema_of_data(*kind.schemas, data, others);
  if (!schema || schema->children.size() != arity) return {};
  if (!schema->others.empty() && (!others || !PyTuple_CheckExact(others.get()) ||
                                  PyTuple_GET_SIZE(others.get()) != static_cast<Py_ssize_t>(schema->others.size())))
    return {};
  Owned out = own(type->tp_alloc(type, 0));
  for (uint32_t k : schema->assigned) {
    PyObject* value = k < arity ? items[k] : PyTuple_GET_ITEM(others.get(), static_cast<Py_ssize_t>(k - arity));
    check(PyObject_GenericSetAttr(out.get(), schema->names[k], value));
  }
  return out;
}

}  // namespace graftax
