# SPDX-License-Identifier: Apache-2.0
"""Opaque values: which ones hide arrays, and which ones were made inside a function."""

from __future__ import annotations

import concurrent.futures
import contextlib
import enum
import functools
import gc
import logging
import operator
import sys
import threading
import types
from collections.abc import Generator
from typing import Any

import jax
import jax.core

from graftax._base.errors import UnsupportedValueError
from graftax._graph.types.describe import MUTABLE_OPAQUE, static_classes
from graftax._graph.types.static_values import PLAIN
from graftax._jax.compat import holds_tracers, is_jaxpr

MADE_INSIDE = (
    "this {type} was made inside the function, where it would be one object for all calls. Make it outside, and pass "
    "it or put it into the result there."
)
# A caller who is given one expects that nobody else has it.
_WITH_STATE = (
    logging.Handler,
    concurrent.futures.Executor,
    concurrent.futures.Future,
    type(functools.lru_cache(len)),
)


def _is_plain(value: Any) -> bool:
    """Is it a name, a number, a function or a class, or a tuple of such?"""
    if type(value) is tuple or type(value) is frozenset:
        return all(map(_is_plain, value))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return type(value) in PLAIN or value is Ellipsis or isinstance(value, (type, types.FunctionType, slice, enum.Enum))


def check_opaque(obj: Any, is_output: bool) -> None:
    """Refuses an opaque value that hides arrays: they would be constants for ever, or tracers that outlive a trace."""
    if isinstance(obj, type) or type(obj) in static_classes:
        return
    if isinstance(obj, (operator.methodcaller, operator.itemgetter)) and not _is_plain(obj.__reduce__()):
        raise UnsupportedValueError(
            f"this {type(obj).__qualname__} holds an object, and a change of that could not be noticed. Write a lambda "
            "or a function instead."
        )
    if isinstance(obj, types.ModuleType):
        if is_output and obj not in list(sys.modules.values()) and not is_module_level(obj):
            raise UnsupportedValueError(MADE_INSIDE.format(type="module"))
        return
    if is_output and (holds_tracers(obj) if is_jaxpr(obj) else _reaches_tracer(obj, depth=6)):
        raise UnsupportedValueError(
            f"this {type(obj).__qualname__} holds a traced array and would outlive its trace. "
            "Return the array by itself, and build the rest from it outside."
        )
    is_mark = type(obj) is object and not getattr(_MADE, "kept", False)
    if is_output and (is_mark or isinstance(obj, (*MUTABLE_OPAQUE, *_WITH_STATE))) and not is_module_level(obj):
        raise UnsupportedValueError(MADE_INSIDE.format(type=type(obj).__qualname__))
    attributes = getattr(obj, "__dict__", None)
    if isinstance(attributes, dict):
        for name, value in attributes.items():  # pyright: ignore[reportUnknownVariableType]
            if isinstance(value, jax.Array):
                raise UnsupportedValueError(
                    f"{type(obj).__qualname__} cannot be opened, but its attribute {name!r} is an array. "
                    "Register the class with jax.tree_util.register_pytree_node, or pass the array by itself."
                )


_MADE = threading.local()


@contextlib.contextmanager
def keeping_made(kept: bool) -> Generator[None]:
    """Within it an `object()` that a function makes may be returned."""
    before = getattr(_MADE, "kept", False)
    _MADE.kept = kept
    try:
        yield
    finally:
        _MADE.kept = before


def is_module_level(obj: Any) -> bool:
    """Is the object a name of a module or a class, like the sentinels that libraries compare with `is`?"""
    if any(
        isinstance(holder, dict) and ("__name__" in holder or "__module__" in holder)
        for holder in gc.get_referrers(obj)
    ):
        return True
    if not gc.get_freeze_count():  # what was frozen is not among the referrers
        return False
    scopes = [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]
    return any(value is obj for scope in scopes for value in list(scope.values()))


def _reaches_tracer(obj: Any, depth: int) -> bool:
    """Looks a few references deep, through whatever the garbage collector sees."""
    seen: set[int] = set()
    level: list[Any] = [obj]
    for _ in range(depth):
        below: list[Any] = []
        for part in level:
            for child in gc.get_referents(part):
                if isinstance(child, jax.core.Tracer):
                    return True
                is_scope = isinstance(part, types.FunctionType) and child is part.__globals__
                if is_scope or id(child) in seen or isinstance(child, _NO_TRACERS):
                    continue
                seen.add(id(child))
                below.append(child)
        level = below[:_MOST_SEEN]
    return False


_NO_TRACERS = (type, types.ModuleType, types.CodeType, str, bytes, int, float)
_MOST_SEEN = 2000  # objects a level
