// SPDX-License-Identifier: Apache-2.0
// The self-test of capture/frame_layout.h: does this interpreter keep a frame's fields where we read and write them, and does it call an
// evaluation hook for each Python frame? It compares words of memory before it follows any of them.
#include "capture/frame_layout.h"

namespace graftax {

std::string frames_unknown = "the self-test did not run";

namespace {

// `call` is run often before the hook is there, so that the interpreter has specialized it by then.
constexpr const char* program = R"(
def inner(value, other=answer, *, word="plain"):
    return value, other, word, answer

def steps(value):
    yield answer
    yield value, answer

def call(value):
    return inner(value)
)";

struct Probe {
  PyObject *globals, *others;    // the program's globals; those that its frames are given
  PyObject *inner, *twin;        // a function, and the one that takes its place
  PyObject *steps_code, *value;  // the code of the generator; the argument of every call
  PyObject* replacement;         // of the default of `other`
  int inner_frames = 0, steps_frames = 0;
  std::string fault;

  bool is(bool holds, const char* what) {
    if (!holds && fault.empty()) fault = std::string("a frame's ") + what + " is not where it is expected";
    return holds;
  }
};

Probe* probe = nullptr;

// Is every field of a frame of `function` in its place? Reads no memory but the frame's own.
bool has_layout(const Frame& frame, PyObject* function, bool of_generator) {
  auto* f = reinterpret_cast<PyFunctionObject*>(function);
  return probe->is(frame.code() == f->func_code, "code") && probe->is(frame.function() == function, "function") &&
         probe->is(frame.globals() == f->func_globals, "globals") &&
         probe->is(frame.builtins() == f->func_builtins, "builtins") &&
         probe->is(frame.is_of_generator() == of_generator, "owner") &&
         probe->is(frame.variable(0) == probe->value, "first argument");
}

PyObject* probe_hook(PyThreadState* state, struct _PyInterpreterFrame* raw, int thrown) {
  auto* frame = reinterpret_cast<Frame*>(raw);
  auto* inner = reinterpret_cast<PyFunctionObject*>(probe->inner);
  if (frame->code() == inner->func_code) {
    ++probe->inner_frames;
    PyObject* other = PyTuple_GET_ITEM(inner->func_defaults, 0);
    if (has_layout(*frame, probe->inner, false) && probe->is(frame->variable(1) == other, "default")) {
      frame->set_globals(probe->others);
      frame->set_function(probe->twin);
      frame->set_variable(1, probe->replacement);
    }
  } else if (frame->code() == probe->steps_code && frame->is_of_generator()) {
    ++probe->steps_frames;
    if (probe->is(frame->globals() == probe->globals, "globals")) {
      frame->set_globals(probe->others);
      PyObject* result = _PyEval_EvalFrameDefault(state, raw, thrown);
      frame->set_globals(probe->globals);
      return result;
    }
  }
  return _PyEval_EvalFrameDefault(state, raw, thrown);
}

bool is_tuple_of(PyObject* result, std::initializer_list<PyObject*> values) {
  if (!result || !PyTuple_CheckExact(result) || PyTuple_GET_SIZE(result) != static_cast<Py_ssize_t>(values.size()))
    return false;
  Py_ssize_t i = 0;
  for (PyObject* value : values)
    if (PyTuple_GET_ITEM(result, i++) != value) return false;
  return true;
}

// What the program gives while its frames are given other parts.
void run_probe(PyObject* call, PyObject* steps) {
  PyObject* replaced_answer = dict_get(probe->others, interned("answer"));
  PyObject* word = dict_get(PyFunction_GET_KW_DEFAULTS(probe->inner), interned("word"));
  PyInterpreterState* interpreter = PyInterpreterState_Get();
  _PyFrameEvalFunction before = _PyInterpreterState_GetEvalFrameFunc(interpreter);
  _PyInterpreterState_SetEvalFrameFunc(interpreter, probe_hook);
  // Nothing is thrown before the hook is gone.
  Owned result = Owned::steal(PyObject_CallOneArg(call, probe->value));
  Owned generator = Owned::steal(result ? PyObject_CallOneArg(steps, probe->value) : nullptr);
  Owned first = Owned::steal(generator ? PyIter_Next(generator.get()) : nullptr);
  Owned second = Owned::steal(first ? PyIter_Next(generator.get()) : nullptr);
  _PyInterpreterState_SetEvalFrameFunc(interpreter, before);
  check(second.get());
  if (!probe->fault.empty()) return;
  if (probe->inner_frames != 1 || probe->steps_frames != 2)
    probe->fault = "the interpreter does not call the hook for each frame";
  else if (!is_tuple_of(result.get(), {probe->value, probe->replacement, word, replaced_answer}) ||
           first.get() != replaced_answer || !is_tuple_of(second.get(), {probe->value, replaced_answer}))
    probe->fault = "a frame does not take the parts that it is given";
}

std::string fault_of_layout() {
  static PyObject* const answer = interned("answer");
  auto fresh = [] { return own(PyObject_CallNoArgs(reinterpret_cast<PyObject*>(&PyBaseObject_Type))); };
  Owned globals = own(PyDict_New());
  check(PyDict_SetItemString(globals.get(), "__builtins__", PyEval_GetBuiltins()));
  check(PyDict_SetItem(globals.get(), answer, fresh().get()));
  own(PyRun_String(program, Py_file_input, globals.get(), globals.get()));
  PyObject *inner = dict_get(globals.get(), interned("inner")), *call = dict_get(globals.get(), interned("call")),
           *steps = dict_get(globals.get(), interned("steps"));
  Owned value = fresh(), replacement = fresh();
  for (int i = 0; i < 100; ++i) own(PyObject_CallOneArg(call, value.get()));
  Owned others = own(PyDict_Copy(globals.get()));
  check(PyDict_SetItem(others.get(), answer, fresh().get()));
  Owned twin = own(PyFunction_New(PyFunction_GET_CODE(inner), others.get()));
  Probe tested{globals.get(), others.get(),      inner, twin.get(), PyFunction_GET_CODE(steps),
               value.get(),   replacement.get(), 0,     0,          {}};
  probe = &tested;
  try {
    run_probe(call, steps);
  } catch (...) {
    probe = nullptr;
    throw;
  }
  probe = nullptr;
  return tested.fault;
}

}  // namespace

void probe_frames() {
#if PY_VERSION_HEX >= 0x03100000
  frames_unknown = "this version of Python is newer than those that it knows";
#else
  frames_unknown = fault_of_layout();
#endif
}

}  // namespace graftax
