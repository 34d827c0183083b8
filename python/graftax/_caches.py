# SPDX-License-Identifier: Apache-2.0
"""`functools.lru_cache` that is filled while a program is traced: it outlives the trace, and may not keep its tracers.

A cache is only a cache: one that would keep a tracer is cleared when the trace ends, and computes again.
"""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any, cast

from ._compat import current_trace
from ._tracers import is_ended, live_traces, trace_of

Cache = type(functools.lru_cache(len))  # the interpreter's own class, which has no public name

_MOST = 10_000  # values that are looked at in one cache
_DEPTH = 3  # containers and objects within each other

_met: weakref.WeakSet[Any] = weakref.WeakSet()


def note_cache(value: Any) -> None:
    """Notes a cache that code under a trace names."""
    if isinstance(value, (staticmethod, classmethod)):
        value = cast("Any", value).__func__
    if type(value) is Cache:
        _met.add(value)


def clear_caches() -> None:
    """Clears the caches that hold tracers of the trace which ends now, or of one that has ended."""
    if _met:
        ending, live = current_trace(), live_traces()
        for cache in list(_met):
            if cache.cache_info().currsize and any(_goes(value, ending, live) for value in _values(cache)):
                cache.cache_clear()


def _goes(value: Any, ending: Any, live: list[Any]) -> bool:
    trace = trace_of(value)
    return trace is not None and (trace is ending or is_ended(value, live))


def _values(cache: Any) -> list[Any]:
    """The arguments and results that a cache keeps, and what is in them."""
    found: list[Any] = []
    level = gc.get_referents(cache)[:_MOST]
    for _ in range(_DEPTH + 1):
        found += level
        level = [inner for value in level for inner in _parts(value)][: _MOST - len(found)]
    return found


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        table = cast("dict[Any, Any]", value)
        return [*table.keys(), *table.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(cast("list[Any]", value))
    if isinstance(value, (type, type(len), type(_parts))):
        return []
    return list(getattr(value, "__dict__", {}).values())
