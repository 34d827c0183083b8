# SPDX-License-Identifier: Apache-2.0
"""Settings and counts that installed packages keep in their modules, classes and closures.

These are numbers, texts and functions, and the dicts, lists, sets and objects that hold them, nested in each other.
What code of a package names there is a binding: it is noticed when a mode is switched, or a class attribute is set,
between two calls. What a package fills in when it is first used (caches, lazy imports) is its own business.

If a trace changes a value, a warning says so, since compiled calls leave it alone. Such a value is not a binding: two
functions that both count something would make each other's programs stale.
"""

from __future__ import annotations

import gc
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from graftax import _core
from graftax._base.missing import MISSING
from graftax._capture.bytecode import Names
from graftax._capture.caches_after_traces import attributes_of, holds_tracer, same_items
from graftax._capture.code_by_identity import IdentitySet
from graftax._capture.code_owner import HEAP_TYPE, is_open_scope, is_users_scope
from graftax._capture.origin import Origin
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
_MOST_ITEMS = 64  # of a list or a set, which is compared on every call
_MOST_TABLES = 64  # tables that one name leads to
_DEPTH = 4  # levels of tables

Place = tuple[str, int]


class Change(NamedTuple):
    """A value that a trace has changed, for a message."""

    place: Place  # file and line of code that names it
    module: str
    what: str  # what messages call it
    key: Any  # None for a whole list or set
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
    """A dict, list or set of a package, or the attributes of one of its objects, classes or functions."""

    place: Place
    module: str
    what: str  # what messages call it
    values: Any  # the dict, list or set itself
    is_of_object: bool = False  # are they attributes?
    depth: int = 0  # how many levels of what is in it are followed
    cls: type | None = None  # the class of the object

    def plain(self) -> Iterator[Any]:
        """The keys of values that can only be replaced as a whole: other tables, functions and classes, too."""
        if type(self.values) is dict:
            yield from (key for key, x in list(self.values.items()) if _is_key(key) and _is_plain(x))

    def items(self) -> list[tuple[Any, Any]]:
        """What is in it, with keys or numbers."""
        return list(self.values.items() if type(self.values) is dict else enumerate(list(self.values)))

    def what_is(self, key: object) -> str:
        return f"{self.what}.{key}" if self.is_of_object else f"{self.what}[{key!r}]"


Setting = tuple[SettingsTable, Any]


class LibraryGlobals:
    """The settings that code of installed packages named under the traces of one function."""

    def __init__(self) -> None:
        self._tables: dict[int, SettingsTable] = {}  # by the id of their values
        self._keys: dict[tuple[int, Any], tuple[SettingsTable, Any]] = {}  # names that were noted alone
        self._functions = IdentitySet[types.FunctionType]()  # of which the closures were noted
        self._without_name = IdentitySet[types.CodeType]()  # of functions that no module holds
        self.changing: set[tuple[int, Any]] = set()  # what traces have changed, by the id of its dict, and the key

    def note(self, code: types.CodeType, scope: dict[str, Any], names: Names) -> Iterator[Setting]:
        """Notes what code of a package names that is going to run. Gives what is new: (table, a key of it or None)."""
        if any(getattr(callback, "__code__", None) is code for callback in gc.callbacks):
            return  # the garbage collector calls it, not the program
        module = _table_of_module(scope, (code.co_filename, code.co_firstlineno))
        for name in names.stored:
            yield from self._note_key(module, name)
        for name in {*(chain[0] for chain in names.chains), *names.stored}:
            yield from self._note_value(module, name, scope.get(name), names.literals)

    def note_named(self, value: object, scope: dict[str, Any], name: str, names: Names) -> Iterator[Setting]:
        """Notes a global of a package that code names as an attribute of its module."""
        if is_package_scope(scope):
            yield from self._note_value(_table_of_module(scope), name, value, names.literals)

    def note_class(self, cls: type, names: set[str]) -> Iterator[Setting]:
        """Notes the tables that a class of a package itself has under these names, for which code may ask it."""
        table = _table_of_class(cls)
        for name in names & vars(cls).keys():
            if type(vars(cls)[name]) in _CONTAINERS:
                yield from self._note_value(table, name, vars(cls)[name])

    def note_function(self, code: types.CodeType, cells: dict[str, Any], function: object) -> Iterator[Setting]:
        """Notes what a function of a package keeps in its variables of an enclosing call, and in its attributes."""
        if not isinstance(function, types.FunctionType) or self.has_met(function):
            return
        # Before Python 3.12 nobody tells which functions a trace has made: those that no module holds may be.
        if not _core.has_watchers and (code in self._without_name or not _has_name(function)):
            self._without_name.add(code)
            return
        self._functions.add(function)
        module = str(function.__globals__.get("__name__"))
        place = code.co_filename, code.co_firstlineno
        table = SettingsTable(place, module, function.__qualname__, cells, True, _DEPTH)
        for name, value in cells.items():
            if type(value) in _CONTAINERS:
                yield from self._note_value(table, name, value)
        if vars(function):
            yield from self._note_table(table._replace(values=vars(function), depth=1), ())

    def has_met(self, function: object) -> bool:
        """Was the closure of this function noted?"""
        return function in self._functions

    def renewed(self, holder: Any, name: Any) -> Iterator[Setting]:
        """Notes what a name leads to that has another value now."""
        if isinstance(holder, type):
            table = _table_of_class(holder) if is_of_package(holder) else None
        elif (table := self._tables.get(id(holder))) is None and is_package_scope(holder):
            table = _table_of_module(holder)
        if table is not None and name in table.values:
            yield from self._note_value(table, name, table.values[name])

    def _note_value(
        self, table: SettingsTable, key: object, value: object, literals: Iterable[str] = ()
    ) -> Iterator[Setting]:
        """Notes the tables to which a value in a table leads, `_MOST_TABLES` at most.

        `literals` are keys that code may ask the first of them for. Those that it does not have yet count, too.
        """
        # The nearest first, so that what is left out lies deepest.
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

    def _note_table(self, table: SettingsTable, keys: Iterable[str]) -> Iterator[Setting]:
        """Notes a table, what it has, and these keys that it does not have yet."""
        self._tables[id(table.values)] = table
        yield table, None
        yield from ((table, key) for key in table.plain())
        if type(table.values) is dict:
            yield from ((table, key) for key in keys if key not in table.values)

    def _note_key(self, table: SettingsTable, key: str) -> Iterator[Setting]:
        if (id(table.values), key) not in self._keys:
            self._keys[id(table.values), key] = table, key
            yield table, key

    @property
    def containers(self) -> list[SettingsTable]:
        """The lists and sets that no trace has changed."""
        # No watcher tells of a change in these, so each call compares them: only small ones.
        tables = [table for table in list(self._tables.values()) if type(table.values) is not dict]
        small = [table for table in tables if len(table.values) <= _MOST_ITEMS]
        return [table for table in small if (id(table.values), None) not in self.changing]

    def snapshot(self) -> Snapshot:
        return Snapshot(list(self._tables.values()), list(self._keys.values()))


class Snapshot:
    """What settings were before a trace."""

    def __init__(self, tables: list[SettingsTable], keys: list[tuple[SettingsTable, Any]]) -> None:
        self._values = dict[tuple[int, Any], tuple[SettingsTable, Any, Any]]()  # (table, key, value) of single values
        self._contents = dict[int, tuple[SettingsTable, Any]]()  # (table, a copy of what it held)
        for table, key in [*((table, None) for table in tables), *keys]:
            self.add(table, key)

    def add(self, table: SettingsTable, key: object) -> None:
        """Notes one key, or for None all that a table holds."""
        if key is not None:
            self._values.setdefault((id(table.values), key), (table, key, table.values.get(key, MISSING)))
        elif id(table.values) not in self._contents:
            self._contents[id(table.values)] = table, table.values.copy()
            for plain_key in table.plain():
                self.add(table, plain_key)

    def changes(self) -> dict[tuple[int, Any], Change]:
        """What has another value now, by the id of its dict, and the key. Takes out what holds arrays of the trace."""
        changes: dict[tuple[int, Any], Change] = {}
        ending = current_trace()
        # Whole tables: what holds arrays of the trace is put back. Of lists and sets, only the lengths are told.
        for table, content in self._contents.values():
            changes |= _undo(table, content, ending)
            if type(table.values) is not dict and not same_items(table.values, content):
                old, new = f"{len(content)} items", f"{len(table.values)} items"
                changes[id(table.values), None] = Change(table.place, table.module, table.what, None, old, new)
        # Single values. Numbers and texts are compared by what they are: a package may store an equal one.
        for place, (table, key, old) in self._values.items():
            new = table.values.get(key, MISSING)
            if new is old or (type(old) in _PLAIN and type(new) is type(old) and new == old):
                continue
            changes[place] = Change(table.place, table.module, table.what_is(key), key, old, new)
            if holds_tracer(new, ending):
                Origin(table.values, key).put(old)
                changes[place] = changes[place]._replace(is_undone=True)
        return changes


def _undo(table: SettingsTable, content: Any, ending: object) -> dict[tuple[int, Any], Change]:
    """Gives a table back what it held, where it holds arrays of the trace that ends now."""
    values, changes = table.values, dict[tuple[int, Any], Change]()
    if type(values) is dict:
        for key, new in list(values.items()):
            old = content.get(key, MISSING)
            if old is not new and holds_tracer(new, ending):
                Origin(values, key).put(old)
                changes[id(values), key] = Change(table.place, table.module, table.what, key, old, new, True)
    elif not same_items(values, content) and holds_tracer(list(values), ending):
        values.clear()
        values.extend(content) if type(values) is list else values.update(content)
        changes[id(values), None] = Change(table.place, table.module, table.what, None, None, None, True)
    return changes


def _has_name(function: types.FunctionType) -> bool:
    """Does a module hold it?"""
    # A function of a module or a class is there before any trace.
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
    """The settings that objects have from their class, until they are given values of their own."""
    names: set[str] = set()
    for base in cls.__mro__[:-1]:
        # Each class has texts such as `__module__` and `__doc__`, which are no settings.
        names |= {name for name, x in vars(base).items() if not name.startswith("__") and type(x) in _SETTINGS}
    return names


def settings_of(cls: type, names: set[str]) -> Iterator[str]:
    """Those of the names under which a class of a package itself has a number, a text, a table or a method."""
    for name in names & vars(cls).keys():
        value = vars(cls)[name]
        if type(value) in (*_SETTINGS, *_OF_CLASSES):
            yield name


def is_setting(change: Change) -> bool:
    """Is it worth a warning?

    A package fills in what was None or another object for itself. So does it with a number under a private name, such
    as the next id that it gives.
    """
    if change.is_undone or change.key is None:
        return True
    is_number = type(change.before) in (int, float)
    is_plain = type(change.before) in _PLAIN and type(change.after) in _PLAIN
    return is_plain and not (is_number and str(change.key).startswith("_"))


def _is_plain(value: object) -> bool:
    """Is it compared by identity, as a value of its table? What tables and objects hold is looked at in these."""
    return type(value) in (*_SETTINGS, *_CONTAINERS) or isinstance(value, _FUNCTIONS) or is_of_package(type(value))


def _is_key(key: object) -> bool:
    """Can the key be looked up without running code of a package?"""
    # Looking up a key calls its `__hash__` and `__eq__`.
    keys = key if type(key) is tuple else (key,)
    return all(type(each) in _KEYS for each in keys)


def is_package_scope(scope: dict[Any, Any]) -> bool:
    """Are these the globals of a module of an installed package, other than JAX's own?"""
    return isinstance(scope.get("__file__"), str) and is_open_scope(scope) and not is_users_scope(scope)


def is_of_package(cls: type) -> bool:
    """Was it made by code of an installed package, other than JAX's own?"""
    module = sys.modules.get(getattr(cls, "__module__", "")) if cls.__flags__ & HEAP_TYPE else None
    return module is not None and is_package_scope(vars(module))
