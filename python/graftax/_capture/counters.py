# SPDX-License-Identifier: Apache-2.0
"""Counters: numbers that code computes anew from themselves, as `self.steps += 1` does, so that each call has another.

They are symbolic from the first call on, where its trace runs the body of the function once all the same. A trace with
symbols may have to begin anew, for code that reads a number in C or catches an exception. So all code that the function
can reach is looked at before, and where that says nothing of some of it, the first call takes the numbers as they are.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import types
from collections.abc import Iterable
from typing import Any

from jax.tree_util import DictKey, GetAttrKey

from graftax._base.missing import MISSING
from graftax._capture.builtin_overrides import asks_numbers
from graftax._capture.bytecode import (
    HEAP_TYPE,
    NEVER,
    cells_of,
    is_never_asked,
    is_users_class,
    is_users_code,
    is_users_scope,
    names_of,
    nested_codes,
)

_MOST_CODES = 256  # that are looked at


def counters(keys: Iterable[Any], function: types.FunctionType, given: Iterable[Any]) -> set[str]:
    """The names of numbers that are symbolic in the first call of a function; none where that may trace it twice.

    Args:
        keys: of numbers, the last entries of their key paths: attributes, or keys of dicts.
        given: functions among the objects that the call is given, and the classes of the others.
    """
    names = {name for name in map(name_of, keys) if name is not None}
    reachable = _Reachable()
    if not names or not (reachable.add(function) and all(map(reachable.add, given)) and reachable.is_plain()):
        return set()
    return {name for name in names if any(_updates(code, name) for code in reachable.codes)}


def name_of(key: Any) -> str | None:
    """The name of an attribute, or of an item of a dict."""
    name = key.name if isinstance(key, GetAttrKey) else key.key if isinstance(key, DictKey) else None
    return name if type(name) is str else None


def _updates(code: types.CodeType, name: str) -> bool:
    """Is there a line that reads what has this name, computes, and stores the result under the same name?"""
    if name not in code.co_names and name not in code.co_consts:
        return False
    lines = itertools.groupby(dis.get_instructions(code), lambda part: part.positions and part.positions.lineno)
    return any(_updates_in_line(list(parts), name) for _, parts in lines)


def _updates_in_line(parts: list[dis.Instruction], name: str) -> bool:
    operations = [(part.opname, part.argval) for part in parts]
    if not any(part.opname == "BINARY_OP" and part.argrepr != "[]" for part in parts):
        return False
    if ("LOAD_ATTR", name) in operations and ("STORE_ATTR", name) in operations:
        return True
    # A key lies on top of the stack where its item is stored. `d[key] += 1` copies it before, to read the item, too.
    after_key = [following[0] for key, following in itertools.pairwise(operations) if key == ("LOAD_CONST", name)]
    stores = any(operation == "STORE_SUBSCR" for operation, _ in operations)
    return ("COPY" in after_key and stores) or ("STORE_SUBSCR" in after_key and len(after_key) > 1)


class _Reachable:
    """The code that a function can call, as far as its names say."""

    def __init__(self) -> None:
        self.codes: list[types.CodeType] = []
        self._functions: list[types.FunctionType] = []  # that are still to be looked at
        self._methods: dict[str, list[types.FunctionType]] = {}  # that no code has named yet
        self._attributes: set[str] = set()
        self._seen: set[int] = set()

    def add(self, value: Any) -> bool:
        """Notes what can be called of a value. False if it may be code that nothing is known of."""
        if id(value) in self._seen:
            return True
        self._seen.add(id(value))
        if type(value) is functools.partial:
            return self.add(value.func)
        if type(value) is types.MethodType:
            return self.add(value.__func__) and self.add(type(value.__self__))
        function = _function_in(value)
        if function is not None:
            if is_users_code(function.__code__, function.__globals__):
                self._functions.append(function)
                return True
            return is_never_asked(function.__code__.co_filename)
        if type(value) is types.ModuleType:
            return _is_of_jax(value.__name__) or is_users_scope(vars(value))
        cls: type = value if issubclass(type(value), type) else type(value)
        return all(map(self._add_class, cls.__mro__)) and (value is cls or self.add(cls))

    def _add_class(self, cls: type) -> bool:
        if not is_users_class(cls):
            return not cls.__flags__ & HEAP_TYPE or _is_of_jax(cls.__module__, *NEVER)
        for name, value in list(vars(cls).items()):
            parts = (value.fget, value.fset, value.fdel) if type(value) is property else (value,)
            for function in map(_function_in, parts):
                if function is not None:
                    is_named = name in self._attributes or name.startswith("__")
                    (self._functions if is_named else self._methods.setdefault(name, [])).append(function)
        return True

    def is_plain(self) -> bool:
        """Does none of this code ask a number in C, catch exceptions or import modules? Adds what it names."""
        while self._functions:
            function = self._functions.pop()
            if not all(map(self.add, cells_of(function).values())):
                return False
            for code in nested_codes(function.__code__):
                self.codes.append(code)
                if len(self.codes) > _MOST_CODES or not self._is_plain_code(code, function.__globals__):
                    return False
        return True

    def _is_plain_code(self, code: types.CodeType, scope: dict[str, Any]) -> bool:
        names = names_of(code)
        if names.imports or asks_numbers(code, scope):
            return False
        if code.co_exceptiontable and any(part.opname == "PUSH_EXC_INFO" for part in dis.get_instructions(code)):
            return False  # handlers, and `with`
        for attribute in names.attributes | names.stored_attributes | names.texts:
            self._attributes.add(attribute)
            self._functions += self._methods.pop(attribute, ())
        for first, *attributes in names.chains:
            value = scope.get(first, MISSING)
            if isinstance(value, types.ModuleType) and attributes and not _is_of_jax(value.__name__):
                value = vars(value).get(attributes[0], MISSING)
            if value is not MISSING and not self.add(value):
                return False
        return True


def _function_in(value: Any) -> types.FunctionType | None:
    """The function that a value is, or that a wrapper without code of its own runs. Runs no code of the user's."""
    if type(value) in (staticmethod, classmethod):
        value = value.__func__
    elif type(value) is not types.FunctionType and not issubclass(type(value), type):
        value = inspect.getattr_static(value, "__wrapped__", None)
    return value if type(value) is types.FunctionType else None


def _is_of_jax(module: str | None, *others: str) -> bool:
    return (module or "").partition(".")[0] in ("jax", "jaxlib", "graftax", "builtins", "typing", *others)
