# SPDX-License-Identifier: Apache-2.0
"""What code asks objects, classes and modules for, by the names of attributes, and where these names may lead.

Bytecode shows the name of an attribute, seldom the object that is asked. So each name that code asks for is looked up
in every class and module that is known, once: a name that a class of the user's gets later makes its names others. The
methods here give what they find; the read set notes it.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from graftax import _core
from graftax._base.class_lookup import in_mro
from graftax._base.errors import GraftaxError
from graftax._base.missing import MISSING
from graftax._capture.bytecode import Names
from graftax._capture.code_owner import HEAP_TYPE, is_users_class, is_users_scope
from graftax._capture.constant_values import (
    OF_NAMES,
    OWN_NAMES,
    in_class,
    is_bound_by,
    is_constant,
    is_looked_up,
    overridden,
)
from graftax._capture.origin import Origin

_MOST_LOOKED_AT = 100  # items of a constant, for the classes among them


class NameRead(NamedTuple):
    """A name of a class, or of a module's dict, that code reads, with its value."""

    holder: Any
    name: str
    value: Any
    can_be_root: bool


class AskedNames(NamedTuple):
    """Names that code asks for: the user's, also of `super()` and by texts, and that of libraries."""

    by_user: set[str]
    of_super: set[str]
    texts: set[str]
    by_libraries: set[str]

    def since(self, earlier: AskedNames) -> AskedNames:
        """The names that have come since."""
        if self is earlier:
            return _NOTHING
        return AskedNames(*(names - before for names, before in zip(self, earlier, strict=True)))


_NOTHING = AskedNames(set(), set(), set(), set())


class AttributeReads:
    """The names that code asks for, with the classes and modules that have been met."""

    def __init__(self) -> None:
        self.classes: dict[type, None] = {}
        self.modules: dict[int, types.ModuleType] = {}  # by their dict: those that code names
        self.attributes: set[str] = set()
        self.reads_names = False  # is there code that may look at all names of a class?
        self.asks_names = False  # is there code that asks classes and functions for their names?
        self._sets_names = False  # is there code that sets attributes by names that it computes?
        self._matches = False  # is there code that matches classes?
        self._stored: set[str] = set()  # attributes that code sets
        self._read: set[str] = set()  # attributes that it does more with than to set them
        self._of_super: set[str] = set()
        self._of_libraries: set[str] = set()  # attributes that the code of libraries asks for
        self._texts: set[str] = set()  # attributes that code may name by texts
        # The names that were looked up, by the id of the class or of the module's dict; for `super()`, by a pair.
        self._looked_up: dict[int | tuple[str, int], set[str]] = {}
        self._searched: set[type] = set()  # the classes in which all of `_last_in_classes` was looked up
        # Most code brings a few new names. These lead to the classes that have them, so that not each one is searched.
        self._owners: dict[str, dict[type, None]] = {}  # the classes that have a name in their own dict
        self._below: dict[type, dict[type, None]] = {}  # of a class, the classes with it in their MRO
        self._library_bases: dict[type, type] = {}  # bases that are a library's, each with one class below it
        # How many names a class or a module had when all names were looked up there, and how many all classes had.
        self._sizes: dict[int, int] = {}
        self._size_of_classes = 0
        self._last = self._last_in_classes = self._last_in_modules = _NOTHING  # what was looked up last in all of them

    # ---- what code asks for

    def note_users(self, names: Names) -> None:
        """Notes the names that code of the user's asks for."""
        reads_names = names.computes or "vars" in names.loaded or OF_NAMES in names.attributes
        if reads_names and not self.reads_names:  # what was looked up for some of its names counts with all
            self.look_up_anew()
        self.reads_names = self.reads_names or reads_names
        if names.matches and not self._matches:
            self._matches = True
            for cls in list(self.classes):
                self.attributes |= {"__match_args__", *_match_args(cls)}
        self._texts |= names.texts
        self.attributes |= names.attributes
        self._of_super |= names.of_super
        self._stored |= names.stored_attributes
        self._read |= names.read_attributes
        self._sets_names = self._sets_names or names.sets

    def note_library(self, names: Names) -> None:
        """Notes the names that a library's code asks for. They count in the user's classes, which override them."""
        self._of_libraries |= names.attributes

    def note_any(self, names: Names) -> None:
        """Notes the names that code asks for, whether it is the user's or a library's."""
        self.asks_names = self.asks_names or not OWN_NAMES.isdisjoint(names.attributes)

    def expect_questions(self, names: bool, subclasses: bool) -> None:
        """Tells that code whose names are not read here asks classes for their names, or for their subclasses."""
        self.asks_names = self.asks_names or names
        self.attributes |= {"__subclasses__"} if subclasses else set()

    def sets(self, name: str | None) -> bool:
        """Does code set an attribute of this name?"""
        return self._sets_names or name in self._stored

    def reads(self, name: str) -> bool:
        """May code ask for the value of an attribute of this name?"""
        return self.reads_names or name in self._read

    def parents(self) -> list[type]:
        """The classes that code may ask for their subclasses."""
        return list(self.classes) if "__subclasses__" in self.attributes else []

    # ---- where it may look

    def add_module(self, module: types.ModuleType) -> None:
        self.modules.setdefault(id(vars(module)), module)

    def add(self, cls: type) -> Iterator[NameRead]:
        """Adds a class of the user's, with its bases, its metaclass and, where code asks for them, its subclasses."""
        if cls in self.classes or not is_users_class(cls):
            return
        self.classes[cls] = None  # before its bases and its metaclass, which may lead back to it
        yield from self.add(type(cls))
        if self._matches:
            self.attributes |= {"__match_args__", *_match_args(cls)}
        if in_mro(cls, "_is_protocol"):  # of `typing`: `isinstance` asks the object for each of them
            self.attributes |= {name for name in vars(cls) if not name.startswith("_")}
        for base in cls.__mro__[1:]:
            yield from self.add(base)
        yield from self.new_subclasses(cls)
        yield NameRead(cls, OF_NAMES, MISSING, False)
        yield from _special_methods(cls)
        # A member may have attributes of its own, which count like those of any object.
        for name, member in cls.__members__.items() if isinstance(cls, enum.EnumType) else ():
            yield NameRead(cls, name, member, _core.class_attribute(cls, name) is member)

    def add_in(self, value: Any, depth: int = 2) -> Iterator[NameRead]:
        """Adds the classes in a constant, and those of what it holds."""
        if isinstance(value, type):
            yield from self.add(value)
        elif type(value) in (tuple, list, set, frozenset, dict) and depth and len(value) <= _MOST_LOOKED_AT:
            for item in list(value):
                yield from self.add_in(item, depth - 1)
            for item in list(value.values()) if type(value) is dict else ():
                yield from self.add_in(item, depth - 1)
        else:
            yield from self.add(type(value))

    # ---- what is there

    def look_up_anew(self) -> None:
        """Forgets what was looked up: all names are to be looked up again in every class and module."""
        self._searched.clear()
        self._sizes.clear()
        self._size_of_classes = 0
        self._looked_up.clear()

    def renewed(self, holder: type) -> Iterator[NameRead]:
        """Forgets what was looked up in a class whose names or bases have changed, and in its subclasses."""
        for cls in [cls for cls in list(self.classes) if holder in cls.__mro__]:
            self._searched.discard(cls)
            self._size_of_classes -= self._sizes.pop(id(cls), 0)
            self._looked_up.pop(id(cls), None)
            self._looked_up.pop(("super()", id(cls)), None)
            for base in cls.__mro__[1:]:
                yield from self.add(base)
            yield from _special_methods(cls)

    def not_looked_up(self) -> Iterator[tuple[type, AskedNames, bool]]:
        """The classes in which something is still to be looked up: (class, names of that, is it the first time?).

        In a new class that is all that code asks for, in the others what it asks for since the last time. Classes that
        are added meanwhile come, too.
        """
        everything = self._asked_names()  # classes that are added may bring more names: these come the next time
        new_names = everything.since(self._last_in_classes)
        if new_names.by_user or new_names.of_super or new_names.by_libraries:
            for cls in self._grown_classes():
                yield cls, everything, False
            for cls in self._concerned(new_names):
                yield cls, new_names, False
        # What is noted of a class may have all be looked up anew: then those that were visited come again.
        while len(self._searched) < len(self.classes):
            for cls in [cls for cls in list(self.classes) if cls not in self._searched]:
                self._index(cls)
                yield cls, everything, True
        self._last_in_classes = everything

    def _asked_names(self) -> AskedNames:
        """What code asks for by now: the same object as before if no name has come."""
        names = self.attributes, self._of_super, self._texts, self._of_libraries
        # The sets only grow, so equal sizes mean the same names.
        if any(len(grown) != len(before) for grown, before in zip(names, self._last, strict=True)):
            self._last = AskedNames(*map(set[str].copy, names))
        return self._last

    def _index(self, cls: type) -> None:
        self._searched.add(cls)
        self._size_of_classes += len(vars(cls)) - self._sizes.get(id(cls), 0)
        self._sizes[id(cls)] = len(vars(cls))
        for name in vars(cls):
            self._owners.setdefault(name, {})[cls] = None
        for base in cls.__mro__:
            self._below.setdefault(base, {})[cls] = None
            if base.__flags__ & HEAP_TYPE and not is_users_class(base):
                self._library_bases.setdefault(base, cls)

    def _grown_classes(self) -> list[type]:
        """The classes that have got names since they were searched: the running trace may have set them."""
        if sum(map(len, map(vars, self._searched))) == self._size_of_classes:
            return []
        grown = [cls for cls in self._searched if self._sizes[id(cls)] != len(vars(cls))]
        for cls in grown:
            self._index(cls)
        return [below for cls in grown for below in self._below[cls] if below in self._searched]

    def _concerned(self, new_names: AskedNames) -> list[type]:
        """The classes in which new names may be found, of those that were searched before."""
        if "__subclasses__" in self.attributes:  # each may have new ones
            return [cls for cls in list(self.classes) if cls in self._searched]
        owners = [owner for name in set().union(*new_names) for owner in self._owners.get(name, ())]
        below = {cls: None for owner in owners for cls in self._below[owner]}
        # A base of a library's is asked for each name, also for those that it has not: any class below it will do.
        libraries = dict.fromkeys(self._library_bases.values()) if new_names.by_user else {}
        return [cls for cls in below | libraries if cls in self._searched]

    def new_subclasses(self, cls: type) -> Iterator[NameRead]:
        """Adds those that were made since, where code asks for subclasses."""
        if "__subclasses__" in self.attributes:
            for subclass in type.__subclasses__(cls):
                yield from self.add(subclass)

    def all_names(self, cls: type) -> Iterator[NameRead]:
        """All names that a class has, and which names these are, for code that may look at all of them."""
        for base in filter(is_users_class, cls.__mro__):
            yield NameRead(base, OF_NAMES, MISSING, False)
            for name in in_class(base, OF_NAMES)[1]:
                if name.startswith("__"):  # what the interpreter looks up counts anyway
                    continue
                value = _core.class_attribute(base, name)
                is_root = not is_bound_by(value) and not is_constant(value)
                # Nobody named it, so one that cannot be a root (a file, a lock) is compared by its identity instead.
                yield NameRead(base, name, value, is_root and not _is_refused(Origin(base, name)))

    def asked_of(
        self, cls: type, asked_names: AskedNames, is_first: bool
    ) -> Iterator[tuple[type, str, type | None, Any]]:
        """What code finds in a class: (the class or a library's base of it, name, the class that has it, value).

        A name that no class of the user's has is looked up only in the bases from libraries. If a class of the user's
        gets that name later, the binding of its names (`OF_NAMES`) fails.
        """
        # Without `object`, which nobody can change.
        users_dicts = [vars(base) for base in cls.__mro__[:-1] if is_users_class(base)]
        users_names = set[str]().union(*users_dicts)
        names = users_names & asked_names.by_user | users_names & asked_names.by_libraries
        # Nobody reads what the code of C and of the standard library asks for: all that overrides it counts at once.
        if is_first:
            names |= overridden(cls, users_names)
        for name in self._take_new(id(cls), names):
            yield cls, name, *in_class(cls, name)
        for base in cls.__mro__[1:] if len(users_dicts) < len(cls.__mro__) - 1 else ():
            if base.__flags__ & HEAP_TYPE and not is_users_class(base):
                for name in self._take_new(id(base), asked_names.by_user):
                    yield base, name, *in_class(base, name)

    def _take_new(self, key: int | tuple[str, int], names: set[str]) -> set[str]:
        """Takes note that these names are looked up under a key of `_looked_up`. Gives those that were not."""
        looked_up = self._looked_up.setdefault(key, set())
        new_names = names - looked_up
        looked_up |= new_names
        return new_names

    def read_of(self, cls: type, name: str, owner: type | None, value: object) -> NameRead:
        """How a name counts that code asks a class for, where `owner` has it."""
        if owner is not None and is_users_class(owner) and not is_constant(value) and not is_bound_by(value):
            return NameRead(owner, name, value, True)
        return NameRead(cls, name, value, False)  # of the class that is asked: another base may come to have the name

    def asked_of_super(self, cls: type) -> Iterator[NameRead]:
        """What code finds above a class: `super()` asks the bases, whatever the class itself has by that name."""
        for base in filter(is_users_class, cls.__mro__[1:] if self._of_super else ()):
            for name in self._take_new(("super()", id(base)), self._of_super & vars(base).keys()):
                yield NameRead(base, name, vars(base)[name], not is_bound_by(vars(base)[name]))

    def asked_of_modules(self) -> Iterator[NameRead]:
        """What code finds in the user's modules that was not looked up there yet."""
        everything = self._asked_names()
        new_names = everything.since(self._last_in_modules)
        for i, module in list(self.modules.items()):
            scope = vars(module)
            asked_names = new_names if self._sizes.get(i) == len(scope) else everything
            if (asked_names.by_user or asked_names.texts) and is_users_scope(scope):
                self._sizes[i] = len(scope)
                # A text may be a name that the module gets later; other names count where the module has them.
                for name in self._take_new(i, (asked_names.by_user & scope.keys()) | asked_names.texts):
                    yield NameRead(scope, name, scope.get(name, MISSING), True)
        self._last_in_modules = everything

    @property
    def of_anybody(self) -> set[str]:
        """The attributes that any code asks for."""
        return self.attributes | self._of_libraries


def _special_methods(cls: type) -> Iterator[NameRead]:
    """What the interpreter looks up in a class, which no code names."""
    for base in cls.__mro__[:-1]:
        for name, value in vars(base).items():
            if is_looked_up(base, name, value):
                yield NameRead(cls, name, value, False)


def _match_args(cls: type) -> tuple[str, ...]:
    """The attributes that the positional patterns of a `match` ask for."""
    names = in_class(cls, "__match_args__")[1]
    return names if isinstance(names, tuple) else ()


def _is_refused(origin: Origin) -> bool:
    """Can its value not be recorded as a root?"""
    try:
        _core.record((origin.value(),), (origin.text(),))
    except GraftaxError:
        return True
    return False
