# SPDX-License-Identifier: Apache-2.0
"""What code names: each chain of names in its bytecode is followed to what it has now, and noted.

Its parts: `ReadNames` has the bindings and the origins, `AttributeReads` what code asks classes and modules for,
`HostCaptures` what only host functions read.
"""

from __future__ import annotations

import logging
import operator
import sys
import threading
import types
import weakref
from collections.abc import Iterable
from typing import Any

import jax

from graftax import _core
from graftax._base.missing import MISSING
from graftax._capture.abstract_classes import AbstractClasses
from graftax._capture.attribute_reads import AttributeReads, NameRead
from graftax._capture.builtin_overrides import StoodIn
from graftax._capture.bytecode import (
    Names,
    absolute_name,
    is_asked_any_time,
    names_of,
    passed_on,
    resolve_lazy_imports,
    texts_in,
)
from graftax._capture.caches_after_traces import note_cache
from graftax._capture.code_by_identity import IdentitySet, MetCode
from graftax._capture.code_owner import (
    is_never_asked,
    is_of_module,
    is_of_named_tuple,
    is_open_scope,
    is_users_code,
    is_users_scope,
)
from graftax._capture.constant_values import (
    OF_KEYS,
    OF_NAMES,
    OWN_NAMES,
    PARTS,
    cells_of,
    defaults_of,
    has_state,
    in_class,
    is_bound_by,
    is_empty,
    is_generated,
)
from graftax._capture.function_attributes import NamedFunctions, function_in
from graftax._capture.host_captures import HostCaptures
from graftax._capture.impure_calls import ImpureCalls
from graftax._capture.library_globals import Setting, is_of_package, settings_of
from graftax._capture.library_reads import (
    LibraryReads,
    LibraryState,
    annotations_of,
    annotations_of_class,
    levels_of,
    module_read,
    name_of_annotations,
    parts_of,
    registry_of,
)
from graftax._capture.locks import LOCKS
from graftax._capture.lru_caches import CachedValues
from graftax._capture.origin import Origin
from graftax._capture.read_names import ReadNames
from graftax._capture.retrace_signals import Signals
from graftax._capture.trace_local import ThreadState


class CodeReads:
    """What the code that traces have run names, and what these names lead to."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # several threads may trace the function at once
        self.names = ReadNames(self.lock)
        self.attributes = AttributeReads()
        self.hosts = HostCaptures(self.names)
        self.impure = ImpureCalls()
        self.signals = Signals()
        self.builtins = StoodIn(self.signals)
        self.cached = CachedValues()
        self.abstract_classes = AbstractClasses()
        self.library = LibraryState()
        self.named = NamedFunctions()
        self.known = MetCode()
        self.of_graph = MetCode()  # of functions that were part of the roots
        self.thread = ThreadState()
        self._functions_asked = 0
        self._with_attributes = weakref.WeakSet[types.FunctionType]()
        self._forgotten = 0  # how often names had been forgotten when classes were looked at
        self._rooted = IdentitySet[types.CodeType]()  # code that reads a root by its name
        self._inner = IdentitySet[types.CodeType]()  # code of functions that known code makes
        self._package_classes: dict[type, bool] = {}  # is it new, so that no name was looked up in it?
        self._asked_of_packages: set[str] = set()
        self._locks: dict[int, Any] = {}  # that bindings lead to
        self._scopes: dict[int, dict[str, Any]] = {}  # of modules whose code has run

    def add(self, code: types.CodeType, scope: dict[str, Any], function: object, stays: bool = True) -> None:
        """Notes what one code object names.

        Args:
            stays: whether the function outlives the trace. Then its state and its code count as well.
        """
        if is_never_asked(code.co_filename):
            return
        # Generated code, and a `__hash__` that graftax calls at times of its own choosing, make no roots.
        is_from_user = is_users_code(code, scope)
        users = is_from_user and not is_asked_any_time(code) and not is_generated(code, function)
        names = names_of(code)
        self.attributes.note_any(names)
        # From here on it collects the names of this code alone, for `touches_root` at the end.
        self.names.touched.clear()
        self._inner.update(c for c in code.co_consts if isinstance(c, types.CodeType))
        cells = cells_of(function)
        for value in cells.values():
            self._note_constant(value)
        if users:
            self.library.note_imports(code, scope, function, names)
        if "__import__" in names.loaded:  # the module's name is one of the constants, if it is anywhere
            for text in sys.modules.keys() & texts_in(code.co_consts):
                self._note_library(module_read(text))
        if not is_of_module(scope) and isinstance(function, types.FunctionType):
            self.names.guard(scope, function)
        self.builtins.note(code, scope, cells, names, users)
        # What code does besides reading names: calls that cannot be repeated, attributes of objects, assigned globals.
        if users:
            if is_of_module(scope):
                self._scopes.setdefault(id(scope), scope)
            if not is_of_named_tuple(code):  # which calls nothing but `tuple.__new__`
                self.impure.note(code, scope, cells, names)
            self.attributes.note_users(names)
            for value in (*cells.values(), *defaults_of(function)):
                self._note_all(self.attributes.add_in(value))
            for name in names.stored:
                self.names.assign(Origin(scope, name, True))
        elif not is_from_user:
            self.attributes.note_library(names)
            self.impure.note_of_package(code)
            self._note_settings(self.impure.library.note(code, scope, names))
            self._note_settings(self.impure.library.note_function(code, cells, function))
        for chain in names.chains:  # as ("config", "layer", "width")
            if self.hosts.is_receiver_in(chain[0], code):
                continue
            if not users and chain[0] in names.stored:  # a library's own counter
                continue
            if chain[0] in code.co_freevars and chain[0] not in cells:  # a variable that only the trace fills
                continue
            function_named = self._follow(chain, scope, cells, names, users)
            if function_named is not None and self._is_passed_on(chain, code, function_named):
                self.names.add(Origin(function_named, None))  # it may leave the trace, or be compared with a root
        if users and stays and isinstance(function, types.FunctionType) and self._is_older(code):
            self._note_state(function)
        if self.names.touches_root():  # met each time, since JAX may jit it inside and keep a tracer of the root
            self._rooted.add(code)

    def _note_state(self, function: types.FunctionType) -> None:
        """A function with state is a root. Of any other one, the code and the constant variables are compared."""
        self.names.functions.setdefault(id(function), function)
        self.names.note_keywords(function)
        if has_state(function):
            self.names.add(Origin(function, None))
        else:  # variables that hold constants by now may be assigned later
            self.names.cells.update({id(cell): (cell, function) for cell in function.__closure__ or ()})

    def _is_passed_on(self, chain: tuple[str, ...], code: types.CodeType, function: types.FunctionType) -> bool:
        """Does code do more with a function of the user's than call it, or give it to a callback of JAX?"""
        return len(chain) == 1 and function.__code__ not in self.hosts.on_host and chain[0] in passed_on(code)

    def _follow(
        self, chain: tuple[str, ...], scope: dict[str, Any], cells: dict[str, Any], names: Names, users: bool
    ) -> types.FunctionType | None:
        """Notes what a chain of names leads to. Gives it where it is a function of the user's with state."""
        name, *attributes = chain
        imports, asked_attributes = names.imports, names.stored_attributes | PARTS | {OF_NAMES}
        # Where the value is found: a variable of an enclosing call has no place under which a twin could be put.
        binding: tuple[Any, str] | None = None if name in cells else (scope, name)
        # The first name: an imported module, a variable of an enclosing call, or a global.
        if name in imports:
            module_name = absolute_name(imports[name], scope)
            value: Any = sys.modules.get(module_name, MISSING)
            self._note(sys.modules, module_name, value, False)
        elif name in cells:
            value = cells[name]
        else:
            resolve_lazy_imports(scope, (name,))
            value = scope.get(name, MISSING)
            self._note(scope, name, value, users and is_users_scope(scope))
        # Attributes, as long as modules and classes have them. What objects have is noted by the names alone.
        for attribute in attributes:
            if isinstance(value, types.ModuleType):
                holder = vars(value)
                binding = holder, attribute
                self.attributes.add_module(value)
                resolve_lazy_imports(holder, (attribute,))
                value = holder.get(attribute, MISSING)
                self._note(holder, attribute, value, users and is_users_scope(holder))
                self._note_settings(self.impure.library.note_named(value, holder, attribute, names))
                if value is MISSING:  # the module may answer for it
                    self._note(holder, "__getattr__", holder.get("__getattr__", MISSING), False)
            elif isinstance(value, type):
                self._add_class(value)
                if names.asks_classes:
                    self.abstract_classes.note(value)
                if attribute == OF_NAMES:
                    return None
                if attribute == "__annotations__":
                    self._note_library(annotations_of_class(value))
                    name = name_of_annotations(value)
                    self._note(value, name, vars(value).get(name, MISSING), False)
                owner, value = in_class(value, attribute)
                binding = owner, attribute
            elif isinstance(value, _core.Caller):
                return self._follow_jitted(value, attribute)
            else:
                function = function_in(value) if users else None
                if function is not None and self.note_function(function, binding) and attribute in asked_attributes:
                    self.names.add(Origin(function, None))
                elif function is not None and attribute in OWN_NAMES and not _core.made_in_trace(function):
                    self.named.note(function)  # a root that is walked, but not its names and annotations
                return None
        return self._note_end(value, binding, names, users)

    def _follow_jitted(self, jitted: _core.Caller, attribute: str) -> None:
        """Notes an attribute that code asks a jitted function for: nothing else looks into one."""
        if not attribute.startswith("__") and not hasattr(type(jitted), attribute):
            attributes = vars(jitted)
            self.names.jitted.add(id(attributes))
            self._note(attributes, attribute, attributes.get(attribute, MISSING), False)

    def _note_end(
        self, value: Any, binding: tuple[Any, str] | None, names: Names, users: bool
    ) -> types.FunctionType | None:
        """Notes the value at the end of a chain. Gives it where it is a function of the user's with state."""
        function = function_in(value) if users else None
        if function is not None and self.note_function(function, binding):
            # The code asks something for its defaults or its closure: perhaps this function, under another name.
            if not PARTS.isdisjoint(names.attributes):
                self.names.add(Origin(function, None))
            return function if has_state(function) else None
        if names.asks_classes:
            self.abstract_classes.note(value)
        if isinstance(value, type):
            self._add_class(value)
        elif isinstance(value, types.ModuleType):
            self.attributes.add_module(value)
        else:
            self._note_cache(value)
            if users:
                self._note_all(self.attributes.add_in(value))
        return None

    def note_function(self, function: types.FunctionType, place: tuple[object, str] | None = None) -> bool:
        """Notes a function that code may ask for attributes.

        Returns:
            False for a function that the trace has made, that a root holds, or that belongs to a library.
        """
        code = function.__code__
        self._note_library(registry_of(function))
        if _core.made_in_trace(function) or not self._is_older(code) or not is_users_code(code, function.__globals__):
            return False
        if place is None and code in self.of_graph:  # a root holds it, and what it holds is walked
            return False
        if place is not None:
            self.named.note_place((id(place[0]), place[1]), self.names.guarded(place[0]))
        if self.named.note(function) and not self.names.is_noted((id(function), None)):
            self.names.bind(vars(function), OF_KEYS)
        return True

    def _note_library(self, reads: LibraryReads) -> None:
        """Notes what a function of the standard library reads for its caller."""
        for text, holder, name in reads.bindings:
            self.library.watch(text, holder)
            self._note(holder, name, MISSING, False)
        for name, value in reads.held:
            if (origin := self.library.hold(name, value)) is not None:
                self.names.add(origin)
        self.attributes.expect_questions(names=bool(reads.functions), subclasses=False)
        for function in reads.functions:
            if self.note_function(function):
                self.add(function.__code__, function.__globals__, function)
        if reads.module is not None:
            self.attributes.add_module(reads.module)
            self._look_up()

    def _note_settings(self, settings: Iterable[Setting]) -> None:
        """Notes settings of installed packages: bindings, or for a whole table the class of its object."""
        for table, key in settings:
            self.impure.note_setting(table, key)
            if key is None:
                if table.cls is not None:
                    self._add_class(table.cls)
                continue
            # `is_of_module` takes the dict of an object that wraps a function for a module's: it has a `__name__`.
            if table.is_of_object or not is_of_module(table.values):
                self.library.watch(table.what, table.values, table.is_of_object)
            self._note(table.values, key, MISSING, False)

    def _look_up_in_packages(self) -> None:
        """Notes the settings that code may ask the classes of installed packages for."""
        if not self._package_classes:
            return
        # A class that is new is asked for all names, the others only for those that have come since.
        all_names = self.attributes.of_anybody
        new_names, self._asked_of_packages = all_names - self._asked_of_packages, all_names
        for cls, is_new in list(self._package_classes.items()):
            names = all_names if is_new else new_names
            self._package_classes[cls] = False
            for name in settings_of(cls, names):
                self._note(cls, name, MISSING, False)
            self._note_settings(self.impure.library.note_class(cls, names))

    def _note_cache(self, value: object) -> None:
        """Notes a `functools.lru_cache`, and has its function heard of again when that fills the cache."""
        # If the code of its function was met before, its frames are not announced any more.
        cache = note_cache(value)
        code = self.cached.note(cache) if cache is not None else None
        if code is not None:
            self.known.discard(code)

    def _ask_functions(self, asks_all: bool = False) -> None:
        """Makes roots of the functions that have an attribute that code asks for.

        Args:
            asks_all: whether functions that had no attributes the last time are asked once more.
        """
        attributes, first_new = self.attributes.attributes, 0 if asks_all else self._functions_asked
        self._functions_asked = self.named.size
        self._with_attributes.update(filter(vars, self.named.functions(start=first_new)))
        for function in list(self._with_attributes):
            if self.attributes.reads_names or not attributes.isdisjoint(vars(function)):
                self.names.add(Origin(function, None))
        # Annotations are a dict of their own, which may change without the function.
        for function in self.named.functions() if "__annotations__" in attributes else ():
            self._note_library(annotations_of(function))
        # A function whose variable holds a root is a root, too: its copy has to hold the copy.
        for cell, function in list(self.names.cells.values()):
            if not is_empty(cell) and self.names.is_noted((id(cell.cell_contents), None)):
                self.names.add(Origin(function, None))

    def _is_older(self, code: types.CodeType) -> bool:
        """Was a function of this code made before the trace, as far as one can tell?"""
        # On Python 3.11 no watcher tells which functions a trace makes, so code that known code makes may be new.
        return _core.has_watchers or code not in self._inner

    def _note(self, holder: object, name: str, value: object, can_be_root: bool) -> None:
        self._note_constant(value)
        self.names.note(holder, name, value, can_be_root)

    def _note_all(self, reads: Iterable[NameRead]) -> None:
        for read in reads:
            self._note(*read)

    def _note_constant(self, value: object) -> None:
        """Notes what a constant reads, locks or asks for when code uses it, which no bytecode shows."""
        if isinstance(value, operator.attrgetter | operator.methodcaller):
            _, texts, *_ = value.__reduce__()
            self.attributes.attributes |= {part for text in texts if isinstance(text, str) for part in text.split(".")}
        elif isinstance(value, LOCKS):
            self._locks[id(value)] = value
            self.thread.locks.note(value)
        elif isinstance(value, logging.Logger):
            self._note_library(levels_of(value))
        elif isinstance(value, jax.custom_jvp | jax.custom_vjp):
            self._note_library(parts_of(value, "the rule of a derivative"))

    def _add_class(self, cls: type) -> None:
        self._note_all(self.attributes.add(cls))
        for base in cls.__mro__[:-1]:
            if base not in self._package_classes and is_of_package(base):
                self._package_classes[base] = True

    def _look_up(self) -> None:
        """Notes the attributes that code asks for, in the classes and modules that it knows."""
        attributes = self.attributes
        if self._forgotten != self.names.forgotten:  # these may be noted again
            self._forgotten = self.names.forgotten
            attributes.look_up_anew()
        # Classes first: what they lead to may bring more names, classes and modules.
        for cls, asked_names, is_first in attributes.not_looked_up():
            self._note_all(attributes.new_subclasses(cls))
            if is_first and attributes.reads_names:
                self._note_all(attributes.all_names(cls))
            for holder, name, owner, value in attributes.asked_of(cls, asked_names, is_first):
                self._note_cache(value)
                self._note_all(attributes.add_in(value))
                if (function := function_in(value)) is not None:
                    self.note_function(function, (owner, name))
                elif is_bound_by(value):
                    self._note_library(parts_of(value, f"{cls.__qualname__}.{name}"))
                self._note(*attributes.read_of(holder, name, owner, value))
            self._note_all(attributes.asked_of_super(cls))
        self._look_up_in_packages()
        self._note_all(attributes.asked_of_modules())
        self._ask_functions()
        if self.thread.is_tracing:
            self._note_before()

    def _note_before(self) -> None:
        """Notes what classes, modules and functions hold before the running trace sets their attributes."""
        size = self.named.size, len(self.attributes.classes), len(self.attributes.modules), len(self._scopes)
        if size != self.thread.noted:
            noted_functions, self.thread.noted = (*self.thread.noted, 0)[0], size
            scopes = [vars(module) for module in list(self.attributes.modules.values()) if is_open_scope(vars(module))]
            # Functions that are roots are put back with the other roots.
            new = self.named.functions(start=noted_functions)
            functions = [f for f in new if not self.names.is_noted((id(f), None))]
            self.thread.note([*self.attributes.classes, *scopes, *self._scopes.values()], functions)
