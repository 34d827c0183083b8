# SPDX-License-Identifier: Apache-2.0
"""`graftax.record`: keeps what the last calls were given, and writes a file when one of them goes wrong."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import itertools
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Self, TypeVar, Unpack, overload

from graftax import _core
from graftax._base.errors import RecordedCallWarning
from graftax._capture.signature import call_opaque, call_partial
from graftax._jax.tracebacks import boundary, caller_level
from graftax._jax.traces import outside_of_traces
from graftax._jit.api import jit
from graftax._jit.jitted import Jitted
from graftax._jit.options import Options, RecordOptions, several
from graftax._jit.stages import Lowered, Traced
from graftax._record.call_file import write_calls
from graftax._record.code_pickle import main_file
from graftax._record.script_module import follow_script
from graftax._record.snapshot import (
    Random,
    Target,
    copies_of,
    copy_to_host,
    error_text,
    is_same_random_state,
    is_true,
    random_state,
    snapshots_of,
)

P = ParamSpec("P")
R = TypeVar("R")

CHECKED = (
    "graftax.record takes a function of jit without check=True, which runs each call twice. Record jit(f), and check "
    "the recorded call with `python -m graftax replay FILE --plain`."
)
NOTHING_YET = "{name} has made no call that could be saved"
NO_PATTERNS = (
    "nonfinite={nonfinite!r}: expected True, False, or patterns of key paths such as 'result[0]' or 'model.**'"
)
WRITTEN = "{name}: {what}. The call is in {path}: run it again with `python -m graftax replay {path}`{hint}"
WHERE = ", and find the operation with --where"
NOT_WRITTEN = "{name}: {what}. The call could not be written to {path}: {error}"
NONFINITE = "a result is not finite"

_numbers = itertools.count(1)  # of the files of this process
_running_files = set[str]()  # of calls that have begun


class Paused:
    """While a file is replayed, recorders of the script that it loads only call their functions."""

    active = False

    def __enter__(self) -> None:
        Paused.active = True
        _core.pause_recorders(True)

    def __exit__(self, *_: object) -> None:
        Paused.active = False
        _core.pause_recorders(False)


@dataclasses.dataclass(frozen=True)
class Policy:
    """What a recorder keeps and writes."""

    last: int = 3
    copy_every: int = 16
    on: tuple[type[BaseException], ...] = (Exception,)
    folder: str = "."
    before: bool = False  # is each call written before it is made?

    def __post_init__(self) -> None:
        for name, meaning in (("last", "the number of calls to keep"), ("copy_every", "a number of calls")):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name}={value}: expected at least 1, {meaning}")
        for cls in self.on:
            if not (isinstance(cls, type) and issubclass(cls, BaseException)):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"on={cls!r}: expected an exception class, a tuple of them, or ()")


class History:
    """What is done with the last calls of a function, shared by its bound methods and by threads."""

    def __init__(self, policy: Policy, name: str, reads: Callable[[], Any]) -> None:
        self.policy, self.name, self.reads = policy, name, reads
        # A call that is written before it is made may end the process, so none of its arguments can be computed again.
        self.ring = _core.CallRing(policy.last, 1 if policy.before else policy.copy_every, self)
        # Then the ring asks for `draws` when a call begins, which is where the call is written.
        self.ring.draws_in_calls = policy.before
        self.files: list[str] = []
        self.thread = threading.local()  # `random`: the states before the newest trace
        self._lock = threading.Lock()
        self._reported: set[str] = set()
        # By the number of the Outcome: each trace makes constants of what it draws.
        self._draws_of_traces: weakref.WeakKeyDictionary[_core.Entry, dict[int, Random]] = weakref.WeakKeyDictionary()

    # ---- what the core asks and tells

    copies = staticmethod(copies_of)
    is_true = staticmethod(is_true)
    copy_to_host = staticmethod(copy_to_host)

    def draws(self, call: _core.KeptCall) -> dict[str, Random]:
        state = {"call": random_state()}
        if self.policy.before:
            call.draws = state
            self._write_beginning(call)
        return state

    def traced(self, call: _core.KeptCall) -> None:
        """Notes whether a call that was traced has drawn random numbers. A trace makes constants of them."""
        state = self._note_draws(call)
        if state is not None:
            self._draws_of_traces.setdefault(call.entry, {})[call.outcome] = state

    def _note_draws(self, call: _core.KeptCall) -> Random | None:
        """Gives a call the random states that the newest trace of this thread began with, once a trace has drawn."""
        state: Random | None = self.thread.__dict__.pop("random", None)
        if state is None:
            return None
        # Reading the states takes tens of microseconds, so the ring asks for those of each call only from here on.
        if not is_same_random_state(state, random_state()):
            self.ring.draws_in_calls = True
        if not self.ring.draws_in_calls:
            return None
        call.draws = {"trace": state, "call": state}
        return state

    def found(self, call: _core.KeptCall) -> None:
        self._report(call, "nonfinite", NONFINITE)

    def failed(self, call: _core.KeptCall, error: BaseException) -> None:
        self._note_draws(call)
        call.raised = error_text(error)
        if isinstance(error, self.policy.on):
            self._report(call, type(error).__qualname__, f"it raised {call.raised}")

    def ended(self, error: BaseException) -> None:
        """An exception has ended the block that the recorder is entered for."""
        if isinstance(error, self.policy.on) and (calls := self._complete_calls()):
            self._report(calls[-1], type(error).__qualname__, f"its block raised {error_text(error)}")

    # ---- files

    def _write_beginning(self, call: _core.KeptCall) -> None:
        """Writes a call that is about to run, over the one before: it may end the process."""
        file = f"{self.name.strip('<>')}-running-{os.getpid()}-{threading.get_native_id()}.record"
        path = os.path.join(self.policy.folder, file)
        try:
            os.makedirs(self.policy.folder, exist_ok=True)
            self._write(f"{path}.part", [call], "it had begun, and nothing is known of its end")
            # The process may end while it writes: the file of the previous call stays whole until then.
            os.replace(f"{path}.part", path)
            _running_files.add(path)
        except Exception as error:
            event = "a call is about to begin"
            message = NOT_WRITTEN.format(name=self.name, what=event, path=path, error=error)
            warnings.warn(message, RecordedCallWarning, caller_level())

    def _complete_calls(self) -> list[_core.KeptCall]:
        return [call for call in self.ring.calls if call.raised is not None or call.outputs is not None]

    def _report(self, call: _core.KeptCall, reason: str, event: str) -> None:
        """Writes the calls up to this one, the first time for each reason."""
        with self._lock:
            if reason in self._reported:
                return
            self._reported.add(reason)
        stamp = time.strftime("%Y%m%d-%H%M%S")
        file = f"{self.name.strip('<>')}-{stamp}-{os.getpid()}-{next(_numbers)}.record"
        path = os.path.join(self.policy.folder, file)
        try:
            os.makedirs(self.policy.folder, exist_ok=True)
            self.save(path, call, event)
        except Exception as error:
            message = NOT_WRITTEN.format(name=self.name, what=event, path=path, error=error)
        else:
            hint = WHERE if reason == "nonfinite" else ""
            message = WRITTEN.format(name=self.name, what=event, path=path, hint=hint)
        warnings.warn(message, RecordedCallWarning, caller_level())

    def save(self, path: str, until: _core.KeptCall | None = None, event: str = "saved by hand") -> None:
        """Writes those kept calls that have ended, up to and including `until`."""
        calls = self._complete_calls()
        if until is not None:
            calls = calls[: calls.index(until) + 1] if until in calls else [until]
        if not calls:
            raise ValueError(NOTHING_YET.format(name=self.name))
        self._write(path, calls, event)
        with self._lock:
            self.files.append(path)

    def _write(self, path: str, calls: list[_core.KeptCall], event: str) -> None:
        snapshots = snapshots_of(calls)
        for call, snapshot in zip(calls, snapshots, strict=True):
            traces = self._draws_of_traces.get(call.entry, {})
            # Of a call that has not come to its end nobody knows which trace it runs: most likely the newest.
            newest = next(reversed(traces.values()), None)
            if (trace := newest if call.outputs is None else traces.get(call.outcome)) is not None:
                snapshot.draws = {"trace": trace, **snapshot.draws}
        write_calls(path, snapshots, event, self.reads())


_HISTORIES: weakref.WeakSet[History] = weakref.WeakSet()


@atexit.register
def _flush_all() -> None:
    for history in list(_HISTORIES):
        history.ring.flush()
    # The process ends normally, so these calls have not killed it.
    for path in _running_files:
        with contextlib.suppress(OSError):
            os.remove(path)


class Recorder(Jitted[P, R]):
    """What `graftax.record` returns: a function of `graftax.jit` that keeps what its last calls were given.

    Example:
        >>> f = graftax.record(graftax.jit(lambda x: x * 2), dir=folder)
        >>> f(jnp.ones(2))
        Array([2., 2.], dtype=float32)
        >>> f.save(folder / "call.record")
        >>> len(f.files)
        1
    """

    def __init__(self, function: Callable[P, R], options: Options, policy: Policy) -> None:
        super().__init__(function, options)
        table = self._table
        self._history = history = History(policy, self._plan.name, lambda: table.reads)
        self._record_in(history.ring)
        _HISTORIES.add(history)
        # Python forgets the file of the script before `_flush_all` runs, so it is kept from here on.
        main_file()
        # Whoever drops the recorder still hears of its last call; at the end of the process `_flush_all` reads it.
        weakref.finalize(self, history.ring.flush).atexit = False

    @property
    def files(self) -> list[str]:
        """The paths of the files that were written."""
        return list(self._history.files)

    @boundary
    def flush(self) -> None:
        """Waits for the calls that were made, and reports those whose results are not finite."""
        if not Paused.active:
            self._history.ring.flush()

    @boundary
    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the calls that are kept now to a file.

        Args:
            path: of the file.

        Raises:
            ValueError: if no call was made.
            GraftaxError: for a value that no other process can find by name, at its path.
        """
        if not Paused.active:
            self._history.save(os.fspath(path))

    def __enter__(self) -> Self:
        return self

    @boundary
    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Reads the calls that were made; an exception that ends the block counts as one of the last call."""
        self.flush()
        if error is not None and not Paused.active:
            self._history.ended(error)

    # Stages are those of the function itself, without the check of the results.

    @boundary
    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Lowered[P, R]:
        return self._unchecked.lower(*args, **kwargs)

    @boundary
    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Traced[P, R]:
        return self._unchecked.trace(*args, **kwargs)

    def _resolve(self, function: Any, name: str, options: Options) -> None:
        super()._resolve(function, name, options)
        plain, count = self._function, len(self._prefix)
        form = "function"
        if count:
            form = "object" if plain is call_opaque or self._method is not None else "method"
            form = "partial" if plain is call_partial else form
        self._target = Target(plain, form, count, options)
        self._bound_target = Target(plain, "bound", count + 1, options)

    def _bind(self, bound: Jitted[..., R], instance: Any) -> None:
        super()._bind(bound, instance)
        # A bound method keeps its calls in the same ring: one history for all objects of the class.
        bound.__dict__["_target"] = self._bound_target
        bound._record_in(self._history.ring)

    def _entry(
        self,
        roots: tuple[Any, ...],
        layout: tuple[Any, ...],
        context: Any,
        opened: _core.Opened,
        binding: _core.Binding,
    ) -> tuple[_core.Entry, _core.Recording]:
        """The entry of a miss, or a new one."""
        # The core can note the statement of a call only once it knows the frame of the script.
        if not Paused.active and outside_of_traces():
            follow_script()
        return super()._entry(roots, layout, context, opened, binding)

    def _begin_trace(self) -> None:
        """Keeps the random states that a trace begins with: it makes constants of the numbers that it draws."""
        self._history.thread.random = random_state()

    def __reduce__(self) -> Any:
        reduced = super().__reduce__()
        # Pickled by its name if it has one. Otherwise the copy has a history of its own.
        is_by_value = isinstance(reduced, tuple) and not self._is_bound
        return (Recorder, (self.__wrapped__, self._options, self._history.policy)) if is_by_value else reduced

    def __repr__(self) -> str:
        return super().__repr__().replace("graftax.jit", "graftax.record", 1)


def _checked_patterns(nonfinite: object) -> tuple[str, ...] | None:
    """The patterns of the results that are checked; empty for all of them, None for none."""
    if isinstance(nonfinite, bool):
        return () if nonfinite else None
    patterns = several(nonfinite)
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(NO_PATTERNS.format(nonfinite=nonfinite))
    return patterns


def _wrap(function: Any, policy: Policy, finite: tuple[str, ...] | None) -> Any:
    if isinstance(function, (classmethod, staticmethod)):
        return type(function)(_wrap(function.__func__, policy, finite))
    jitted = function if isinstance(function, Jitted) else jit(function)
    if jitted._options.check:  # pyright: ignore[reportPrivateUsage]
        raise ValueError(CHECKED)
    options = dataclasses.replace(jitted._options, finite=finite)  # pyright: ignore[reportPrivateUsage]
    if jitted._is_bound:  # pyright: ignore[reportPrivateUsage]
        return Recorder(jitted._method_of.__wrapped__, options, policy).__get__(jitted.__self__)  # pyright: ignore[reportPrivateUsage]
    return Recorder(jitted.__wrapped__, options, policy)


@overload
def record(function: Callable[P, R], /, **options: Unpack[RecordOptions]) -> Recorder[P, R]: ...
@overload
def record(**options: Unpack[RecordOptions]) -> Callable[[Callable[P, R]], Recorder[P, R]]: ...
@boundary
def record(
    function: Callable[..., Any] | None = None,
    /,
    *,
    last: int = 3,
    nonfinite: bool | str | Sequence[str] = True,
    on: type[BaseException] | tuple[type[BaseException], ...] = Exception,
    copy_every: int = 16,
    dir: str | os.PathLike[str] = ".",
    before: bool = False,
) -> Any:
    """Keeps what the last calls of a function were given, and writes them to a file when one goes wrong.

    A call is kept as it was before it ran: its arguments, what the function captures and reads, and the random states
    that it draws from. When a result is not finite, or the call raises, a `RecordedCallWarning` names the file.
    `python -m graftax replay FILE` runs the call again in another process.

    Args:
        function: of `graftax.jit` or `filter_jit`, or a plain one, which is jitted. Without it, `record` returns a
            decorator.
        last: how many calls are kept, with their arrays. Results are checked when a later call begins, so that the
            device may be that many calls behind.
        nonfinite: True checks all floating results and what the call writes into its arguments, False none; or
            patterns of their key paths: `"result[0]"`, `"model.**"`.
        on: the classes of exceptions for which a file is written; `()` for none. The exception is raised as usual.
        copy_every: donated arrays are gone after a call. If the previous call returned them, they are computed again
            when a file is written, and copied only once in this many calls. Others are copied before each call.
        dir: the folder of the files.
        before: writes each call before it is made, to `NAME-running-PID-THREAD.record`, over the one before, for calls
            that kill the process. A process that ends normally removes the file. Each call takes as long as writing its
            arguments does.

    Returns:
        a `Recorder`, which is called as the function is. `flush()` waits for the last call, `save(path)` writes the
        calls that are kept, `files` lists what was written. In a `with` block, leaving it flushes, and an exception
        that ends the block writes a file, too.

    Raises:
        ValueError: for a function of `jit(check=True)`, or a number of calls below 1.
        TypeError: for `on` or `nonfinite` of another type.

    Example:
        >>> @graftax.record(dir=folder)
        ... def step(x):
        ...     return jnp.log(x)
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as found:
        ...     warnings.simplefilter("always")
        ...     y = step(-jnp.ones(2))
        ...     step.flush()
        >>> len(found), len(step.files)
        (1, 1)

        >>> with graftax.record(graftax.jit(lambda x: x + 1), dir=folder) as step:
        ...     y = step(jnp.ones(2))
    """
    finite = _checked_patterns(nonfinite)
    policy = Policy(last, copy_every, on if isinstance(on, tuple) else (on,), os.path.abspath(dir), before)
    wrap = functools.partial(_wrap, policy=policy, finite=finite)
    return wrap if function is None else wrap(function)
