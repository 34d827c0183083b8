# SPDX-License-Identifier: Apache-2.0
"""Settings and counts that installed packages keep in their modules and classes: numbers, texts, and tables of them.

What code of a package names there is a binding, so that a mode that is switched or a class attribute that is set
between two calls is noticed. What a package fills in when it is first used (caches, lazy imports) is its own business.
But a value that is another one after the trace is told, since a call that is compiled leaves it alone. It is no
binding, or two functions that count something would each make the other one's programs stale.
"""

from __future__ import annotations

import gc
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from graftax._capture.bytecode import HEAP_TYPE, Names, is_open_scope, is_users_scope

CHANGED = (
    "{name} runs code of {module} that changed {what} from {before!r} to {after!r} while it was traced. A compiled "
    "function does that once; later calls leave {what} as it is, and do not notice when it changes. Change it outside "
    "of {name}. warn_impure=False turns this warning off."
)

_PLAIN = bool, int, float, str
_OF_CLASSES = dict, types.FunctionType, staticmethod, classmethod, property
_MOST = 64  # entries of a table that is looked at


class Change(NamedTuple):
    """What a message tells of one value."""

    place: tuple[str, int]  # file and line of code that names it
    module: str
    what: str
    key: str
    before: Any
    after: Any


class SettingsTable(NamedTuple):
    """A dict of a package, or the attributes of an object of its."""

    place: tuple[str, int]
    module: str
    what: str
    values: dict[Any, Any]
    is_of_object: bool

    def plain(self) -> dict[Any, Any]:
        """The values that can only be replaced: functions and classes, too."""
        if len(self.values) > _MOST:
            return {}
        return {key: x for key, x in list(self.values.items()) if type(key) is str and _is_plain(x)}

    def what_is(self, key: str) -> str:
        return f"{self.what}.{key}" if self.is_of_object else f"{self.what}[{key!r}]"


class LibraryGlobals:
    """Those that code of installed packages named under the traces of one function."""

    def __init__(self) -> None:
        self._tables: dict[tuple[int, str | None], tuple[SettingsTable, str | None]] = {}
        self.changing: set[tuple[int, Any]] = set()  # what traces have changed, by the id of its dict, and the key

    def note(self, code: types.CodeType, scope: dict[str, Any], names: Names) -> Iterator[tuple[SettingsTable, str]]:
        """Code of a package that is going to run. Gives what is new: a table and a key."""
        if any(getattr(callback, "__code__", None) is code for callback in gc.callbacks):
            return  # the collector has begun: nobody called it
        module = str(scope.get("__name__"))
        place = code.co_filename, code.co_firstlineno
        own = SettingsTable(place, module, module, scope, True)
        for name in {*(chain[0] for chain in names.chains), *names.stored}:
            value = scope.get(name)
            if type(value) in _PLAIN:
                yield from self._note_key(own, name) if name in names.stored else ()
            else:
                yield from self._note_value(place, module, f"{module}.{name}", value)

    def note_named(self, value: Any, scope: dict[str, Any], name: str) -> Iterator[tuple[SettingsTable, str]]:
        """Code of the user's names a global of a package."""
        if is_open_scope(scope):
            module = str(scope.get("__name__"))
            yield from self._note_value((str(scope.get("__file__")), 1), module, f"{module}.{name}", value)

    def note_class(self, cls: type, asked: set[str]) -> Iterator[tuple[SettingsTable, str]]:
        """The tables among what code may ask a class of a package for, by its own names."""
        place = str(vars(sys.modules[cls.__module__]).get("__file__")), 1
        for name in asked & vars(cls).keys():
            if type(vars(cls)[name]) is dict:
                yield from self._note_value(place, cls.__module__, f"{cls.__qualname__}.{name}", vars(cls)[name])

    def _note_value(
        self, place: tuple[str, int], module: str, what: str, value: Any
    ) -> Iterator[tuple[SettingsTable, str]]:
        """What such a name leads to, and one level further."""
        is_of_object = type(value) is not dict
        values = _attributes(value) if is_of_object else value
        if not values:
            return
        table = SettingsTable(place, module, what, values, is_of_object)
        yield from self._note_table(table)
        if is_of_object and len(values) <= _MOST:
            for key, inner in list(values.items()):
                if type(inner) is dict and inner and type(key) is str:
                    yield from self._note_table(SettingsTable(place, module, table.what_is(key), inner, False))

    def _note_table(self, table: SettingsTable) -> Iterator[tuple[SettingsTable, str]]:
        if (id(table.values), None) not in self._tables:
            self._tables[id(table.values), None] = table, None
            for key in table.plain():
                yield table, key

    def _note_key(self, table: SettingsTable, key: str) -> Iterator[tuple[SettingsTable, str]]:
        if (id(table.values), key) not in self._tables:
            self._tables[id(table.values), key] = table, key
            yield table, key

    def snapshot(self) -> Snapshot:
        return Snapshot(list(self._tables.values()))


class Snapshot:
    """What they held before a trace."""

    def __init__(self, tables: list[tuple[SettingsTable, str | None]]) -> None:
        self._before = dict[tuple[int, str], tuple[SettingsTable, str, Any]]()
        for table, key in tables:
            for each in (key,) if key is not None else table.plain():
                self.add(table, each)

    def add(self, table: SettingsTable, key: str) -> None:
        self._before.setdefault((id(table.values), key), (table, key, table.values.get(key)))

    def changes(self) -> dict[tuple[int, Any], Change]:
        """What has another value now, by the id of its dict, and the key."""
        found: dict[tuple[int, Any], Change] = {}
        for place, (table, key, before) in self._before.items():
            after = table.values.get(key)
            if after is not before and not _is_equal(before, after):
                found[place] = Change(table.place, table.module, table.what_is(key), key, before, after)
        return found


def settings_of(cls: type, asked: set[str]) -> Iterator[str]:
    """The numbers, texts, tables and methods of a class of a package that code may ask for, by name."""
    for name in asked & vars(cls).keys():
        value = vars(cls)[name]
        if value is None or type(value) in (*_PLAIN, *_OF_CLASSES):
            yield name


def is_setting(change: Change) -> bool:
    """Is it worth a warning? What was None or another object is what a package fills in for itself.

    So is a number with a private name, such as the next id that it gives.
    """
    is_number = type(change.before) in (int, float)
    is_plain = type(change.before) in _PLAIN and type(change.after) in _PLAIN
    return is_plain and not (is_number and change.key.startswith("_"))


def _is_equal(before: Any, after: Any) -> bool:
    return type(before) in _PLAIN and type(after) is type(before) and after == before


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or isinstance(value, types.FunctionType | types.BuiltinFunctionType)


def _attributes(value: Any) -> dict[str, Any] | None:
    """Of an object of a class of an installed package."""
    if isinstance(value, type | types.ModuleType | threading.local) or not is_of_package(type(value)):
        return None
    return getattr(value, "__dict__", None)


def is_of_package(cls: type) -> bool:
    """Was it made by code of an installed package, other than JAX's own?"""
    module = sys.modules.get(getattr(cls, "__module__", "")) if cls.__flags__ & HEAP_TYPE else None
    return module is not None and is_open_scope(vars(module)) and not is_users_scope(vars(module))
