# SPDX-License-Identifier: Apache-2.0
"""What a read set notes of the trace that runs in this thread."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

from graftax import _core
from graftax._base.missing import MISSING
from graftax._capture.caches_after_traces import holds_tracer
from graftax._capture.function_attributes import State
from graftax._capture.locks import Locks
from graftax._capture.origin import Origin
from graftax._jax.traces import current_trace

P = ParamSpec("P")
R = TypeVar("R")


def synchronized(method: Callable[P, R]) -> Callable[P, R]:
    """Lets one thread at a time run a method: its object has a `lock`."""

    @functools.wraps(method)
    def waiting(*args: P.args, **kwargs: P.kwargs) -> R:
        owner: Any = args[0]
        with owner.lock:
            return method(*args, **kwargs)

    return waiting


class Begun(NamedTuple):
    """What a read set is told of a trace that begins."""

    shown: set[tuple[int, str | None]]  # the names whose values it sees rebuilt
    take_in: Callable[[], bool] | None  # gives it the roots that are found while it runs; False where that cannot be
    has_changed: Callable[[], bool]  # has it changed anything so far?
    copied: Callable[[object], int | None]  # of a copy: the id of the caller's object


def _is_no_copy(obj: object) -> None: ...


_NO_TRACE = Begun(set(), None, lambda: False, _is_no_copy)


class ThreadState(threading.local):
    """What is known of the trace that runs in this thread: others may trace the same function at once."""

    def __init__(self) -> None:
        self.begun = _NO_TRACE
        self.noted: tuple[int, ...] = ()  # how many classes, modules and functions there were at the last `note`
        self.trace: object = None  # that of JAX
        self.runs = False  # has the traced function begun? From then on its own code calls it
        self._held: dict[int, tuple[Any, dict[str, Any]]] = {}  # modules and classes, with what they held before
        self._states: dict[int, State] = {}  # the same of functions
        self.locks = Locks(())  # that its code knows

    @property
    def is_tracing(self) -> bool:
        return self.begun is not _NO_TRACE

    def begin(self, begun: Begun) -> None:
        self.begun, self.trace, self.noted, self.runs = begun, current_trace(), (), False
        self._held, self._states = {}, {}

    def show(self, keys: Iterable[tuple[int, str | None]]) -> None:
        """The trace sees these rebuilt as well from now on."""
        for key in keys:
            self.begun.shown.add(key)
            if key[1] is None:  # what it sets from now on is set in the copy, which is written back
                self._states.pop(key[0], None)

    def note(self, holders: Iterable[object], functions: Iterable[types.FunctionType]) -> None:
        """Notes what these modules and classes hold, and these functions, where the trace has no copy."""
        for holder in holders:
            # What was noted first is from before the trace has set anything.
            if id(holder) not in self._held:
                self._held[id(holder)] = holder, dict(names_in(holder))
        for function in functions:
            if (id(function), None) not in self.begun.shown and id(function) not in self._states:
                self._states[id(function)] = State.from_function(function)

    def has_set(self, origin: Origin) -> bool:
        """Has the trace changed what is there, before it was a root?"""
        if origin.name is None:
            return (state := self._states.get(id(origin.holder))) is not None and state.is_changed
        held = self._held.get(id(origin.holder))
        return held is not None and held[1].get(origin.name, MISSING) is not origin.value()

    def set_names(
        self, can_set: Callable[[str], bool], left_out: Container[tuple[int, str | None]]
    ) -> Iterator[tuple[Origin, object]]:
        """What the trace has set in modules and classes before it was a root, with what was there.

        Args:
            can_set: does code of the trace set attributes of this name?
            left_out: the keys of what the trace may leave as it has set it.
        """
        for holder, original in self._held.values():
            current = dict(names_in(holder))
            for name in current.keys() | original.keys():
                old, new = original.get(name, MISSING), current.get(name, MISSING)
                if old is new or (id(holder), name) in left_out or (id(holder), name) in self.begun.shown:
                    continue
                # Another thread may have set it. If no code of the trace seems to have, only a tracer tells.
                if can_set(name) or holds_tracer(new, self.trace):
                    yield Origin(holder, name, True), old

    def end(self, can_set: Callable[[str], bool], left_out: Container[tuple[int, str | None]]) -> list[Origin]:
        """Puts back what the trace has set, and gives the origins of that. The arguments are those of `set_names`."""
        # First, since what the trace saw rebuilt is forgotten below.
        changed = list(self.set_names(can_set, left_out))
        states = [state for i, state in self._states.items() if (i, None) not in left_out and state.is_changed]
        self.begun, self.trace, self._held, self._states = _NO_TRACE, None, {}, {}
        for origin, old in changed:
            origin.put(old)
        for state in states:
            state.put_back()
        return [*(origin for origin, _ in changed), *(Origin(state.owner, None) for state in states)]


def names_in(holder: Any) -> Mapping[str, Any]:
    """What the dict of a module, or a class, holds by name, whatever a trace shows there."""
    if not isinstance(holder, type):
        return holder
    return {name: _core.class_attribute(holder, name) for name in _core.class_names(holder)}
