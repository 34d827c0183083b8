# SPDX-License-Identifier: Apache-2.0
"""What the code under a trace sees: rebuilt values, in the places where it looks for them, in this thread alone."""

from __future__ import annotations

import builtins
import contextlib
import functools
import threading
import types
from collections.abc import Callable
from typing import Any

from . import _core
from ._code import MISSING
from ._reads import Place, ReadSet


class _SeenAttribute:
    """Stands in a class for a rebuilt attribute: the thread that traces sees the rebuilt one, others their own."""

    def __init__(self, value: Any, original: Any) -> None:
        self.value, self.original, self.thread = value, original, threading.get_ident()

    def __get__(self, obj: Any, cls: Any = None) -> Any:
        return self.value if threading.get_ident() == self.thread else self.original


class _SeenName:
    """Stands in the class of a module for a name that is rebuilt, while a trace runs."""

    def __init__(self, scope: dict[str, Any], seen: dict[str, Any], name: str) -> None:
        self.scope, self.seen, self.name, self.thread = scope, seen, name, threading.get_ident()

    def _of_thread(self) -> dict[str, Any]:
        return self.seen if threading.get_ident() == self.thread else self.scope

    def __get__(self, module: Any, cls: Any = None) -> Any:
        try:
            return self._of_thread()[self.name]
        except KeyError:
            raise AttributeError(f"module has no attribute {self.name!r}") from None

    def __set__(self, module: Any, value: Any) -> None:
        self._of_thread()[self.name] = value

    def __delete__(self, module: Any) -> None:
        del self._of_thread()[self.name]


def with_parts(
    function: types.FunctionType, scope: dict[str, Any], closure: tuple[types.CellType, ...] | None
) -> types.FunctionType:
    out = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, closure)
    out.__kwdefaults__ = function.__kwdefaults__
    out.__qualname__ = function.__qualname__
    out.__module__ = function.__module__
    out.__doc__ = function.__doc__
    return out


def seen(function: types.FunctionType) -> types.FunctionType:
    """The function as the code of this thread's trace sees it: with rebuilt state and globals."""
    twin = _core.seen_function(function)
    scope = _core.seen_globals(twin.__globals__)
    if scope is not twin.__globals__:
        twin = with_parts(twin, scope, twin.__closure__)
        _core.stands_for(twin, function)
    return twin


class Assigned(Exception):
    """The traced code assigned globals or class attributes; args[0] lists them."""


_PATCHING = threading.RLock()  # one trace at a time puts what it sees into classes and modules


class Rebuilt:
    """What code under a trace may ask of the rebuilt graph: which functions are in it, and whose copy an object is."""

    def __init__(self) -> None:
        self.functions: set[int] = set()  # their ids
        self.asked: dict[int, int] = {}  # of the caller's objects whose id() was asked for: tracked index -> id
        self._trace: _core.Trace | None = None
        self._ids: dict[int, tuple[int, int]] = {}

    def begin(self, trace: _core.Trace) -> None:
        self.functions.update(map(id, trace.functions()))
        self._trace = trace

    def end(self) -> None:
        self._trace = None
        self._ids = {}

    def id(self, obj: object, /) -> int:
        """What `id` is for code under the trace: of a copy, that of the caller's object."""
        if self._trace is not None:
            self._ids, self._trace = self._trace.identities(), None
        found = self._ids.get(builtins.id(obj))
        if found is None:
            return builtins.id(obj)
        self.asked[found[0]] = found[1]
        return found[1]


class Views:
    """The rebuilt values of places, where the code under the trace looks for them."""

    def __init__(self, reads: ReadSet | None, changed: list[tuple[Place, Any]], rebuilt: Rebuilt | None) -> None:
        self._reads, self._rebuilt = reads, rebuilt or Rebuilt()
        self._modules: list[tuple[types.ModuleType, type, type]] = []
        self._scopes: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._classes: list[tuple[type, str, _SeenAttribute]] = []
        self.functions: list[tuple[Any, Any]] = []
        for place, value in changed:
            if place.name is None:
                self.functions.append((place.holder, value))
            elif isinstance(place.holder, type):
                self._classes.append((place.holder, place.name, _SeenAttribute(value, place.value())))
            else:
                self.scope(place.holder)[place.name] = value
        if reads is not None:
            self._see_modules(reads, [place for place, _ in changed if isinstance(place.holder, dict)])
        for scope, _ in reads.stored.values() if reads is not None else ():
            self.scope(scope)
        for scope in reads.of_ids.values() if reads is not None else ():
            self.scope(scope)["id"] = self._rebuilt.id
        self._before = {i: dict(seen) for i, (_, seen) in self._scopes.items()}

    def _see_modules(self, reads: ReadSet, places: list[Place]) -> None:
        names: dict[int, dict[str, Any]] = {}
        for holder, name in places:
            if id(holder) in reads.modules and name is not None:
                names.setdefault(id(holder), {})[name] = _SeenName(holder, self.scope(holder), name)
        for i, seen in names.items():
            module = reads.modules[i]
            cls = type(module)
            self._modules.append((module, cls, type(cls.__name__, (cls,), seen)))

    def scope(self, scope: dict[str, Any]) -> dict[str, Any]:
        """What frames of these globals see."""
        return self._scopes.setdefault(id(scope), (scope, dict(scope)))[1]

    def seen(self, scope: dict[str, Any]) -> dict[str, Any]:
        """The same, where they see anything else than the globals themselves."""
        return self._scopes[id(scope)][1] if id(scope) in self._scopes else scope

    def run(self, function: Callable[[], Any]) -> Any:
        """Calls it while its code, and what it calls, sees the rebuilt values.

        Raises:
            Assigned: where it has assigned a global or a class attribute.
        """
        with _PATCHING if self._classes or self._modules else contextlib.nullcontext():
            return self._run(function)

    def _run(self, function: Callable[[], Any]) -> Any:
        reads = self._reads
        for cls, name, seen in self._classes:
            type.__setattr__(cls, name, seen)
        for module, _, seen_class in self._modules:
            module.__class__ = seen_class
        try:
            if reads is None:  # part of the trace around it, if there is one
                for original, copy in (*self._scopes.values(), *self.functions):
                    _core.stands_for(copy, original)
                return function()
            scopes = list(self._scopes.values())
            enter = functools.partial(reads.enter, self._rebuilt.functions)
            result = _core.run_watched(function, enter, reads.known, scopes, self.functions)
            assigned = self._assigned()
        finally:
            for module, own_class, _ in self._modules:
                module.__class__ = own_class
            replaced = [f"{c.__qualname__}.{n}" for c, n, seen in self._classes if vars(c).get(n) is not seen]
            for cls, name, seen in self._classes:
                type.__setattr__(cls, name, seen.original)
        if assigned or replaced:
            raise Assigned([*assigned, *replaced])
        return result

    def _assigned(self) -> list[str]:
        found: list[str] = []
        for i, (_, names) in self._reads.stored.items() if self._reads is not None else ():
            now, before = self._scopes[i][1], self._before[i]
            found += [n for n in sorted(names) if now.get(n, MISSING) is not before.get(n, MISSING)]
        return found
