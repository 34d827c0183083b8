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
_MOST = 100  # items of a container that is looked at
_GC = 1 << 14  # Py_TPFLAGS_HAVE_GC: what else is there holds nothing


def give_own_objects(error: Exception, original: Callable[[Any], object]) -> None:
    """Puts the caller's objects into the arguments and attributes of an exception, and of those that led to it.

    `original` gives the object that another one is a copy of, or None.
    """
    for each in _chain(error):
        _tell_of_tracers(each)
        args = _own(each.args, original)
        if args is not each.args:
            each.args = args
        for name, value in list(vars(each).items()):
            if (own := _own(value, original)) is not value:
                setattr(each, name, own)


def _chain(error: BaseException) -> list[BaseException]:
    """The exception, and those that it was raised from or while they were handled."""
    found = [error]
    for each in found:
        causes = [cause for cause in (each.__cause__, each.__context__) if cause is not None]
        found += [cause for cause in causes if all(cause is not known for known in found)]
    return found


def _tell_of_tracers(error: BaseException) -> None:
    paths = [f"args[{i}]" for i, value in enumerate(error.args) if isinstance(value, Tracer)]
    paths += [name for name, value in vars(error).items() if isinstance(value, Tracer)]
    if paths:
        note = TRACED.format(path=f"{type(error).__name__}.{paths[0]}")
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def _own(value: Any, original: Callable[[Any], object], depth: int = _DEPTH) -> Any:
    """The caller's object. In a container that the function made, the caller's take the places of copies."""
    if not type(value).__flags__ & _GC:
        return value
    known = original(value)
    if known is not None:
        return known
    if type(value) not in (tuple, list, dict) or not depth or len(value) > _MOST:
        return value
    if type(value) is tuple:
        own = tuple(_own(item, original, depth - 1) for item in value)
        return own if any(a is not b for a, b in zip(own, value, strict=True)) else value
    for key, item in list(value.items() if type(value) is dict else enumerate(value)):
        if (own := _own(item, original, depth - 1)) is not item:
            value[key] = own
    return value
