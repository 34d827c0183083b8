# SPDX-License-Identifier: Apache-2.0
"""Opaque values: those that hide arrays, or were created inside a traced function, are refused."""

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
from graftax._jax.equations import holds_tracers, is_jaxpr

MADE_INSIDE = (
    "this {type} was created inside the function, where it would be one object for all calls. Create it outside, and "
    "pass it in or add it to the result afterwards."
)
# A caller that receives one expects to be its only owner.
_WITH_STATE = (
    logging.Handler,
    concurrent.futures.Executor,
    concurrent.futures.Future,
    type(functools.lru_cache(len)),
)


def _is_plain(value: object) -> bool:
    """Is it a name, a number, a function or a class, or a tuple of such?"""
    if type(value) is tuple or type(value) is frozenset:
        return all(map(_is_plain, value))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return type(value) in PLAIN or value is Ellipsis or isinstance(value, (type, types.FunctionType, slice, enum.Enum))


def check_opaque(obj: object, is_output: bool) -> None:
    """Refuses an opaque value that hides arrays: constants that never change, or tracers that outlive their trace."""
    if isinstance(obj, type) or type(obj) in static_classes:
        return
    if isinstance(obj, (operator.methodcaller, operator.itemgetter)) and not _is_plain(obj.__reduce__()):
        raise UnsupportedValueError(
            f"this {type(obj).__qualname__} holds an object whose changes could not be noticed. Write a lambda "
            "or a function instead."
        )
    if isinstance(obj, types.ModuleType):
        if is_output and obj not in list(sys.modules.values()) and not is_module_level(obj):
            raise UnsupportedValueError(MADE_INSIDE.format(type="module"))
        return
    if is_output and (holds_tracers(obj) if is_jaxpr(obj) else _reaches_tracer(obj)):
        raise UnsupportedValueError(
            f"this {type(obj).__qualname__} holds a traced array and would outlive its trace. "
            "Return the array by itself, and build the rest from it outside."
        )
    # An `object()` is a mark: one per call for the function as it is written, but one for all calls once compiled.
    is_mark = type(obj) is object and not getattr(_THREAD, "allows_new_objects", False)
    if is_output and (is_mark or isinstance(obj, (*MUTABLE_OPAQUE, *_WITH_STATE))) and not is_module_level(obj):
        raise UnsupportedValueError(MADE_INSIDE.format(type=type(obj).__qualname__))
    # Arrays in the attributes of an object that is not opened would silently be constants.
    attributes = getattr(obj, "__dict__", None)
    if isinstance(attributes, dict):
        for name, value in attributes.items():  # pyright: ignore[reportUnknownVariableType]
            if isinstance(value, jax.Array):
                raise UnsupportedValueError(
                    f"{type(obj).__qualname__} cannot be opened, but its attribute {name!r} is an array. "
                    "Register the class with jax.tree_util.register_pytree_node, or pass the array by itself."
                )


_THREAD = threading.local()


@contextlib.contextmanager
def allow_new_objects(allowed: bool) -> Generator[None]:
    """Within this context, a traced function may return an `object()` that it created."""
    previous = getattr(_THREAD, "allows_new_objects", False)
    _THREAD.allows_new_objects = allowed
    try:
        yield
    finally:
        _THREAD.allows_new_objects = previous


def is_module_level(obj: object) -> bool:
    """Is the object a variable of a module or a class, like the sentinels that libraries compare with `is`?"""
    # The namespace of a module or a class refers to its variables.
    if any(
        isinstance(holder, dict) and ("__name__" in holder or "__module__" in holder)
        for holder in gc.get_referrers(obj)
    ):
        return True
    if not gc.get_freeze_count():  # `gc.freeze` hides objects from `get_referrers`
        return False
    # The slow way, which finds only the variables of modules.
    scopes = [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]
    return any(value is obj for scope in scopes for value in list(scope.values()))


def _reaches_tracer(obj: object) -> bool:
    """Is a tracer reachable by a few references that the garbage collector knows?"""
    visited: set[int] = set()
    level: list[Any] = [obj]
    for _ in range(_MAX_DEPTH):
        next_level: list[Any] = []
        for part in level:
            for child in gc.get_referents(part):
                if isinstance(child, jax.core.Tracer):
                    return True
                # Globals of a function reach the whole program, and no trace stores tracers there unnoticed.
                is_scope = isinstance(part, types.FunctionType) and child is part.__globals__
                if is_scope or id(child) in visited or isinstance(child, _NO_TRACERS):
                    continue
                visited.add(id(child))
                next_level.append(child)
        level = next_level[:_MAX_LEVEL]
    return False


_NO_TRACERS = (type, types.ModuleType, types.CodeType, str, bytes, int, float)
# The search ends early, since an opaque object may refer to much of the program.
_MAX_DEPTH = 6
_MAX_LEVEL = 2000  # objects examined at each depth
