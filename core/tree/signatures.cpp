// SPDX-License-Identifier: Apache-2.0
// A function of the core that can have attributes: `inspect.signature` reads one, and nanobind's functions have none.
#include "tree/walk.h"

#include <structmember.h>

namespace graftax {

namespace {

struct Signed {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* function;
  PyObject* dict;
  PyObject* weakrefs;
};

Signed* signed_of(PyObject* self) { return reinterpret_cast<Signed*>(self); }

// What such a function costs more than nanobind's own: about 5 ns a call.
PyObject* forward(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  return PyObject_Vectorcall(signed_of(self)->function, args, nargsf, kwnames);
}

PyObject* bound_to(PyObject* self, PyObject* instance, PyObject*) {
  return instance && instance != Py_None ? PyMethod_New(self, instance) : Py_NewRef(self);
}

PyObject* name_of(PyObject* self, PyObject* = nullptr) { return attribute(self, "__qualname__"); }

PyObject* repr(PyObject* self) {
  PyObject* name = name_of(self);
  if (!name) return nullptr;
  PyObject* out = PyUnicode_FromFormat("<function %S>", name);  // %S, as an attribute may be anything
  Py_DECREF(name);
  return out;
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(signed_of(self)->function);
  Py_VISIT(signed_of(self)->dict);
  return 0;
}

// The function stays, as a call may follow; a cycle through its attributes is broken by this.
int clear(PyObject* self) {
  Py_CLEAR(signed_of(self)->dict);
  return 0;
}

void dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  if (signed_of(self)->weakrefs) PyObject_ClearWeakRefs(self);
  Py_CLEAR(signed_of(self)->function);
  Py_CLEAR(signed_of(self)->dict);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef methods[] = {{"__reduce__", name_of, METH_NOARGS, "By name, as any function."},
                         {nullptr, nullptr, 0, nullptr}};

PyMemberDef members[] = {{"__vectorcalloffset__", T_PYSSIZET, offsetof(Signed, vectorcall), READONLY, nullptr},
                         {"__dictoffset__", T_PYSSIZET, offsetof(Signed, dict), READONLY, nullptr},
                         {"__weaklistoffset__", T_PYSSIZET, offsetof(Signed, weakrefs), READONLY, nullptr},
                         {nullptr, 0, 0, 0, nullptr}};

PyType_Slot slots[] = {{Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                       {Py_tp_descr_get, reinterpret_cast<void*>(bound_to)},
                       {Py_tp_repr, reinterpret_cast<void*>(repr)},
                       {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                       {Py_tp_clear, reinterpret_cast<void*>(clear)},
                       {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
                       {Py_tp_getattro, reinterpret_cast<void*>(PyObject_GenericGetAttr)},
                       {Py_tp_setattro, reinterpret_cast<void*>(PyObject_GenericSetAttr)},
                       {Py_tp_methods, methods},
                       {Py_tp_members, members},
                       {0, nullptr}};

PyType_Spec spec = {
    "graftax._core.Function", sizeof(Signed), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

}  // namespace

void bind_signed(nb::module_& m) {
  static PyObject* type = check(PyType_FromSpec(&spec));
  m.def(
      "with_attributes",
      [](nb::object function, nb::dict attributes) {
        auto* self = reinterpret_cast<Signed*>(check(PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(type), 0)));
        self->vectorcall = forward;
        self->function = function.release().ptr();
        self->dict = attributes.release().ptr();
        return nb::steal(reinterpret_cast<PyObject*>(self));
      },
      nb::arg("function"), nb::arg("attributes"),
      nb::sig("def with_attributes(function: Callable[..., Any], attributes: dict[str, Any]) -> Any"),
      "The function, as one that has these attributes.");
}

}  // namespace graftax
