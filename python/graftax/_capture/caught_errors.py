# SPDX-License-Identifier: Apache-2.0
"""Exceptions that the code of a trace catches, although a tracer or a symbol may have caused them.

Plain Python may raise nothing there: then the trace follows the handler, where the program would not.
"""

from __future__ import annotations

import dis
import functools
import sys
import threading
import types
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import jax

from graftax import _core
from graftax._base.code_line import code_line
from graftax._base.errors import ImpureCallWarning
from graftax._base.given_warnings import note_warning
from graftax._capture.code_owner import is_in_package, is_users
from graftax._capture.numbers.symbols import Symbol, operation

ERROR_CAUGHT = (
    "{name} catches {error} at {place}: an array has no value while it is traced, so the handler is what gets "
    "compiled. Plain Python has a value there and raises nothing. Use jnp.where or graftax.cond instead of an if on "
    "an array, and arrays instead of float(), int(), bool() or .tolist(). If the handler is meant to run while "
    "tracing, let it name jax.errors.{error}."
)

# What C code raises for a value that a symbol has told it, which has made a guard; or for other reasons than numbers.
_OF_KNOWN_VALUES = (
    *(LookupError, StopIteration, StopAsyncIteration, GeneratorExit, OSError, ImportError, NameError, AssertionError),
    *(KeyboardInterrupt, EOFError, MemoryError, RecursionError),
)
_RAISES = dis.opmap["RAISE_VARARGS"]
_LOADS_ATTRIBUTE = frozenset(dis.opmap[name] for name in ("LOAD_ATTR", "LOAD_METHOD") if name in dis.opmap)
ERRORS_OF_TRACERS = (
    *(jax.errors.ConcretizationTypeError, jax.errors.TracerBoolConversionError, jax.errors.TracerArrayConversionError),
    *(jax.errors.TracerIntegerConversionError, jax.errors.NonConcreteBooleanIndexError),
)


@functools.cache
def _handles(filename: str) -> bool:
    """Do handlers in this file count? Those of JAX, NumPy and graftax know what a symbol or a tracer is."""
    return not is_in_package(filename, "jax", "jaxlib", "numpy", "graftax") and not filename.startswith(
        "<frozen importlib"
    )


def may_be_of_a_symbol(error: BaseException, trace: types.TracebackType | None) -> bool:
    """May it have been raised because a number was a symbol, or may another number not raise it?

    Not if the user's own code decided to raise it: whatever it asks a symbol makes a guard. C code and libraries look
    at the type of what they get.
    """
    if isinstance(error, _OF_KNOWN_VALUES):
        return False
    if isinstance(error, AttributeError) and error.obj is not None:  # it says whose attribute is missing
        owner = error.obj if isinstance(error.obj, type) else type(error.obj)
        if not issubclass(owner, Symbol):
            return False
    # The frame that raised, and its instruction.
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return True
    code = trace.tb_frame.f_code
    # An operation of symbols has made its guards before it raises; `__getattr__` raises for the name of an attribute.
    if code is operation.__code__ or code.co_name == "__getattr__":
        return False
    opcode = code.co_code[trace.tb_lasti]
    if opcode == _RAISES:
        return not is_users(code.co_filename)
    return not (isinstance(error, AttributeError) and opcode in _LOADS_ATTRIBUTE)


class Caught:
    """What the code of one trace with symbols has caught."""

    def __init__(self) -> None:
        self.hears = False  # does anything tell of handlers?
        self._suspects: dict[int, BaseException] = {}  # by id
        # This thread counts, and those that the trace starts. `threading` does not know all threads.
        self._other_threads = sys._current_frames().keys() - {threading.get_ident()}

    @property
    def is_suspect(self) -> bool:
        """May a handler have run because of a symbol? Where nobody can listen, anything may have been caught."""
        return bool(self._suspects) or not self.hears

    def at_handler(
        self, code: types.CodeType, error: BaseException, trace: types.TracebackType | None
    ) -> None:  # unmeasured: in an event
        """Notes that a handler of this code begins. `trace` is the traceback of the error."""
        # What other threads, finalizers and signal handlers catch in the midst of a trace says nothing of its symbols.
        if threading.get_ident() in self._other_threads or _core.is_interrupted():
            return
        # A handler that cleans up (`with`, `finally`) raises the exception again: the last handler decides.
        self._suspects.pop(id(error), None)
        if _handles(code.co_filename) and may_be_of_a_symbol(error, trace):
            self._suspects[id(error)] = error

    def passes(self, error: BaseException) -> None:  # unmeasured: in an event
        """Notes that a frame ends with the exception, so it is not caught yet."""
        self._suspects.pop(id(error), None)


class FrameEvents:
    """The trace function of a thread on Python 3.11.

    A thread can have only one. So this one calls another that wants to hear of calls, if there is one.
    """

    def __init__(self, caught: Caught) -> None:
        self._caught = caught
        self.call_listener: Callable[[types.FrameType, str, Any], Any] | None = None

    def __call__(self, frame: types.FrameType, event: str, arg: Any) -> Any:  # unmeasured: in an event
        local = self.call_listener(frame, event, arg) if self.call_listener is not None and event == "call" else None
        # Events of lines would be far more than those of exceptions, and nobody asks for them.
        frame.f_trace_lines = False

        def on_event(frame: types.FrameType, event: str, arg: Any) -> Any:
            if event == "exception" and isinstance(arg[1], BaseException):
                # The exception itself does not have this traceback yet.
                self._caught.at_handler(frame.f_code, arg[1], arg[2])
            elif local is not None and self.call_listener is not None:
                local(frame, event, arg)
            return on_event

        return on_event


if sys.version_info >= (3, 12):
    _monitoring = sys.monitoring
    _IDS = (3, 4, 1)  # of tools; those without a name in the documentation of `sys.monitoring` come first
    _LOCK = threading.Lock()
    _running: list[Caught] = []
    _tool: int | None = None

    def _on_handled(code: types.CodeType, offset: int, error: BaseException) -> None:  # unmeasured: in an event
        for caught in list(_running):
            caught.at_handler(code, error, error.__traceback__)

    def _on_unwind(code: types.CodeType, offset: int, error: BaseException) -> None:  # unmeasured: in an event
        for caught in list(_running):
            caught.passes(error)

    def _begin(caught: Caught) -> bool:
        global _tool
        with _LOCK:
            if _tool is None:
                _tool = next((i for i in _IDS if _monitoring.get_tool(i) is None), None)
                if _tool is None:
                    return False
                _monitoring.use_tool_id(_tool, "graftax: what is caught")
                _monitoring.register_callback(_tool, _monitoring.events.EXCEPTION_HANDLED, _on_handled)
                _monitoring.register_callback(_tool, _monitoring.events.PY_UNWIND, _on_unwind)
                _monitoring.set_events(_tool, _monitoring.events.EXCEPTION_HANDLED | _monitoring.events.PY_UNWIND)
            _running.append(caught)
            return True

    def _end(caught: Caught) -> None:
        global _tool
        with _LOCK:
            _running.remove(caught)
            if not _running and _tool is not None:
                _monitoring.set_events(_tool, 0)
                _monitoring.register_callback(_tool, _monitoring.events.EXCEPTION_HANDLED, None)
                _monitoring.register_callback(_tool, _monitoring.events.PY_UNWIND, None)
                _monitoring.free_tool_id(_tool)
                _tool = None

else:  # unmeasured: on Python 3.11 what measures is the trace function

    def _begin(caught: Caught) -> bool:
        """Listens, unless a debugger does. The last frame with an event of an exception is the one that catches it."""
        if sys.gettrace() is not None:
            return False
        events = FrameEvents(caught)
        sys.settrace(events)
        # For the threads that the code starts, which may catch something as well.
        threading.settrace(events)
        return True

    def _end(caught: Caught) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]


@contextmanager
def catching() -> Generator[Caught]:
    """While entered, notes what is caught in this thread, and in those that begin meanwhile."""
    caught = Caught()
    caught.hears = _begin(caught)
    try:
        yield caught
    finally:
        if caught.hears:
            _end(caught)


# ---- errors of JAX about a tracer


def tell_of_caught(name: str, raised: list[BaseException]) -> None:
    """Warns of errors about a tracer that were raised in a trace of the function `name`, and caught by its code."""
    # Each has left a frame of a trace that ended well all the same, so code has caught it.
    for error in raised:
        traceback, class_name = error.__traceback__, type(error).__name__
        if traceback is None or not _handles(traceback.tb_frame.f_code.co_filename):  # JAX itself has tried it
            continue
        code = traceback.tb_frame.f_code
        # Code that names an error of JAX knows that it runs under a trace.
        if not any(hasattr(jax.errors, error_name) for error_name in code.co_names):
            location = code_line(code.co_filename, traceback.tb_lineno)
            message = ERROR_CAUGHT.format(name=name, error=class_name, place=location)
            note_warning()
            warnings.warn_explicit(message, ImpureCallWarning, code.co_filename, traceback.tb_lineno)
    raised.clear()
