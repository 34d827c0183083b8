# SPDX-License-Identifier: Apache-2.0
"""`functools.lru_cache` that is filled while a program is traced: it outlives the trace, and may not keep its tracers.

A cache is only a cache: one that would keep a tracer is cleared when the trace ends, and computes again.
"""

from __future__ import annotations

import functools
import gc
import types
import weakref
from typing import Any, cast

from jax.core import Tracer

from ._compat import array_class, current_trace
from ._symbols import Symbol
from ._tracers import is_ended, live_traces, trace_of

Cache = type(functools.lru_cache(len))  # the interpreter's own class, which has no public name

# What leads away from what is kept: to code, to all of JAX, or to a trace whose end makes a plain number of a symbol.
_NO_HOLDERS = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, Tracer, array_class(), Symbol)
_MOST = 10_000  # values that are looked at in one cache
_DEPTH = 4  # containers and objects within each other

# A WeakSet cannot be looked through while another thread notes a cache; a dict is copied at once.
_met: dict[weakref.ref[Any], None] = {}


def _forget(ref: weakref.ref[Any]) -> None:
    _met.pop(ref, None)


def note_cache(value: Any) -> None:
    """Notes a cache that code under a trace names."""
    if isinstance(value, (staticmethod, classmethod)):
        value = cast("Any", value).__func__
    if type(value) is Cache:
        _met.setdefault(weakref.ref(value, _forget))


def clear_caches() -> None:
    """Clears the caches that hold tracers of the trace which ends now, or of one that has ended."""
    if _met:
        ending, live = current_trace(), live_traces()
        for cache in [cache for ref in list(_met) if (cache := ref()) is not None]:
            if cache.cache_info().currsize and any(_goes(value, ending, live) for value in _values(cache)):
                cache.cache_clear()


def _goes(value: Any, ending: Any, live: list[Any]) -> bool:
    trace = trace_of(value) if issubclass(type(value), Tracer) else None
    return trace is not None and (trace is ending or is_ended(value, live))


def holds_tracer(value: Any, ending: Any) -> bool:
    """Does it lead to a tracer of the trace which ends now, or of one that has ended?"""
    live = live_traces()
    return _goes(value, ending, live) or any(_goes(inside, ending, live) for inside in _values(value))


def _values(holder: Any) -> list[Any]:
    """What a container, an object or a cache holds, and what is in that. No code of the user's runs for it."""
    if issubclass(type(holder), _NO_HOLDERS):
        return []
    found: list[Any] = []
    level = gc.get_referents(holder)
    for _ in range(_DEPTH + 1):
        level = level[: _MOST - len(found)]
        found += level
        level = gc.get_referents(*[value for value in level if not issubclass(type(value), _NO_HOLDERS)])
    return found
