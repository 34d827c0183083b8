# SPDX-License-Identifier: Apache-2.0
"""What a read set notes of the trace that runs in this thread."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Container, Iterable
from typing import Any, ParamSpec, TypeVar

from ._compat import current_trace
from ._named_functions import State
from ._origin import Origin

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


class Now(threading.local):
    """The trace that runs in this thread: others may trace the same function at once."""

    def __init__(self) -> None:
        self.shown: set[tuple[int, str | None]] | None = None  # what it sees rebuilt
        self.noted: tuple[int, ...] = ()  # how much was known when it was noted last
        self.trace: Any = None  # that of JAX
        self.touched: set[tuple[int, str]] = set()  # names of globals and modules that the code noted last has
        self.runs = False  # has the traced function begun? From then on its own code calls it
        self._before: dict[tuple[int, str | None], tuple[Origin, Any]] = {}  # what it may set, and held before
        self._states: dict[int, State] = {}  # of functions

    def begin(self, shown: set[tuple[int, str | None]]) -> None:
        self.shown, self.trace, self.noted, self.runs = shown, current_trace(), (), False
        self._before, self._states = {}, {}

    def note(self, holders: Iterable[Any], names: Iterable[str], functions: Iterable[types.FunctionType]) -> None:
        """Notes what these names of modules and classes hold, and these functions, where the trace has no copy."""
        shown = self.shown or set()
        names = list(names)
        for holder in holders:
            for name in names:
                origin = Origin(holder, name, True)
                if (isinstance(holder, type) or name in holder) and origin.key not in shown:
                    self._before.setdefault(origin.key, (origin, origin.value()))
        for function in functions:
            if (id(function), None) not in shown and id(function) not in self._states:
                self._states[id(function)] = State.of(function)

    def end(self, left: Container[tuple[int, str | None]]) -> list[Origin]:
        """Puts back what the trace has set, but for what is left to it; gives where that was."""
        before = [(origin, was) for origin, was in self._before.values() if origin.key not in left]
        changed = [(origin, was) for origin, was in before if origin.value() is not was]
        states = [state for i, state in self._states.items() if (i, None) not in left and state.is_changed]
        self.shown, self.trace, self._before, self._states = None, None, {}, {}
        for origin, was in changed:
            origin.put(was)
        for state in states:
            state.put_back()
        return [*(origin for origin, _ in changed), *(Origin(state.owner, None) for state in states)]
