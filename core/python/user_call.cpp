// SPDX-License-Identifier: Apache-2.0
#include "python/user_call.h"

namespace graftax {

namespace {

// In C++ because a frame of Python between JAX's and the user's would stand in every log of a failing host function.
nb::object call_host(nb::object host, nb::args leaves) {
  // (positional arguments, keyword arguments, what takes the result): see `_Host.given` in transforms/callbacks.py.
  nb::tuple call = nb::cast<nb::tuple>(nb::steal(check(attribute(host.ptr(), "given")))(leaves));
  nb::object function = nb::steal(check(attribute(host.ptr(), "host_function")));
  nb::object result =
      nb::steal(check(PyObject_Call(function.ptr(), nb::object(call[0]).ptr(), nb::object(call[1]).ptr())));
  return nb::object(call[2])(result);
}

}  // namespace

void bind_host_call(nb::module_& m) {
  m.def("call_host", &call_host, nb::sig("def call_host(host: object, *leaves: object) -> Any"),
        "Calls a function of the user on the host: what it raises shows no frame of this package.");
}

}  // namespace graftax
