# SPDX-License-Identifier: Apache-2.0
"""An exception that leaves a trace carries the caller's own objects, not the copies that the trace had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.core import Tracer

TRACED = (
    "{path} is an array that was traced, which has no value: the exception was raised while the function was "
    "compiled. Give the exception what is known then, or check the value outside of the function."
)


def give_own_objects(error: Exception, original: Callable[[Any], object]) -> None:
    """Puts the caller's objects into the arguments and attributes of an exception.

    `original` gives the object that another one is a copy of, or None.
    """
    taken = [value for value in (*error.args, *vars(error).values()) if isinstance(value, Tracer)]
    own = {id(value): original(value) for value in (*error.args, *vars(error).values()) if type(value).__flags__ & _GC}
    if any(value is not None for value in own.values()):
        error.args = tuple(_own(value, own) for value in error.args)
        for name, value in list(vars(error).items()):
            if own.get(id(value)) is not None:
                setattr(error, name, own[id(value)])
    if taken:
        paths = [f"args[{i}]" for i, value in enumerate(error.args) if value is taken[0]]
        paths += [name for name, value in vars(error).items() if value is taken[0]]
        note = TRACED.format(path=f"{type(error).__name__}.{paths[0]}")
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)


_GC = 1 << 14  # Py_TPFLAGS_HAVE_GC: what else is there holds nothing


def _own(value: object, own: dict[int, Any]) -> Any:
    known = own.get(id(value))
    return value if known is None else known
