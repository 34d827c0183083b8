// SPDX-License-Identifier: Apache-2.0
// The callable that graftax.jit returns, as the core sees it.
#pragma once

#include "call/trace.h"

namespace graftax {

struct CallerObject {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* weakrefs;
  PyObject* function;  // the Python function that runs
  PyObject* prefix;    // tuple: arguments that come before the caller's (self of a bound method, a partial's)
  PyObject* table;     // Table
  PyObject* binding;   // Binding
  PyObject* ring;      // CallRing of a recorder; else null
  PyObject* method;    // of a callable object, the first of the prefix: what its class had as __call__; else null
};

// What the class of a callable object has as __call__ now; borrowed, null where it has none.
inline PyObject* method_of(PyObject* prefix) {
  static PyObject* const call = interned("__call__");
  return _PyType_Lookup(Py_TYPE(PyTuple_GET_ITEM(prefix, 0)), call);
}

// Has the function other code or defaults than its signature was read from, or the class another method?
bool has_changed(const CallerObject* self);

// One call, with what a trace that begins anew needs.
PyObject* call(CallerObject* self, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames);

void bind_caller(nb::module_& m);
void bind_active_call(nb::module_& m);

}  // namespace graftax
