# SPDX-License-Identifier: Apache-2.0
"""Settings and counts that installed packages keep in their modules, classes and closures: numbers, texts, functions,
and the dicts, lists, sets and objects that hold them, within each other.

What code of a package names there is a binding, so that a mode that is switched or a class attribute that is set
between two calls is noticed. What a package fills in when it is first used (caches, lazy imports) is its own business.
But a value that is another one after the trace is told, since a call that is compiled leaves it alone. It is no
binding, or two functions that count something would each make the other one's programs stale.
"""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from graftax import _core
from graftax._base.missing import MISSING
from graftax._capture.bytecode import Names
from graftax._capture.caches_in_traces import attributes_of, holds_tracer, same_items
from graftax._capture.code_by_identity import CodeSet
from graftax._capture.code_owner import HEAP_TYPE, is_open_scope, is_users_scope
from graftax._jax.traces import current_trace

CHANGED = (
    "{name} runs code of {module} that changed {what} from {before} to {after} while it was traced. A compiled "
    "function does that once; later calls leave {what} as it is, and do not notice when it changes. Change it outside "
    "of {name}. warn_impure=False turns this warning off."
)
KEPT = (
    "{name} runs code of {module} that stored an array in {what} while it was traced. The array has no value there, so "
    "{what} was left as it was before, and compiled calls do not store anything. If it is a cache, nothing is lost: "
    "the compiled function computes the array itself. Otherwise return the array, and store it outside of {name}. "
    "warn_impure=False turns this warning off."
)

_PLAIN = bool, int, float, str
_SETTINGS = *_PLAIN, types.NoneType, tuple
_CONTAINERS = dict, list, set
_FUNCTIONS = types.FunctionType, types.BuiltinFunctionType, type
_KEYS = int, str, type
_OF_CLASSES = *_CONTAINERS, types.FunctionType, staticmethod, classmethod, property
_MOST = 256  # entries of a table that is looked at
_MOST_ITEMS = 64  # of a list or a set: it is compared on every call
_MOST_TABLES = 64  # that one name leads to
_DEPTH = 4  # tables within each other

Place = tuple[str, int]


class Change(NamedTuple):
    """What a message tells of one value."""

    place: Place  # file and line of code that names it
    module: str
    what: str
    key: Any
    before: Any
    after: Any
    is_undone: bool = False  # was it put back, as an array of the trace was stored there?

    def text(self, name: str) -> str:
        """The message, for a trace of the function `name`."""
        if self.is_undone:
            return KEPT.format(name=name, module=self.module, what=self.what)
        before, after = (self.before, self.after) if self.key is None else (repr(self.before), repr(self.after))
        return CHANGED.format(name=name, module=self.module, what=self.what, before=before, after=after)


class SettingsTable(NamedTuple):
    """A dict, a list or a set of a package, or the attributes of an object, a class or a function of its."""

    place: Place
    module: str
    what: str
    values: Any
    is_of_object: bool = False
    depth: int = 0  # how far what is in it is followed
    cls: type | None = None  # that of the object

    def plain(self) -> Iterator[Any]:
        """The keys of what can only be replaced: functions, classes and other tables, too."""
        if type(self.values) is dict:
            yield from (key for key, x in list(self.values.items()) if _is_key(key) and _is_plain(x))

    def items(self) -> list[tuple[Any, Any]]:
        """What is in it, with keys or numbers."""
        return list(self.values.items() if type(self.values) is dict else enumerate(list(self.values)))

    def what_is(self, key: Any) -> str:
        return f"{self.what}.{key}" if self.is_of_object else f"{self.what}[{key!r}]"


Setting = tuple[SettingsTable, Any]


class LibraryGlobals:
    """Those that code of installed packages named under the traces of one function."""

    def __init__(self) -> None:
        self._tables: dict[int, SettingsTable] = {}
        self._keys: dict[tuple[int, Any], tuple[SettingsTable, Any]] = {}  # names that were noted alone
        self._functions: dict[int, weakref.ref[types.FunctionType]] = {}  # of which the closures were noted
        self._without_name = CodeSet()  # of functions that no module holds
        self.changing: set[tuple[int, Any]] = set()  # what traces have changed, by the id of its dict, and the key

    def note(self, code: types.CodeType, scope: dict[str, Any], names: Names) -> Iterator[Setting]:
        """Code of a package that is going to run. Gives what is new: a table, and a key of it or None."""
        if any(getattr(callback, "__code__", None) is code for callback in gc.callbacks):
            return  # the collector has begun: nobody called it
        own = _table_of_module(scope, (code.co_filename, code.co_firstlineno))
        for name in names.stored:
            yield from self._note_key(own, name)
        for name in {*(chain[0] for chain in names.chains), *names.stored}:
            yield from self._note_value(own, name, scope.get(name), names.literals)

    def note_named(self, value: Any, scope: dict[str, Any], name: str, names: Names) -> Iterator[Setting]:
        """Code names a global of a package, as an attribute of its module."""
        if is_package_scope(scope):
            yield from self._note_value(_table_of_module(scope), name, value, names.literals)

    def note_class(self, cls: type, asked: set[str]) -> Iterator[Setting]:
        """The tables among what code may ask a class of a package for, by its own names."""
        own = _table_of_class(cls)
        for name in asked & vars(cls).keys():
            if type(vars(cls)[name]) in _CONTAINERS:
                yield from self._note_value(own, name, vars(cls)[name])

    def note_function(self, code: types.CodeType, cells: dict[str, Any], function: object) -> Iterator[Setting]:
        """What a function of a package keeps in its variables of an enclosing call, and in its attributes."""
        if not isinstance(function, types.FunctionType) or self.has_met(function):
            return
        # Before Python 3.12 nobody tells which functions a trace has made: those without a name may be such ones.
        if not _core.has_watchers and (code in self._without_name or not _has_name(function)):
            self._without_name.add(code)
            return
        self._functions[id(function)] = weakref.ref(function)
        module = str(function.__globals__.get("__name__"))
        own = SettingsTable((code.co_filename, code.co_firstlineno), module, function.__qualname__, cells, True, _DEPTH)
        for name, value in cells.items():
            if type(value) in _CONTAINERS:
                yield from self._note_value(own, name, value)
        if vars(function):
            yield from self._note_table(own._replace(values=vars(function), depth=1), ())

    def has_met(self, function: object) -> bool:
        """Was the closure of this function noted?"""
        reference = self._functions.get(id(function))
        return reference is not None and reference() is function

    def renewed(self, holder: Any, name: Any) -> Iterator[Setting]:
        """A name has another value: gives what that leads to."""
        if isinstance(holder, type):
            table = _table_of_class(holder) if is_of_package(holder) else None
        elif (table := self._tables.get(id(holder))) is None and is_package_scope(holder):
            table = _table_of_module(holder)
        if table is not None and name in table.values:
            yield from self._note_value(table, name, table.values[name])

    def _note_value(
        self, table: SettingsTable, key: Any, value: Any, literals: Iterable[str] = ()
    ) -> Iterator[Setting]:
        """What a value in a table leads to, and what that leads to, as far as there is room.

        `literals` are keys that code may ask it for. Those that it has not got yet count, too.
        """
        room, queue = _MOST_TABLES, deque([(table, key, value)])
        while queue and room:
            outer, key, value = queue.popleft()
            is_of_object = type(value) not in _CONTAINERS
            values: Any = attributes_of(value) if is_of_object and is_of_package(type(value)) else value
            if type(values) not in _CONTAINERS or id(values) in self._tables or len(values) > _MOST:
                continue
            table = SettingsTable(outer.place, outer.module, outer.what_is(key), values, depth=outer.depth - 1)
            if is_of_object:
                table = table._replace(is_of_object=True, cls=type(value))
            yield from self._note_table(table, _class_settings(type(value)) if is_of_object else literals)
            room, literals = room - 1, ()
            if table.depth:
                queue.extend((table, key, value) for key, value in table.items())

    def _note_table(self, table: SettingsTable, asked: Iterable[str]) -> Iterator[Setting]:
        self._tables[id(table.values)] = table
        yield table, None
        yield from ((table, key) for key in table.plain())
        if type(table.values) is dict:
            yield from ((table, key) for key in asked if key not in table.values)

    def _note_key(self, table: SettingsTable, key: str) -> Iterator[Setting]:
        if (id(table.values), key) not in self._keys:
            self._keys[id(table.values), key] = table, key
            yield table, key

    @property
    def containers(self) -> list[SettingsTable]:
        """The lists and sets that no trace has changed."""
        tables = [table for table in list(self._tables.values()) if type(table.values) is not dict]
        small = [table for table in tables if len(table.values) <= _MOST_ITEMS]
        return [table for table in small if (id(table.values), None) not in self.changing]

    def snapshot(self) -> Snapshot:
        return Snapshot(list(self._tables.values()), list(self._keys.values()))


class Snapshot:
    """What they held before a trace."""

    def __init__(self, tables: list[SettingsTable], keys: list[tuple[SettingsTable, Any]]) -> None:
        self._before = dict[tuple[int, Any], tuple[SettingsTable, Any, Any]]()  # what can only be replaced
        self._contents = dict[int, tuple[SettingsTable, Any]]()
        for table, key in [*((table, None) for table in tables), *keys]:
            self.add(table, key)

    def add(self, table: SettingsTable, key: Any) -> None:
        """Notes one key, or for None all that a table holds."""
        if key is not None:
            self._before.setdefault((id(table.values), key), (table, key, table.values.get(key, MISSING)))
        elif id(table.values) not in self._contents:
            self._contents[id(table.values)] = table, table.values.copy()
            for each in table.plain():
                self.add(table, each)

    def changes(self) -> dict[tuple[int, Any], Change]:
        """What has another value now, by the id of its dict, and the key. Takes out what holds arrays of the trace."""
        found: dict[tuple[int, Any], Change] = {}
        ending = current_trace()
        for table, content in self._contents.values():
            found |= _undo(table, content, ending)
            if type(table.values) is not dict and not same_items(table.values, content):
                before, after = f"{len(content)} items", f"{len(table.values)} items"
                found[id(table.values), None] = Change(table.place, table.module, table.what, None, before, after)
        for place, (table, key, before) in self._before.items():
            after = table.values.get(key, MISSING)
            if after is before or (type(before) in _PLAIN and type(after) is type(before) and after == before):
                continue
            found[place] = Change(table.place, table.module, table.what_is(key), key, before, after)
            if holds_tracer(after, ending):
                _put(table.values, key, before)
                found[place] = found[place]._replace(is_undone=True)
        return found


def _undo(table: SettingsTable, before: Any, ending: object) -> dict[tuple[int, Any], Change]:
    """Gives a table back what it held, where it holds arrays of the trace that ends now."""
    values, found = table.values, dict[tuple[int, Any], Change]()
    if type(values) is dict:
        for key, value in list(values.items()):
            was = before.get(key, MISSING)
            if was is not value and holds_tracer(value, ending):
                _put(values, key, was)
                found[id(values), key] = Change(table.place, table.module, table.what, key, was, value, True)
    elif not same_items(values, before) and holds_tracer(list(values), ending):
        values.clear()
        values.extend(before) if type(values) is list else values.update(before)
        found[id(values), None] = Change(table.place, table.module, table.what, None, None, None, True)
    return found


def _put(values: dict[Any, Any], key: Any, value: Any) -> None:
    if value is MISSING:
        values.pop(key, None)
    else:
        values[key] = value


def _has_name(function: types.FunctionType) -> bool:
    """Does a module hold it?"""
    if "<locals>" not in function.__qualname__:
        return True
    scopes = [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]
    return any(value is function for scope in (function.__globals__, *scopes) for value in list(scope.values()))


def _table_of_module(scope: dict[str, Any], place: Place | None = None) -> SettingsTable:
    module = str(scope.get("__name__"))
    return SettingsTable(place or (str(scope.get("__file__")), 1), module, module, scope, True, _DEPTH)


def _table_of_class(cls: type) -> SettingsTable:
    place = str(vars(sys.modules[cls.__module__]).get("__file__")), 1
    return SettingsTable(place, cls.__module__, cls.__qualname__, vars(cls), True, _DEPTH)


def _class_settings(cls: type) -> set[str]:
    """What objects of a class have by the class, until they are given their own."""
    found: set[str] = set()
    for base in cls.__mro__[:-1]:
        found |= {name for name, x in vars(base).items() if not name.startswith("__") and type(x) in _SETTINGS}
    return found


def settings_of(cls: type, asked: set[str]) -> Iterator[str]:
    """The numbers, texts, tables and methods of a class of a package that code may ask for, by name."""
    for name in asked & vars(cls).keys():
        value = vars(cls)[name]
        if type(value) in (*_SETTINGS, *_OF_CLASSES):
            yield name


def is_setting(change: Change) -> bool:
    """Is it worth a warning? What was None or another object is what a package fills in for itself.

    So is a number with a private name, such as the next id that it gives, and a set.
    """
    if change.is_undone or change.key is None:
        return True
    is_number = type(change.before) in (int, float)
    is_plain = type(change.before) in _PLAIN and type(change.after) in _PLAIN
    return is_plain and not (is_number and str(change.key).startswith("_"))


def _is_plain(value: Any) -> bool:
    """Can it only be replaced?"""
    return type(value) in (*_SETTINGS, *_CONTAINERS) or isinstance(value, _FUNCTIONS) or is_of_package(type(value))


def _is_key(key: Any) -> bool:
    parts = key if type(key) is tuple else (key,)
    return all(type(part) in _KEYS for part in parts)


def is_package_scope(scope: dict[Any, Any]) -> bool:
    """Are these the globals of a module of an installed package, other than JAX's own?"""
    return isinstance(scope.get("__file__"), str) and is_open_scope(scope) and not is_users_scope(scope)


def is_of_package(cls: type) -> bool:
    """Was it made by code of an installed package, other than JAX's own?"""
    module = sys.modules.get(getattr(cls, "__module__", "")) if cls.__flags__ & HEAP_TYPE else None
    return module is not None and is_package_scope(vars(module))
