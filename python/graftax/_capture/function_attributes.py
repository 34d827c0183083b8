# SPDX-License-Identifier: Apache-2.0
"""Functions that code names, and what they hold besides their code: a function is an object with attributes."""

from __future__ import annotations

import weakref
from types import FunctionType
from typing import Any, NamedTuple

from graftax._capture.origin import Origin


class State(NamedTuple):
    """What a function held when a trace began."""

    owner: FunctionType
    defaults: tuple[Any, ...] | None
    keywords: dict[str, Any] | None
    in_keywords: dict[str, Any]
    attributes: dict[str, Any]

    @classmethod
    def of(cls, function: FunctionType) -> State:
        keywords = function.__kwdefaults__
        return cls(function, function.__defaults__, keywords, dict(keywords or {}), dict(vars(function)))

    @property
    def is_changed(self) -> bool:
        """Does the function hold something else by now?"""
        now: Any = self.owner
        return (
            now.__defaults__ is not self.defaults
            or now.__kwdefaults__ is not self.keywords
            or not _same_items(self.keywords or {}, self.in_keywords)
            or not _same_items(vars(now), self.attributes)
        )

    def put_back(self) -> None:
        """Gives the function what it held."""
        now: Any = self.owner
        now.__defaults__, now.__kwdefaults__ = self.defaults, self.keywords
        for held, before in ((self.keywords or {}, self.in_keywords), (vars(now), self.attributes)):
            if not _same_items(held, before):
                held.clear()
                held.update(before)


def _same_items(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(value is b[key] for key, value in a.items())


def attribute_names(function: FunctionType) -> list[str]:
    """The names of a function's attributes, without the table that graftax keeps there."""
    return sorted(name for name in vars(function) if not name.startswith("__graftax"))


def function_in(value: Any) -> FunctionType | None:
    """The function that this is, or that this static method or class method holds."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    return value if isinstance(value, FunctionType) else None


def in_place_of(value: Any, function: FunctionType) -> Any:
    """Another function, held as `value` holds its own."""
    return type(value)(function) if isinstance(value, staticmethod | classmethod) else function


class NamedFunctions:
    """The functions that code may ask for attributes, and the names under which it finds them. None is kept alive."""

    def __init__(self) -> None:
        self._functions: dict[int, weakref.ref[FunctionType]] = {}
        self._places: dict[tuple[int, str], tuple[Any, str]] = {}

    def note(self, function: FunctionType) -> bool:
        """True where it is new."""
        known = self._functions.get(id(function))
        if known is not None and known() is function:
            return False
        self._functions[id(function)] = weakref.ref(function)
        return True

    def note_place(self, holder: Any, name: str, guards: dict[int, weakref.ref[Any]]) -> None:
        """`guards` are functions with globals that are not kept alive."""
        self._places[id(holder), name] = guards.get(id(holder), holder), name

    @property
    def size(self) -> int:
        return len(self._functions)

    def functions(self) -> list[FunctionType]:
        return [function for known in list(self._functions.values()) if (function := known()) is not None]

    def places(self) -> list[Origin]:
        held = [(at() if isinstance(at, weakref.ref) else at, name) for at, name in list(self._places.values())]
        held = [(at.__globals__ if isinstance(at, FunctionType) else at, name) for at, name in held]
        return [Origin(holder, name) for holder, name in held if holder is not None]
