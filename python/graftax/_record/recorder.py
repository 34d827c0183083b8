# SPDX-License-Identifier: Apache-2.0
"""`graftax.record`: keeps what the last calls were given, and writes a file when one of them goes wrong."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import itertools
import os
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import jax

from graftax import _core
from graftax._base.errors import RecordedCallWarning
from graftax._capture.signature import call_opaque, call_partial, is_called_by_its_class
from graftax._graph.patterns import Pattern, argument_pattern
from graftax._jax.tracebacks import boundary, caller_level
from graftax._jax.traces import outside_of_traces
from graftax._jit.api import jit
from graftax._jit.jitted import Jitted
from graftax._jit.options import Options, several
from graftax._record.call_file import write_calls
from graftax._record.code_pickle import main_file
from graftax._record.script_module import statement_line
from graftax._record.snapshot import (
    Random,
    Snapshot,
    Target,
    error_text,
    has_finite_results,
    is_ready,
    is_same_random_state,
    note_results,
    random_state,
    snapshot_of,
)

P = ParamSpec("P")
R = TypeVar("R")

CHECKED = (
    "graftax.record takes a function of jit without check=True, which runs each call twice. Record jit(f), and check "
    "the recorded call with `python -m graftax replay FILE --plain`."
)
NOTHING_YET = "{name} has made no call that could be saved"
WRITTEN = "{name}: {what}. The call is in {path}: run it again with `python -m graftax replay {path}`{hint}"
WHERE = ", and find the operation with --where"
NOT_WRITTEN = "{name}: {what}. The call could not be written to {path}: {error}"
NONFINITE = "a result is not finite"

_MOST_STRUCTURES = 64  # that have drawn random numbers; a state has 5 kB
_numbers = itertools.count(1)  # of the files of this process


class Paused:
    """While a file is replayed, recorders of the script that it loads only call their functions."""

    now = False


@dataclasses.dataclass(frozen=True)
class Policy:
    """What a recorder keeps, checks and writes."""

    last: int = 3
    checked: tuple[str, ...] | None = ()  # patterns of the results that have to be finite; None: none of them
    on: tuple[type[BaseException], ...] = (Exception,)
    folder: str = "."

    def __post_init__(self) -> None:
        if self.last < 1:
            raise ValueError(f"last={self.last}: expected at least 1, the number of calls to keep")
        for cls in self.on:
            if not (isinstance(cls, type) and issubclass(cls, BaseException)):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"on={cls!r}: expected an exception class, a tuple of them, or ()")


class History:
    """The last calls of a function, shared by its bound methods and by threads."""

    def __init__(self, policy: Policy, name: str, reads: Callable[[], Any]) -> None:
        self.policy, self.name, self.reads = policy, name, reads
        checked = policy.checked
        self.patterns: list[Pattern] | None = (
            None if checked is None else [argument_pattern(text, name, "nonfinite=") for text in checked]
        )
        self.files: list[str] = []
        self.running = threading.local()  # `call`: the call whose misses are noted, of each thread
        self._lock = threading.Lock()
        self._calls: list[Snapshot] = []
        self._reported: set[str] = set()
        self._draws_of_traces: dict[_core.GraphDef, Random] = {}
        self._draws_in_calls = False

    # ---- random states

    def draws_before(self, snapshot: Snapshot) -> None:
        """Notes the random states that a call will use, as far as earlier calls have shown that it does."""
        if self._draws_in_calls:
            snapshot.draws["call"] = random_state()
        if self._draws_of_traces:
            state = self._draws_of_traces.get(snapshot.graphdef.without_numbers())
            if state is not None:
                snapshot.draws["trace"] = state

    def draws_after_trace(self, snapshot: Snapshot, before: Random) -> None:
        """Notes that the trace of a call has drawn random numbers, which are constants of its program."""
        self._draws_in_calls |= not is_same_random_state(before, random_state())
        if self._draws_in_calls:
            self._draws_of_traces[snapshot.graphdef.without_numbers()] = before
            if len(self._draws_of_traces) > _MOST_STRUCTURES:
                del self._draws_of_traces[next(iter(self._draws_of_traces))]
            snapshot.draws.update(trace=before, call=before)

    # ---- calls

    def add(self, snapshot: Snapshot, given: Sequence[Any]) -> None:
        """Adds a call, and forgets the oldest ones.

        Args:
            given: its input leaves. Donated ones are deleted by now, and results of earlier calls are copies of them.
        """
        copies = {id(leaf): copy for leaf, copy in zip(given, snapshot.leaves, strict=True) if leaf is not copy}
        with self._lock:
            for call in self._calls:
                call.after_leaves = [copies.get(id(leaf), leaf) for leaf in call.after_leaves]
            self._calls.append(snapshot)
            oldest = self._calls[: -self.policy.last]
        for call in oldest:
            self._read(call)
        with self._lock:
            self._calls = [call for call in self._calls if call not in oldest]

    def read_ready(self) -> None:
        """Reads whether the results of earlier calls are finite, where that is known by now."""
        for snapshot in list(self._calls):
            if snapshot.pending and is_ready(snapshot):
                self._read(snapshot)

    def flush(self) -> None:
        for snapshot in list(self._calls):
            self._read(snapshot)

    def _read(self, snapshot: Snapshot) -> None:
        with self._lock:  # one thread reads it, and no other waits for the device meanwhile
            pending, snapshot.pending = snapshot.pending, []
        if not pending:
            return
        try:
            is_finite = has_finite_results(dataclasses.replace(snapshot, pending=pending))
        except Exception as error:  # of a callback, or of the device: the user's own code meets it, too
            self.fail(snapshot, error)
            return
        if not is_finite:
            self._report(snapshot, "nonfinite", NONFINITE)

    def fail(self, snapshot: Snapshot, error: BaseException) -> None:
        snapshot.raised = error_text(error)
        if isinstance(error, self.policy.on):
            self._report(snapshot, type(error).__qualname__, f"it raised {snapshot.raised}")

    def _report(self, snapshot: Snapshot, reason: str, what: str) -> None:
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
            self.save(path, snapshot, what)
        except Exception as error:
            message = NOT_WRITTEN.format(name=self.name, what=what, path=path, error=error)
        else:
            hint = WHERE if reason == "nonfinite" else ""
            message = WRITTEN.format(name=self.name, what=what, path=path, hint=hint)
        warnings.warn(message, RecordedCallWarning, caller_level())

    def save(self, path: str, until: Snapshot | None = None, what: str = "saved by hand") -> None:
        """Writes the calls that are kept, up to one of them."""
        with self._lock:
            calls = list(self._calls)
        if until is not None:
            calls = calls[: calls.index(until) + 1] if until in calls else [until]
        if not calls:
            raise ValueError(NOTHING_YET.format(name=self.name))
        write_calls(path, calls, what, self.reads())
        with self._lock:
            self.files.append(path)


_HISTORIES: weakref.WeakSet[History] = weakref.WeakSet()


@atexit.register
def _flush_all() -> None:
    for history in list(_HISTORIES):
        history.flush()


class _Running:
    """A call that runs: the snapshot of what it was given, renewed when a trace finds more inputs."""

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None
        self.roots: tuple[Any, ...] = ()
        self.given: list[Any] = []
        self.random_before: Random | None = None  # of a call that traces


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
        _HISTORIES.add(history)
        main_file()  # which Python forgets before `_flush_all`
        # Whoever drops the recorder still hears of its last call; at the end of the process `_flush_all` reads it.
        weakref.finalize(self, history.flush).atexit = False

    @property
    def files(self) -> list[str]:
        """The paths of the files that were written."""
        return list(self._history.files)

    @boundary
    def flush(self) -> None:
        """Waits for the calls that were made, and reports those whose results are not finite."""
        if not Paused.now:
            self._history.flush()

    @boundary
    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the calls that are kept now to a file.

        Args:
            path: of the file.

        Raises:
            ValueError: if no call was made.
            GraftaxError: for a value that no other process can find by name, at its path.
        """
        if not Paused.now:
            self._history.save(os.fspath(path))

    @boundary
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        call: Callable[..., Any] = super().__call__
        if Paused.now or jax.config.jax_disable_jit or not outside_of_traces():
            return call(*args, **kwargs)
        history, running = self._history, _Running()
        history.read_ready()
        self._note_inputs(running, args, kwargs)
        around = getattr(history.running, "call", None)
        history.running.call = running
        try:
            result = call(*args, **kwargs)
        except BaseException as error:
            history.running.call = around
            if running.snapshot is not None:
                history.add(running.snapshot, running.given)
                history.fail(running.snapshot, error)
            raise
        history.running.call = around
        self._note_results(running, result)
        return result

    def _note_inputs(self, running: _Running, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            roots, layout = self._bind_arguments(args, kwargs)
            self._take_snapshot(running, roots, layout, None)
        except Exception:  # the call itself raises it, or records its arguments again
            running.snapshot = None

    def _take_snapshot(self, running: _Running, roots: tuple[Any, ...], layout: tuple[Any, ...], context: Any) -> None:
        target = Target(self._function, self._way(), len(self._prefix), self._options)
        running.snapshot, running.given = snapshot_of(target, self._plan, roots, layout, context)
        running.snapshot.line = statement_line()
        running.roots = roots
        self._history.draws_before(running.snapshot)

    def _way(self) -> str:
        """How the function came to `jit`, as in `Target`."""
        if not self._prefix or not self._plan.signature.skip:
            return "bound" if self._prefix else "function"
        if self._function is call_partial:
            return "partial"
        return "object" if self._function is call_opaque or is_called_by_its_class(self.__wrapped__) else "method"

    def _entry(
        self,
        roots: tuple[Any, ...],
        layout: tuple[Any, ...],
        context: Any,
        opened: _core.Opened,
        binding: _core.Binding,
    ) -> tuple[_core.Entry, _core.Recording]:
        """A miss. The roots may be more than those of the snapshot, and nothing has changed since it was taken."""
        running: _Running | None = getattr(self._history.running, "call", None)
        running = running if outside_of_traces() else None
        if running is not None and running.random_before is None:
            running.random_before = random_state()
        found = super()._entry(roots, layout, context, opened, binding)
        if running is not None and self._plan.signature.binding is binding:
            self._take_snapshot(running, roots, layout, context)
        return found

    def _note_results(self, running: _Running, result: Any) -> None:
        snapshot, history = running.snapshot, self._history
        if snapshot is None:
            return
        try:
            if running.random_before is not None:
                history.draws_after_trace(snapshot, running.random_before)
            note_results(snapshot, running.roots, running.given, result, history.patterns)
        except Exception as error:
            message = f"{history.name}: the results of a call could not be recorded: {error}"
            warnings.warn(message, RecordedCallWarning, caller_level())
        history.add(snapshot, running.given)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None or not isinstance(self.__wrapped__, types.FunctionType):
            return self
        bound = type(self).__new__(type(self))
        self._bind(bound, instance)
        return bound

    def __reduce__(self) -> Any:
        reduced = super().__reduce__()
        is_by_value = isinstance(reduced, tuple) and not self._is_bound
        return (_recorder, (self.__wrapped__, self._options, self._history.policy)) if is_by_value else reduced

    def __repr__(self) -> str:
        return super().__repr__().replace("graftax.jit", "graftax.record", 1)


def _recorder(function: Callable[P, R], options: Options, policy: Policy) -> Recorder[P, R]:
    """Unpickles a recorder."""
    return Recorder(function, options, policy)


def _wrap(function: Any, policy: Policy) -> Any:
    if isinstance(function, (classmethod, staticmethod)):
        return type(function)(_wrap(function.__func__, policy))
    jitted = function if isinstance(function, Jitted) else jit(function)
    if jitted._options.check:  # pyright: ignore[reportPrivateUsage]
        raise ValueError(CHECKED)
    if jitted._is_bound:  # pyright: ignore[reportPrivateUsage]
        unbound = jitted._method_of  # pyright: ignore[reportPrivateUsage]
        return Recorder(unbound.__wrapped__, jitted._options, policy).__get__(jitted.__self__)  # pyright: ignore[reportPrivateUsage]
    return Recorder(jitted.__wrapped__, jitted._options, policy)  # pyright: ignore[reportPrivateUsage]


Checked = bool | str | Sequence[str]
On = type[BaseException] | tuple[type[BaseException], ...]


@overload
def record(
    function: Callable[P, R], /, *, last: int = 3, nonfinite: Checked = True, on: On = Exception, dir: Any = "."
) -> Recorder[P, R]: ...
@overload
def record(
    *, last: int = 3, nonfinite: Checked = True, on: On = Exception, dir: Any = "."
) -> Callable[[Callable[P, R]], Recorder[P, R]]: ...
@boundary
def record(
    function: Callable[..., Any] | None = None,
    /,
    *,
    last: int = 3,
    nonfinite: bool | str | Sequence[str] = True,
    on: type[BaseException] | tuple[type[BaseException], ...] = Exception,
    dir: str | os.PathLike[str] = ".",
) -> Any:
    """Keeps what the last calls of a function were given, and writes them to a file when one goes wrong.

    A call is kept as it was before it ran: its arguments, what the function captures and reads, and the random states
    that it draws from. When a result is not finite, or the call raises, a `RecordedCallWarning` names the file.
    `python -m graftax replay FILE` runs the call again in another process.

    Args:
        function: of `graftax.jit` or `filter_jit`, or a plain one, which is jitted. Without it, `record` returns a
            decorator.
        last: how many calls are kept, with their arrays. Whether results are finite is read when a later call begins,
            so the device may be that many calls behind.
        nonfinite: True checks all floating results and what the call writes into its arguments, False none; or
            patterns of their key paths: `"return[0]"`, `"model.**"`.
        on: the classes of exceptions that write a file; `()` for none. The exception itself is raised as without.
        dir: the folder of the files.

    Returns:
        a `Recorder`, which is called as the function is. `flush()` waits for the last call, `save(path)` writes the
        calls that are kept, `files` lists what was written.

    Raises:
        ValueError: for a function of `jit(check=True)`.

    Example:
        >>> @graftax.record(dir=folder)
        ... def step(x):
        ...     return jnp.log(x)
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as found:
        ...     y = step(-jnp.ones(2))
        ...     step.flush()
        >>> len(found), len(step.files)
        (1, 1)
    """
    checked = None if nonfinite is False else () if nonfinite is True else several(nonfinite)
    classes = on if isinstance(on, tuple) else (on,)
    policy = Policy(last, checked, classes, os.path.abspath(dir))
    return functools.partial(_wrap, policy=policy) if function is None else _wrap(function, policy)
