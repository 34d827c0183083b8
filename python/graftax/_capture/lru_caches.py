# SPDX-License-Identifier: Apache-2.0
"""What caches of functions (`functools.cache`) give out to the code of a trace: the caller's own objects.

A cached object without arrays is a root: the trace works on the object itself, and each call repeats what the trace
changes in it. Of a cached object with arrays, the attributes are bindings, since a copy of it could not be put into the
cache. Each key is a binding as well, so that it is noticed when a cache is cleared.

A cache that a trace would fill is filled before the trace, in plain Python: otherwise it would keep tracers.
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
from graftax._capture.caches_after_traces import attributes_of, is_object, values_in
from graftax._capture.code_by_identity import IdentitySet
from graftax._capture.code_owner import is_users_code
from graftax._capture.library_reads import Held, can_be_root, watch_attributes
from graftax._capture.origin import Origin
from graftax._capture.retrace_signals import NewReads

_SIMPLE = int, float, complex, bool, str, bytes, type(None)
_CONTAINERS = list, dict, set
_MOST_FILLS = 3  # times that one call fills a cache with the same result: it drops the result each time
_MOST_KEYS = 64  # of a cache, or of the attributes of a cached object, that are compared

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


class _FilledForCopy(NamedTuple):
    """A cache that the trace fills for a copy of an object of the caller's."""

    cache: Any
    copy: object
    is_known: bool  # does the cache have a result for the caller's object?
    call: CachedCall

    def has_copy(self, key: object) -> bool:
        return any(argument is self.copy for argument in _arguments_in(key))


class _Thread(threading.local):
    """The trace that runs in this thread."""

    def __init__(self) -> None:
        self.copies: list[_FilledForCopy] = []
        self.results_before: dict[int, dict[Any, Any]] | None = None  # of each cache when the trace began


class CachedValues:
    """The caches that the code under the traces of one function names, and what they give out."""

    def __init__(self) -> None:
        self.objects: dict[str, Held] = {}  # those that are roots, by the names that messages have for them
        self.bindings: list[Binding] = []
        self._caches = IdentitySet[Any]()
        self._functions: dict[int, weakref.ref[Any]] = {}  # by the id of its function, the cache
        # Calls of a cache are known by its id and the arguments.
        self._to_fill: list[tuple[Any, tuple[Any, ...]]] = []  # calls that plain Python makes before the next trace
        self._errors: dict[tuple[int, tuple[Any, ...]], Exception] = {}  # what these have raised
        self._filling: set[tuple[int, tuple[Any, ...]]] = set()  # those in `_to_fill`
        self._times: Counter[tuple[int, tuple[Any, ...]]] = Counter()  # how often each was made in this call
        self._thread = _Thread()

    @contextlib.contextmanager
    def begun(self) -> Generator[None]:
        """While entered, a trace runs. What it puts into a cache is its own, and no root of it."""
        outer_results, self._thread.results_before = self._thread.results_before, {}
        outer_copies, self._thread.copies = self._thread.copies, []
        is_over = True
        try:
            for cache in self._caches:
                self._thread.results_before[id(cache)] = results_in(cache)
            yield
        except NewReads:  # the call goes on with another trace
            is_over = False
            raise
        finally:
            if is_over:
                self._times.clear()
            # The copies end with the trace: no call asks a cache for them again.
            for filled in self._thread.copies:
                for key in filter(filled.has_copy, results_in(filled.cache)):
                    take_out(filled.cache, key)
            self._thread.results_before, self._thread.copies = outer_results, outer_copies

    def note_copy(self, function: types.FunctionType, copy: object, original: int, frame: types.FrameType) -> None:
        """The trace computes a result for a copy of the caller's object, which no call will ask the cache for."""
        if (cache := self._functions[id(function)]()) is not None:
            is_known = any(id(argument) == original for key in results_in(cache) for argument in _arguments_in(key))
            place = frame.f_code, frame.f_lineno, frame.f_globals.get("__name__")
            self._thread.copies.append(_FilledForCopy(cache, copy, is_known, CachedCall(function.__qualname__, *place)))

    def lost(self) -> Iterator[CachedCall]:
        """The calls of this trace that differ from plain Python, since the cache is asked for a copy.

        Plain Python has a result already, or keeps an object as the result, which later calls give out.
        """
        for filled in self._thread.copies:
            results = [result for key, result in results_in(filled.cache).items() if filled.has_copy(key)]
            if filled.is_known or any(type(result) in _CONTAINERS or is_object(result) for result in results):
                yield filled.call

    def in_keys(self) -> Iterator[object]:
        """The objects that the caches know by their identity: for an equal object they have other results.

        Copies for which the trace itself has computed the result are left out: any such object gets that result.
        """
        copies = {id(filled.copy) for filled in self._thread.copies if not filled.is_known}
        for cache in self._caches:
            yield from (
                argument
                for key in results_in(cache)
                for argument in _arguments_in(key)
                if _is_by_identity(type(argument)) and id(argument) not in copies
            )

    def note(self, cache: object) -> types.CodeType | None:
        """Notes a cache that code names. Gives the code of its function where that is new."""
        if type(cache) is not Cache or not is_known or cache in self._caches:
            return None
        self._caches.add(cache)
        if self._thread.results_before is not None:
            self._thread.results_before[id(cache)] = results_in(cache)
        function = getattr(cache, "__wrapped__", None)
        if not isinstance(function, types.FunctionType):
            return None
        self._functions[id(function)] = weakref.ref(cache)
        return function.__code__

    def named(self) -> list[Any]:
        """The caches that the code names, and that are still alive."""
        return list(self._caches)

    def names(self) -> list[str]:
        """The functions of the user's that have such a cache."""
        functions = [getattr(cache, "__wrapped__", None) for cache in self._caches]
        of_python = [function for function in functions if isinstance(function, types.FunctionType)]
        return [f.__qualname__ for f in of_python if is_users_code(f.__code__, f.__globals__)]

    def is_cached(self, function: object) -> bool:
        """Is this the function of a cache?"""
        return id(function) in self._functions

    def fills(self, function: types.FunctionType, first: object) -> bool:
        """Can plain Python fill the cache with the result of this call, before the trace begins anew?"""
        call = self._call(function, first)
        # If there is a result already, this call is spelled otherwise, for instance with an argument for a default.
        if call is None or (id(call[0]), call[1]) in self._filling or _has_result(*call):
            return False
        self._filling.add((id(call[0]), call[1]))
        self._to_fill.append(call)
        return True

    def take_error(self, function: types.FunctionType, first: object) -> Exception | None:
        """The error that plain Python has met instead of a result. It is raised in the trace, once."""
        call = self._call(function, first) if self._errors else None
        return None if call is None else self._errors.pop((id(call[0]), call[1]), None)

    def _call(self, function: types.FunctionType, first: object) -> tuple[Any, tuple[Any, ...]] | None:
        """(cache, arguments) of a call; None where it has arguments that are not constants, or more than one."""
        reference = self._functions.get(id(function))
        cache = reference() if reference is not None else None
        code = function.__code__
        # Only the first argument of a frame is known here.
        takes_more = code.co_argcount > 1 or code.co_kwonlyargcount or code.co_flags & 0x0C  # *args, **kwargs
        if cache is None or getattr(cache, "__wrapped__", None) is not function or takes_more:
            return None
        # Plain Python can be called before the trace only with what does not change from call to call.
        if code.co_argcount and not _is_simple(first):
            return None
        return cache, (first,) if code.co_argcount else ()

    def fill(self) -> bool:
        """Makes the calls with which traces would have filled caches. False where there are none."""
        calls, self._to_fill = self._to_fill, []
        for cache, arguments in calls:
            self._times[id(cache), arguments] += 1
            if self._times[id(cache), arguments] > _MOST_FILLS:
                self._times.clear()
                raise MutationError(DROPPED.format(call=_text(cache, arguments, ())))
            try:
                # The call may be within a trace of JAX's: results must be arrays all the same.
                with jax.ensure_compile_time_eval():
                    cache(*arguments)
            except Exception as error:
                self._errors[id(cache), arguments] = error
            self._filling.discard((id(cache), arguments))  # when the cache is cleared, it may have to be filled again
        return bool(calls)

    def watches(self, holder: object, name: object) -> bool:
        """Is this one of its bindings?"""
        return any(binding[0] is holder and binding[1] == name for binding in self.bindings)

    def look(self) -> list[Origin]:
        """Looks at all caches again: sets `bindings`, and gives the cached objects that are roots now."""
        objects: dict[str, Held] = {}
        bindings: list[Binding] = []
        watched = {id(holder) for holder, _ in self.bindings}
        for cache in self._caches:
            # Each key becomes a binding, which every entry compares after a change: too many for a large cache.
            if not 0 < cache.cache_info().currsize <= _MOST_KEYS:
                continue
            results = {key: value for key, value in results_in(cache).items() if _is_watched(key)}
            # What the running trace has put there is not the caller's own. Another thread may have noted the cache.
            if self._thread.results_before is not None:
                original = self._thread.results_before.setdefault(id(cache), results)
                results = {key: value for key, value in results.items() if original.get(key, MISSING) is value}
            table = table_of(cache)
            bindings += [(table, key) for key in results]
            for key, result in results.items():
                if (type(result) in _CONTAINERS or is_object(result)) and can_be_root(result):
                    # The same holder for the same object, so that its root is the same one as in the last call.
                    name = _text(cache, key, objects)
                    holder = self.objects.get(name)
                    objects[name] = holder if holder is not None and holder.value is result else Held(result)
                else:
                    bindings += _bindings_of(result, watched)
        if [(id(holder), name) for holder, name in bindings] != [(id(h), name) for h, name in self.bindings]:
            self.bindings = bindings
        if objects.keys() != self.objects.keys() or any(objects[name] is not self.objects[name] for name in objects):
            self.objects = objects  # another dict: these are other origins
        return [Origin(self.objects, name) for name in self.objects]


def _has_result(cache: object, arguments: tuple[object, ...]) -> bool:
    return any(_arguments_in(key) == arguments for key in results_in(cache) if _is_simple(key))


def _is_simple(key: object) -> bool:
    """Are the arguments in a key constants, which are equal for equal calls and are shown by their `repr`?"""
    return all(type(argument) in _SIMPLE or isinstance(argument, type) for argument in _arguments_in(key))


def _arguments_in(key: object) -> tuple[Any, ...]:
    """The arguments in a key: of a call with one text or number, the key is that itself."""
    return key if type(key) is tuple else (key,)


def _is_watched(key: object) -> bool:
    """Can a key be looked up without running code of the user's?"""
    return all(_is_simple(argument) or _is_by_identity(type(argument)) for argument in _arguments_in(key))


def _is_by_identity(cls: type) -> bool:
    """Are objects of this class compared by their identity?"""
    # Its `__hash__` and `__eq__` are those of `object`, so neither runs code of the user's.
    return all(in_mro(cls, name) is vars(object)[name] for name in ("__hash__", "__eq__"))


def _text(cache: Any, key: object, taken: Container[str]) -> str:
    """What messages call a result of the cache: another name than those that are `taken`."""
    shown = [repr(x) if _is_simple(x) else type(x).__qualname__ for x in _arguments_in(key)]
    text = f"{cache.__module__}.{cache.__qualname__}({', '.join(shown)})"
    return next(name for i in itertools.count() if (name := f"{text} ({i})" if i else text) not in taken)


def _bindings_of(result: object, watched: set[int]) -> list[Binding]:
    """The attributes, and the items under texts, of all objects and dicts that it leads to."""
    bindings: list[Binding] = []
    for value in [result, *values_in(result)]:
        held = value if type(value) is dict else attributes_of(value)
        if held is not None and len(held) <= _MOST_KEYS:
            if held is not value and id(held) not in watched:
                watch_attributes(held)
            bindings += [(held, name) for name in held if type(name) is str]
    return bindings
