// SPDX-License-Identifier: Apache-2.0
#include "call/caller.h"

#include <structmember.h>

#include "call/arguments.h"
#include "call/cache.h"
#include "call/kept_calls.h"

namespace graftax {

namespace {

// What the interpreter calls. No C++ exception may leave it.
PyObject* caller_vectorcall(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  try {
    return call(reinterpret_cast<CallerObject*>(self), args, PyVectorcall_NARGS(nargsf), kwnames);
  } catch (nb::python_error& e) {
    e.restore();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_SystemError, e.what());
  }
  return nullptr;
}

// Not set up yet: `_configure` does that. Empty parts, so that each slot can be used before.
PyObject* caller_new(PyTypeObject* type, PyObject*, PyObject*) {
  auto* self = reinterpret_cast<CallerObject*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  self->vectorcall = caller_vectorcall;
  self->function = Py_NewRef(Py_None);
  self->prefix = Py_NewRef(runtime.empty_tuple);
  self->table = Py_NewRef(Py_None);
  self->binding = Py_NewRef(Py_None);
  return reinterpret_cast<PyObject*>(self);
}

PyObject* caller_configure(PyObject* obj, PyObject* args) {
  PyObject *function, *prefix, *table, *binding;
  int is_method = 0;
  if (!PyArg_ParseTuple(args, "OO!OO|p", &function, &PyTuple_Type, &prefix, &table, &binding, &is_method))
    return nullptr;
  if (!nb::isinstance<Table>(nb::handle(table)) || !nb::isinstance<Binding>(nb::handle(binding))) {
    PyErr_SetString(PyExc_TypeError, "expected a Table and a Binding");
    return nullptr;
  }
  auto* self = reinterpret_cast<CallerObject*>(obj);
  Py_XSETREF(self->function, Py_NewRef(function));
  Py_XSETREF(self->prefix, Py_NewRef(prefix));
  Py_XSETREF(self->table, Py_NewRef(table));
  Py_XSETREF(self->binding, Py_NewRef(binding));
  Py_XSETREF(self->method, is_method && PyTuple_GET_SIZE(prefix) ? Py_XNewRef(method_of(prefix)) : nullptr);
  Py_RETURN_NONE;
}

PyObject* caller_record_in(PyObject* obj, PyObject* ring) {
  if (!nb::isinstance<CallRing>(nb::handle(ring))) {
    PyErr_SetString(PyExc_TypeError, "expected a CallRing");
    return nullptr;
  }
  auto* self = reinterpret_cast<CallerObject*>(obj);
  Py_XSETREF(self->ring, Py_NewRef(ring));
  Py_RETURN_NONE;
}

PyObject* caller_has_changed(PyObject* obj, PyObject*) {
  auto* self = reinterpret_cast<CallerObject*>(obj);
  try {
    return PyBool_FromLong(self->binding != Py_None && has_changed(self));
  } catch (nb::python_error& e) {
    e.restore();
    return nullptr;
  }
}

int caller_traverse(PyObject* obj, visitproc visit, void* arg) {
  auto* self = reinterpret_cast<CallerObject*>(obj);
  Py_VISIT(Py_TYPE(obj));
  Py_VISIT(self->function);
  Py_VISIT(self->prefix);
  Py_VISIT(self->table);
  Py_VISIT(self->binding);
  Py_VISIT(self->ring);
  Py_VISIT(self->method);
  return 0;
}

// The caller can still be called: without a table it raises an error.
int caller_clear(PyObject* obj) {
  auto* self = reinterpret_cast<CallerObject*>(obj);
  Py_XSETREF(self->function, Py_NewRef(Py_None));
  Py_XSETREF(self->table, Py_NewRef(Py_None));
  Py_CLEAR(self->ring);
  Py_CLEAR(self->method);
  return 0;
}

void caller_dealloc(PyObject* obj) {
  auto* self = reinterpret_cast<CallerObject*>(obj);
  PyTypeObject* type = Py_TYPE(obj);
  PyObject_GC_UnTrack(obj);
  if (self->weakrefs) PyObject_ClearWeakRefs(obj);
  Py_CLEAR(self->function);
  Py_CLEAR(self->prefix);
  Py_CLEAR(self->table);
  Py_CLEAR(self->binding);
  Py_CLEAR(self->ring);
  Py_CLEAR(self->method);
  type->tp_free(obj);
  Py_DECREF(type);  // each instance of a heap type owns a reference to it
}

PyMethodDef caller_methods[] = {
    {"_configure", caller_configure, METH_VARARGS, "_configure(function, prefix, table, binding, is_method=False)"},
    {"_record_in", caller_record_in, METH_O, "_record_in(ring): keeps what each call is given"},
    {"_has_changed", caller_has_changed, METH_NOARGS,
     "_has_changed(): has the function other code or defaults than its signature was read from?"},
    {nullptr, nullptr, 0, nullptr}};

PyMemberDef caller_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(CallerObject, vectorcall), READONLY, nullptr},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(CallerObject, weakrefs), READONLY, nullptr},
    {"_function", T_OBJECT, offsetof(CallerObject, function), READONLY, nullptr},
    {"_prefix", T_OBJECT, offsetof(CallerObject, prefix), READONLY, nullptr},
    {"_table", T_OBJECT, offsetof(CallerObject, table), READONLY, nullptr},
    {"_binding", T_OBJECT, offsetof(CallerObject, binding), READONLY, nullptr},
    {"_method", T_OBJECT, offsetof(CallerObject, method), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyType_Slot caller_slots[] = {{Py_tp_doc, const_cast<char*>("The callable that graftax.jit returns: its C++ part.")},
                              {Py_tp_new, reinterpret_cast<void*>(caller_new)},
                              {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                              {Py_tp_traverse, reinterpret_cast<void*>(caller_traverse)},
                              {Py_tp_clear, reinterpret_cast<void*>(caller_clear)},
                              {Py_tp_dealloc, reinterpret_cast<void*>(caller_dealloc)},
                              {Py_tp_methods, caller_methods},
                              {Py_tp_members, caller_members},
                              {0, nullptr}};

PyType_Spec caller_spec = {"graftax._core.Caller", sizeof(CallerObject), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
                           caller_slots};

}  // namespace

void bind_caller(nb::module_& m) {
  nb::object caller = nb::steal(check(PyType_FromSpec(&caller_spec)));
  m.attr("Caller") = caller;
}

}  // namespace graftax
