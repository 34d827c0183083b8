# SPDX-License-Identifier: Apache-2.0
"""The code of the user's that a function can call, as far as names say before it runs."""

from __future__ import annotations

import dataclasses
import functools
import reprlib
import types
from collections.abc import Collection, Iterator
from typing import Any

from graftax._base.class_lookup import held_as
from graftax._base.missing import MISSING
from graftax._capture.bytecode import names_of, nested_codes
from graftax._capture.code_owner import HEAP_TYPE, NEVER, is_never_asked, is_users_class, is_users_scope
from graftax._capture.constant_values import cells_of

# Methods that `dataclasses` gives a class: a `__repr__` around the one that it generates, against endless recursion,
# and a `__replace__` that calls the class.
_GUARDS_REPR = {function.__code__.co_filename for function in (dataclasses.field, reprlib.recursive_repr)}
_REPLACE = getattr(dataclasses, "_replace", None)
_REFUSE_CHANGES = ("__setattr__", "__delattr__")  # which a frozen dataclass gets, and may not define itself
_ANNOTATE = ("__annotate__", "__annotate_func__")  # which computes annotations on Python 3.14 and later


class ReachableCode:
    """Follows names from functions and classes to the code that they lead to.

    A method counts once its name, or a text equal to it, occurs in code that was reached; a special method at once.
    """

    def __init__(self, not_run: Collection[str] = ()) -> None:
        """`not_run`: names of functions that are passed over, but not what is defined in them."""
        self._not_run = not_run
        self.is_known = True  # False where something may call code of the user's in ways that no name shows
        self._functions: list[types.FunctionType] = []  # that are still to be looked at
        self._methods: dict[str, list[types.FunctionType]] = {}  # by names that no code has used yet
        self._attributes: set[str] = set()  # names that code has used
        self._visited: set[int] = set()

    def add(self, value: Any) -> None:
        """Notes what can be called of a value."""
        if id(value) in self._visited:
            return
        self._visited.add(id(value))
        if type(value) is functools.partial:
            self.add(value.func)
            return
        if type(value) is types.MethodType:
            self.add(value.__func__)
            self.add(type(value.__self__))
            return
        function = _function_in(value)
        if function is not None:
            if not is_never_asked(function.__code__.co_filename):
                self._functions.append(function)
        elif type(value) is types.ModuleType:
            # A library's code may call back. In a module of the user's `_follow` looks up the names that are used.
            self.is_known = self.is_known and (_is_of_jax(value.__name__) or is_users_scope(vars(value)))
        else:  # a class, with its bases and its metaclass, or the class of an object
            cls: type = value if issubclass(type(value), type) else type(value)
            for base in cls.__mro__:
                self._add_class(base)
            if value is not cls:
                self.add(cls)

    def _add_class(self, cls: type) -> None:
        if not is_users_class(cls):
            is_known = _is_of_jax(cls.__module__, "dataclasses", "collections", *NEVER)
            self.is_known = self.is_known and (is_known or not cls.__flags__ & HEAP_TYPE)
            return
        never_run = (*_ANNOTATE, *(_REFUSE_CHANGES if _is_frozen(cls) else ()))
        for name, value in list(vars(cls).items()):
            if name in never_run:
                continue
            parts = (value.fget, value.fset, value.fdel) if type(value) is property else (value,)
            for function in map(_method_in, parts):
                if function is not None:
                    is_named = name in self._attributes or name.startswith("__")
                    (self._functions if is_named else self._methods.setdefault(name, [])).append(function)

    def codes(self) -> Iterator[tuple[types.CodeType, dict[str, Any]]]:
        """Each code object that is reached, with its globals. `is_known` may become False with each of them."""
        while self._functions:
            function = self._functions.pop()
            for value in cells_of(function).values():
                self.add(value)
            # What is defined in a function counts at once, since it may be called in many ways.
            for code in nested_codes(function.__code__):
                if code.co_name in self._not_run:
                    continue
                self._follow(code, function.__globals__)
                yield code, function.__globals__

    def _follow(self, code: types.CodeType, scope: dict[str, Any]) -> None:
        """Adds what the names in code lead to, and the methods that wait for one of these names."""
        names = names_of(code)
        for attribute in names.attributes | names.stored_attributes | names.texts:
            self._attributes.add(attribute)
            self._functions += self._methods.pop(attribute, ())
        for first, *attributes in names.chains:
            value = scope.get(first, MISSING)
            if isinstance(value, types.ModuleType) and attributes and not _is_of_jax(value.__name__):
                value = vars(value).get(attributes[0], MISSING)
            if value is not MISSING:
                self.add(value)


def _function_in(value: Any) -> types.FunctionType | None:
    """The function that a value is, or that a wrapper without code of its own runs."""
    # By `held_as`, so that no method of the class is asked.
    if type(value) in (staticmethod, classmethod):
        value = value.__func__
    elif type(value) is not types.FunctionType and not issubclass(type(value), type):
        value = held_as(value, "__wrapped__")
    return value if type(value) is types.FunctionType else None


def _method_in(value: object) -> types.FunctionType | None:
    """The function of a method; None for the `__replace__` of a dataclass, and of the guard, what it guards."""
    function = _function_in(value)
    if function is None or function is _REPLACE:
        return None
    if function.__code__.co_filename not in _GUARDS_REPR:
        return function
    # The guard of `reprlib` has no `__wrapped__` before Python 3.12.
    guarded = vars(function).get("__wrapped__") or cells_of(function).get("user_function")
    return guarded if type(guarded) is types.FunctionType else function


def _is_frozen(cls: type) -> bool:
    """Is it a frozen dataclass?"""
    return getattr(vars(cls).get("__dataclass_params__"), "frozen", False) is True


def _is_of_jax(module: str | None, *more_packages: str) -> bool:
    """Does this module belong to JAX, to graftax, to Python's own types, or to one of `more_packages`?"""
    return (module or "").partition(".")[0] in ("jax", "jaxlib", "graftax", "builtins", "typing", *more_packages)
