# SPDX-License-Identifier: Apache-2.0
"""What caches of functions (`functools.cache`) give out to the code of a trace: it is the caller's own.

A cached object without arrays is a root: the trace works on the object itself, and what it changes is changed by every
call. The attributes of one with arrays are bindings, since its copy could not be put into the cache. Each key is a
binding as well, so that a cache that is cleared is noticed.

A cache that a trace would fill is filled before it, by plain Python: otherwise it would keep tracers.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import types
import weakref
from collections import Counter
from collections.abc import Container, Generator, Iterator
from typing import Any, NamedTuple

import jax

from graftax._base.class_lookup import in_mro
from graftax._base.errors import MutationError
from graftax._base.missing import MISSING
from graftax._capture.cache_layout import Cache, is_known, results_in, table_of, take_out
from graftax._capture.caches_in_traces import attributes_of, is_object, values_in
from graftax._capture.code_owner import is_users_code
from graftax._capture.library_reads import Held, can_be_root, watch_attributes
from graftax._capture.origin import Origin
from graftax._capture.retrace_signals import NewReads

_SIMPLE = int, float, complex, bool, str, bytes, type(None)
_CONTAINERS = list, dict, set
_MOST_FILLS = 3  # of a cache with one result, in one call
_MOST_KEYS = 64  # of a cache that is looked at

Binding = tuple[Any, Any]

DROPPED = (
    "The function asks for {call}, and the cache drops the result before the call has ended: there is no room for it, "
    "or the function clears the cache. A compiled function cannot compute it again in each call, as plain Python does. "
    "Give the cache a larger maxsize, clear it outside, or take it away."
)


class CachedCall(NamedTuple):
    """Where code calls the function of a cache."""

    name: str
    code: types.CodeType
    line: int
    module: str | None


class _OfCopy(NamedTuple):
    """A cache that the trace fills for a copy of an object of the caller's."""

    cache: Any
    copy: object
    is_known: bool  # has it a result for the caller's object?
    call: CachedCall

    def is_of(self, key: object) -> bool:
        return any(part is self.copy for part in _parts(key))


class _Now(threading.local):
    def __init__(self) -> None:
        self.copies: list[_OfCopy] = []
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
        self._times: Counter[tuple[int, tuple[Any, ...]]] = Counter()  # how often each was filled in this call
        self._now = _Now()

    @contextlib.contextmanager
    def begun(self) -> Generator[None]:
        """While entered, a trace runs. What it puts into a cache is its own, and no root of it."""
        around, self._now.given = self._now.given, {}
        copies_around, self._now.copies = self._now.copies, []
        try:
            for reference in list(self._caches.values()):
                if (cache := reference()) is not None:
                    self._now.given[id(cache)] = results_in(cache)
            yield
        except NewReads:
            raise
        except BaseException:
            self._times.clear()
            raise
        else:
            self._times.clear()
        finally:
            for each in self._now.copies:
                for key in filter(each.is_of, results_in(each.cache)):
                    take_out(each.cache, key)
            self._now.given, self._now.copies = around, copies_around

    def note_copy(self, function: types.FunctionType, copy: object, original: int, frame: types.FrameType) -> None:
        """The trace computes a result for a copy of the caller's object, which no call will ask the cache for."""
        if (cache := self._functions[id(function)]()) is not None:
            is_known = any(id(part) == original for key in results_in(cache) for part in _parts(key))
            place = frame.f_code, frame.f_lineno, frame.f_globals.get("__name__")
            self._now.copies.append(_OfCopy(cache, copy, is_known, CachedCall(function.__qualname__, *place)))

    def lost(self) -> Iterator[CachedCall]:
        """The calls of this trace for copies that plain Python had a result for, or keeps an object of."""
        for each in self._now.copies:
            made = [result for key, result in results_in(each.cache).items() if each.is_of(key)]
            if each.is_known or any(type(x) in _CONTAINERS or is_object(x) for x in made):
                yield each.call

    def in_keys(self) -> Iterator[object]:
        """The objects that the caches know by their identity: another one that is equal has other results.

        Not the copies for which the trace has computed one, as it would for the copy of any such object.
        """
        copies = {id(each.copy) for each in self._now.copies if not each.is_known}
        for cache in [cache for reference in list(self._caches.values()) if (cache := reference()) is not None]:
            yield from (
                part
                for key in results_in(cache)
                for part in _parts(key)
                if _is_by_identity(type(part)) and id(part) not in copies
            )

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

    def named(self) -> list[Any]:
        """The caches that the code names."""
        return [cache for reference in list(self._caches.values()) if (cache := reference()) is not None]

    def names(self) -> list[str]:
        """The functions of the user's that have such a cache."""
        functions = [getattr(reference(), "__wrapped__", None) for reference in list(self._caches.values())]
        of_python = [function for function in functions if isinstance(function, types.FunctionType)]
        return [f.__qualname__ for f in of_python if is_users_code(f.__code__, f.__globals__)]

    def is_cached(self, function: object) -> bool:
        return id(function) in self._functions

    def fills(self, function: types.FunctionType, first: object) -> bool:
        """Is this the function of a cache that plain Python can fill, before the trace begins anew?"""
        call = self._call(function, first)
        if call is None or (id(call[0]), call[1]) in self._filled or _has_result(*call):
            return False  # what it has is for another spelling of the call, such as one that leaves out a default
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
            self._times[id(cache), arguments] += 1
            if self._times[id(cache), arguments] > _MOST_FILLS:
                self._times.clear()
                raise MutationError(DROPPED.format(call=_text(cache, arguments, ())))
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
            results = {key: value for key, value in results_in(cache).items() if _is_watched(key)}
            if self._now.given is not None:
                given = self._now.given.setdefault(id(cache), results)  # another thread may have noted it
                results = {key: value for key, value in results.items() if given.get(key, MISSING) is value}
            table = table_of(cache)
            bindings += [(table, key) for key in results]
            for key, result in results.items():
                if (type(result) in _CONTAINERS or is_object(result)) and can_be_root(result):
                    name = _text(cache, key, objects)
                    known = self.objects.get(name)
                    objects[name] = known if known is not None and known.value is result else Held(result)
                else:
                    bindings += _bindings_of(result, watched)
        if [(id(holder), name) for holder, name in bindings] != [(id(h), name) for h, name in self.bindings]:
            self.bindings = bindings
        if objects.keys() != self.objects.keys() or any(objects[name] is not self.objects[name] for name in objects):
            self.objects = objects  # another dict: these are other origins
        return [Origin(self.objects, name) for name in self.objects]


def _has_result(cache: Any, arguments: tuple[Any, ...]) -> bool:
    return any(_parts(key) == arguments for key in results_in(cache) if _is_simple(key))


def _is_simple(key: object) -> bool:
    return all(type(part) in _SIMPLE or isinstance(part, type) for part in _parts(key))


def _parts(key: object) -> tuple[Any, ...]:
    """The arguments in a key."""
    return key if type(key) is tuple else (key,)


def _is_watched(key: object) -> bool:
    """Can it be looked up without code of the user's? So can an object that is compared by identity."""
    return all(_is_simple(part) or _is_by_identity(type(part)) for part in _parts(key))


def _is_by_identity(cls: type) -> bool:
    return all(in_mro(cls, name) is vars(object)[name] for name in ("__hash__", "__eq__"))


def _text(cache: Any, key: object, taken: Container[str]) -> str:
    """What messages call a result of the cache."""
    shown = [repr(part) if _is_simple(part) else type(part).__qualname__ for part in _parts(key)]
    text = f"{cache.__module__}.{cache.__qualname__}({', '.join(shown)})"
    return next(each for i in itertools.count() if (each := f"{text} ({i})" if i else text) not in taken)


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
