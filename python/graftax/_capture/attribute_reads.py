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
    is_protocol,
    overridden,
)
from graftax._capture.origin import Origin

_MOST_LOOKED_AT = 100  # items of a constant, for the classes among them


class NameRead(NamedTuple):
    """That code reads a name of a class or of a module's dict, and what it has there."""

    holder: Any
    name: str
    value: Any
    can_be_root: bool


class Asked(NamedTuple):
    """Names that code asks for: the user's, also of `super()` and by texts, and that of libraries."""

    users: set[str]
    of_super: set[str]
    texts: set[str]
    of_libraries: set[str]

    def since(self, earlier: Asked) -> Asked:
        """The names that have come since."""
        return (
            NOTHING
            if self is earlier
            else Asked(*(names - before for names, before in zip(self, earlier, strict=True)))
        )


NOTHING = Asked(set(), set(), set(), set())


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
        self._looked_up: dict[int, set[str]] = {}  # the names that were, by class or module dict
        self._searched: set[type] = set()  # the classes in which all of `_last_in_classes` was looked up
        # Most code brings a few new names. These lead to the classes that have them, so that not each one is searched.
        self._owners: dict[str, dict[type, None]] = {}  # the classes that have a name in their own dict
        self._below: dict[type, dict[type, None]] = {}  # of a class, the classes with it in their MRO
        self._library_bases: dict[type, type] = {}  # bases that are a library's, each with one class below it
        self._sizes: dict[int, int] = {}  # how many names a module had when all of `_last_in_modules` was looked up
        self._last = self._last_in_classes = self._last_in_modules = NOTHING  # what was looked up last in all of them

    # ---- what code asks for

    def note_users(self, names: Names) -> None:
        """Code of the user's asks for these."""
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
        """Code of a library asks for these: they count in the classes of the user's, which override them."""
        self._of_libraries |= names.attributes

    def note_any(self, names: Names) -> None:
        """Code of anybody asks for these."""
        self.asks_names = self.asks_names or not OWN_NAMES.isdisjoint(names.attributes)

    def expect_questions(self, names: bool, subclasses: bool) -> None:
        """Code that has run elsewhere asks classes for their names, or for their subclasses."""
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
        self.classes[cls] = None
        yield from self.add(type(cls))
        if self._matches:
            self.attributes |= {"__match_args__", *_match_args(cls)}
        if is_protocol(cls):  # `isinstance` asks the object for each of them
            self.attributes |= {name for name in vars(cls) if not name.startswith("_")}
        for base in cls.__mro__[1:]:
            yield from self.add(base)
        yield from self.new_subclasses(cls)
        yield NameRead(cls, OF_NAMES, MISSING, False)
        yield from _special_methods(cls)
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
        """Whatever was looked up counts no more."""
        self._searched.clear()
        self._sizes.clear()
        self._looked_up.clear()

    def renewed(self, holder: type) -> Iterator[NameRead]:
        """The names of a class have changed: what it and its subclasses have is to be looked up again."""
        for cls in [cls for cls in list(self.classes) if holder in cls.__mro__]:
            self._searched.discard(cls)
            self._looked_up.pop(id(cls), None)
            yield from _special_methods(cls)

    def not_looked_up(self) -> Iterator[tuple[type, Asked]]:
        """The classes in which not all that code asks for by now was looked up, with those that are added meanwhile.

        Each with what to look up there: all of it, or what code asks for since the classes were looked at last.
        """
        everything = self._asked()  # classes that are added may bring more
        since = everything.since(self._last_in_classes)
        if since.users or since.of_super or since.of_libraries:
            for cls in self._concerned(since):
                yield cls, since
        while len(self._searched) < len(self.classes):
            for cls in [cls for cls in list(self.classes) if cls not in self._searched]:
                self._index(cls)
                yield cls, everything
        self._last_in_classes = everything

    def _asked(self) -> Asked:
        """What code asks for by now: the same object as before where nothing has come."""
        names = self.attributes, self._of_super, self._texts, self._of_libraries
        if any(len(grown) != len(before) for grown, before in zip(names, self._last, strict=True)):  # none shrinks
            self._last = Asked(*map(set[str].copy, names))
        return self._last

    def _index(self, cls: type) -> None:
        self._searched.add(cls)
        for name in vars(cls):
            self._owners.setdefault(name, {})[cls] = None
        for base in cls.__mro__:
            self._below.setdefault(base, {})[cls] = None
            if base.__flags__ & HEAP_TYPE and not is_users_class(base):
                self._library_bases.setdefault(base, cls)

    def _concerned(self, since: Asked) -> list[type]:
        """The classes in which new names may be found, of those that were searched before."""
        if "__subclasses__" in self.attributes:  # each may have new ones
            return [cls for cls in list(self.classes) if cls in self._searched]
        owners = [owner for name in set().union(*since) for owner in self._owners.get(name, ())]
        below = {cls: None for owner in owners for cls in self._below[owner]}
        libraries = dict.fromkeys(self._library_bases.values()) if since.users else {}
        return [cls for cls in below | libraries if cls in self._searched]

    def new_subclasses(self, cls: type) -> Iterator[NameRead]:
        """Adds those that were made since, where code asks for subclasses."""
        if "__subclasses__" in self.attributes:
            for subclass in type.__subclasses__(cls):
                yield from self.add(subclass)

    def all_names(self, cls: type) -> Iterator[NameRead]:
        """All that a class has, and that it has no more, where code may look at all names."""
        is_new = self.reads_names and id(cls) not in self._looked_up
        for base in filter(is_users_class, cls.__mro__ if is_new else ()):
            yield NameRead(base, OF_NAMES, MISSING, False)
            for name in in_class(base, OF_NAMES)[1]:
                if name == "_abc_impl":  # the interpreter's own notes on an abstract class
                    continue
                value = _core.class_attribute(base, name)
                is_root = not is_bound_by(value) and not is_constant(value)
                yield NameRead(base, name, value, is_root and not _is_refused(Origin(base, name)))

    def asked_of(self, cls: type, asked: Asked) -> Iterator[tuple[type, str, type | None, Any]]:
        """What code finds in a class: (that class, or a base of a library's, the name, the base that has it, value).

        A name that no class of the user's has is looked up in the bases of libraries alone: if a class of the user's
        gets it, the names of that class are others.
        """
        own = [vars(base) for base in cls.__mro__[:-1] if is_users_class(base)]
        own_names = set[str]().union(*own)
        names = own_names & asked.users | own_names & asked.of_libraries
        if id(cls) not in self._looked_up:
            names |= overridden(cls, own_names)
        for name in self._new(cls, names):
            yield cls, name, *in_class(cls, name)
        for base in cls.__mro__[1:] if len(own) < len(cls.__mro__) - 1 else ():
            if base.__flags__ & HEAP_TYPE and not is_users_class(base):
                for name in self._new(base, asked.users):
                    yield base, name, *in_class(base, name)

    def _new(self, holder: Any, asked: set[str], what: str = "") -> list[str]:
        """Those of the names that were not looked up yet in a class or a module's dict."""
        looked_up = self._looked_up.setdefault(id(holder), set())
        new = {what + name for name in asked} - looked_up if what else asked - looked_up
        looked_up |= new
        return [name.removeprefix(what) for name in new]

    def read_of(self, cls: type, name: str, owner: type | None, value: object) -> NameRead:
        if owner is not None and is_users_class(owner) and not is_constant(value) and not is_bound_by(value):
            return NameRead(owner, name, value, True)
        return NameRead(cls, name, value, False)  # of the class that is asked: another base may come to have the name

    def asked_of_super(self, cls: type) -> Iterator[NameRead]:
        """What code finds above a class: `super()` asks the bases, whatever the class itself has by that name."""
        for base in filter(is_users_class, cls.__mro__[1:] if self._of_super else ()):
            for name in self._new(base, self._of_super & vars(base).keys(), "super()."):
                yield NameRead(base, name, vars(base)[name], not is_bound_by(vars(base)[name]))

    def asked_of_modules(self) -> Iterator[NameRead]:
        """What code finds in the modules of the user's, where it was not looked up."""
        everything = self._asked()
        since = everything.since(self._last_in_modules)
        for i, module in list(self.modules.items()):
            scope = vars(module)
            asked = since if self._sizes.get(i) == len(scope) else everything
            if (asked.users or asked.texts) and is_users_scope(scope):
                self._sizes[i] = len(scope)
                for name in self._new(scope, (asked.users & scope.keys()) | asked.texts):
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
    names = in_class(cls, "__match_args__")[1]
    return names if isinstance(names, tuple) else ()


def _is_refused(origin: Origin) -> bool:
    try:
        _core.record((origin.value(),), (origin.text(),))
    except GraftaxError:
        return True
    return False
