// SPDX-License-Identifier: Apache-2.0
#include "capture/interruptions.h"

namespace graftax {

namespace {

// A function for `gc.callbacks`, which the collector calls with ("start" or "stop", a dict), in their order.
struct Callback {
  void (*tell)(bool begins) = nullptr;
  PyObject* function = nullptr;  // for the life of the process
};

Callback first, last;  // what others put between them runs in a collection

PyObject* callbacks() {
  static PyObject* const list = nb::object(nb::module_::import_("gc").attr("callbacks")).release().ptr();
  return list;
}

void make(Callback& callback, const char* phase, bool begins) {
  if (callback.function) return;
  nb::object function = nb::cpp_function(
      [&callback, phase, begins](nb::str now, nb::handle) {
        if (callback.tell && now.equal(nb::str(phase))) callback.tell(begins);
      },
      nb::arg("phase"), nb::arg("info"));
  callback.function = function.release().ptr();
}

bool is_among_callbacks(PyObject* function) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(callbacks()); ++i)
    if (PyList_GET_ITEM(callbacks(), i) == function) return true;
  return false;
}

// From the end, as taking one out moves those behind it.
void take_out(PyObject* function) {
  for (Py_ssize_t i = PyList_GET_SIZE(callbacks()); i-- > 0;)
    if (PyList_GET_ITEM(callbacks(), i) == function && PyList_SetSlice(callbacks(), i, i + 1, nullptr) < 0)
      PyErr_Clear();
}

bool are_of_a_signal(PyObject* number, PyObject* frame) {
  return number && frame && PyLong_CheckExact(number) && PyFrame_Check(frame);
}

// The number of the signal, where the frame was called as a handler is; null otherwise.
PyObject* signal_of(const Frame& frame) {
  auto* code = reinterpret_cast<PyCodeObject*>(frame.code());
  const int count = code->co_argcount;
  // Of a handler in `*args`, or of the last two parameters: those before may be bound by a method or a partial.
  if (code->co_flags & CO_VARARGS) {
    PyObject* rest = frame.variable(count + code->co_kwonlyargcount);
    const Py_ssize_t size = rest && PyTuple_CheckExact(rest) ? PyTuple_GET_SIZE(rest) : 0;
    if (size >= 2 && are_of_a_signal(PyTuple_GET_ITEM(rest, size - 2), PyTuple_GET_ITEM(rest, size - 1)))
      return PyTuple_GET_ITEM(rest, size - 2);
  }
  if (count < 2 || !are_of_a_signal(frame.variable(count - 2), frame.variable(count - 1))) return nullptr;
  return frame.variable(count - 2);
}

}  // namespace

void hear_collections(void (*tell)(bool begins)) {
  make(first, "start", true);
  make(last, "stop", false);
  first.tell = last.tell = tell;
  if (is_among_callbacks(first.function)) return;
  check(PyList_Insert(callbacks(), 0, first.function));
  check(PyList_Append(callbacks(), last.function));
}

void hear_collections_no_more() {
  if (!first.function) return;
  take_out(first.function);
  take_out(last.function);
}

bool is_signal_handler(const Frame& frame) {
  PyObject* number = frame.function() ? signal_of(frame) : nullptr;
  if (!number) return false;
  try {
    // Not of `signal`, which catches errors of its own.
    nb::object handler = nb::module_::import_("_signal").attr("getsignal")(nb::borrow(number));
    // The function inside of methods and partials.
    while (!PyFunction_Check(handler.ptr())) {
      const char* inner = PyMethod_Check(handler.ptr()) ? "__func__" : "func";  // of a functools.partial
      if (!nb::hasattr(handler, inner)) break;
      handler = nb::object(handler.attr(inner));
    }
    if (handler.is(frame.function())) return true;
    nb::object call = nb::getattr(handler.type(), "__call__", nb::none());  // an object that can be called
    return call.is(frame.function());
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("the handler of a signal");
    return false;
  }
}

}  // namespace graftax
