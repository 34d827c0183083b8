# SPDX-License-Identifier: Apache-2.0
"""What a function is going to read, as far as names tell before it runs: a trace need not begin anew for that."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from . import _core
from ._code import (
    ASKED_ANY_TIME,
    MISSING,
    cells_of,
    has_state,
    in_class,
    is_constant,
    is_generated,
    is_users_class,
    is_users_code,
    is_users_scope,
    names_of,
)
from ._origin import Origin

_MOST_CODES = 1_000
_CALLED_BY_SYNTAX = ("__call__", "__getitem__", "__iter__", "__len__", "__enter__", "__exit__", "__add__", "__mul__")
_CALLED_BY_CLASS = ("__init__", "__post_init__", "__call__")

Scope = dict[str, Any]


def foresee(function: types.FunctionType, classes: Iterable[type]) -> Iterator[Origin]:
    """The origins that the code behind the names in `function` has, and in the methods that it names of `classes`.

    The function's own names are roots already. Code that is made anew, or found in another way, is not foreseen.
    """
    return _Walk(function, classes).origins()


class _Walk:
    def __init__(self, function: types.FunctionType, classes: Iterable[type]) -> None:
        self._first = function
        self._met: dict[types.CodeType, None] = {}
        self._next: list[tuple[types.CodeType, Scope, types.FunctionType | None]] = []
        self._classes: dict[type, None] = {}
        self._attributes: set[str] = set(_CALLED_BY_SYNTAX)
        self._add(function)
        for cls in list(classes):
            self._add_class(cls)

    def origins(self) -> Iterator[Origin]:
        while self._next and len(self._met) < _MOST_CODES:
            code, scope, function = self._next.pop()
            own = function is self._first
            if function is not None and not own and has_state(function):
                yield Origin(function, None)
            for origin in self._read(code, scope, function):
                if not (own and origin.holder is scope):
                    yield origin
            for constant in code.co_consts:
                if isinstance(constant, types.CodeType):
                    self._add_code(constant, scope, None)

    def _read(self, code: types.CodeType, scope: Scope, function: types.FunctionType | None) -> Iterator[Origin]:
        names, cells = names_of(code), cells_of(function)
        for name in names.stored:
            yield Origin(scope, name, True)
        for chain in names.chains:
            if chain[0] in code.co_freevars and chain[0] not in cells:
                continue
            value: Any = None
            for i, name in enumerate(chain):
                holder: Any = scope if i == 0 else value
                if i == 0 and name in names.imports:
                    value = sys.modules.get(names.imports[name], MISSING)
                    continue
                if i == 0 and name in cells:
                    value = cells[name]
                    continue
                if isinstance(holder, types.ModuleType):
                    holder = vars(holder)
                if isinstance(holder, dict) and (i == 0 or isinstance(value, types.ModuleType)):
                    value = holder.get(name, MISSING)
                    if name not in names.stored and is_users_scope(holder) and not is_constant(value):
                        yield Origin(holder, name)
                elif isinstance(holder, type):
                    value = in_class(holder, name)[1]
                else:
                    break
            self._find(value)
        new = names.attributes - self._attributes
        self._attributes |= new
        for cls in list(self._classes):
            self._add_methods(cls, new)

    def _find(self, value: Any) -> None:
        """Code that runs where this is called, or where something is asked of it."""
        while isinstance(value, functools.partial):
            value = value.func
        if isinstance(value, staticmethod | classmethod | types.MethodType):
            value = value.__func__
        if isinstance(value, _core.Caller):
            value = value._function
        elif callable(value) and not isinstance(value, type | types.FunctionType) and not is_users_class(type(value)):
            value = inspect.getattr_static(value, "__wrapped__", value)  # of a cache, of what JAX has jitted
        if isinstance(value, types.FunctionType):
            self._add(value)
        elif isinstance(value, type):
            self._add_class(value)
            if is_users_class(value):
                self._add_methods(value, _CALLED_BY_CLASS)
        elif not isinstance(value, types.ModuleType) and is_users_class(type(value)):
            self._add_class(type(value))

    def _add_class(self, cls: type) -> None:
        if cls not in self._classes and is_users_class(cls):
            self._classes[cls] = None
            self._add_methods(cls, self._attributes)

    def _add_methods(self, cls: type, names: Iterable[str]) -> None:
        for name in names:
            holder, value = in_class(cls, name)
            if isinstance(value, property):
                value = value.fget
            if holder is not None and is_users_class(holder):
                if isinstance(value, staticmethod | classmethod):
                    value = value.__func__
                if isinstance(value, types.FunctionType):
                    self._add(value)

    def _add(self, function: types.FunctionType) -> None:
        self._add_code(function.__code__, function.__globals__, function)

    def _add_code(self, code: types.CodeType, scope: Scope, function: types.FunctionType | None) -> None:
        if code in self._met or "__name__" not in scope or code.co_name in ASKED_ANY_TIME:
            return
        if is_users_code(code, scope) and not is_generated(code):
            self._met[code] = None
            self._next.append((code, scope, function))
