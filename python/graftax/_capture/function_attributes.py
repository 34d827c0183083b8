# SPDX-License-Identifier: Apache-2.0
"""Functions that code names, and what they hold besides their code: a function is an object with attributes."""

from __future__ import annotations

import weakref
from types import FunctionType
from typing import Any, NamedTuple

from graftax._capture.code_by_identity import IdentitySet
from graftax._capture.origin import Origin


class State(NamedTuple):
    """What a function held when a trace began."""

    owner: FunctionType
    defaults: tuple[object, ...] | None
    keywords: dict[str, Any] | None  # the dict itself
    in_keywords: dict[str, Any]  # a copy of it
    attributes: dict[str, Any]  # a copy

    @classmethod
    def from_function(cls, function: FunctionType) -> State:
        """What a function holds now."""
        keywords = function.__kwdefaults__
        return cls(function, function.__defaults__, keywords, dict(keywords or {}), dict(vars(function)))

    @property
    def is_changed(self) -> bool:
        """Does the function hold something else now?"""
        function: Any = self.owner
        return (
            function.__defaults__ is not self.defaults
            or function.__kwdefaults__ is not self.keywords
            or not _same_items(self.keywords or {}, self.in_keywords)
            or not _same_items(vars(function), self.attributes)
        )

    def put_back(self) -> None:
        """Gives the function what it held."""
        function: Any = self.owner
        function.__defaults__, function.__kwdefaults__ = self.defaults, self.keywords
        for current, original in ((self.keywords or {}, self.in_keywords), (vars(function), self.attributes)):
            # The dicts stay the same objects, since bindings know them by their identity.
            if not _same_items(current, original):
                current.clear()
                current.update(original)


def _same_items(first: dict[str, Any], second: dict[str, Any]) -> bool:
    # By identity: `==` would run code of the user's, and of two arrays it has no truth value.
    return first.keys() == second.keys() and all(value is second[key] for key, value in first.items())


def attribute_names(function: FunctionType) -> list[str]:
    """The names of a function's attributes, without the table that graftax keeps there."""
    return sorted(name for name in vars(function) if not name.startswith("__graftax"))


def function_in(value: object) -> FunctionType | None:
    """The function that this is, or that this static method or class method holds."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    return value if isinstance(value, FunctionType) else None


def in_place_of(value: object, function: FunctionType) -> Any:
    """Another function, held as `value` holds its own."""
    return type(value)(function) if isinstance(value, staticmethod | classmethod) else function


class NamedFunctions:
    """The functions that code may ask for attributes, and the names under which it finds them. None is kept alive."""

    def __init__(self) -> None:
        self._functions = IdentitySet[FunctionType]()
        # Dead ones stay, so that positions do not move: `functions(start)` gives what has come since the last look.
        self._in_order: list[weakref.ref[FunctionType]] = []  # as they were noted, dead ones included
        self._places: dict[tuple[int, str], tuple[Any, str]] = {}  # (holder, or a function with it as globals; name)

    def note(self, function: FunctionType) -> bool:
        """Notes a function. True where it is new."""
        if function in self._functions:
            return False
        self._functions.add(function)
        self._in_order.append(weakref.ref(function))
        return True

    def note_place(self, key: tuple[int, str], holder: object) -> None:
        """Notes a name under which code finds one of them. For globals of `exec`, `holder` is a weak reference."""
        self._places[key] = holder, key[1]

    @property
    def size(self) -> int:
        return len(self._in_order)

    def functions(self, start: int = 0) -> list[FunctionType]:
        """Those that are still alive; with `start`, without the first ones that were noted."""
        return [function for reference in self._in_order[start:] if (function := reference()) is not None]

    def places(self) -> list[Origin]:
        """The names under which code finds them, where their holders are still alive."""
        origins = list[Origin]()
        for holder, name in list(self._places.values()):
            if isinstance(holder, weakref.ref):
                function = holder()
                holder = None if function is None else function.__globals__
            if holder is not None:
                origins.append(Origin(holder, name))
        return origins
