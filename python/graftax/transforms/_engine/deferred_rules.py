# SPDX-License-Identifier: Apache-2.0
"""Custom derivative rules run after the trace that defined them: captured copies are mapped back to the originals."""

from __future__ import annotations

import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

from graftax._capture.namespaces import with_parts
from graftax._jit.running_trace import RunningTrace, originals

_DEPTH = 3  # how deep functions that capture functions are followed
_PLAIN_VALUES = (bool, int, float, complex, str, type(None))

_RUN = threading.local()  # .count: how often this thread has run a rule


def rules_run() -> int:
    return getattr(_RUN, "count", 0)


class DeferredRule:
    """A derivative rule, or a part that it captures, which may have been rebuilt by a running trace.

    While that trace runs, `current` is the rebuilt object; afterwards it is the caller's own.
    """

    def __init__(self, value: Any, depth: int = _DEPTH) -> None:
        self._value = value
        # What the value was rebuilt from, the innermost trace first.
        self._owners = _weak_references(originals(value))
        captured = [] if self._owners or not depth else _captured_parts(value)
        self._parts = [DeferredRule(part, depth - 1) for part in captured]
        self._is_rebuilt = bool(self._owners) or any(part._is_rebuilt for part in self._parts)

    @property
    def current(self) -> Any:
        _RUN.count = rules_run() + 1
        if not self._is_rebuilt:
            return self._value
        value = self._value
        # From the innermost trace out: one that has ended gives way to what it rebuilt, up to one that still runs.
        for running, reference in self._owners:
            if running.trace is not None:
                break
            # None after the object has died; an enclosing trace may still have what it rebuilt.
            live_object = reference()
            value = value if live_object is None else live_object
        if not self._parts:
            return value
        # The function itself was not rebuilt, but what it captures was: a twin gets the current parts.
        parts = [part.current for part in self._parts]
        if all(part is captured for part, captured in zip(parts, _captured_parts(value), strict=True)):
            return value
        if isinstance(value, types.CellType):
            return types.CellType(parts[0])
        if isinstance(value, types.MethodType):
            return types.MethodType(parts[1], parts[0])
        copy = with_parts(value, value.__globals__, tuple(parts))
        vars(copy).update(vars(value))
        return copy


def _captured_parts(value: object) -> list[Any]:
    """The objects that a function captures directly: its cells, or the parts of a bound method."""
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, types.FunctionType):
        return list(value.__closure__ or ())
    if isinstance(value, types.CellType):
        try:
            return [value.cell_contents]
        # A cell is empty until its variable is assigned, which may be after the function was made.
        except ValueError:
            return []
    return []


def _weak_references(
    owners: list[tuple[RunningTrace, object]],
) -> list[tuple[RunningTrace, Callable[[], Any]]]:
    # JAX keeps a rule alive for as long as its compiled code, which must not keep the caller's objects. Where an object
    # has no weak references, the rebuilt copy is used.
    references: list[tuple[RunningTrace, Callable[[], Any]]] = []
    for running, owner in owners:
        try:
            references.append((running, weakref.ref(owner)))
        except TypeError:
            if not isinstance(owner, types.CellType) or not isinstance(owner.cell_contents, _PLAIN_VALUES):
                break
            # A cell has no weak references, but with a plain value in it, it keeps nothing else alive.
            references.append((running, lambda owner=owner: owner))
    return references
