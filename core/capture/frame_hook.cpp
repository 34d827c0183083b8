// SPDX-License-Identifier: Apache-2.0
#include "capture/frame_hook.h"

#include "capture/interruptions.h"
#include "capture/jax_frames.h"
#include "capture/named_scopes.h"
#include "capture/session.h"
#include "python/function_events.h"
#include "python/hooks.h"
#include "python/thread_stack.h"

#include <optional>
#include <unordered_set>

namespace graftax {

namespace {

PerThread<Session> sessions;

Session* innermost() { return sessions.all().empty() ? nullptr : sessions.innermost(PyThreadState_Get()); }

bool is_only_thread(PyThreadState* thread) {
  for (const auto& entry : sessions.all())
    if (entry.thread != thread) return false;
  return true;
}

_PyFrameEvalFunction previous_hook = nullptr;  // that of a debugger or a compiler, which runs below ours; null: none
// Code that no session has to hear of (JAX, the standard library): kept for the life of the process.
std::unordered_set<PyObject*>& unobserved_code() {
  static auto* all = new std::unordered_set<PyObject*>();
  return *all;
}

PyObject* evaluate(PyThreadState* state, struct _PyInterpreterFrame* frame, int thrown) {
  return previous_hook ? previous_hook(state, frame, thrown) : _PyEval_EvalFrameDefault(state, frame, thrown);
}

PyObject* hook(PyThreadState* state, struct _PyInterpreterFrame* raw, int thrown);

// Puts one hook in another's place; where the interpreter has a third one, whoever came after calls ours.
void exchange_hooks(_PyFrameEvalFunction from, _PyFrameEvalFunction to) {
  PyInterpreterState* interpreter = PyInterpreterState_Get();
  if (_PyInterpreterState_GetEvalFrameFunc(interpreter) == from) _PyInterpreterState_SetEvalFrameFunc(interpreter, to);
}

_PyFrameEvalFunction unhooked() { return previous_hook ? previous_hook : _PyEval_EvalFrameDefault; }

// Takes the hook away while one frame runs. It is the interpreter's: only where no other thread has a session.
class Unhooked {
 public:
  Unhooked() { exchange_hooks(hook, unhooked()); }
  Unhooked(const Unhooked&) = delete;
  Unhooked& operator=(const Unhooked&) = delete;
  ~Unhooked() { exchange_hooks(unhooked(), hook); }
};

// Sets a flag of the session for the time of a scope.
struct Busy {
  bool& flag;
  explicit Busy(bool& f) : flag(f) { flag = true; }
  ~Busy() { flag = false; }
};

constexpr int most_again = 1000;  // code may try again for ever

// Tells the session of code that it has not met. False with an exception set, which is to be raised in its place. The
// code of the trace may catch that, and call the same again: it would run on what the trace has no copies of.
bool announce(Session& session, const Frame& frame) {
  Busy busy(session.busy);
  auto refused = session.refused.find(frame.code());
  if (refused != session.refused.end() && session.raised_again++ < most_again) {
    set_error(refused->second);
    return false;
  }
  // Copies are announced as what they stand for: the read set knows the caller's functions and globals.
  auto* code = reinterpret_cast<PyCodeObject*>(frame.code());
  PyObject* function = frame.function() ? session.original(frame.function()) : Py_None;
  if (session.made_functions.count(function)) function = Py_None;  // its state is the trace's own
  PyObject* first = code->co_argcount > 0 && frame.variable(0) ? frame.variable(0) : Py_None;
  PyObject* args[] = {frame.code(), session.original(frame.globals()), function, first};
  std::optional<Unhooked> off;  // nobody has to hear of the frames of `enter`, which are many
  if (is_only_thread(PyThreadState_Get())) off.emplace();
  Owned answer = Owned::steal(PyObject_Vectorcall(session.enter, args, 4, nullptr));
  off.reset();
  if (!answer) return false;
  if (answer.get() == Py_NotImplemented) {  // nobody has to hear of it
    if (unobserved_code().insert(frame.code()).second) Py_INCREF(frame.code());
    return true;
  }
  if (answer.get() == Py_False) return true;  // it wants to hear of each frame
  if (answer.get() == Py_True) {              // of each, but for those of this function
    if (frame.function() && session.known_functions.insert(frame.function()).second)
      session.held.push(frame.function());
    return true;
  }
  if (answer.get() == Py_None) {
    session.known_code[frame.code()].push_back(session.original(frame.globals()));
    session.held.push(frame.code());
    return true;
  }
  if (session.refused.emplace(frame.code(), answer.get()).second) {
    session.held.push(frame.code());
    session.held.push(answer.get());
  }
  set_error(answer.get());
  return false;
}

// The defaults of a function are in its frame by now: those of the rebuilt one take their place.
void replace_defaults(Frame& frame, PyObject* own, PyObject* twin) {
  auto* code = reinterpret_cast<PyCodeObject*>(frame.code());
  auto replace = [&](Py_ssize_t at, PyObject* before, PyObject* after) {
    if (after && before != after && frame.variable(at) == before) frame.set_variable(at, after);
  };
  PyObject *before = PyFunction_GET_DEFAULTS(own), *after = PyFunction_GET_DEFAULTS(twin);
  // Only where the frame still has the default: an argument of the call stays.
  Py_ssize_t count = before && after ? PyTuple_GET_SIZE(before) : 0;
  if (count <= code->co_argcount && count && PyTuple_GET_SIZE(after) == count)
    for (Py_ssize_t i = 0; i < count; ++i)
      replace(code->co_argcount - count + i, PyTuple_GET_ITEM(before, i), PyTuple_GET_ITEM(after, i));
  before = PyFunction_GET_KW_DEFAULTS(own), after = PyFunction_GET_KW_DEFAULTS(twin);
  if (!before || !after || before == after) return;
  Owned names = Owned::steal(PyCode_GetVarnames(code));
  if (!names) return PyErr_Clear();
  for (int k = 0; k < code->co_kwonlyargcount; ++k) {
    PyObject* name = PyTuple_GET_ITEM(names.get(), code->co_argcount + k);
    PyObject* value = dict_get(before, name);
    if (value) replace(code->co_argcount + k, value, dict_get(after, name));
  }
}

// Is it the handler of a signal? Asking runs Python, of which nobody hears.
bool interrupts(Session& session, const Frame& frame) {
  Busy busy(session.busy);
  return is_signal_handler(frame);
}

// Tells the session of a frame, where it has to be told. Null with an exception set, which is to be raised in its place.
const FrameDecision* meet(Session& session, const Frame& frame) {
  // Most frames end here: their code has run with these globals before.
  PyObject* code = frame.code();
  FrameDecision& met = session.decisions[(reinterpret_cast<uintptr_t>(code) >> 5) % session.decisions.size()];
  if (met.code == code && met.globals == frame.globals()) return &met;
  met.code = nullptr;
  auto is_known = [&] { return session.knows(code, frame.globals()) || unobserved_code().count(code); };
  const bool is_known_function = frame.function() && session.known_functions.count(frame.function());
  if (!is_known() && !is_known_function) {
    static const FrameDecision interruption{nullptr, nullptr, nullptr, false, false, false, false, true};
    if (interrupts(session, frame)) return &interruption;
    if (!announce(session, frame)) return nullptr;
  }
  // Without its code the decision is for this frame alone: the next one is announced too.
  met = {is_known() ? code : nullptr,
         frame.globals(),
         session.shadow(frame.globals()),
         session.replaced.count(code) > 0,
         session.inside.frames() && session.inside.frames()->may_be(frame),
         !unobserved_code().count(code) && is_of_method(reinterpret_cast<PyCodeObject*>(code))};
  met.answerable = session.answered_codes.count(code) || (session.answers_methods && met.method) ||
                   (session.answers_after >= 0 && !unobserved_code().count(code));
  return &met;
}

// The function of a frame, and what it reads of its parts, become those of the rebuilt one.
void replace_function(Session& session, Frame& frame, bool starts) {
  PyObject *own = frame.function(), *twin = session.twin(own);
  if (twin == own) return;
  if (starts) replace_defaults(frame, own, twin);
  frame.set_function(twin);
}

// Is nothing below this frame anybody else's? -1 with an exception set.
int stays_inside(Session& session, const Frame& frame) {
  Busy busy(session.busy);
  try {
    return session.inside.holds(frame);
  } catch (nb::python_error& error) {
    error.restore();
    return -1;
  } catch (const std::exception&) {
    PyErr_NoMemory();
    return -1;
  }
}

// The scope of a method that begins, if it is one. What cannot be named runs without; an interrupt stays set.
Owned scope_of(Session& session, PyThreadState* state, PyObject* self) {
  Busy busy(session.busy);
  try {
    return enter_scope(state, self);
  } catch (nb::python_error& error) {
    if (error.matches(PyExc_Exception)) error.discard_as_unraisable("the scope of a method");
    else error.restore();
  } catch (const std::exception&) {}
  return {};
}

// What a call is given, in the order of its parameters.
Owned arguments_of(const Frame& frame) {
  auto* code = reinterpret_cast<PyCodeObject*>(frame.code());
  Py_ssize_t count = code->co_argcount + code->co_kwonlyargcount + ((code->co_flags & CO_VARARGS) != 0) +
                     ((code->co_flags & CO_VARKEYWORDS) != 0);
  Owned out = Owned::steal(PyTuple_New(count));
  for (Py_ssize_t i = 0; out && i < count; ++i) {
    if (!frame.variable(i)) return {};
    PyTuple_SET_ITEM(out.get(), i, Py_NewRef(frame.variable(i)));
  }
  return out;
}

constexpr int not_answered = -1;

// Is a call of this code one that may be answered?
bool may_be_answered(Session& session, PyObject* code) {
  if (session.answered_codes.count(code) || session.answers_after < 0) return true;
  try {
    auto [calls, is_new] = session.calls.emplace(code, 0);
    if (is_new) session.held.push(code);
    return calls->second != not_answered && calls->second++ >= session.answers_after;
  } catch (const std::exception&) {
    return false;
  }
}

// Runs a frame that begins, unless its call is answered. Then the frame is given an exception at once, with which the
// interpreter itself puts it away, and the answer takes the place of that.
PyObject* run_or_answer(Session& session, PyThreadState* state, struct _PyInterpreterFrame* raw, bool answerable) {
  auto* frame = reinterpret_cast<Frame*>(raw);
  if (!answerable || !session.answer || !frame->function()) return evaluate(state, raw, 0);
  if (session.unanswered_code == frame->code()) {
    session.unanswered_code = nullptr;
    return evaluate(state, raw, 0);
  }
  if (!may_be_answered(session, frame->code())) return evaluate(state, raw, 0);
  Owned arguments = arguments_of(*frame);
  if (!arguments) return evaluate(state, raw, PyErr_Occurred() ? 1 : 0);
  Owned hold = Owned::borrow(session.answer.get());
  PyObject* given[] = {frame->function(), arguments.get()};
  Owned answer;
  {
    Busy busy(session.busy);  // what it runs itself is no part of the trace
    answer = Owned::steal(PyObject_Vectorcall(hold.get(), given, 2, nullptr));
  }
  if (!answer) return evaluate(state, raw, 1);
  if (answer.get() == Py_None) {  // all frames of this code run from now on
    session.answered_codes.erase(frame->code());
    session.calls[frame->code()] = not_answered;
  }
  if (answer.get() == Py_None || answer.get() == Py_NotImplemented) return evaluate(state, raw, 0);
  if (!PyTuple_Check(answer.get()) || PyTuple_GET_SIZE(answer.get()) != 1) {
    PyErr_SetString(PyExc_SystemError, "a call was answered with no tuple");
    return evaluate(state, raw, 1);
  }
  PyErr_SetNone(PyExc_StopIteration);
  if (PyObject* result = evaluate(state, raw, 1)) return result;
  PyErr_Clear();
  return Py_NewRef(PyTuple_GET_ITEM(answer.get(), 0));
}

PyObject* run_method(Session& session, PyThreadState* state, struct _PyInterpreterFrame* raw, bool answerable) {
  auto* frame = reinterpret_cast<Frame*>(raw);
  PyObject* self = frame->variable(0);
  if (!self || self == session.method_self) return run_or_answer(session, state, raw, answerable);
  // What runs in the place of a call that was asked about has the scope of that call already.
  bool is_named = session.unanswered_code == frame->code();
  Owned scope = is_named ? Owned() : scope_of(session, state, self);
  if (!scope && PyErr_Occurred()) return evaluate(state, raw, 1);
  PyObject* around = scope || is_named ? std::exchange(session.method_self, self) : session.method_self;
  Owned result = Owned::steal(run_or_answer(session, state, raw, answerable));
  session.method_self = around;
  if (!scope) return result.release();
  Busy busy(session.busy);
  return leave_scope(scope) ? result.release() : nullptr;
}

// Keeps the exception that a frame ends with, where it is one of those that are told.
void note_raised(Session& session) {
  if (!session.telling || !PyErr_Occurred() || !PyErr_ExceptionMatches(session.telling)) return;
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  // Each frame on the way out ends with the same exception: it is kept once.
  Py_ssize_t count = PyList_GET_SIZE(session.raised);
  bool is_new = value && (count == 0 || PyList_GET_ITEM(session.raised, count - 1) != value);
  if (is_new && PyList_Append(session.raised, value) < 0) PyErr_Clear();
  PyErr_Restore(type, value, traceback);
}

PyObject* run_frame(Session* session, PyThreadState* state, struct _PyInterpreterFrame* raw, int thrown) {
  auto* frame = reinterpret_cast<Frame*>(raw);
  // A frame that goes on with an exception, such as a generator's, was met when it began. Only its globals count.
  FrameDecision resumed;
  const FrameDecision* met = &resumed;
  if (thrown) {
    resumed = {nullptr, frame->globals(), session->shadow(frame->globals()),
               session->replaced.count(frame->code()) > 0};
  } else {
    try {
      met = meet(*session, *frame);
    } catch (const std::exception&) {
      PyErr_NoMemory();
      met = nullptr;
    }
    if (!met) return evaluate(state, raw, 1);
    if (met->interrupts) {
      Busy busy(session->busy), handles(session->in_handler);
      return evaluate(state, raw, 0);
    }
  }
  if (met->replaced && frame->function()) replace_function(*session, *frame, !thrown);
  PyObject *own_globals = frame->globals(), *shadow = met->shadow;
  bool method = met->method && !thrown, answerable = met->answerable && !thrown;
  if (session->noted && !thrown && !unobserved_code().count(frame->code())) session->note(frame->code());
  // Globals without a rebuilt value. Below JAX's own frames that run nobody else's code the hook is off.
  if (shadow == own_globals) {
    int inside = met->inner && !thrown && is_only_thread(state) ? stays_inside(*session, *frame) : 0;
    if (inside < 0) return evaluate(state, raw, 1);
    if (inside == 0 && method) return run_method(*session, state, raw, answerable);
    if (inside == 0) return answerable ? run_or_answer(*session, state, raw, answerable) : evaluate(state, raw, thrown);
    Busy made_by_jax(session->inside_jax);
    Unhooked off;
    return evaluate(state, raw, thrown);
  }
  bool stays = frame->is_of_generator();  // other frames are gone when they have returned
  // The frame sees the rebuilt globals. It is borrowed memory: nothing of it is read after it has run, unless it stays.
  Owned hold = Owned::borrow(frame->code());
  frame->set_globals(shadow);
  PyObject* result = method       ? run_method(*session, state, raw, answerable)
                     : answerable ? run_or_answer(*session, state, raw, answerable)
                                  : evaluate(state, raw, thrown);
  if (stays) frame->set_globals(own_globals);
  return result;
}

PyObject* hook(PyThreadState* state, struct _PyInterpreterFrame* raw, int thrown) {
  Session* session = sessions.innermost(state);
  // What a debugger, a profiler or coverage does between two steps of the program is no part of it.
  if (!session || session->busy || session->collecting || state->tracing) return evaluate(state, raw, thrown);
  PyObject* result = run_frame(session, state, raw, thrown);
  if (!result) note_raised(*session);
  return result;
}

void collect(bool begins) {
  if (Session* session = innermost()) session->collecting = begins;
}

class Scope {
 public:
  explicit Scope(Session& session) : session_(session) {
    if (frames_unknown.empty()) hear_collections(collect);
    sessions.enter(&session);
    if (!frames_unknown.empty()) return;
    // The first session puts the hook in, and the last one takes it out.
    if (sessions.all().size() == 1) {
      previous_hook = _PyInterpreterState_GetEvalFrameFunc(PyInterpreterState_Get());
      if (previous_hook == _PyEval_EvalFrameDefault) previous_hook = nullptr;
    }
    exchange_hooks(unhooked(), hook);  // another thread may have taken it away for a frame of its own
  }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
  ~Scope() {
    sessions.leave(&session_);
    if (!frames_unknown.empty() || !sessions.all().empty()) return;
    exchange_hooks(hook, unhooked());
    hear_collections_no_more();
  }

 private:
  Session& session_;
};

}  // namespace

void bind_frames(nb::module_& m) {
  tell_function_made = function_made;
  probe_frames();
  m.def(
      "frames_unknown", [] { return frames_unknown; },
      "Why the code under a trace is not heard of by this interpreter; empty where it is.");
  m.def(
      "forget_frames", [](std::string reason) { frames_unknown = std::move(reason); }, nb::arg("reason"),
      "As if the interpreter's frames were not known, for the rest of the process. For tests.");
  m.def(
      "run_watched",
      [](nb::handle f, nb::handle enter, nb::handle known, nb::list shadows, nb::list functions, InnerFrames* inner,
         bool quiet, nb::object telling, nb::object raised) {
        Session session;
        session.quiet = quiet;
        if (PyTuple_Check(telling.ptr()) && PyList_Check(raised.ptr())) {
          session.telling = telling.ptr();
          session.raised = raised.ptr();
        }
        session.inside = Inside(inner);
        session.enter = enter.ptr();
        for (nb::handle item : nb::borrow<nb::object>(known)) {
          nb::tuple pair = nb::cast<nb::tuple>(item);
          PyObject* code = nb::object(pair[0]).ptr();
          session.known_code[code].push_back(reinterpret_cast<PyObject*>(nb::cast<uintptr_t>(nb::object(pair[1]))));
          session.held.push(code);
        }
        session.sees(shadows, functions);
        Scope scope(session);
        return nb::steal(check(PyObject_CallOneArg(hooks::with_room.get(), f.ptr())));
      },
      nb::arg("f"), nb::arg("enter"), nb::arg("known"), nb::arg("shadows"), nb::arg("functions"),
      nb::arg("inner").none(), nb::arg("quiet") = false, nb::arg("telling") = nb::none(),
      nb::arg("raised") = nb::none(),
      nb::sig("def run_watched(f: Callable[[], Any], enter: Callable[[Any, dict[str, Any], Any, Any], Any], known: "
              "Iterable[tuple[Any, int]], shadows: list[tuple[dict[str, Any], dict[str, Any]]], functions: "
              "list[tuple[Any, Any]], "
              "inner: InnerFrames | None, quiet: bool = False, telling: tuple[type[BaseException], ...] | None = None, "
              "raised: list[BaseException] | None = None) -> Any"),
      "f(), while frames of code that is not known with their globals (by id; 0 for any) are announced: enter(code, "
      "globals, function, first argument) "
      "returns None, False to hear of the next one too, True to hear of those of other functions, NotImplemented for "
      "code that nobody ever has to hear of, or an "
      "exception to raise in its place. Frames of the globals in `shadows` see the other dict; a function in "
      "`functions` "
      "runs with the parts of the other one. Frames below those of `inner` are not heard of. Where it is `quiet`, the "
      "trace is none "
      "that others are part of. Exceptions of the classes in `telling` that a frame ends with are put into `raised`.");
  m.def(
      "sees_too",
      [](nb::list shadows, nb::list functions) {
        if (Session* session = innermost()) session->sees(std::move(shadows), std::move(functions));
      },
      nb::arg("shadows"), nb::arg("functions"),
      nb::sig("def sees_too(shadows: list[tuple[dict[str, Any], dict[str, Any]]], functions: list[tuple[Any, Any]]) -> "
              "None"),
      "From now on this thread's trace sees these too, as `run_watched` says.");
  m.def(
      "seen_function",
      [](nb::object f) {
        Session* session = innermost();
        return session ? nb::borrow(session->twin(f.ptr())) : f;
      },
      nb::arg("function"), nb::sig("def seen_function(function: Any) -> Any"),
      "What runs in the place of a function in this thread's trace.");
  m.def(
      "seen_globals",
      [](nb::object d) {
        Session* session = innermost();
        return session ? nb::borrow(session->shadow(d.ptr())) : d;
      },
      nb::arg("globals"), nb::sig("def seen_globals(globals: dict[str, Any]) -> dict[str, Any]"),
      "What frames of these globals see in this thread's trace.");
  m.def(
      "stands_for",
      [](nb::handle copy, nb::handle original) {
        if (Session* session = innermost()) session->stands_for(copy.ptr(), original.ptr());
      },
      nb::arg("copy"), nb::arg("original"), nb::sig("def stands_for(copy: object, original: object) -> None"),
      "A copy of a function or of its globals is announced as the original, for the rest of this thread's trace.");
  m.def(
      "give_parts",
      [](nb::handle function, nb::dict globals, nb::object closure) {
        if (!PyFunction_Check(function.ptr())) raise_error(PyExc_TypeError, "expected a function");
        auto* f = reinterpret_cast<PyFunctionObject*>(function.ptr());
        if (f->func_globals != globals.ptr()) Py_SETREF(f->func_globals, globals.release().ptr());
        check(PyFunction_SetClosure(function.ptr(), closure.ptr()));  // the interpreter forgets what it knew of it
      },
      nb::arg("function"), nb::arg("globals"), nb::arg("closure").none(),
      nb::sig("def give_parts(function: Any, globals: dict[str, Any], closure: tuple[Any, ...] | None) -> None"),
      "Gives a function that a trace has made other globals and cells.");
  m.def(
      "made_in_trace",
      [](nb::handle f) {
        Session* session = innermost();
        return session && session->made_functions.count(f.ptr()) > 0;
      },
      nb::arg("function"), "Has this thread's trace made this function? Known from 3.12 on.");
  m.def(
      "made_with",
      [](const std::vector<nb::object>& scopes) -> nb::object {
        Session* session = innermost();
        if (!session || PY_VERSION_HEX < 0x030C0000) return nb::none();
        nb::list functions;
        for (PyObject* function : session->made_functions) {
          if (session->original(function) != function) continue;  // a copy, which is ours
          for (const nb::object& scope : scopes)
            if (PyFunction_GET_GLOBALS(function) == scope.ptr()) functions.append(nb::borrow(function));
        }
        return functions;
      },
      nb::arg("scopes"), nb::sig("def made_with(scopes: Sequence[dict[str, Any]]) -> list[Any] | None"),
      "The functions with these globals that code of this thread's trace has made; None where that is not known.");
  m.def(
      "answer_calls",
      [](nb::object answer, nb::list codes, bool methods, int after) {
        Session* session = innermost();
        if (!session) return;
        session->answer = Owned::borrow(answer.ptr());
        session->answers_methods = methods;
        session->answers_after = after;
        for (nb::handle code : codes) {
          session->answered_codes.insert(code.ptr());
          session->held.push(code.ptr());
        }
        for (FrameDecision& decision : session->decisions) decision.code = nullptr;  // made without this answer
      },
      nb::arg("answer"), nb::arg("codes"), nb::arg("methods"), nb::arg("after"),
      nb::sig("def answer_calls(answer: Callable[[Any, tuple[Any, ...]], Any], codes: list[Any], methods: bool, "
              "after: int) -> None"),
      "For the rest of this thread's trace, answer(function, its arguments in the order of its parameters) is asked "
      "before a frame of these codes runs, with `methods` before that of each method of an object in the graph, and "
      "before that of any function from the call on that follows `after` others (-1: none). Its answer is "
      "NotImplemented to let the frame run, None to let all frames of the code run, or a tuple of the result.");
  m.def(
      "call_unanswered",
      [](nb::handle function, nb::args arguments, nb::kwargs keywords) {
        Session* session = innermost();
        struct Scope {
          Session* session;
          bool was_busy = session && std::exchange(session->busy, false);
          ~Scope() {
            if (session) session->unanswered_code = nullptr, session->busy = was_busy;
          }
        } scope{session};
        if (session && PyFunction_Check(function.ptr())) session->unanswered_code = PyFunction_GET_CODE(function.ptr());
        return nb::steal(check(PyObject_Call(function.ptr(), arguments.ptr(), keywords.ptr())));
      },
      nb::arg("function"), nb::arg("args"), nb::arg("kwargs"),
      nb::sig("def call_unanswered(function: Any, /, *args: object, **kwargs: object) -> Any"),
      "function(*args, **kwargs), whose own frame nobody is asked for.");
  m.def(
      "note_codes",
      [](nb::object noted) {
        Session* session = innermost();
        if (!session) return nb::object(nb::none());
        nb::object before = session->noted ? nb::borrow(session->noted.get()) : nb::object(nb::none());
        session->noted = noted.is_none() ? Owned() : Owned::borrow(noted.ptr());
        session->noted_codes.clear();
        return before;
      },
      nb::arg("noted").none(), nb::sig("def note_codes(noted: list[Any] | None) -> list[Any] | None"),
      "From now on this list gets the code of each frame of this thread's trace, but for JAX's and the like. Returns "
      "the list that got it before.");
  m.def("is_watched", &is_watched, "Is this thread inside of a trace that notes what is read?");
  m.def(
      "is_interrupted",
      [] {
        Session* session = innermost();
        return session && (session->collecting || session->in_handler);
      },
      "Does what runs interrupt this thread's trace: a finalizer that the collector calls, or a handler of a signal?");
}

void function_made(PyObject* function) {
  Session* session = innermost();
  if (session && !session->inside_jax) session->made_functions.insert(function);  // JAX's own are never told of
}

void function_gone(PyObject* function) {
  for (const auto& entry : sessions.all())
    entry.value->made_functions.erase(function);  // its address may be used again
}

bool is_watched() {
  Session* session = innermost();
  return session && !session->quiet;
}

}  // namespace graftax
