# SPDX-License-Identifier: Apache-2.0
"""`functools.lru_cache` that is filled while a program is traced: it outlives the trace, and may not keep its tracers.

What would keep a tracer goes when the trace ends, and is computed again. Of a trace that is discarded everything goes
that it has put there. What a cache gave before the trace is the caller's own (`cached_values.py`): an array that is put
there is taken out.
"""

from __future__ import annotations

import functools
import gc
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from jax.core import Tracer

from graftax._base.errors import MutationError
from graftax._base.missing import MISSING
from graftax._capture.cache_layout import Cache, is_known, results_in, take_out
from graftax._capture.code_owner import HEAP_TYPE
from graftax._capture.numbers.symbols import Symbol
from graftax._capture.retrace_signals import NewReads
from graftax._jax.arrays import array_class
from graftax._jax.tracers import is_ended, live_traces, trace_of
from graftax._jax.traces import current_trace

P = ParamSpec("P")
R = TypeVar("R")

# What leads away from what is kept: to code, to all of JAX, or to a trace whose end makes a plain number of a symbol.
_NO_HOLDERS = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, Tracer, array_class(), Symbol)
_MOST = 10_000  # values that are looked at in one cache
_DEPTH = 4  # containers and objects within each other

# A WeakSet cannot be looked through while another thread notes a cache; a dict is copied at once.
_met: dict[weakref.ref[Any], None] = {}


def _forget(ref: weakref.ref[Any]) -> None:
    _met.pop(ref, None)


KEPT_IN_CACHE = (
    "{name} puts an array into an object that {cache} returned. The contents of a cache are not an input "
    "of a compiled function, so the object was left as it was. Pass it to the function as an argument, or"
    " keep it under a global name that the function reads."
)


class _Now(threading.local):
    """The trace that runs in this thread."""

    def __init__(self) -> None:
        # What caches gave out before it: a list or a dict, what that held, and the cache. None where no trace runs.
        self.held: dict[int, tuple[Any, Any, Any]] | None = None
        self.results: dict[int, tuple[Any, dict[Any, Any]]] = {}  # of these caches, by key
        self.named: Callable[[], list[Any]] | None = None  # the caches that its code names; None: whatever was met


_now = _Now()


def note_cache(value: object) -> Any:
    """Notes a cache that code under a trace names, and gives it; None of any other value."""
    if isinstance(value, (staticmethod, classmethod)):
        value = cast("Any", value).__func__
    elif isinstance(value, property):
        value = value.fget
    if type(value) is not Cache:
        return None
    ref = weakref.ref(value, _forget)
    if ref not in _met:
        _met[ref] = None
    if id(value) not in _now.results:
        _hold(value)
    return value


def _hold(cache: object) -> None:
    if _now.held is None or not is_known:
        return
    results = results_in(cache)
    _now.results[id(cache)] = cache, results
    for value in [part for result in results.values() for part in (result, *values_in(result))]:
        held = value if type(value) in (list, dict) else attributes_of(value)
        if held is not None and id(held) not in _now.held:
            _now.held[id(held)] = held, held.copy(), cache


def is_object(value: object) -> bool:
    """Is it an instance of a class that a class statement made?"""
    return not issubclass(type(value), _NO_HOLDERS) and bool(type(value).__flags__ & HEAP_TYPE)


def attributes_of(value: object) -> dict[str, Any] | None:
    """The attributes of an instance of a class that a class statement made. No code of the class runs for it."""
    if not is_object(value):
        return None
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if type(found) is dict else None


def keeping_cached(trace: Callable[P, R]) -> Callable[P, R]:
    """Of a function that runs a trace. What fails, or is discarded, has changed nothing of what caches kept.

    A trace that will be repeated without its body keeps the results that it has put into caches.
    """

    @functools.wraps(trace)
    def kept(*args: P.args, **kwargs: P.kwargs) -> R:
        around, _now.held, _now.results = (_now.held, _now.results), {}, {}
        try:
            for cache in _caches():
                _hold(cache)
            returned = trace(*args, **kwargs)
            if around[0] is not None:  # what is around this may be discarded yet
                for held, state in _now.held.items():
                    around[0].setdefault(held, state)
                for cache, results in _now.results.items():
                    around[1].setdefault(cache, results)
            return returned
        except BaseException as error:
            _put_back(lambda now: True)
            take_out_new = functools.partial(_take_out_new, _now.results)
            if isinstance(error, NewReads) and error.if_discarded is not None:
                error.if_discarded.append(take_out_new)
            else:
                take_out_new()
            raise
        finally:
            _now.held, _now.results = around

    return kept


def _take_out_new(results: dict[int, tuple[Any, dict[Any, Any]]]) -> None:
    """Takes results out of caches that were not there before. `results`: (cache, its results at that time)."""
    for cache, before in results.values():
        for key, result in results_in(cache).items():
            if before.get(key, MISSING) is not result:
                take_out(cache, key)


def refuse_cached(name: str) -> None:
    """Raises MutationError where the trace has put a tracer into what a cache kept before."""
    ending = current_trace()
    cache = _put_back(lambda now: holds_tracer(now, ending))
    if cache is not None:
        called = getattr(cache, "__qualname__", "a cached function")
        raise MutationError(KEPT_IN_CACHE.format(name=name, cache=f"{called}()"))


def _put_back(goes: Callable[[Any], bool]) -> Any:
    """Puts back what has changed, where that is wanted. Gives one of the caches that it is of."""
    found = None
    for held, before, cache in list((_now.held or {}).values()):
        if not _same_items(held, before) and goes(held):
            found = cache
            held.clear()
            held.extend(before) if type(held) is list else held.update(before)
    return found


def _same_items(one: Any, other: Any) -> bool:
    if len(one) != len(other):
        return False
    if type(one) is list:
        return all(a is b for a, b in zip(one, other, strict=True))
    return all(a is b and one[a] is other[b] for a, b in zip(one, other, strict=True))


def look_at(named: Callable[[], list[Any]] | None) -> Callable[[], list[Any]] | None:
    """From now on the traces of this thread look at these caches, besides those that they meet: others may hold a whole
    model or a data set, and are not reached. Gives what it was before."""
    before, _now.named = _now.named, named
    return before


def _caches() -> list[Any]:
    if _now.named is not None and is_known:
        return _now.named()
    return [cache for ref in list(_met) if (cache := ref()) is not None]


def clear_caches() -> None:
    """Clears the caches of what holds tracers of the trace which ends now, or of one that has ended."""
    if _met:
        ending, live = current_trace(), live_traces()
        for cache in _caches():
            if not cache.cache_info().currsize or not any(_goes(value, ending, live) for value in values_in(cache)):
                continue
            if not is_known:
                cache.cache_clear()
                continue
            for key, result in results_in(cache).items():
                if any(_goes(value, ending, live) for value in (key, result, *values_in([key, result]))):
                    take_out(cache, key)


def _goes(value: object, ending: object, live: list[Any]) -> bool:
    trace = trace_of(value) if issubclass(type(value), Tracer) else None
    return trace is not None and (trace is ending or is_ended(value, live))


def holds_tracer(value: object, ending: object) -> bool:
    """Does it lead to a tracer of the trace which ends now, or of one that has ended?"""
    live = live_traces()
    # The collector is told of an instance's values by the instance, not by its dict.
    parts = [value, *value.values()] if type(value) is dict else [value]
    return any(_goes(part, ending, live) or any(_goes(i, ending, live) for i in values_in(part)) for part in parts)


def values_in(holder: object) -> list[Any]:
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
