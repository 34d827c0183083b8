# SPDX-License-Identifier: Apache-2.0
"""An exception that leaves a trace carries the caller's own objects, not the copies that the trace had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.core import Tracer

TRACED = (
    "{path} is an array that was traced, which has no value: the exception was raised while the function was "
    "compiled. Give the exception only values that are known while tracing, or check the value outside of the function."
)


_DEPTH = 4  # containers within each other
_MOST = 100  # items of a container that is searched
_GC = 1 << 14  # Py_TPFLAGS_HAVE_GC: objects without it hold no others


def give_own_objects(error: Exception, original: Callable[[Any], object]) -> None:
    """Puts the caller's objects into the arguments and attributes of an exception, and of those that led to it.

    `original` gives the object that another one is a copy of, or None.
    """
    for linked in _chain(error):
        _tell_of_tracers(linked)
        args = _in_callers_terms(linked.args, original)
        if args is not linked.args:
            linked.args = args
        for name, value in list(vars(linked).items()):
            if (replaced := _in_callers_terms(value, original)) is not value:
                setattr(linked, name, replaced)


def _chain(error: BaseException) -> list[BaseException]:
    """The exception, and those that it was raised from or while they were handled."""
    chain = [error]
    for linked in chain:  # which grows meanwhile
        causes = [cause for cause in (linked.__cause__, linked.__context__) if cause is not None]
        chain += [cause for cause in causes if all(cause is not other for other in chain)]
    return chain


def _tell_of_tracers(error: BaseException) -> None:
    """Notes the first tracer that an exception holds: no object of the caller's stands for it."""
    paths = [f"args[{i}]" for i, value in enumerate(error.args) if isinstance(value, Tracer)]
    paths += [name for name, value in vars(error).items() if isinstance(value, Tracer)]
    if paths:
        note = TRACED.format(path=f"{type(error).__name__}.{paths[0]}")
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def _in_callers_terms(value: Any, original: Callable[[Any], object], depth: int = _DEPTH) -> Any:
    """The caller's object for a copy. In a container that the function made, the caller's objects replace copies."""
    if not type(value).__flags__ & _GC:
        return value
    callers_object = original(value)
    if callers_object is not None:
        return callers_object
    if type(value) not in (tuple, list, dict) or not depth or len(value) > _MOST:
        return value
    if type(value) is tuple:
        # A tuple cannot be changed, so a new one takes its place.
        items = tuple(_in_callers_terms(item, original, depth - 1) for item in value)
        return items if any(a is not b for a, b in zip(items, value, strict=True)) else value
    for key, item in list(value.items() if type(value) is dict else enumerate(value)):
        if (replaced := _in_callers_terms(item, original, depth - 1)) is not item:
            value[key] = replaced
    return value
