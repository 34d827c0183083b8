# SPDX-License-Identifier: Apache-2.0
"""Calls that a compiled function cannot repeat: time, random numbers, print, files. A warning names them.

The names in code decide whether its calls are reported, and its calls whether there is a warning. From Python 3.12 on
the interpreter reports the calls of such code alone (`sys.monitoring`). On 3.11 a trace function sees where such a call
begins.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Generator, Iterable, Set
from typing import Any

from graftax import _core
from graftax._base.errors import ImpureCallWarning
from graftax._capture.bytecode import Names, names_of
from graftax._capture.caught_errors import FrameEvents
from graftax._capture.code_by_identity import MetCode
from graftax._capture.code_owner import is_never_asked, is_users_code
from graftax._capture.constant_values import cells_of
from graftax._capture.impure_functions import (
    CACHE_OF_INSTANCE,
    ENVIRON,
    ENVIRON_CODES,
    ENVIRON_FILES,
    VALUES_ALONE,
    Call,
    call_of,
    handing_over,
    known_functions,
)
from graftax._capture.impure_names import (
    ANYWHERE,
    HAS_MONITORING,
    LookupScope,
    ModuleRead,
    Offsets,
    calls_in,
    module_reads,
    names_impure,
)
from graftax._capture.library_globals import LibraryGlobals, SettingsTable, Snapshot, is_setting
from graftax._capture.lru_caches import CachedCall
from graftax._capture.traces_ahead import give_up, is_ahead, must_end
from graftax._capture.unheard_effects import (
    attributes_of_others,
    calls_others,
    is_lasting_judgement,
    keeps_state,
    loads_modules,
    names_others,
)

IMPURE = (
    "{name} calls {call} ({place}). A compiled function does that once, when it is traced; later calls {later}. {way} "
    "warn_impure=False turns this warning off."
)

LOCK_LEFT = (
    "{name} ({place}) leaves a {cls} in another state than before. A compiled function does that once, when it is "
    "traced; later calls do not touch it. Take it in a `with` statement, or outside of {name}. warn_impure=False turns "
    "this warning off."
)

TWICE = (
    "{name} called {call} ({place}) while it was traced, and then met a value that the trace did not know of, such as "
    "a class attribute that it sets, the result of a cache, or a global of a function under a transform. It would have "
    "to be traced again, and to call {call} a second time. Make the call outside of {name}, or on every run by "
    "jax.experimental.io_callback. If {name} is called once more, one trace is enough."
)


_Warnings = dict[tuple[str, int, str], tuple[str, str | None]]  # by place and name: text, and name of the module

_REGISTRY: dict[Any, Any] = {}  # for Python's filters of warnings: "once at a place" is once in the process
_LOCK = threading.RLock()


class _Thread(threading.local):
    """The traces that run in this thread, the innermost last."""

    def __init__(self) -> None:
        self.watches: list[_Watch | None] = []
        self.libraries: list[tuple[ImpureCalls, Snapshot]] = []
        self.done_once: str = ""  # the message for what the last trace has done and must not be done twice


_THREAD = _Thread()


def _watch() -> _Watch | None:
    """The watch of the innermost trace; None where its calls are not wanted."""
    return _THREAD.watches[-1] if _THREAD.watches else None


class ImpureCalls:
    """The calls that cannot be repeated, of the code under the traces of one function."""

    def __init__(self) -> None:
        # Code of the user's: what names such a function, all other code, and what reads such an attribute of a module.
        self._suspects: weakref.WeakKeyDictionary[types.CodeType, Offsets] = weakref.WeakKeyDictionary()
        self._unsuspected: weakref.WeakKeyDictionary[types.CodeType, Offsets] = weakref.WeakKeyDictionary()
        self._reads: weakref.WeakKeyDictionary[types.CodeType, list[ModuleRead]] = weakref.WeakKeyDictionary()
        self.library = LibraryGlobals()
        self.heard: dict[str, dict[str, None]] = {}  # what was called or read, with the lines
        self.warned: set[tuple[str, int, str]] = set()  # the keys of warnings that were given
        self._of_packages: weakref.WeakSet[types.CodeType] = weakref.WeakSet()
        self._imports: weakref.WeakKeyDictionary[types.CodeType, tuple[Iterable[tuple[str, str]], str]] = (
            weakref.WeakKeyDictionary()
        )
        self._stored_attributes: set[str] = set()  # by code of the user's
        self._names_others = False  # modules that may do what nobody hears

    def note(self, code: types.CodeType, scope: dict[str, Any], cells: dict[str, Any], names: Names) -> None:
        """Notes code of the user's that is going to run: whether its calls are to be reported, and which."""
        lookup_scope = LookupScope(code, scope, cells, names)
        self._names_others = self._names_others or names_others(names, lookup_scope.value)
        self._stored_attributes |= names.stored_attributes
        if names.imported and code not in self._imports:
            with _LOCK:
                self._imports[code] = names.imported, str(scope.get("__package__") or "")
        reads, watch = module_reads(lookup_scope), _watch()
        if reads and code not in self._reads:
            with _LOCK:  # a weak dict cannot be gone over while another thread adds to it
                self._reads[code] = reads
            if watch is not None and watch.calls is self:
                watch.tell_of_reads(code, reads)
        if code in self._suspects:
            return
        is_suspect = names_impure(lookup_scope)
        offsets: Offsets = calls_in(lookup_scope) if is_suspect else {ANYWHERE: None}
        with _LOCK:
            (self._suspects if is_suspect else self._unsuspected)[code] = offsets
        # The trace runs already. Code that is no suspect counts where all calls do, or may hand over an opaque object.
        if watch is not None and watch.calls is self and (is_suspect or watch.opaque or watch.hears_all):
            watch.look_at(code, offsets)
        if watch is not None:
            watch.stop_early_at_code()

    def note_of_package(self, code: types.CodeType) -> None:
        """Notes code of an installed package that is going to run."""
        with _LOCK:
            self._of_packages.add(code)
        watch = _watch()
        if watch is not None and watch.calls is self and watch.hears_all:
            watch.look_into(code)
            watch.stop_early()

    def has_effects_without_calls(self, attributes: Set[str]) -> bool:
        """May code load a module at an import statement, or store one of these attributes?"""
        if not self._stored_attributes.isdisjoint(attributes):
            return True
        with _LOCK:
            imports = list(self._imports.values())
        return any(loads_modules(imported, package) for imported, package in imports)

    def note_setting(self, table: SettingsTable, key: object) -> None:
        """Notes that code which is going to run reads a setting of an installed package."""
        # The trace runs already, but the code that may change this setting has not run yet.
        for calls, snapshot in _THREAD.libraries:
            if calls is self:
                snapshot.add(table, key)

    def count_heard(self) -> int | None:
        """How many such calls this trace has made so far; None where it may have made some and nobody listens."""
        watch = _watch()
        if watch is None or (not watch.looks and (self._suspects or self._reads)):
            return None
        return watch.count

    def may_repeat(self) -> bool:
        """May what this trace did be done again? So it is if all calls were heard, and all of them can be repeated."""
        watch = _watch()
        if watch is None or not watch.hears_all or not watch.looks:
            return False
        return not (watch.count or watch.has_others or self._names_others)

    def were_made_by(self, codes: Iterable[types.CodeType]) -> bool:
        """Has code of these made calls that cannot be repeated? Where nobody listens: may it have done so?"""
        suspects = [code for code in codes if code in self._suspects or code in self._reads]
        watch = _watch()
        if watch is None or not watch.looks:
            return bool(suspects)
        # Calls were noted by their lines, since that is what warnings show.
        lines = {f"{code.co_filename}:{line}" for code in suspects for _, _, line in code.co_lines()}
        return any(not lines.isdisjoint(places) for places in self.heard.values())

    def tell_of_locks(self, name: str, function: types.FunctionType, classes: Iterable[str]) -> None:
        """Warns of locks of these classes that a trace of the function `name` has left in another state."""
        code, warnings_by_key = function.__code__, _Warnings()
        place = f"{code.co_filename}:{code.co_firstlineno}"
        for cls in classes:
            key = code.co_filename, code.co_firstlineno, cls
            self.heard.setdefault(f"a {cls}", {})[place] = None
            if key not in self.warned:
                text = LOCK_LEFT.format(name=name, cls=cls, place=place)
                warnings_by_key[key] = text, function.__globals__.get("__name__", "")
        self.warn(warnings_by_key, is_raising=False)

    def tell_of_copies(self, calls: Iterable[CachedCall]) -> None:
        """Warns of calls of a cache for an object of which the trace has a copy, so that its results do not fit."""
        if (watch := _watch()) is not None:
            for call in calls:
                watch.tell_of_cache(call)

    @contextlib.contextmanager
    def named(
        self, name: str, wanted: bool, recording: _core.Recording, warns: bool, hears_all: bool
    ) -> Generator[None]:
        """While entered, a trace of the function `name` runs in this thread, and its calls are noted in `heard`.

        Args:
            wanted: whether calls are to be noted at all.
            recording: has the `opaque` objects. From Python 3.12 on, calls that hand one to C code count, too.
            warns: whether to warn. Warnings come at the end, since the function may record warnings, or catch those
                that are errors.
            hears_all: whether to listen to all calls, for `may_repeat`.
        """
        # Where nobody listens, a trace ahead cannot be stopped before it does what only a call may do.
        if is_ahead() and not wanted:
            give_up()
        watch, is_raising = _Watch(self, name, recording, warns, hears_all) if wanted else None, True
        _THREAD.watches.append(watch)
        try:
            # Code that earlier traces have met. Code that is new to this trace comes through `note`.
            if watch is not None:
                with _LOCK:
                    suspects, reads = list(self._suspects.items()), list(self._reads.items())
                    suspects += list(self._unsuspected.items()) if watch.opaque or watch.hears_all else []
                    of_packages = list(self._of_packages) if watch.hears_all else []
                for code, code_reads in reads:
                    watch.tell_of_reads(code, code_reads)
                for code, offsets in suspects:
                    watch.look_at(code, offsets)
                for code in of_packages:
                    watch.look_into(code)
                watch.stop_early_at_code()
            yield
            if watch is not None:
                watch.stop_early()  # code may have caught the exception of an earlier one
            is_raising = False
        finally:
            _THREAD.watches.pop()
            # The trace around this one would run it again, so what this one has done counts for both.
            if watch is not None:
                _THREAD.done_once = watch.done_once
                if (outer := _watch()) is not None and watch.done_once:
                    outer.done_once = outer.done_once or watch.done_once
                watch.end(is_raising)

    @contextlib.contextmanager
    def keeping_packages(self, name: str, warns: bool) -> Generator[None]:
        """While entered, a trace of the function `name` runs, and its objects are put back.

        What it has changed in packages is no binding any more, and a warning says so if `warns`. No array of the trace
        stays there.
        """
        is_raising = True
        _THREAD.libraries.append((self, self.library.snapshot()))
        try:
            yield
            is_raising = False
        finally:
            changes = _THREAD.libraries.pop()[1].changes()
            # What was put back is as it was before, so it stays a binding.
            self.library.changing |= {place for place, change in changes.items() if not change.is_undone}
            warnings_by_key: _Warnings = {}
            for change in filter(is_setting, changes.values() if warns else ()):
                key = *change.place, change.what
                if key not in self.warned:
                    warnings_by_key[key] = change.text(name), change.module
            self.warn(warnings_by_key, is_raising)

    def warn(self, warnings_by_key: _Warnings, is_raising: bool) -> None:
        """Gives these warnings. If an error `is_raising`, a warning that is an error must not hide it."""
        for key, (message, module) in warnings_by_key.items():
            try:
                warnings.warn_explicit(message, ImpureCallWarning, *key[:2], module, _REGISTRY)
            except ImpureCallWarning:
                if not is_raising:
                    raise
            else:
                # A warning that is an error is given again by the next trace.
                self.warned.add(key)


def take_done_once() -> str:
    """The message for why the last trace of this thread must not be repeated; empty where it may be."""
    message, _THREAD.done_once = _THREAD.done_once, ""
    return message


class _Watch:
    """Listens to the calls of one trace that runs in this thread."""

    def __init__(self, calls: ImpureCalls, name: str, recording: _core.Recording, warns: bool, hears_all: bool) -> None:
        self.calls, self._name, self._warns, self.looks = calls, name, warns, False  # `looks`: does it hear of calls?
        self.opaque = {id(obj) for obj in recording.opaque} if HAS_MONITORING else set[int]()
        self.codes: dict[int, tuple[types.CodeType, Offsets]] = {}  # whose calls are reported, by id
        self.count, self.done_once = 0, ""  # of calls that cannot be repeated; the message for one that must not be
        self._warnings: _Warnings = {}
        self._is_ahead = is_ahead()
        self._foreign_attributes = attributes_of_others(recording.graphdef.rows()) if self._is_ahead else set[str]()
        self.hears_all = (hears_all or self._is_ahead) and HAS_MONITORING
        self.has_others = False  # was there another call, without a warning, that must not be made twice?

    def stop_early(self) -> None:
        """Raises NotAhead if this trace runs ahead of its calls, and may be about to do more than to compute."""
        if self._is_ahead and (must_end() or not self.calls.may_repeat()):
            give_up()

    def stop_early_at_code(self) -> None:
        """The same before code runs that was not known: imports and stores of attributes are no calls."""
        self.stop_early()
        if self._is_ahead and self.calls.has_effects_without_calls(self._foreign_attributes):
            give_up()

    def look_into(self, code: types.CodeType) -> None:
        """Listens to calls of an installed package's code. There are no warnings of these."""
        self.has_others = self.has_others or keeps_state(code)
        if not self.has_others:
            self.looks = self.looks or _begin()
            if self.looks:
                _report_calls_of(code)
                judged_calls.add_code(code)

    def judge(self, function: object, first: object, is_told: bool) -> None:  # unmeasured: in an event
        """Notes whether a second run may make this call again. `is_told`: it is among those that cannot be repeated."""
        if self.has_others or judged_calls.knows(function, first):
            return
        self.has_others = is_told or calls_others(function, first)
        if not self.has_others and is_lasting_judgement(function, first):
            judged_calls.add(function, first)

    def look_at(self, code: types.CodeType, offsets: Offsets) -> None:
        """Listens to calls of the user's code. `offsets` says where it may call such a function."""
        if not offsets:  # on Python 3.11: all its calls were noted
            return
        if not self.looks or not HAS_MONITORING:  # a trace function ends itself when all was noted
            self.looks = _begin()
        if self.looks:
            # A copy for this trace: if a warning is an error, the next trace has to warn again.
            self.codes[id(code)] = code, offsets.copy()
            _report_calls_of(code)

    def end(self, is_raising: bool) -> None:
        if self.looks:
            _end()
        self.calls.warn(self._warnings, is_raising)

    def tell(self, call: Call, frame: types.FrameType) -> None:  # unmeasured: in an event
        """Notes a call that this frame makes."""
        self._tell(call, frame.f_code, frame.f_lineno, frame.f_globals.get("__name__"))

    def tell_of_reads(self, code: types.CodeType, reads: list[ModuleRead]) -> None:
        """Notes attributes of modules that code reads. That is no call, so it counts whether or not the line runs."""
        for call, line, module in reads:
            self._tell(call, code, line, module)

    def _tell(self, call: Call, code: types.CodeType, line: int, module: str | None) -> None:
        """Counts a call, and prepares its warning."""
        call, place = call.of_code(code), f"{code.co_filename}:{line}"
        text = call.name if call.is_read else f"{call.name}()"
        # Every call counts, so that `may_repeat` is right; the warning is given once.
        self.count += 1
        if call.kind.is_once and not self.done_once:
            self.done_once = TWICE.format(name=self._name, call=f"{call.name}()", place=place)
        key = (code.co_filename, line, call.name)
        self.calls.heard.setdefault(text, {})[place] = None
        if not self._warns or key in self.calls.warned or key in self._warnings:
            return
        verb = IMPURE.replace("calls {call}", "uses {call}") if call.is_read else IMPURE
        kind = call.kind
        message = verb.format(name=self._name, call=text, place=place, later=kind.later_calls, way=kind.remedy)
        self._warnings[key] = message, module

    def tell_of_cache(self, call: CachedCall) -> None:
        """Notes a call of a cache for a copy, where code of the user's makes it."""
        if is_users_code(call.code, vars(sys.modules.get(call.module or "", builtins))):
            self._tell(Call(call.name, CACHE_OF_INSTANCE), *call[1:])

    def tell_of_environ(self, frame: types.FrameType | None) -> None:  # unmeasured: in an event
        """Notes a use of `os.environ`. `frame` is of one of its own methods."""
        # `os.environ.get` and the like come from the base class, so there may be several frames of the library.
        while frame is not None and frame.f_code.co_filename in ENVIRON_FILES:
            frame = frame.f_back
        if frame is not None and id(frame.f_code) in self.codes:
            self.tell(ENVIRON, frame)


if sys.version_info >= (3, 12):
    _monitoring = sys.monitoring
    _IDS = (4, 3)  # of tools; the documentation of `sys.monitoring` has no names for these
    _tool: int | None = None
    _users = 0  # traces of all threads: the first one takes a tool's id, the last one frees it
    _reported: dict[int, tuple[types.CodeType, int]] = {}  # by id: code that has events, and which

    def _begin() -> bool:
        """Begins to listen for one trace. False where other tools have taken all ids."""
        global _tool, _users
        with _LOCK:
            if _users == 0:
                _tool = next((i for i in _IDS if _monitoring.get_tool(i) is None), None)
                if _tool is None:
                    return False
                _monitoring.use_tool_id(_tool, "graftax")
                _monitoring.register_callback(_tool, _monitoring.events.CALL, judged_calls.hear)
                _monitoring.register_callback(_tool, _monitoring.events.JUMP, _on_jump)
                _monitoring.register_callback(_tool, _monitoring.events.PY_START, _on_start)
                for code in ENVIRON_CODES:
                    _monitoring.set_local_events(_tool, code, _monitoring.events.PY_START)
            _users += 1
            return True

    def _report_calls_of(code: types.CodeType) -> None:
        # A trace that runs ahead hears of jumps, too: a loop may be endless for numbers that no call has.
        wanted = _monitoring.events.CALL | (_monitoring.events.JUMP if is_ahead() else 0)
        with _LOCK:
            _, events = _reported.get(id(code), (code, 0))
            if _tool is not None and wanted & ~events:
                _reported[id(code)] = code, wanted | events
                _monitoring.set_local_events(_tool, code, wanted | events)

    def _end() -> None:
        global _tool, _users
        with _LOCK:
            _users -= 1
            if _users or _tool is None:
                return
            # The last trace: no event stays, so code runs at full speed again, and another tool finds the id free.
            for code in (*(code for code, _ in _reported.values()), *ENVIRON_CODES):
                _monitoring.set_local_events(_tool, code, 0)
            _reported.clear()
            judged_calls.clear()
            for event in (_monitoring.events.CALL, _monitoring.events.JUMP, _monitoring.events.PY_START):
                _monitoring.register_callback(_tool, event, None)
            _monitoring.free_tool_id(_tool)
            _tool = None

    def _on_call(
        code: types.CodeType, offset: int, function: object, first_argument: object
    ) -> None:  # unmeasured: in an event
        watch = _watch()
        if watch is None:
            return
        # Code of packages: its calls are judged, if all calls are, but there are no warnings of them.
        is_of_package = judged_calls.has_code(code)
        if is_of_package and (watch.has_others or not watch.hears_all):
            watch.stop_early()
            return
        call = call_of(function, first_argument)
        if watch.hears_all:
            if not (is_of_package and call is not None and call.kind in VALUES_ALONE):
                watch.judge(function, first_argument, call is not None)
                watch.stop_early()
            if is_of_package:
                return
        # Code of the user's.
        if call is None and id(first_argument) in watch.opaque:
            call = handing_over(function)
        # `default_rng(None)` draws its seed as `default_rng()` does.
        if call is None or (call.unseeded and first_argument is not _monitoring.MISSING and first_argument is not None):
            return
        watch.tell(call, sys._getframe(1))

    judged_calls = _core.JudgedCalls(_on_call)

    def _on_jump(code: types.CodeType, offset: int, destination: int) -> None:  # unmeasured: in an event
        watch = _watch()
        if watch is not None:
            watch.stop_early()

    def _on_start(code: types.CodeType, offset: int) -> None:  # unmeasured: in an event
        watch = _watch()
        if watch is not None:
            watch.tell_of_environ(sys._getframe(1))

else:  # unmeasured: on Python 3.11 what measures is the trace function, and graftax puts none beside it

    def _on_call(*call: object) -> None:
        """Calls of packages are not heard here."""

    judged_calls = _core.JudgedCalls(_on_call)

    def _begin() -> bool:
        trace_function = sys.gettrace()
        if isinstance(trace_function, FrameEvents):
            # A thread has one trace function: this one listens to exceptions, and passes calls on.
            trace_function.call_listener = _on_frame
            return True
        if trace_function is None:
            sys.settrace(_on_frame)
        return sys.gettrace() is _on_frame  # else a debugger is there, or a tool that measures coverage

    def _stop() -> None:
        trace_function = sys.gettrace()
        if isinstance(trace_function, FrameEvents):
            trace_function.call_listener = None
        elif trace_function is _on_frame:
            sys.settrace(None)

    def _report_calls_of(code: types.CodeType) -> None:
        del code

    def _end() -> None:
        if not any(watch is not None and watch.codes for watch in _THREAD.watches):
            _stop()

    def _on_frame(frame: types.FrameType, event: str, arg: object) -> Any:
        watch = _watch()
        if watch is None:
            return None
        # A method in Python, whose class is not known from the names in the calling code, tells by itself that it runs.
        code, caller = frame.f_code, frame.f_back
        call = known_functions().codes.get(id(code))
        if call is not None and call is ENVIRON:
            watch.tell_of_environ(frame)
        elif call is not None and caller is not None and id(caller.f_code) in watch.codes:
            watch.tell(call, caller)
        # Other calls are known by their offsets in the code.
        offsets = watch.codes[id(code)][1] if id(code) in watch.codes else {}
        if not offsets:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False

        def on_opcode(frame: types.FrameType, event: str, arg: object) -> Any:
            call = offsets.get(frame.f_lasti) if event == "opcode" else None
            if call is not None:
                watch.tell(call, frame)
                offsets.pop(frame.f_lasti, None)
                if not any(left for running in _THREAD.watches if running for _, left in running.codes.values()):
                    _stop()  # tracing is slow, and there is nothing more to note
            return on_opcode

        return on_opcode


def tell_of_call(call: Call, frame: types.FrameType) -> None:
    """Notes a call for which a function of graftax stands in, so that nobody else hears of it."""
    watch = _watch()
    if watch is not None:
        watch.tell(call, frame)


class Overheard:
    """Listens to calls that cannot be repeated, for a function that has no read set."""

    def __init__(self) -> None:
        self.impure = ImpureCalls()
        self.known = MetCode()

    def enter(self, code: types.CodeType, scope: dict[str, Any], function: object, first: object) -> Any:
        """As `ReadSet.enter`."""
        if is_never_asked(code.co_filename):
            return NotImplemented
        if is_users_code(code, scope):
            self.impure.note(code, scope, cells_of(function), names_of(code))
        self.known.add(code)
        return None
