# SPDX-License-Identifier: Apache-2.0
"""Calls that a compiled function cannot repeat: time, random numbers, print, files. A trace names the user's.

What code names decides whether it is looked at, its calls decide what is told. From Python 3.12 on the interpreter
reports the calls of that code alone (`sys.monitoring`); before, a trace function sees where such a call begins.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import itertools
import os
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

from graftax._base.errors import ImpureCallWarning
from graftax._base.missing import MISSING
from graftax._capture.bytecode import Names, cells_of, is_never_asked, is_users_code, names_of
from graftax._capture.caught_errors import FrameEvents

IMPURE = (
    "{name} calls {call} ({place}). A compiled function does that once, when it is traced; later calls {later}. {way} "
    "warn_impure=False turns this warning off."
)


class Kind(NamedTuple):
    later: str
    way: str


_CALLBACK = "jax.experimental.io_callback calls a function in each run."
_VALUE = "repeat the value of then"
_CLOCK = Kind(_VALUE, f"Take the time outside, around jax.block_until_ready, or give it as an argument. {_CALLBACK}")
_RANDOM = Kind(_VALUE, "Give the function a jax.random key, and draw from that.")
_VALUES = Kind(_VALUE, f"Make the value outside, and give it as an argument. {_CALLBACK}")
_ENVIRON = Kind("do not look again", "Read it outside, and give the value as an argument.")
_PRINT = Kind("print nothing", "jax.debug.print prints in each run, and shows values in place of tracers.")
_FILE = Kind("leave the file alone", f"Read it outside, and give its content as an argument. {_CALLBACK}")
_INPUT = Kind("do not ask again", f"Ask outside, and give the answer as an argument. {_CALLBACK}")
_WARN = Kind("warn of nothing", "jax.debug.callback and jax.experimental.io_callback call a function in each run.")
_HANDED = Kind(
    "leave the object alone",
    "The object is one of C code below a registered class: it counts by identity, and no change of it is seen. Change "
    "it outside, and put a new one into what the function is given.",
)
_LOG = Kind("log nothing", "jax.debug.callback and jax.experimental.io_callback call a function in each run.")

_CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
_LOGS = ("debug", "info", "warning", "error", "exception", "critical", "log", "warn")
_NOW = ("now", "today", "utcnow")

# module -> (kind, names of its functions); where there are none, all of its public ones
_FUNCTIONS: dict[str, tuple[Kind, tuple[str, ...]]] = {
    "time": (_CLOCK, (*_CLOCKS, *(f"{name}_ns" for name in _CLOCKS), "sleep", "clock_gettime", "strftime")),
    "random": (_RANDOM, ()),
    "numpy.random": (_RANDOM, ()),
    "uuid": (_VALUES, ("uuid1", "uuid4", "uuid6", "uuid7")),
    "secrets": (_VALUES, ("token_bytes", "token_hex", "token_urlsafe", "choice", "randbelow", "randbits")),
    "os": (_VALUES, ("urandom", "getcwd", "getcwdb", "getpid", "getloadavg")),
    "sys": (_VALUES, ("getrecursionlimit", "getrefcount", "getswitchinterval")),
    "builtins": (_PRINT, ("print",)),
    "io": (_FILE, ("open",)),
    "warnings": (_WARN, ("warn", "warn_explicit")),
    "logging": (_LOG, _LOGS),
}
# What is impure where it is given nothing.
_UNSEEDED = {
    "time": (_CLOCK, ("localtime", "gmtime", "ctime", "asctime")),
    "random": (_RANDOM, ("Random",)),
    "numpy.random": (_RANDOM, ("default_rng", "RandomState", "SeedSequence")),
}


class Call(NamedTuple):
    """A function that cannot be replayed."""

    name: str
    kind: Kind
    unseeded: bool = False  # only where it is given nothing


class _Table(NamedTuple):
    calls: dict[Any, Call]
    types: frozenset[type]  # of these functions: whatever is not of one of these types is not hashed
    states: dict[int, str]  # the generators of the modules `random` and `numpy.random`
    codes: dict[int, Call]  # of methods, and of the environment: whose they are is not known before they run
    names: frozenset[str]


@functools.cache
def _table(modules: tuple[str, ...]) -> _Table:
    calls: dict[Any, Call] = {}
    states: dict[int, str] = {}
    for module in modules:
        names = vars(sys.modules[module])
        if module in ("random", "numpy.random"):
            states[id(names["random"].__self__)] = module
        unseeded, (kind, chosen) = _UNSEEDED.get(module, (_RANDOM, ()))[1], _FUNCTIONS[module]
        for name in chosen or names["__all__"]:
            value = names.get(name)
            if callable(value) and not isinstance(value, type) and name not in unseeded:
                calls[value] = Call("open" if name == "open" else f"{module}.{name}".removeprefix("builtins."), kind)
        calls.update((names[name], Call(f"{module}.{name}", _UNSEEDED[module][0], True)) for name in unseeded)
    calls[builtins.input] = Call("input", _INPUT)
    if "logging" in modules:
        methods = vars(sys.modules["logging"].Logger)
        calls.update((methods[name], Call(f"Logger.{name}", _LOG)) for name in _LOGS if name in methods)
    codes = {id(f.__code__): call for f, call in calls.items() if call.name.startswith("Logger.")}
    codes.update((id(code), Call("os.environ", _ENVIRON)) for code in _ENVIRON_CODES)
    last = frozenset(call.name.rpartition(".")[2] for call in calls.values()) | {*_NOW, "environ", "getenv"}
    kinds = frozenset(map(type, calls)) | {type(f.__func__) for f in calls if isinstance(f, types.MethodType)}
    return _Table(calls, kinds, states, codes, last)


def _known() -> _Table:
    """Of the modules that are imported by now: nobody calls the others."""
    return _of_modules(len(sys.modules))


@functools.lru_cache(1)
def _of_modules(count: int) -> _Table:
    return _table(tuple(name for name in _FUNCTIONS if name in sys.modules))


_ENVIRON_CODES: tuple[types.CodeType, ...] = tuple(
    vars(type(os.environ))[name].__code__ for name in ("__getitem__", "__setitem__", "__delitem__", "__iter__")
)
_ENVIRON_FILES = ("<frozen os>", os.__file__, "<frozen _collections_abc>")  # what is between it and who asks


def _call_of(function: Any, first: Any = MISSING) -> Call | None:
    """What a function is, if it cannot be replayed; `first` is its first argument, if it has one."""
    known = _known()
    if type(function) is types.MethodType and type(function.__func__) not in known.types:
        return None
    if type(function) is types.BuiltinMethodType and function.__name__ in _NOW:
        return Call(f"datetime.{function.__name__}", _VALUES) if _is_date(function.__self__) else None
    call = known.calls.get(function) if type(function) in known.types else None
    if call is None and id(first) in known.states and hasattr(function, "__name__"):
        return Call(f"{known.states[id(first)]}.{function.__name__}", _RANDOM)
    return call


def _handing_over(function: Any) -> Call | None:
    """What a function is that was given an object of C code, if it is C code itself. Builtins only look at it."""
    if isinstance(function, (types.FunctionType, type)) or getattr(function, "__module__", "") == "builtins":
        return None
    if isinstance(function, types.MethodType) and isinstance(function.__func__, types.FunctionType):
        return None
    return Call(str(getattr(function, "__qualname__", type(function).__name__)), _HANDED)


def _is_date(value: Any) -> bool:
    module = sys.modules.get("datetime")
    return module is not None and type(value) is type and issubclass(value, module.date)


# ---- what code names

_HAS_MONITORING = sys.version_info >= (3, 12)
_ANYWHERE = -1
_Offsets = dict[int, "Call | None"]


class _Scope(NamedTuple):
    """Where the names of one code object are looked up."""

    code: types.CodeType
    scope: dict[str, Any]
    cells: dict[str, Any]
    imports: dict[str, str]

    def value(self, chain: tuple[str, ...]) -> Any:
        """What a chain of names leads to, or the first object on its way that is no module; MISSING without one."""
        name, *attributes = chain
        if name in self.imports:
            value = sys.modules.get(self.imports[name], MISSING)
        elif name in self.cells:
            value = self.cells[name]
        elif name in self.code.co_freevars:
            return MISSING
        else:
            value = self.scope.get(name, vars(builtins).get(name, MISSING))
        for attribute in attributes:
            if isinstance(value, types.ModuleType):
                value = vars(value).get(attribute, MISSING)
            else:
                return getattr(value, attribute) if _is_date(value) and attribute in _NOW else value
        return value


def _tells_itself(value: Any) -> bool:
    """The environment or a logger: their methods run as Python's own code, whatever they are called through."""
    logging = sys.modules.get("logging")
    loggers = (logging.Logger, logging.LoggerAdapter) if logging is not None else ()
    return value is os.getenv or issubclass(type(value), (type(os.environ), *loggers))


def _is_impure(value: Any, known: _Table) -> bool:
    """Is it what cannot be replayed, or leads to it?"""
    if type(value) is types.ModuleType:
        return value.__name__ in _FUNCTIONS or value.__name__ == "datetime"
    return _tells_itself(value) or (type(value) in known.types and _call_of(value) is not None)


def _names_impure(where: _Scope, names: Names) -> bool:
    known = _known()
    for chain in names.chains:
        value = where.value(chain)
        if value is MISSING:  # a variable of an enclosing call that the trace itself runs
            if chain[0] in where.code.co_freevars and chain[-1] in known.names:
                return True
        elif _is_impure(value, known):
            return True
    return _asks_a_logger(names)


def _asks_a_logger(names: Names) -> bool:
    """Does it name a logger's method on what is known only when it runs, `self.logger` say?"""
    if names.attributes.isdisjoint(_LOGS[:6]):
        return False
    return not names.attributes.difference(*(chain[1:] for chain in names.chains)).isdisjoint(_LOGS[:6])


# ---- what a trace tells

_TOLD: dict[Any, Any] = {}  # the registry of Python's own filters: "once at a place" is once in the process
_LOCK = threading.RLock()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.watches: list[_Watch | None] = []


_THREAD = _Thread()


def _watch() -> _Watch | None:
    return _THREAD.watches[-1] if _THREAD.watches else None


class ImpureCalls:
    """What the code under the traces of one function calls that cannot be replayed."""

    def __init__(self) -> None:
        self._suspects: weakref.WeakKeyDictionary[types.CodeType, _Offsets] = weakref.WeakKeyDictionary()
        self._others: weakref.WeakKeyDictionary[types.CodeType, _Offsets] = weakref.WeakKeyDictionary()
        self.told: set[tuple[str, int, str]] = set()

    def note(self, code: types.CodeType, scope: dict[str, Any], cells: dict[str, Any], names: Names) -> None:
        """Code of the user's that is going to run: is it worth a look?"""
        where = _Scope(code, scope, cells, names.imports)
        if code in self._suspects:
            return
        watch = _watch()
        is_suspect = _names_impure(where, names)
        offsets: _Offsets = _looked_at(where, names) if is_suspect else {_ANYWHERE: None}
        with _LOCK:
            (self._suspects if is_suspect else self._others)[code] = offsets
        if watch is not None and watch.calls is self and (is_suspect or watch.opaque):
            watch.look_at(code, offsets)

    @contextlib.contextmanager
    def named(self, name: str, wanted: bool, opaque: Sequence[Any] = ()) -> Generator[None]:
        """While a trace of the function `name` runs in this thread: its calls are told of, where that is wanted.

        So are those that hand one of the `opaque` objects to C code, from Python 3.12 on.
        """
        watch = _Watch(self, name, opaque) if wanted else None
        _THREAD.watches.append(watch)
        try:
            if watch is not None:
                with _LOCK:
                    suspects = list(self._suspects.items()) + (list(self._others.items()) if watch.opaque else [])
                for code, offsets in suspects:
                    watch.look_at(code, offsets)
            yield
        finally:
            _THREAD.watches.pop()
            if watch is not None:
                watch.end()


class _Watch:
    """One trace that runs in this thread."""

    def __init__(self, calls: ImpureCalls, name: str, opaque: Sequence[Any]) -> None:
        self.calls, self._name, self._looks = calls, name, False
        self.opaque = {id(obj) for obj in opaque} if _HAS_MONITORING else set[int]()
        self.codes: dict[int, tuple[types.CodeType, _Offsets]] = {}

    def look_at(self, code: types.CodeType, offsets: _Offsets) -> None:
        if not offsets:  # all was told
            return
        if not self._looks or not _HAS_MONITORING:  # a trace function is gone when all was told
            self._looks = _begin()
        if self._looks:
            self.codes[id(code)] = (code, offsets)
            _report_calls_of(code)

    def end(self) -> None:
        if self._looks:
            _end()

    def tell(self, call: Call, frame: types.FrameType) -> None:  # unmeasured: in an event
        filename, line = frame.f_code.co_filename, frame.f_lineno
        key = (filename, line, call.name)
        if key in self.calls.told:
            return
        text = call.name if call.kind is _ENVIRON else f"{call.name}()"
        verb = IMPURE if call.kind is not _ENVIRON else IMPURE.replace("calls {call}", "uses {call}")
        message = verb.format(
            name=self._name, call=text, place=f"{filename}:{line}", later=call.kind.later, way=call.kind.way
        )
        module = frame.f_globals.get("__name__")
        warnings.warn_explicit(message, ImpureCallWarning, filename, line, module, _TOLD)
        self.calls.told.add(key)

    def tell_of_environ(self, frame: types.FrameType | None) -> None:  # unmeasured: in an event
        """`frame` is of the environment itself."""
        while frame is not None and frame.f_code.co_filename in _ENVIRON_FILES:
            frame = frame.f_back
        if frame is not None and id(frame.f_code) in self.codes:
            self.tell(Call("os.environ", _ENVIRON), frame)


if sys.version_info >= (3, 12):
    _monitoring = sys.monitoring
    _IDS = (4, 3)  # those that have no use of their own
    _tool: int | None = None
    _users = 0  # traces, of all threads
    _reported: dict[int, types.CodeType] = {}

    def _looked_at(where: _Scope, names: Names) -> dict[int, Call | None]:
        """Where this code can call such a function, as far as that is known before: at an offset, or at `_ANYWHERE`."""
        return {_ANYWHERE: None}

    def _begin() -> bool:
        global _tool, _users
        with _LOCK:
            if _users == 0:
                _tool = next((i for i in _IDS if _monitoring.get_tool(i) is None), None)
                if _tool is None:
                    return False
                _monitoring.use_tool_id(_tool, "graftax")
                _monitoring.register_callback(_tool, _monitoring.events.CALL, _on_call)
                _monitoring.register_callback(_tool, _monitoring.events.PY_START, _on_start)
                for code in _ENVIRON_CODES:
                    _monitoring.set_local_events(_tool, code, _monitoring.events.PY_START)
            _users += 1
            return True

    def _report_calls_of(code: types.CodeType) -> None:
        with _LOCK:
            if _tool is not None and id(code) not in _reported:
                _reported[id(code)] = code
                _monitoring.set_local_events(_tool, code, _monitoring.events.CALL)

    def _end() -> None:
        global _tool, _users
        with _LOCK:
            _users -= 1
            if _users or _tool is None:
                return
            for code in (*_reported.values(), *_ENVIRON_CODES):
                _monitoring.set_local_events(_tool, code, 0)
            _reported.clear()
            _monitoring.register_callback(_tool, _monitoring.events.CALL, None)
            _monitoring.register_callback(_tool, _monitoring.events.PY_START, None)
            _monitoring.free_tool_id(_tool)
            _tool = None

    def _on_call(code: types.CodeType, offset: int, function: Any, first: Any) -> None:  # unmeasured: in an event
        watch = _watch()
        call = _call_of(function, first) if watch is not None else None
        if watch is not None and call is None and id(first) in watch.opaque:
            call = _handing_over(function)
        if watch is None or call is None or (call.unseeded and first is not _monitoring.MISSING and first is not None):
            return
        watch.tell(call, sys._getframe(1))

    def _on_start(code: types.CodeType, offset: int) -> None:  # unmeasured: in an event
        watch = _watch()
        if watch is not None:
            watch.tell_of_environ(sys._getframe(1))

else:  # unmeasured: on Python 3.11 what measures is the trace function, and graftax puts none beside it

    def _looked_at(where: _Scope, names: Names) -> dict[int, Call | None]:
        found: dict[int, Call | None] = dict(_offsets(where))
        if _asks_a_logger(names) or any(_tells_itself(where.value(chain)) for chain in names.chains):
            found[_ANYWHERE] = None
        return found

    def _offsets(where: _Scope) -> dict[int, Call]:
        """Where, in code of Python 3.11, a call of such a function begins: its name is loaded in order to be called."""
        found: dict[int, Call] = {}
        chain: tuple[str, ...] = ()
        called = pushed = False
        module, imported = "", ()
        variables: dict[str, tuple[str, ...]] = {}
        all_of_it = [at for at in dis.get_instructions(where.code) if at.opname != "CACHE"]
        for at, following in itertools.pairwise(all_of_it):
            op = at.opname
            if op in ("LOAD_ATTR", "LOAD_METHOD"):
                chain = (*chain, at.argval) if chain else ()
            elif op in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_FAST", "LOAD_CLASSDEREF"):
                called = pushed or (op == "LOAD_GLOBAL" and bool((at.arg or 0) & 1))
                local = (at.argval,) if at.argval in where.imports else ()
                chain = variables.get(at.argval, local) if op == "LOAD_FAST" else (at.argval,)
            else:
                if op == "IMPORT_NAME":
                    module = at.argval
                elif op == "IMPORT_FROM":
                    imported = (f"from {module}", at.argval)
                elif op == "STORE_FAST" and imported:
                    variables[at.argval], imported = imported, ()
                chain = ()
            pushed = op == "PUSH_NULL"
            call = _call_of(where.value(chain)) if chain and (called or op == "LOAD_METHOD") else None
            if call is not None and (not call.unseeded or (following.opname == "PRECALL" and not following.arg)):
                found[at.offset] = call
        return found

    def _begin() -> bool:
        there = sys.gettrace()
        if isinstance(there, FrameEvents):
            there.beside = _on_frame
            return True
        if there is None:
            sys.settrace(_on_frame)
        return sys.gettrace() is _on_frame  # else a debugger is there, or what measures coverage

    def _stop() -> None:
        there = sys.gettrace()
        if isinstance(there, FrameEvents):
            there.beside = None
        elif there is _on_frame:
            sys.settrace(None)

    def _report_calls_of(code: types.CodeType) -> None:
        del code

    def _end() -> None:
        still = any(watch is not None and watch.codes for watch in _THREAD.watches)
        if not still:
            _stop()

    def _on_frame(frame: types.FrameType, event: str, arg: Any) -> Any:
        watch = _watch()
        if watch is None:
            return None
        code, caller = frame.f_code, frame.f_back
        call = _known().codes.get(id(code))
        if call is not None and call.kind is _ENVIRON:
            watch.tell_of_environ(frame)
        elif call is not None and caller is not None and id(caller.f_code) in watch.codes:
            watch.tell(call, caller)
        offsets = watch.codes[id(code)][1] if id(code) in watch.codes else {}
        if not offsets:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False

        def at(frame: types.FrameType, event: str, arg: Any) -> Any:
            call = offsets.get(frame.f_lasti) if event == "opcode" else None
            if call is not None:
                watch.tell(call, frame)
                offsets.pop(frame.f_lasti, None)
                if not any(left for each in _THREAD.watches if each for _, left in each.codes.values()):
                    _stop()  # tracing is slow, and there is nothing more to tell
            return at

        return at


class Overheard:
    """The calls that cannot be repeated, of a function whose reads are as in JAX."""

    def __init__(self) -> None:
        self.impure = ImpureCalls()
        self.known: weakref.WeakSet[types.CodeType] = weakref.WeakSet()

    def enter(self, code: types.CodeType, scope: dict[str, Any], function: Any, first: Any) -> Any:
        if is_never_asked(code.co_filename):
            return NotImplemented
        if is_users_code(code, scope):
            self.impure.note(code, scope, cells_of(function), names_of(code))
        self.known.add(code)
        return None
