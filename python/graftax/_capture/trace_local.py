# SPDX-License-Identifier: Apache-2.0
"""What a read set notes of the trace that runs in this thread."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

from graftax import _core
from graftax._base.missing import MISSING
from graftax._capture.caches_in_traces import holds_tracer
from graftax._capture.function_attributes import State
from graftax._capture.locks import Locks
from graftax._capture.origin import Origin
from graftax._jax.traces import current_trace

P = ParamSpec("P")
R = TypeVar("R")


def alone(method: Callable[P, R]) -> Callable[P, R]:
    """One thread at a time: the method's object has a lock."""

    @functools.wraps(method)
    def waiting(*args: P.args, **kwargs: P.kwargs) -> R:
        of: Any = args[0]
        with of.lock:
            return method(*args, **kwargs)

    return waiting


class Begun(NamedTuple):
    """What a trace that begins tells of itself."""

    shown: set[tuple[int, str | None]]  # the names whose values it sees rebuilt
    take_in: Callable[[], bool] | None  # gives it the roots that are found while it runs; False: it has to begin anew
    has_changed: Callable[[], bool]  # has it changed anything so far?
    copied: Callable[[object], int | None]  # of a copy: the id of the caller's object


class Now(threading.local):
    """The trace that runs in this thread: others may trace the same function at once."""

    def __init__(self) -> None:
        self.shown: set[tuple[int, str | None]] | None = None  # what it sees rebuilt
        self.noted: tuple[int, ...] = ()  # how much was known when it was noted last
        self.trace: Any = None  # that of JAX
        self.runs = False  # has the traced function begun? From then on its own code calls it
        self._held: dict[int, tuple[Any, dict[str, Any]]] = {}  # modules and classes, with what they held before
        self._states: dict[int, State] = {}  # of functions
        self.locks = Locks(())  # of the trace that runs
        self.take_in: Callable[[], bool] | None = None  # takes in new roots while it runs, where it can
        self.has_changed: Callable[[], bool] = lambda: False  # has it changed anything so far?
        self.copied: Callable[[object], int | None] = lambda obj: None  # of a copy: the id of the caller's object

    def begin(self, begun: Begun) -> None:
        self.trace, self.noted, self.runs = current_trace(), (), False
        self.shown, self.take_in, self.has_changed, self.copied = begun
        self._held, self._states = {}, {}

    def show(self, keys: Iterable[tuple[int, str | None]]) -> None:
        """The trace sees these rebuilt as well from now on."""
        self.shown = self.shown or set()
        for key in keys:
            self.shown.add(key)
            if key[1] is None:
                self._states.pop(key[0], None)

    def note(self, holders: Iterable[object], functions: Iterable[types.FunctionType]) -> None:
        """Notes what these modules and classes hold, and these functions, where the trace has no copy."""
        for holder in holders:
            if id(holder) not in self._held:
                self._held[id(holder)] = holder, dict(names_in(holder))
        shown = self.shown or set()
        for function in functions:
            if (id(function), None) not in shown and id(function) not in self._states:
                self._states[id(function)] = State.of(function)

    def has_set(self, origin: Origin) -> bool:
        """Has the trace changed what is there, before it was a root?"""
        if origin.name is None:
            return (state := self._states.get(id(origin.holder))) is not None and state.is_changed
        held = self._held.get(id(origin.holder))
        return held is not None and held[1].get(origin.name, MISSING) is not origin.value()

    def end(self, sets: Callable[[str], bool], left: Container[tuple[int, str | None]]) -> list[Origin]:
        """Puts back what the trace has set, but for what is left to it; gives where that was.

        `sets` says whether its code sets attributes of a name. Where it does not seem to, a tracer tells.
        """
        changed: list[tuple[Origin, Any]] = []
        for holder, before in self._held.values():
            now = dict(names_in(holder))
            for name in now.keys() | before.keys():
                was, value = before.get(name, MISSING), now.get(name, MISSING)
                if was is value or (id(holder), name) in left or (id(holder), name) in (self.shown or ()):
                    continue
                if sets(name) or holds_tracer(value, self.trace):
                    changed.append((Origin(holder, name, True), was))
        states = [state for i, state in self._states.items() if (i, None) not in left and state.is_changed]
        self.shown, self.trace, self.take_in, self._held, self._states = None, None, None, {}, {}
        self.has_changed, self.copied = lambda: False, lambda obj: None
        for origin, was in changed:
            origin.put(was)
        for state in states:
            state.put_back()
        return [*(origin for origin, _ in changed), *(Origin(state.owner, None) for state in states)]


def names_in(holder: Any) -> Mapping[str, Any]:
    """What the dict of a module, or a class, holds by name, whatever a trace shows there."""
    if not isinstance(holder, type):
        return holder
    return {name: _core.class_attribute(holder, name) for name in _core.class_names(holder)}
