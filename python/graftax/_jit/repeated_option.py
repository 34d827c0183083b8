# SPDX-License-Identifier: Apache-2.0
"""The option `repeated=` of `jit`: which calls may take the program of an earlier one."""

from __future__ import annotations

import inspect
import types
from collections.abc import Collection, Iterator
from typing import Any

from graftax._capture.code_owner import is_users_code

NOT_CALLED = (
    "repeated={item!r}: objects of {item.__qualname__} are not called. Name the method that repeats, as in "
    "repeated={item.__name__}.{method}."
)
NO_FUNCTION = (
    "repeated={item!r} is not a Python class, method or function. Give the class of the parts that repeat "
    '(repeated=Block), a method or a function (repeated=Block.forward), several of them, True for all, or "auto".'
)


class Selection:
    """The calls that `repeated=` selects: of these classes, methods and functions, or of classes with several objects.

    Args:
        repeated: a tuple of classes, methods and functions; True for all of classes; or "auto" for those that pay, and
            for the user's functions.

    Raises:
        TypeError: for anything else.
    """

    def __init__(self, repeated: Any) -> None:
        self.is_auto = repeated == "auto"
        self.is_all = repeated is True
        self._functions: list[types.FunctionType] = []
        self._classes: list[type] = []
        for item in repeated if isinstance(repeated, tuple) else ():
            if isinstance(item, type):
                if _function(getattr(item, "__call__", None)) is None:  # noqa: B004  (the function itself is wanted)
                    members = vars(item).items()
                    method = next((n for n, v in members if isinstance(v, types.FunctionType)), "forward")
                    raise TypeError(NOT_CALLED.format(item=item, method=method))
                self._classes.append(item)
            elif (function := _function(item)) is not None:
                self._functions.append(function)
            else:
                raise TypeError(NO_FUNCTION.format(item=item))
        self._codes = {id(function.__code__) for function in self._functions}

    def codes(self, instances: Collection[type]) -> list[types.CodeType]:
        """The code of the selected functions. `instances` are the classes of which the graph has several objects."""
        if self.is_auto:
            return [method.__code__ for cls in instances for method in _methods(cls)]
        classes = [*self._classes, *(c for c in instances if issubclass(c, tuple(self._classes)))]
        methods = [_function(getattr(cls, "__call__", None)) for cls in classes]  # noqa: B004
        return [f.__code__ for f in (*self._functions, *methods) if f is not None]

    def selects(self, function: types.FunctionType, arguments: tuple[object, ...], instances: Collection[type]) -> bool:
        """Is this call selected? `arguments` are the variables that it begins with."""
        if not arguments:  # a call without arrays is not shared
            return False
        if self.is_all or self.is_auto:
            if type(arguments[0]) in instances or not self.is_auto:
                return type(arguments[0]) in instances
            return _is_plain(function.__name__) and is_users_code(function.__code__, function.__globals__)
        return id(function.__code__) in self._codes or isinstance(arguments[0], tuple(self._classes))

    @staticmethod
    def name(function: types.FunctionType, arguments: tuple[object, ...]) -> str:
        """The name of the part in the program, and in `explain`."""
        return type(arguments[0]).__name__ if function.__name__ == "__call__" else function.__qualname__


def _methods(cls: type) -> Iterator[types.FunctionType]:
    for base in cls.__mro__:
        for name, member in list(vars(base).items()):
            if isinstance(member, types.FunctionType) and _is_plain(name):
                yield member


def _is_plain(name: str) -> bool:
    """Python itself calls most methods of other names, and some before the object is complete."""
    return name == "__call__" or not name.startswith("__")


def _function(value: object) -> types.FunctionType | None:
    """The Python function behind a method or a wrapper; None if there is none."""
    value = inspect.unwrap(value) if callable(value) and not isinstance(value, type) else value
    value = getattr(value, "__func__", value)
    return value if isinstance(value, types.FunctionType) else None
