# SPDX-License-Identifier: Apache-2.0
"""What caches of functions (`functools.cache`) give out to the code of a trace: it is the caller's own.

A cached object without arrays is a root: the trace works on the object itself, and what it changes is changed by every
call. The attributes of one with arrays are bindings, since its copy could not be put into the cache. Each key is a
binding as well, so that a cache that is cleared is noticed.

A cache that a trace would fill is filled before it, by plain Python: otherwise it would keep tracers.
"""

from __future__ import annotations

import contextlib
import threading
import types
import weakref
from collections.abc import Generator
from typing import Any

import jax

from graftax._base.missing import MISSING
from graftax._capture.cache_layout import Cache, is_known, results_in, table_of
from graftax._capture.library_reads import Held, can_be_root, watch_attributes
from graftax._capture.origin import Origin
from graftax._capture.user_caches import attributes_of, values_in

_SIMPLE = int, float, complex, bool, str, bytes, type(None)
_MOST_KEYS = 64  # of a cache that is looked at

Binding = tuple[Any, Any]


class _Now(threading.local):
    def __init__(self) -> None:
        self.given: dict[int, dict[Any, Any]] | None = None  # what each cache gave out when the trace began


class CachedValues:
    """Of the caches that the traces of one function name."""

    def __init__(self) -> None:
        self.objects: dict[str, Held] = {}  # those that are roots, by the names that messages have for them
        self.bindings: list[Binding] = []
        self._caches: dict[int, weakref.ref[Any]] = {}
        self._functions: dict[int, weakref.ref[Any]] = {}  # the cache of a function
        self._to_fill: list[tuple[Any, tuple[Any, ...]]] = []
        self._errors: dict[tuple[int, tuple[Any, ...]], Exception] = {}
        self._filled: set[tuple[int, tuple[Any, ...]]] = set()
        self._now = _Now()

    @contextlib.contextmanager
    def begun(self) -> Generator[None]:
        """While entered, a trace runs. What it puts into a cache is its own, and no root of it."""
        around, self._now.given = self._now.given, {}
        try:
            for reference in list(self._caches.values()):
                if (cache := reference()) is not None:
                    self._now.given[id(cache)] = results_in(cache)
            yield
        finally:
            self._now.given = around

    def note(self, cache: object) -> types.CodeType | None:
        """Notes a cache that code names. Gives the code of its function where that is new."""
        if type(cache) is not Cache or not is_known or self._is_known(cache):
            return None
        self._caches[id(cache)] = weakref.ref(cache)
        if self._now.given is not None:
            self._now.given[id(cache)] = results_in(cache)
        function = getattr(cache, "__wrapped__", None)
        if not isinstance(function, types.FunctionType):
            return None
        self._functions[id(function)] = weakref.ref(cache)
        return function.__code__

    def _is_known(self, cache: object) -> bool:
        reference = self._caches.get(id(cache))
        return reference is not None and reference() is cache

    def is_cached(self, function: object) -> bool:
        return id(function) in self._functions

    def fills(self, function: types.FunctionType, first: object) -> bool:
        """Is this the function of a cache that plain Python can fill, before the trace begins anew?"""
        call = self._call(function, first)
        if call is None or (id(call[0]), call[1]) in self._filled:
            return False
        self._filled.add((id(call[0]), call[1]))
        self._to_fill.append(call)
        return True

    def take_error(self, function: types.FunctionType, first: object) -> Exception | None:
        """What plain Python has met instead of a result."""
        call = self._call(function, first) if self._errors else None
        return None if call is None else self._errors.pop((id(call[0]), call[1]), None)

    def _call(self, function: types.FunctionType, first: object) -> tuple[Any, tuple[Any, ...]] | None:
        """The cache, and the arguments where these are constants that are known from the first one."""
        reference = self._functions.get(id(function))
        cache = reference() if reference is not None else None
        code = function.__code__
        takes_more = code.co_argcount > 1 or code.co_kwonlyargcount or code.co_flags & 0x0C  # *args, **kwargs
        if cache is None or getattr(cache, "__wrapped__", None) is not function or takes_more:
            return None
        if code.co_argcount and not _is_simple(first):
            return None
        return cache, (first,) if code.co_argcount else ()

    def fill(self) -> bool:
        """Calls what traces would have filled caches with. False where that is nothing."""
        calls, self._to_fill = self._to_fill, []
        for cache, arguments in calls:
            try:
                with jax.ensure_compile_time_eval():
                    cache(*arguments)
            except Exception as error:
                self._errors[id(cache), arguments] = error
            self._filled.discard((id(cache), arguments))  # it may be cleared
        return bool(calls)

    def watches(self, holder: object, name: object) -> bool:
        """Is this one of its bindings?"""
        return any(binding[0] is holder and binding[1] == name for binding in self.bindings)

    def look(self) -> list[Origin]:
        """The cached objects that are roots now."""
        objects: dict[str, Held] = {}
        bindings: list[Binding] = []
        watched = {id(holder) for holder, _ in self.bindings}
        for reference in list(self._caches.values()):
            cache = reference()
            if cache is None or not 0 < cache.cache_info().currsize <= _MOST_KEYS:
                continue
            results = {key: value for key, value in results_in(cache).items() if _is_simple(key)}
            if self._now.given is not None:
                given = self._now.given.setdefault(id(cache), results)  # another thread may have noted it
                results = {key: value for key, value in results.items() if given.get(key, MISSING) is value}
            table = table_of(cache)
            bindings += [(table, key) for key in results]
            for key, result in results.items():
                if _can_be_root(result):
                    name = _text(cache, key)
                    known = self.objects.get(name)
                    objects[name] = known if known is not None and known.value is result else Held(result)
                else:
                    bindings += _bindings_of(result, watched)
        if [(id(holder), name) for holder, name in bindings] != [(id(h), name) for h, name in self.bindings]:
            self.bindings = bindings
        if objects.keys() != self.objects.keys() or any(objects[name] is not self.objects[name] for name in objects):
            self.objects = objects  # another dict: these are other origins
        return [Origin(self.objects, name) for name in self.objects]


def _is_simple(key: object) -> bool:
    parts: tuple[Any, ...] = key if type(key) is tuple else (key,)
    return all(type(part) in _SIMPLE or isinstance(part, type) for part in parts)


def _text(cache: Any, key: object) -> str:
    arguments = key if type(key) is tuple else (key,)
    return f"{cache.__module__}.{cache.__qualname__}({', '.join(map(repr, arguments))})"


def _can_be_root(result: object) -> bool:
    """Is it an object that can change, with no array in it?"""
    if type(result) not in (list, dict, set) and attributes_of(result) is None:
        return False
    return can_be_root(result)


def _bindings_of(result: object, watched: set[int]) -> list[Binding]:
    """The attributes and items by name that it leads to."""
    bindings: list[Binding] = []
    for value in [result, *values_in(result)]:
        held = value if type(value) is dict else attributes_of(value)
        if held is not None and len(held) <= _MOST_KEYS:
            if held is not value and id(held) not in watched:
                watch_attributes(held)
            bindings += [(held, name) for name in held if type(name) is str]
    return bindings
