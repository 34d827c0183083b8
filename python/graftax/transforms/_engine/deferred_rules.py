# SPDX-License-Identifier: Apache-2.0
"""Rules that run after the trace in which they were found: what they reach is the caller's own again by then."""

from __future__ import annotations

import threading
import types
import weakref
from typing import Any

from graftax._jit.trace import RunningTrace, originals

_DEPTH = 3  # functions within functions
_SMALL = (bool, int, float, complex, str, type(None))

_RUN = threading.local()  # .count: how often this thread has run a rule


def rules_run() -> int:
    return getattr(_RUN, "count", 0)


class Standing:
    """A rule: a function, or what it captures. While a trace runs it is what that has rebuilt, and then the caller's.

    It refers to the caller's objects weakly: JAX keeps rules for as long as what it has compiled. What cannot be
    referred to so stays the copy.
    """

    def __init__(self, value: Any, depth: int = _DEPTH) -> None:
        self._value = value
        self._owners = _weakly(originals(value))
        inside = [] if self._owners or not depth else _inside(value)
        self._parts = [Standing(part, depth - 1) for part in inside]
        self._moves = bool(self._owners) or any(part._moves for part in self._parts)

    @property
    def now(self) -> Any:
        _RUN.count = rules_run() + 1
        if not self._moves:
            return self._value
        value = self._value
        for running, own in self._owners:
            if running.trace is not None:
                break
            found = own()  # none, of a trace that has ended: one that is around it has its own
            value = value if found is None else found
        if not self._parts:
            return value
        parts = [part.now for part in self._parts]
        if all(new is old for new, old in zip(parts, _inside(value), strict=True)):
            return value
        if isinstance(value, types.CellType):
            return types.CellType(parts[0])
        if isinstance(value, types.MethodType):
            return types.MethodType(parts[1], parts[0])
        return _with_cells(value, tuple(parts))


def _inside(value: Any) -> list[Any]:
    """What a function made in a trace may have been given by it."""
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, types.FunctionType):
        return list(value.__closure__ or ())
    if isinstance(value, types.CellType):
        try:
            return [value.cell_contents]
        except ValueError:  # it is empty yet
            return []
    return []


def _weakly(found: list[tuple[RunningTrace, Any]]) -> list[tuple[RunningTrace, Any]]:
    out: list[tuple[RunningTrace, Any]] = []
    for running, own in found:
        try:
            out.append((running, weakref.ref(own)))
        except TypeError:
            if not isinstance(own, types.CellType) or not isinstance(own.cell_contents, _SMALL):
                break
            out.append((running, lambda own=own: own))  # a variable with a number in it
    return out


def _with_cells(function: types.FunctionType, cells: tuple[Any, ...]) -> types.FunctionType:
    scope, name, defaults = function.__globals__, function.__name__, function.__defaults__
    out = types.FunctionType(function.__code__, scope, name, defaults, cells)
    out.__kwdefaults__, out.__qualname__ = function.__kwdefaults__, function.__qualname__
    vars(out).update(vars(function))
    return out
