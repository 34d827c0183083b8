# SPDX-License-Identifier: Apache-2.0
"""Caches of `functools.lru_cache` that are filled while a program is traced: they outlive it, and must keep no tracers.

When a trace ends, results that hold tracers are taken out, and computed again in the next one. Of a trace that is
discarded, all its results are. What a cache gave out before the trace is the caller's own (`lru_caches.py`): if the
trace puts an array into it, that is an error, and the object gets back what it held.
"""

from __future__ import annotations

import functools
import gc
import threading
import types
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from jax.core import Tracer

from graftax._base.errors import MutationError
from graftax._base.missing import MISSING
from graftax._capture.cache_layout import Cache, is_known, results_in, take_out
from graftax._capture.code_by_identity import IdentitySet
from graftax._capture.code_owner import HEAP_TYPE
from graftax._capture.numbers.symbols import Symbol
from graftax._capture.retrace_signals import NewReads
from graftax._jax.arrays import array_class
from graftax._jax.tracers import is_ended, live_traces, trace_of
from graftax._jax.traces import current_trace

P = ParamSpec("P")
R = TypeVar("R")

# These are not searched for tracers: they lead to code, to all of JAX, or to a trace whose end makes symbols numbers.
_NO_HOLDERS = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, Tracer, array_class(), Symbol)
_MOST = 10_000  # values that are looked at in one cache
_DEPTH = 4  # levels of containers and objects

_met = IdentitySet[Any]()  # caches that code under any trace has named

KEPT_IN_CACHE = (
    "{name} puts an array into an object that {cache} returned. The contents of a cache are not an input "
    "of a compiled function, so the object was left as it was. Pass it to the function as an argument, or"
    " keep it under a global name that the function reads."
)


class _Thread(threading.local):
    """The trace that runs in this thread."""

    def __init__(self) -> None:
        # What caches gave out before it: a list or a dict, a copy of that, and the cache. None where no trace runs.
        self.held: dict[int, tuple[Any, Any, Any]] | None = None
        self.results: dict[int, tuple[Any, dict[Any, Any]]] = {}  # of these caches, by key
        self.named: Callable[[], list[Any]] | None = None  # gives the caches that its code names; None: all in `_met`


_THREAD = _Thread()


def note_cache(value: object) -> Any:
    """Notes a cache that code under a trace names, and gives it; None of any other value."""
    if isinstance(value, (staticmethod, classmethod)):
        value = cast("Any", value).__func__
    elif isinstance(value, property):
        value = value.fget
    if type(value) is not Cache:
        return None
    _met.add(value)
    if id(value) not in _THREAD.results:
        _hold(value)
    return value


def _hold(cache: object) -> None:
    """Notes what a cache gives out before the trace changes it."""
    if _THREAD.held is None or not is_known:
        return
    results = results_in(cache)
    _THREAD.results[id(cache)] = cache, results
    for value in [value for result in results.values() for value in (result, *values_in(result))]:
        held = value if type(value) in (list, dict) else attributes_of(value)
        if held is not None and id(held) not in _THREAD.held:
            _THREAD.held[id(held)] = held, held.copy(), cache


def is_object(value: object) -> bool:
    """Is it an instance of a class that a class statement made?"""
    return not issubclass(type(value), _NO_HOLDERS) and bool(type(value).__flags__ & HEAP_TYPE)


def attributes_of(value: object) -> dict[str, Any] | None:
    """The attributes of an instance of a class that a class statement made. No code of the class runs for it."""
    if not is_object(value):
        return None
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:  # its class has slots alone
        return None
    return attributes if type(attributes) is dict else None


def keeping_cached(trace: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function that runs a trace. A trace that fails, or is discarded, leaves caches as they were.

    A trace that will be repeated without its body keeps the results that it has put into caches.
    """

    @functools.wraps(trace)
    def run_trace(*args: P.args, **kwargs: P.kwargs) -> R:
        outer, _THREAD.held, _THREAD.results = (_THREAD.held, _THREAD.results), {}, {}
        try:
            for cache in _caches():
                _hold(cache)
            returned = trace(*args, **kwargs)
            if outer[0] is not None:  # the trace around this one may still be discarded, and this one with it
                for held, state in _THREAD.held.items():
                    outer[0].setdefault(held, state)
                for cache, results in _THREAD.results.items():
                    outer[1].setdefault(cache, results)
            return returned
        except BaseException as error:
            _put_back(lambda held: True)
            take_out_new = functools.partial(_take_out_new, _THREAD.results)
            if isinstance(error, NewReads) and error.if_discarded is not None:
                error.if_discarded.append(take_out_new)
            else:
                take_out_new()
            raise
        finally:
            _THREAD.held, _THREAD.results = outer

    return run_trace


def _take_out_new(results: dict[int, tuple[Any, dict[Any, Any]]]) -> None:
    """Takes new results out of caches. `results` has, by the id of each cache, (cache, its results before)."""
    for cache, original in results.values():
        for key, result in results_in(cache).items():
            if original.get(key, MISSING) is not result:
                take_out(cache, key)


def refuse_cached(name: str) -> None:
    """Raises MutationError where the trace has put a tracer into what a cache kept before."""
    ending = current_trace()
    cache = _put_back(lambda held: holds_tracer(held, ending))
    if cache is not None:
        called = getattr(cache, "__qualname__", "a cached function")
        raise MutationError(KEPT_IN_CACHE.format(name=name, cache=f"{called}()"))


def _put_back(is_unwanted: Callable[[Any], bool]) -> Any:
    """Undoes unwanted changes of what caches gave out before the trace. Gives one of the caches where there are any."""
    changed_cache = None
    for held, original, cache in list((_THREAD.held or {}).values()):
        if not same_items(held, original) and is_unwanted(held):
            changed_cache = cache
            # In place: the cache gives out this very object, and others may hold it.
            held.clear()
            held.extend(original) if type(held) is list else held.update(original)
    return changed_cache


def same_items(first: Any, second: Any) -> bool:
    """Do two lists, sets or dicts hold the same objects, in the same order where they have one?"""
    if len(first) != len(second):
        return False
    if type(first) is set:
        return set(map(id, first)) == set(map(id, second))
    is_same = all(a is b for a, b in zip(first, second, strict=True))
    return is_same and (type(first) is list or all(first[key] is second[key] for key in first))


def look_at(named: Callable[[], list[Any]] | None) -> Callable[[], list[Any]] | None:
    """Sets which caches the traces of this thread look at, besides those that they meet. Gives the last setting.

    A program may have caches with a whole model or a data set, which a function that does not name them cannot reach.
    """
    outer, _THREAD.named = _THREAD.named, named
    return outer


def _caches() -> list[Any]:
    """The caches that the running trace may fill."""
    if _THREAD.named is not None and is_known:
        return _THREAD.named()
    return list(_met)


def clear_caches() -> None:
    """Clears the caches of what holds tracers of the trace which ends now, or of one that has ended."""
    if _met:
        ending, live = current_trace(), live_traces()
        for cache in _caches():
            if not cache.cache_info().currsize or not any(_goes(value, ending, live) for value in values_in(cache)):
                continue
            # One result alone can only be taken out where the layout of a cache is known.
            if not is_known:
                cache.cache_clear()
                continue
            for key, result in results_in(cache).items():
                if any(_goes(value, ending, live) for value in (key, result, *values_in([key, result]))):
                    take_out(cache, key)


def _goes(value: object, ending: object, live: list[Any]) -> bool:
    """Is it a tracer of the trace which ends now, or of one that has ended?"""
    trace = trace_of(value) if issubclass(type(value), Tracer) else None
    return trace is not None and (trace is ending or is_ended(value, live))


def holds_tracer(value: object, ending: object) -> bool:
    """Does it lead to a tracer of the trace which ends now, or of one that has ended?"""
    live = live_traces()
    # An instance may keep its values itself: then its dict does not tell the collector of them.
    holders = [value, *value.values()] if type(value) is dict else [value]
    return any(_goes(x, ending, live) for holder in holders for x in (holder, *values_in(holder)))


def values_in(holder: object) -> list[Any]:
    """What a container, an object or a cache holds, and what is in that. No code of the user's runs for it."""
    if issubclass(type(holder), _NO_HOLDERS):
        return []
    values: list[Any] = []
    level = gc.get_referents(holder)
    for _ in range(_DEPTH + 1):
        # A cache may hold a whole data set, so each level is cut before the next one is asked for.
        level = level[: _MOST - len(values)]
        values += level
        level = gc.get_referents(*[value for value in level if not issubclass(type(value), _NO_HOLDERS)])
    return values
