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
from graftax._capture.bytecode import (
    HEAP_TYPE,
    OF_NAMES,
    OWN_NAMES,
    Names,
    in_class,
    is_bound_by,
    is_constant,
    is_looked_up,
    is_protocol,
    is_users_class,
    is_users_scope,
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
    """Names that code of the user's asks for, and those that code of libraries does."""

    users: set[str]
    of_libraries: set[str]


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
        self._looked: dict[int, int] = {}  # how many attributes were looked up in it, by class or module dict
        self._found: dict[int, set[str]] = {}  # which of them, by class or module dict
        self._last, self._last_count = Asked(set(), set()), 0  # what was looked up last in all classes

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
        self._looked.clear()
        self._found.clear()

    def renewed(self, holder: type) -> Iterator[NameRead]:
        """The names of a class have changed: what it and its subclasses have is to be looked up again."""
        for cls in [cls for cls in list(self.classes) if holder in cls.__mro__]:
            self._looked.pop(id(cls), None)
            self._found.pop(id(cls), None)
            yield from _special_methods(cls)

    def not_looked_up(self) -> Iterator[tuple[type, Asked]]:
        """The classes in which not all that code asks for by now was looked up, with those that are added meanwhile.

        Each with what to look up there: all of it, or what code asks for since the classes were looked at last.
        """
        count, last = self._count, self._last_count
        everything = Asked(self.attributes.copy(), self._of_libraries.copy())  # classes that are added may bring more
        since = Asked(everything.users - self._last.users, everything.of_libraries - self._last.of_libraries)
        while unscanned := [cls for cls in list(self.classes) if self._looked.get(id(cls)) != count]:
            for cls in unscanned:
                was_current = self._looked.get(id(cls)) == last
                self._looked[id(cls)] = count
                yield cls, since if was_current else everything
        self._last_count, self._last = count, everything

    def new_subclasses(self, cls: type) -> Iterator[NameRead]:
        """Adds those that were made since, where code asks for subclasses."""
        if "__subclasses__" in self.attributes:
            for subclass in type.__subclasses__(cls):
                yield from self.add(subclass)

    def all_names(self, cls: type) -> Iterator[NameRead]:
        """All that a class has, and that it has no more, where code may look at all names."""
        is_new = self.reads_names and id(cls) not in self._found
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
        names = {name for name in asked.users | asked.of_libraries if any(name in holder for holder in own)}
        if id(cls) not in self._found:
            names |= overridden(cls, set[str]().union(*own))
        for name in self._new(cls, names):
            yield cls, name, *in_class(cls, name)
        for base in cls.__mro__[1:] if len(own) < len(cls.__mro__) - 1 else ():
            if base.__flags__ & HEAP_TYPE and not is_users_class(base):
                for name in self._new(base, asked.users):
                    yield base, name, *in_class(base, name)

    def _new(self, holder: Any, asked: set[str], what: str = "") -> list[str]:
        """Those of the names that were not looked up yet in a class or a module's dict."""
        found = self._found.setdefault(id(holder), set())
        new = {what + name for name in asked} - found if what else asked - found
        found |= new
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
        count = self._count
        for i, module in list(self.modules.items()):
            if self._looked.get(i) != count and is_users_scope(vars(module)):
                self._looked[i] = count
                for name in self._new(vars(module), (self.attributes & vars(module).keys()) | self._texts):
                    yield NameRead(vars(module), name, vars(module).get(name, MISSING), True)

    @property
    def of_anybody(self) -> set[str]:
        """The attributes that any code asks for."""
        return self.attributes | self._of_libraries

    @property
    def _count(self) -> int:
        return len(self.attributes) + len(self._of_super) + len(self._texts) + len(self._of_libraries)


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
