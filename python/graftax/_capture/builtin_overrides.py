# SPDX-License-Identifier: Apache-2.0
"""Builtins in whose place code under a trace finds other functions: `id`, `vars`, and those that read a number in C."""

from __future__ import annotations

import copy
import sys
import threading
import types
import typing
from collections.abc import Iterator
from typing import Any

import numpy as np

from graftax._capture.bytecode import Names, attributes_passed_on, names_of, passed_on
from graftax._capture.code_owner import is_never_asked
from graftax._capture.numbers.math_overrides import OF_NUMBERS, SCALAR_TYPES, TYPE, power, stand_ins
from graftax._capture.retrace_signals import Signals

_SERIALIZERS = frozenset({"json", "orjson", "ujson", "simplejson", "msgpack", "marshal"})
_OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod"),
    *("pow", "and", "or", "xor", "lshift", "rshift"),
)
# Methods in which symbols differ from numbers: a number has no `__array__`, and its `__add__` answers NotImplemented
# where that of a symbol computes.
_DIFFERENT_METHODS = frozenset(
    ["__array__", "__array_ufunc__", "__array_function__", "__array_priority__", "__jax_array__"]
    + [f"__{side}{name}__" for name in _OPERATORS for side in ("", "r")]
)
_FOR_SYMBOLS = frozenset({"float", "int", "pow", "sum", "type"})

Scopes = dict[int, dict[str, Any]]  # globals, by id


class _Thread(threading.local):
    """The trace that runs in this thread."""

    def __init__(self) -> None:
        self.originals: Scopes = {}  # the globals of modules, by the ids of what frames see of them
        self.symbolic = False  # does it have symbols?


class StoodIn:
    """The globals of the code, under the traces of one function, that names builtins which are replaced."""

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self.of_ids: Scopes = {}  # of code that calls id()
        self.of_vars: Scopes = {}  # of code that calls vars()
        self._of_ids_in_packages: Scopes = {}  # of code of packages that calls id(), while these get the copies' ids
        self._packages_get_ids = False  # do they get the ids of the caller's objects?
        self.thread = _Thread()
        self._of_types: Scopes = {}  # of code that names type()
        self._of_powers: Scopes = {}  # of code that names pow(), which asks its third operand for nothing
        self._of_numbers: Scopes = {}  # of code that calls float(), int() or math on a symbol
        self._asks_in_c = False  # a serializer, or code that names a method that a symbol has otherwise than a number
        self._passed: dict[int, set[str]] = {}  # builtin classes that code does more with than to call them

    @property
    def size(self) -> tuple[int, ...]:
        """Sizes of what makes a trace begin anew when it grows. Most of it matters to symbols alone."""
        kinds = len(self._of_types), len(self._of_powers), sum(map(len, self._passed.values())), self._asks_in_c
        symbolic = kinds if self.thread.symbolic else ()
        return len(self.of_ids), len(self.of_vars), *symbolic

    def note(
        self, code: types.CodeType, scope: dict[str, Any], cells: dict[str, Any], names: Names, users: bool
    ) -> None:
        """Notes the builtins that code names: `id` and `vars` only in the user's code, the others in any.

        For `id` see `give_ids_to_packages`, too.
        """
        if ("id",) in names.chains and "id" not in scope and "id" not in cells:
            if users or self._packages_get_ids:
                # `deepcopy` and the user's code find each other's objects by id.
                for asking in (scope, copy.deepcopy.__globals__):
                    self.of_ids.setdefault(id(asking), asking)
            else:
                self._of_ids_in_packages.setdefault(id(scope), scope)
        if users and "vars" in names.loaded and "vars" not in scope:
            self.of_vars.setdefault(id(scope), scope)
        # A serializer in C looks at the types of numbers by itself, so it would find a symbol where there was an int.
        if users and not self._asks_in_c:
            firsts = {chain[0] for chain in names.chains}
            modules = [sys.modules.get(module) for module in names.imports.values()]
            serializes = any(map(_is_of_a_serializer, [*map(scope.get, firsts), *modules]))
            self._asks_in_c = serializes or not _DIFFERENT_METHODS.isdisjoint(_names_and_texts(code))
        if "type" in names.loaded and "type" not in scope:
            self._of_types.setdefault(id(scope), scope)
        if "pow" in names.loaded and "pow" not in scope:
            self._of_powers.setdefault(id(scope), scope)
        # A class that code passes on cannot be replaced: who gets it may compare it, or make a subclass.
        if classes := _FOR_SYMBOLS.intersection(names.loaded):
            self._passed.setdefault(id(scope), set()).update(classes & passed_on(code, scope))
        for name in names.loaded:
            # The same for the classes of NumPy's scalars, which code names as attributes of the module.
            if scope.get(name) is np:
                scalar_types = (SCALAR_TYPES | {name}) & attributes_passed_on(code, name)
                self._passed.setdefault(id(scope), set()).update(scalar_types)

    def give_ids_to_packages(self) -> bool:
        """From now on code of packages gets the ids of the caller's objects, too: some object holds such ids.

        As a rule packages ask for ids within one call, for which those of copies serve as well, and are read faster.
        But an optimizer of Keras finds its Variables by ids that it has kept since it was built.

        Returns:
            Whether code of packages that has run may have got other ids.
        """
        was_given_others = not self._packages_get_ids and bool(self._of_ids_in_packages)
        self._packages_get_ids = True
        self.of_ids.update(self._of_ids_in_packages)
        return was_given_others

    def note_class_check(self, code: types.CodeType, scope: dict[str, Any]) -> bool | None:
        """Notes code of `typing` by which `isinstance` asks a union. Before Python 3.14 that calls `type`.

        Returns:
            Whether a trace with symbols begins anew for it; None for any other code.
        """
        if code.co_name != "__instancecheck__" or "type" not in code.co_names or code.co_filename != typing.__file__:
            return None
        is_new = id(scope) not in self._of_types
        self._of_types.setdefault(id(scope), scope)
        return is_new and self.thread.symbolic

    def look_at_call(self, code: types.CodeType, scope: dict[str, Any]) -> None:
        """Notes that code asks a symbol for its value in C, as `float(x)` does.

        Raises:
            NewReads: the code is to find a function that takes symbols, in the next trace.
        """
        # A frame may have what it sees of its module's globals: the module's own are noted.
        scope = self.thread.originals.get(id(scope), scope)
        if is_never_asked(code.co_filename) or id(scope) in self._of_numbers:
            return
        builtins = _FOR_SYMBOLS.intersection(names_of(code).loaded)
        if stand_ins(scope, builtins, self._passed.get(id(scope), frozenset())):
            self._of_numbers[id(scope)] = scope
            raise self._signals.give()

    @property
    def tells_types(self) -> bool:
        """Can `type(x)` be answered for symbols?

        Not if code passes `type` on, gives numbers to C code that asks by itself, or names a method in which symbols
        differ from numbers.
        """
        return not self._asks_in_c and not any("type" in self._passed.get(i, ()) for i in list(self._of_types))

    def seen_by_symbols(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """(globals, what stands in them for builtins) of code that a trace with symbols runs."""
        for scope in list(self._of_types.values()):
            yield scope, {"type": TYPE}
        for i, scope in list(self._of_powers.items()):
            if "pow" not in self._passed.get(i, ()):
                yield scope, {"pow": power}
        for i, scope in list(self._of_numbers.items()):
            yield scope, stand_ins(scope, {"float", "int", "sum"}, self._passed.get(i, frozenset()))


def asks_numbers(code: types.CodeType, scope: dict[str, Any]) -> bool:
    """May this code read a number in C, so that a trace with symbols begins anew for it?"""
    loaded = names_of(code).loaded
    builtins = (*_FOR_SYMBOLS, "id", "eval", "exec")
    return (
        any(name in loaded and name not in scope for name in builtins)
        or any(scope.get(name) is np or id(scope.get(name)) in OF_NUMBERS for name in loaded)
        or not _DIFFERENT_METHODS.isdisjoint(_names_and_texts(code))
    )


def _names_and_texts(code: types.CodeType) -> list[str]:
    return [*code.co_names, *(const for const in code.co_consts if type(const) is str)]


def _is_of_a_serializer(value: object) -> bool:
    """Is it a module that serializes, or something of one?"""
    module_name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return isinstance(module_name, str) and module_name.partition(".")[0] in _SERIALIZERS
