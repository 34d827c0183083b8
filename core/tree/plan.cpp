// SPDX-License-Identifier: Apache-2.0
#include "tree/plan.h"

namespace graftax {

namespace {

constexpr size_t most_plans = 16;         // of one class: instances with ever new names are not worth it
constexpr size_t most_known = 16;         // node data of one plan
constexpr Py_ssize_t longest_kept = 256;  // characters, bytes or elements that are kept alive for it

std::vector<uint32_t> numbers(PyObject* tuple, size_t below) {
  std::vector<uint32_t> out;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
    auto n = PyLong_AsUnsignedLong(PyTuple_GET_ITEM(tuple, i));
    if (PyErr_Occurred()) raise_python();
    if (n >= below) raise_error(PyExc_SystemError, "a layout names an attribute that is not there");
    out.push_back(static_cast<uint32_t>(n));
  }
  return out;
}

// Is the name one that an instance dictionary holds, and nothing of the class comes before it?
bool is_plain(PyTypeObject* type, PyObject* name) {
  if (!PyUnicode_CheckExact(name) || !PyUnicode_CHECK_INTERNED(name)) return false;
  PyObject* found = _PyType_Lookup(type, name);
  return !found || !Py_TYPE(found)->tp_descr_set;
}

// Asks Python what is done with instances that have the attributes of this dict. False where nothing is to be planned.
bool learn(const TreeKind& kind, PyObject* dict) {
  TreePlans& plans = *kind.plans;
  if (plans.plans.size() >= most_plans || PyDict_GET_SIZE(dict) > static_cast<Py_ssize_t>(most_attributes))
    return false;
  Owned given = own(PySequence_Tuple(dict));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given.get()); ++i)
    if (!is_plain(kind.type, PyTuple_GET_ITEM(given.get(), i))) return false;
  Owned answer = own(PyObject_CallOneArg(plans.layout.get(), given.get()));
  PyObject *data, *aux, *entries, *children, *others, *assigned;
  if (!PyArg_ParseTuple(answer.get(), "OOO!O!O!O!", &data, &aux, &PyTuple_Type, &entries, &PyTuple_Type, &children,
                        &PyTuple_Type, &others, &PyTuple_Type, &assigned))
    raise_python();
  auto plan = std::make_unique<TreePlan>();
  auto n = static_cast<size_t>(PyTuple_GET_SIZE(given.get()));
  plan->children = numbers(children, n);
  plan->others = numbers(others, n);
  plan->assigned = numbers(assigned, n);
  plan->data = Owned::borrow(data);
  plan->entries = Owned::borrow(entries);
  for (size_t i = 0; i < n; ++i)
    plan->given.push_back(Py_NewRef(PyTuple_GET_ITEM(given.get(), static_cast<Py_ssize_t>(i))));
  for (const auto* part : {&plan->children, &plan->others})
    for (uint32_t i : *part) plan->names.push_back(plan->given[i]);
  plans.aux = Owned::borrow(aux);
  plans.plans.push_back(std::move(plan));
  return true;
}

bool fits(const TreePlan& plan, PyObject* dict, PlannedValues& values) {
  if (PyDict_GET_SIZE(dict) != static_cast<Py_ssize_t>(plan.given.size())) return false;
  PyObject *key, *value;
  Py_ssize_t pos = 0;
  for (size_t i = 0; i < plan.given.size(); ++i) {
    if (!PyDict_Next(dict, &pos, &key, &value) || key != plan.given[i]) return false;
    values[i] = value;
  }
  return true;
}

TreePlan* fitting(TreePlans& plans, PyObject* dict, PlannedValues& values) {
  size_t n = plans.plans.size();
  for (size_t k = 0, i = plans.recent; k < n; ++k, i = i + 1 < n ? i + 1 : 0) {
    if (!fits(*plans.plans[i], dict, values)) continue;
    plans.recent = i;
    return plans.plans[i].get();
  }
  return nullptr;
}

// Is this object the same value for ever?
bool never_changes(PyObject* p, int depth = 4) {
  if (p == Py_None || PyBool_Check(p) || PyLong_CheckExact(p) || PyFloat_CheckExact(p) || PyComplex_CheckExact(p))
    return true;
  if (PyType_Check(p)) return true;
  if (PyCFunction_Check(p)) return !PyCFunction_GET_SELF(p) || PyModule_Check(PyCFunction_GET_SELF(p));
  if (PyUnicode_CheckExact(p)) return PyUnicode_GET_LENGTH(p) <= longest_kept;
  if (PyBytes_CheckExact(p)) return PyBytes_GET_SIZE(p) <= longest_kept;
  if (!PyTuple_CheckExact(p) || depth == 0 || PyTuple_GET_SIZE(p) > longest_kept) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(p); ++i)
    if (!never_changes(PyTuple_GET_ITEM(p, i), depth - 1)) return false;
  return true;
}

bool same_value(PyObject* known, PyObject* p) {
  if (known == p) return true;
  return PyUnicode_CheckExact(known) && PyUnicode_CheckExact(p) && PyUnicode_Compare(known, p) == 0;
}

// The plan and the values of node data; null where they are of another class's making.
const TreePlan* plan_of_data(const TreePlans& plans, PyObject* data, Owned& others) {
  for (const auto& plan : plans.plans) {
    if (plan->others.empty() && plan->data.get() == data) return plan.get();
    for (const TreePlan::Known& known : plan->known) {
      if (known.data.get() != data) continue;
      others = Owned::borrow(known.others.get());
      return plan.get();
    }
  }
  if (reinterpret_cast<PyObject*>(Py_TYPE(data)) != plans.aux.get()) return nullptr;
  Owned of = own(PyObject_GetAttrString(data, "plan"));
  others = own(PyObject_GetAttrString(data, "values"));
  for (const auto& plan : plans.plans)
    if (plan->data.get() == of.get()) return plan.get();
  return nullptr;
}

}  // namespace

TreePlan* plan_of(PyObject* obj, const TreeKind& kind, PlannedValues& values) {
  Owned dict = instance_dict(obj);
  if (TreePlan* plan = fitting(*kind.plans, dict.get(), values)) return plan;
  return learn(kind, dict.get()) ? fitting(*kind.plans, dict.get(), values) : nullptr;
}

Owned planned_data(const TreeKind& kind, TreePlan& plan, const PlannedValues& values) {
  if (plan.others.empty()) return Owned::borrow(plan.data.get());
  for (const TreePlan::Known& known : plan.known) {
    bool same = true;
    for (size_t i = 0; same && i < plan.others.size(); ++i)
      same = same_value(PyTuple_GET_ITEM(known.others.get(), static_cast<Py_ssize_t>(i)), values[plan.others[i]]);
    if (same) return Owned::borrow(known.data.get());
  }
  OwnedList held;  // a new tuple may run the collector
  for (uint32_t i : plan.others) held.push(values[i]);
  Owned others = own(PyTuple_New(static_cast<Py_ssize_t>(held.size())));
  for (size_t i = 0; i < held.size(); ++i) PyTuple_SET_ITEM(others.get(), static_cast<Py_ssize_t>(i), held.release(i));
  Owned data = own(PyObject_CallFunctionObjArgs(kind.plans->aux.get(), plan.data.get(), others.get(), nullptr));
  if (!never_changes(others.get())) return data;
  TreePlan::Known fresh{Owned::borrow(others.get()), Owned::borrow(data.get())};
  if (plan.known.size() < most_known) plan.known.push_back(std::move(fresh));
  else std::swap(plan.known[plan.replaced++ % most_known], fresh);  // what it replaces is released last
  return data;
}

Owned build_by_plan(const TreeKind& kind, PyObject* data, PyObject* const* items, uint32_t arity) {
  PyTypeObject* type = kind.type;
  if (!data || kind.version != type->tp_version_tag || type->tp_flags & Py_TPFLAGS_IS_ABSTRACT) return {};
  Owned others;
  const TreePlan* plan = plan_of_data(*kind.plans, data, others);
  if (!plan || plan->children.size() != arity) return {};
  if (!plan->others.empty() && (!others || !PyTuple_CheckExact(others.get()) ||
                                PyTuple_GET_SIZE(others.get()) != static_cast<Py_ssize_t>(plan->others.size())))
    return {};
  Owned out = own(type->tp_alloc(type, 0));
  for (uint32_t k : plan->assigned) {
    PyObject* value = k < arity ? items[k] : PyTuple_GET_ITEM(others.get(), static_cast<Py_ssize_t>(k - arity));
    check(PyObject_GenericSetAttr(out.get(), plan->names[k], value));
  }
  return out;
}

}  // namespace graftax
