# SPDX-License-Identifier: Apache-2.0
"""The read set: what the code that runs under a trace names, outside of the arguments.

A *binding* is a name of a module or a class whose value is a function, a class, a module or a constant: it is watched,
and a change makes a new entry. A *origin* holds what can change by itself (arrays, containers, objects, functions with
state): its value is one more root of every call.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import operator
import sys
import threading
import types
import weakref
from collections.abc import Callable, Generator, Iterable
from typing import Any

import jax

from graftax import _core
from graftax._base.errors import GraftaxError
from graftax._base.missing import MISSING
from graftax._capture.abstract_classes import AbstractClasses
from graftax._capture.builtin_overrides import StoodIn
from graftax._capture.bytecode import (
    OF_KEYS,
    OF_NAMES,
    OWN_NAMES,
    PARTS,
    Names,
    absolute_name,
    can_be_equal,
    cells_of,
    content,
    has_defaults,
    has_state,
    in_class,
    is_asked_any_time,
    is_bound_by,
    is_constant,
    is_empty,
    is_generated,
    is_looked_up,
    is_never_asked,
    is_of_module,
    is_open_scope,
    is_protocol,
    is_users_class,
    is_users_code,
    is_users_scope,
    names_of,
    nested_codes,
    overridden,
    own_value,
    passed_on,
    resolve_lazy_imports,
    texts_in,
)
from graftax._capture.cached_values import CachedValues
from graftax._capture.code_by_identity import CodeSet, MetCode
from graftax._capture.function_attributes import NamedFunctions, function_in
from graftax._capture.host_callback_names import only_in, passed_hosts, receivers
from graftax._capture.impure_calls import ImpureCalls
from graftax._capture.library_reads import (
    OF_CODE,
    LibraryReads,
    LibraryState,
    annotations_of,
    is_asked_by_user,
    levels_of,
    module_read,
    parts_of,
    registry_of,
)
from graftax._capture.locks import LOCKS, Locks
from graftax._capture.origin import Origin
from graftax._capture.retrace_signals import Signals
from graftax._capture.trace_local import Now, alone
from graftax._capture.user_caches import note_cache
from graftax._jax.nested_jit import is_inside_jit

_MOST_BINDINGS = 50_000
_MOST_LOOKED_AT = 100  # items of a constant, for the classes among them


class ReadSet:
    """What the code that ran under the traces of one function names."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # several threads may trace the function at once
        self.origins: list[Origin] = []
        self.assigned_own: set[str] = set()  # globals of the function itself that the code assigns
        self.impure = ImpureCalls()
        self.signals = Signals()
        self.builtins = StoodIn(self.signals)
        self.known = MetCode()
        self.cached = CachedValues()
        self.abstract_classes = AbstractClasses()
        self.library = LibraryState()
        self._seen: set[tuple[int, str | None]] = set()
        self._bindings: list[tuple[Any, str]] = []
        self._guards: dict[int, weakref.ref[Any]] = {}  # a function with these globals, which are not kept alive
        self._functions: dict[int, types.FunctionType] = {}
        self._cells: dict[int, tuple[types.CellType, types.FunctionType]] = {}  # with constants, and whose they are
        self._reads_names = False  # is there code that may look at all names of a class?
        self._laid_open: set[type] = set()  # classes whose __dict__ code reads: it would show what stands for a root
        self.left: set[tuple[int, str | None]] = set()  # origins that are none: they count traces
        self.changing: set[tuple[int, str | None]] = set()  # origins of numbers that were seen to change
        self.hidden: set[str] = set()  # variables and globals of the function that only its host functions read
        self._hosts: dict[int, tuple[types.CellType, str]] = {}  # variables with functions that run on the host alone
        self._on_host = CodeSet()  # of functions that code gives to callbacks
        self._receivers: set[str] = set()  # those of `hidden` of which methods are given to callbacks
        self._receiving = CodeSet()  # the code that gives them
        self._scope: dict[str, Any] | None = None  # that of the function itself
        self._itself: Callable[[], Any] = lambda: None  # the function, where its defaults may change
        self._own_codes = CodeSet()  # those that it had
        self._own: set[tuple[int, str]] = set()  # globals of the function itself that are roots
        self._shared: set[str] = set()  # those of them that other code reads in a trace
        self._was_refused = False
        self.has_inner_jit = False  # does JAX jit a function inside that reads a root?
        self._now = Now()
        self._rooted = CodeSet()  # code that reads a root by its name
        self._ran = CodeSet()  # code with variables of an enclosing call
        self._inner = CodeSet()  # code of functions that known code makes
        self._scanned = CodeSet()  # of functions that traces made
        self._of_graph = MetCode()  # of functions that were part of the roots
        self.modules: dict[int, types.ModuleType] = {}  # by their dict: those that code names
        self._attributes: set[str] = set()
        self._stored_attributes: set[str] = set()
        self._of_super: set[str] = set()
        self._looked: dict[int, int] = {}  # how many attributes were looked up in it, by class or module dict
        self._classes: dict[type, None] = {}
        self._computes_names = False  # is there code that asks for attributes by names that it computes?
        self._sets_names = False  # is there code that sets attributes by names that it computes?
        self._asks_names = False  # is there code that asks classes and functions for their names?
        self._matches = False  # is there code that matches classes?
        self._of_libraries: set[str] = set()  # attributes that the code of libraries asks for
        self._locks: dict[int, Any] = {}  # that bindings lead to
        self._texts: set[str] = set()  # attributes that code may name by texts
        self._scopes: dict[int, dict[str, Any]] = {}  # of modules whose code has run
        self.named = NamedFunctions()
        self._keywords: dict[int, types.FunctionType] = {}  # by the dict of its keyword defaults
        self._reads: tuple[tuple[int, ...], _core.Reads] | None = None

    # ---- while a trace runs

    @contextlib.contextmanager
    def begun(self, locks: Locks) -> Generator[None]:
        """While entered, a trace runs. What it knows of locks is noted in `locks`.

        Raises:
            NewReads: at its end, where it was told to begin anew.
        """
        around, self._now.locks = self._now.locks, locks
        self.abstract_classes.begin()
        try:
            for lock in list(self._locks.values()):
                locks.note(lock)
            with self.cached.begun(), self.signals.heeded():
                yield
        finally:
            self._now.locks = around

    def enter(self, present: set[int], code: types.CodeType, scope: dict[str, Any], function: Any, first: Any) -> Any:
        """Notes what code names that begins to run. An exception where something of it is no root yet.

        `function` is None where the trace itself made it (before 3.12: where known code makes such functions).
        """
        if is_never_asked(code.co_filename):
            if (reads := OF_CODE.get(code)) is not None:
                return self._meet_library(reads(function, first)) if is_asked_by_user() else False
            if not self.builtins.note_class_check(code):
                return NotImplemented
            return self.signals.give() if self.builtins.now.symbolic else None
        if self.library.imports(code, scope):
            return self.signals.give()
        if code.co_freevars:
            self._ran.add(code)
        if self._is_jitted_inside(code, function, present):
            return self.signals.give()
        hosts = {name: content(cell) for cell, name in list(self._hosts.values())}
        run = {name for name, host in hosts.items() if getattr(host, "__code__", None) is code}
        if code in self._inner:
            run |= self.hidden.intersection(code.co_freevars) - hosts.keys()
        if run & self.hidden:  # no host function alone
            self.hidden -= run
            return self.signals.give()
        if self.cached.is_cached(function):
            if (error := self.cached.take_error(function, first)) is not None:
                return error
            if not self._now.has_changed() and self.cached.fills(function, first):
                with self.lock:  # a program on disk depends on its code
                    self._meet(present, code, scope, function, first)
                return self.signals.give()
        if self.known.has(code, scope):
            return False
        if code in self._own_codes and function is self._itself():
            return self._meet_itself(code, scope, function)
        with self.lock:
            return self._meet(present, code, scope, function, first)

    def _meet(self, present: set[int], code: types.CodeType, scope: dict[str, Any], function: Any, first: Any) -> Any:
        """Notes what code names that is not known, as `enter` says."""
        is_made_in_trace = function is None or bool(code.co_freevars and code in self._inner and not _core.has_watchers)
        known_scope = is_of_module(scope) or id(scope) in self._guards
        if not known_scope and (is_made_in_trace or code.co_name == "<module>" or not _core.has_watchers):
            return False  # globals that the trace itself has made, for `eval` or `exec`
        if is_made_in_trace and code.co_freevars:  # made in this trace; another one of this code may be older
            if code in self._scanned:
                return False
            self._scanned.add(code)
        if not is_made_in_trace and (id(function) in present or self._functions.get(id(function)) is function):
            return False
        size_before = self._size
        self.add(code, scope, function, not is_made_in_trace)
        self.see_caches()
        for obj in (first, type(first)):
            if isinstance(obj, type):
                self._add_class(obj)
        self._look_up()
        # Another function of this code may hold other state.
        is_met_each_time = bool(code.co_freevars) and is_users_code(code, scope) and not is_generated(code, function)
        is_met_each_time = is_met_each_time or code in self._rooted or self.cached.is_cached(function)
        is_met_each_time = is_met_each_time or not is_of_module(scope)  # others may come to lie in its place
        if not is_met_each_time:
            self.known.add(code, scope)
        if self._is_jitted_inside(code, function, present) or (self._size != size_before and not self._take_in()):
            return self.signals.give()
        return False if is_met_each_time else None

    @alone
    def _meet_library(self, reads: LibraryReads) -> Any:
        """Notes what a function of the standard library reads that begins to run."""
        size_before = self._size
        self._note_library(reads)
        return self.signals.give() if self._size != size_before and not self._take_in() else False

    def _note_library(self, reads: LibraryReads) -> None:
        for text, holder, name in reads.bindings:
            self.library.watch(text, holder)
            self._note(holder, name, MISSING, False)
        for name, value in reads.held:
            if (origin := self.library.hold(name, value)) is not None:
                self._add_origin(origin)
        self._asks_names = self._asks_names or bool(reads.functions)
        for function in reads.functions:
            if self.note_function(function):
                self.add(function.__code__, function.__globals__, function)
        if reads.module is not None:
            self.modules.setdefault(id(vars(reads.module)), reads.module)
            self._look_up()

    @alone
    def _meet_itself(self, code: types.CodeType, scope: dict[str, Any], function: types.FunctionType) -> Any:
        """The traced function begins. A call by its own code takes the defaults that it has, which are roots then."""
        if not self._now.runs:
            self._now.runs = True
            return False
        size_before = self._size
        self.add(code, scope, function)
        self.known.add(code, scope)
        return self.signals.give() if self._size != size_before and not self._take_in() else False

    def _take_in(self) -> bool:
        """Gives the running trace the roots that were found. False where it has to begin anew with them."""
        return self._now.take_in is not None and self._now.take_in()

    def show(self, keys: Iterable[tuple[int, str | None]]) -> None:
        """The running trace sees these origins rebuilt, too."""
        self._now.show(keys)

    def has_set(self, origin: Origin) -> bool:
        """Has the running trace changed what is there, before it was a root?"""
        return self._now.has_set(origin)

    def note_lock(self, lock: Any) -> None:
        self._now.locks.note(lock)

    @alone
    def note_itself(self, function: types.FunctionType) -> None:
        """Notes what the traced function names. Where its defaults may change, each call of it is heard of."""
        code, changes = function.__code__, has_defaults(function)
        if code in self._own_codes or (self.known.has(code, function.__globals__) and not changes):
            return
        if changes:  # as they were made, or since they were replaced
            self._itself = weakref.ref(function)
            self._own_codes.add(code)
            self.known.discard(code)
        else:
            self.known.add(code, function.__globals__)
        self.add(code, function.__globals__, function, False)

    @alone
    def note_closure(self, function: types.FunctionType) -> None:
        """Notes what another function of known code names through its own variables of an enclosing call."""
        if function.__closure__:
            self.add(function.__code__, function.__globals__, function, False)

    def _is_jitted_inside(self, code: types.CodeType, function: Any, present: set[int]) -> bool:
        """Does JAX jit code that reads a root, for the first time? Its caches are to be ours alone then."""
        reads_root = code in self._rooted or (code.co_freevars and id(function) in present)
        if not reads_root and not any(origin.holder is function for origin in self.origins):
            return False
        was_known, is_inside = self.has_inner_jit, is_inside_jit(self._now.trace)
        self.has_inner_jit = was_known or is_inside
        return is_inside and not was_known

    @property
    def _size(self) -> tuple[int, ...]:
        """Of what a trace has to begin anew for when it grows."""
        assigned = sum(origin.assigned for origin in self.origins)
        return len(self.origins), assigned, len(self.hidden), *self.builtins.size

    def add(self, code: types.CodeType, scope: dict[str, Any], function: Any, stays: bool = True) -> None:
        """Notes what one code object names; of a function that stays also its state, and which code it has."""
        if is_never_asked(code.co_filename):
            return
        users = is_users_code(code, scope) and not is_asked_any_time(code) and not is_generated(code, function)
        names = names_of(code)
        self._asks_names = self._asks_names or not OWN_NAMES.isdisjoint(names.attributes)
        self._now.touched.clear()
        self._inner.update(c for c in code.co_consts if isinstance(c, types.CodeType))
        cells = cells_of(function)
        for value in cells.values():
            self._note_constant(value)
        if users:
            self.library.note_imports(code, scope, function, names)
        if "__import__" in names.loaded:
            for text in sys.modules.keys() & texts_in(code.co_consts):
                self._note_library(module_read(text))
        if not is_of_module(scope) and isinstance(function, types.FunctionType):
            self._guards.setdefault(id(scope), weakref.ref(function))
        self.builtins.note(code, scope, cells, names, users)
        if users and not self._reads_names and ("vars" in names.loaded or OF_NAMES in names.attributes):
            self._reads_names = True
            self._looked.clear()
        if users and names.computes and not self._computes_names:
            self._reads_names = self._computes_names = True
            self._looked.clear()
        if users and names.matches and not self._matches:
            self._matches = True
            for cls in list(self._classes):
                self._attributes |= {"__match_args__", *_match_args(cls)}
        if users:
            if is_of_module(scope):
                self._scopes.setdefault(id(scope), scope)
            self._texts |= names.texts
            self.impure.note(code, scope, cells, names)
            self._attributes |= names.attributes
            self._of_super |= names.of_super
            self._stored_attributes |= names.stored_attributes
            self._sets_names = self._sets_names or names.sets
            for value in (*cells.values(), *_defaults_of(function)):
                self._add_classes_in(value)
            for name in names.stored:
                self.assign(Origin(scope, name, True))
        elif not is_users_code(code, scope):
            self._of_libraries |= names.attributes
        for chain in names.chains:
            if chain[0] in self._receivers and code in self._receiving:
                continue
            if not users and chain[0] in names.stored:  # a library's own counter
                continue
            if chain[0] in code.co_freevars and chain[0] not in cells:  # the trace's own
                continue
            function_named = self._follow(chain, scope, cells, names, users)
            if function_named is not None and self._is_passed_on(chain, code, function_named):
                self._add_origin(Origin(function_named, None))  # it may leave the trace, or be compared with a root
        if users and stays and isinstance(function, types.FunctionType) and self._is_older(code):
            self._functions.setdefault(id(function), function)
            self._note_keywords(function)
            if has_state(function):
                self._add_origin(Origin(function, None))
            else:
                self._cells.update({id(cell): (cell, function) for cell in function.__closure__ or ()})
        touched = self._now.touched
        if not touched.isdisjoint(self._own) or any(origin.key in touched for origin in self.origins):
            self._rooted.add(code)

    def _is_passed_on(self, chain: tuple[str, ...], code: types.CodeType, function: types.FunctionType) -> bool:
        return len(chain) == 1 and function.__code__ not in self._on_host and chain[0] in passed_on(code)

    def _follow(
        self, chain: tuple[str, ...], scope: dict[str, Any], cells: dict[str, Any], names: Names, users: bool
    ) -> types.FunctionType | None:
        """Notes what a chain of names leads to. Gives it where it is a function of the user's with state."""
        name, *attributes = chain
        imports, asked_attributes = names.imports, names.stored_attributes | PARTS | {OF_NAMES}
        binding: tuple[Any, str] | None = None if name in cells else (scope, name)
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
        for attribute in attributes:
            if isinstance(value, types.ModuleType):
                holder = vars(value)
                binding = holder, attribute
                self.modules.setdefault(id(holder), value)
                resolve_lazy_imports(holder, (attribute,))
                value = holder.get(attribute, MISSING)
                self._note(holder, attribute, value, users and is_users_scope(holder))
                if value is MISSING:
                    self._note(holder, "__getattr__", holder.get("__getattr__", MISSING), False)
            elif isinstance(value, type):
                self._add_class(value)
                if names.asks_classes:
                    self.abstract_classes.note(value)
                if users and attribute == OF_NAMES:
                    self._lay_open(value)
                    return None
                owner, value = in_class(value, attribute)
                binding = owner, attribute
            else:
                function = function_in(value) if users else None
                if function is not None and self.note_function(function, binding) and attribute in asked_attributes:
                    self._add_origin(Origin(function, None))
                return None
        function = function_in(value) if users else None
        if function is not None and self.note_function(function, binding):
            if not PARTS.isdisjoint(names.attributes):
                self._add_origin(Origin(function, None))  # asked under another name, perhaps
            return function if has_state(function) else None
        if names.asks_classes:
            self.abstract_classes.note(value)
        if isinstance(value, type):
            self._add_class(value)
        elif isinstance(value, types.ModuleType):
            self.modules.setdefault(id(vars(value)), value)
        else:
            self._note_cache(value)
            if users:
                self._add_classes_in(value)
        return None

    def note_function(self, function: types.FunctionType, place: tuple[Any, str] | None = None) -> bool:
        """Notes a function that code may ask for attributes. False where it is the trace's, a root's, a library's."""
        code = function.__code__
        self._note_library(registry_of(function))
        if _core.made_in_trace(function) or not self._is_older(code) or not is_users_code(code, function.__globals__):
            return False
        if place is None and code in self._of_graph:  # what it holds is walked
            return False
        if place is not None:
            self.named.note_place(*place, self._guards)
        if self.named.note(function) and (id(function), None) not in self._seen:
            self._seen.add((id(vars(function)), OF_KEYS))
            self._bindings.append((vars(function), OF_KEYS))
        return True

    def _note_cache(self, value: Any) -> None:
        cache = note_cache(value)
        code = self.cached.note(cache) if cache is not None else None
        if code is not None:
            self.known.discard(code)

    def run_before(self) -> None:
        """Runs in plain Python what a trace is not to run: fills caches, and imports modules."""
        self._note_imported(self.library.import_modules())
        if self.cached.fill():
            self.see_caches()

    @alone
    def _note_imported(self, modules: Iterable[str] = ()) -> None:
        """Notes modules, and what code names in those that it has imported meanwhile."""
        for name in modules:
            self._note_library(module_read(name))
        for code, scope, reference in self.library.imported():
            self.add(code, scope, reference(), stays=False)

    @alone
    def see_caches(self) -> bool:
        """Makes roots of the objects that caches give out. True where these are others."""
        before, bindings = self.cached.objects, self.cached.bindings
        origins = self.cached.look()
        if self.cached.bindings is not bindings:
            self._reads = None
        if self.cached.objects is before:
            return False
        self.origins = [origin for origin in self.origins if origin.holder is not before] + origins
        self._reads = None
        return True

    def _ask_functions(self) -> None:
        """Makes roots of the functions that have an attribute that code asks for."""
        for function in self.named.functions():
            attributes = vars(function).keys()
            if not self._attributes.isdisjoint(attributes) or (attributes and self._reads_names):
                self._add_origin(Origin(function, None))
            if "__annotations__" in self._attributes:
                self._note_library(annotations_of(function))
        for cell, function in list(self._cells.values()):
            if not is_empty(cell) and (id(cell.cell_contents), None) in self._seen:  # its copy holds the copy
                self._add_origin(Origin(function, None))

    def _note_keywords(self, function: types.FunctionType) -> None:
        keywords = function.__kwdefaults__
        if keywords and id(keywords) not in self._keywords:
            self._keywords[id(keywords)] = function
            self._bindings += [(keywords, name) for name in keywords]
            self._reads = None

    def _is_older(self, code: types.CodeType) -> bool:
        """Was a function of this code made before the trace, as far as one can tell?"""
        return _core.has_watchers or code not in self._inner

    def _note(self, holder: Any, name: str, value: Any, can_be_root: bool) -> None:
        self._now.touched.add((id(holder), name))
        self._note_constant(value)
        if (id(holder), name) in self._own:
            self._shared.add(name)
            self.hidden.discard(name)
        if (id(holder), name) in self._seen:
            return
        if can_be_root and not is_constant(value):
            self._add_origin(Origin(holder, name))
        else:
            self._seen.add((id(holder), name))
            self._bindings.append((self._guards.get(id(holder), holder), name))

    def _note_constant(self, value: Any) -> None:
        if isinstance(value, operator.attrgetter | operator.methodcaller):
            _, texts, *_ = value.__reduce__()
            self._attributes |= {part for text in texts if isinstance(text, str) for part in text.split(".")}
        elif isinstance(value, LOCKS):
            self._locks[id(value)] = value
            self._now.locks.note(value)
        elif isinstance(value, logging.Logger):
            self._note_library(levels_of(value))
        elif isinstance(value, jax.custom_jvp | jax.custom_vjp):
            self._note_library(parts_of(value, "the rule of a derivative"))

    def _add_origin(self, origin: Origin) -> None:
        if origin.key not in self._seen:
            self._seen.add(origin.key)
            self.origins.append(origin)
            if origin.name is None:
                attributes = vars(origin.holder)
                self._bindings = [b for b in self._bindings if b[1] != OF_KEYS or b[0] is not attributes]
                self._reads = None

    def assign(self, origin: Origin) -> None:
        """Makes a root of a name that the code assigns: what it is given is given on each call."""
        if origin.key in self.left or any(p.what == origin.what for p in self.origins):
            return
        if origin.key in self._own:
            self._own.discard((id(origin.holder), origin.name or ""))
            self.assigned_own.add(origin.name or "")
        self.origins = [p for p in self.origins if p.key != origin.key]
        self._bindings = [b for b in self._bindings if b[1] != origin.name or not origin.feeds(b[0])]
        self._reads = None
        self._seen.add(origin.key)
        self.origins.append(origin)

    def _add_class(self, cls: type) -> None:
        if cls not in self._classes and is_users_class(cls):
            self._classes[cls] = None
            self._add_class(type(cls))
            if self._matches:
                self._attributes |= {"__match_args__", *_match_args(cls)}
            if is_protocol(cls):
                self._attributes |= {name for name in vars(cls) if not name.startswith("_")}
            for base in cls.__mro__[1:]:
                self._add_class(base)
            self._add_subclasses(cls)
            self._note(cls, OF_NAMES, MISSING, False)
            self._note_methods(cls)
            for name, member in cls.__members__.items() if isinstance(cls, enum.EnumType) else ():
                self._note(cls, name, member, own_value(cls, name) is member)

    def _add_subclasses(self, cls: type) -> None:
        if "__subclasses__" in self._attributes:
            for subclass in type.__subclasses__(cls):
                self._add_class(subclass)

    def _note_methods(self, cls: type) -> None:
        for base in cls.__mro__[:-1]:
            for name, value in vars(base).items():
                if is_looked_up(base, name, value):
                    self._note(cls, name, value, False)

    def _add_classes_in(self, value: Any, depth: int = 2) -> None:
        """Notes the classes in a constant, and those of what it holds."""
        if isinstance(value, type):
            self._add_class(value)
        elif type(value) in (tuple, list, set, frozenset, dict) and depth and len(value) <= _MOST_LOOKED_AT:
            for item in list(value):
                self._add_classes_in(item, depth - 1)
            for item in list(value.values()) if type(value) is dict else ():
                self._add_classes_in(item, depth - 1)
        else:
            self._add_class(type(value))

    def _look_up(self) -> None:
        """Notes the attributes that code asks for, in the classes and modules that it knows."""
        count = len(self._attributes) + len(self._of_super) + len(self._texts) + len(self._of_libraries)
        while unscanned := [cls for cls in list(self._classes) if self._looked.get(id(cls)) != count]:
            for cls in unscanned:
                self._looked[id(cls)] = count
                self._add_subclasses(cls)
                self._look_up_in_class(cls)  # which may lead to classes that are not known yet
        for i, module in list(self.modules.items()):
            if self._looked.get(i) != count and is_users_scope(vars(module)):
                self._looked[i] = count
                for name in (self._attributes & vars(module).keys()) | self._texts:
                    self._note(vars(module), name, vars(module).get(name, MISSING), True)
        self._ask_functions()
        if self._now.shown is not None:
            self._note_before()

    # ---- attributes of classes, modules and functions that the code sets: known only once it has done it

    def begin(
        self,
        shown: set[tuple[int, str | None]],
        take_in: Callable[[], bool] | None,
        has_changed: Callable[[], bool],
    ) -> None:
        """A trace begins: notes what the names hold that code may set, and does not see rebuilt.

        `take_in` gives it the roots that are found while it runs; it is False where the trace has to begin anew.
        `has_changed` says whether it has changed anything so far.
        """
        self._now.begin(shown, take_in, has_changed)
        self._note_before()

    def _note_before(self) -> None:
        size = len(self._classes), len(self.modules), len(self._scopes), self.named.size
        if size != self._now.noted:
            self._now.noted = size
            scopes = [vars(module) for module in list(self.modules.values()) if is_open_scope(vars(module))]
            functions = [f for f in self.named.functions() if (id(f), None) not in self._seen]  # roots are put back
            self._now.note([*self._classes, *scopes, *self._scopes.values()], functions)

    def sets(self, name: str | None) -> bool:
        """Has code of the trace set an attribute of this name?"""
        return self._sets_names or name in self._stored_attributes

    def end(self) -> bool:
        """The trace has ended: puts back what it has set, and makes roots of that. True where there is any."""
        size_before = self._size
        self._note_imported()
        changed = self._now.end(self.sets, self.left)
        for origin in changed:
            if origin.name is None:
                self._add_origin(origin)
            else:
                self.assign(origin)
        return bool(changed) or self._size != size_before

    def _look_up_in_class(self, cls: type) -> None:
        if self._reads_names:
            self._note_names(cls)
        users = set[str]().union(*map(vars, filter(is_users_class, cls.__mro__)))
        for name in self._attributes | (self._of_libraries & users) | overridden(cls, users):
            holder, value = in_class(cls, name)
            self._note_cache(value)
            self._add_classes_in(value)
            if (function := function_in(value)) is not None:
                self.note_function(function, (holder, name))
            elif is_bound_by(value):
                self._note_library(parts_of(value, f"{cls.__qualname__}.{name}"))
            if holder is not None and is_users_class(holder) and not is_constant(value) and not is_bound_by(value):
                self._note(holder, name, value, holder not in self._laid_open)
            else:
                self._note(cls, name, value, False)
        for base in cls.__mro__[1:]:
            if is_users_class(base):
                for name in self._of_super & vars(base).keys():
                    self._note(base, name, vars(base)[name], not is_bound_by(vars(base)[name]))

    def _lay_open(self, cls: type) -> None:
        """Code reads `cls.__dict__`: what is in it counts as a binding."""
        if cls not in self._laid_open:
            self._laid_open.update(cls.__mro__)
            for origin in [p for p in self.origins if p.holder in cls.__mro__ and not p.assigned]:
                self.origins.remove(origin)
                self._seen.discard(origin.key)
            self._looked.clear()

    def _note_names(self, cls: type) -> None:
        """All that a class has, and that it has no more. What may change by itself is a root where `vars` shows it."""
        for base in cls.__mro__:
            if not is_users_class(base):
                continue
            self._note(base, OF_NAMES, MISSING, False)
            for name in in_class(base, OF_NAMES)[1]:
                if name == "_abc_impl":  # the interpreter's own notes on an abstract class
                    continue
                value = own_value(base, name)
                shows = (self._computes_names or bool(self.builtins.of_vars)) and base not in self._laid_open
                is_root = shows and not is_bound_by(value) and not is_constant(value)
                self._note(base, name, value, is_root and not _is_refused(Origin(base, name)))

    @alone
    def leave_out(self, origins: Iterable[Origin]) -> bool:
        """These are no roots: what a trace changes there happens in it alone. True where that is new."""
        new_keys = {origin.key for origin in origins} - self.left
        self.left |= new_keys
        self.origins = [origin for origin in self.origins if origin.key not in self.left]
        return bool(new_keys)

    def hide_inner(self, code: types.CodeType) -> bool:
        """Leaves out what only functions inside of this one read: they may be host functions, which take any value.

        Asked once, where a root was refused. Where such a function runs in a trace, it is a root again.
        """
        if self._was_refused:
            return False
        self._was_refused = True
        return self._hide(code, {constant for constant in code.co_consts if isinstance(constant, types.CodeType)})

    @alone
    def see_hosts(self, function: types.FunctionType, hosts: set[types.CodeType]) -> bool:
        """Notes what only host functions read, which run after the trace: no root. True where that is new.

        A function that ran in the trace itself is none.
        """
        hosts = {host for host in hosts if host not in self._ran and host not in self.known}
        is_new = self._hide(function.__code__, hosts)
        for origin in [p for p in self.origins if p.name is None and p.holder.__code__ in hosts]:
            self.origins.remove(origin)
            self._seen.discard(origin.key)
            self._on_host.add(origin.holder.__code__)
            is_new = True
        for cell, name in passed_hosts(function, hosts) if hosts else ():
            if name not in self._shared and name not in self.hidden:
                self._hosts[id(cell)] = cell, name
                self.hidden.add(name)
                is_new = True
        return is_new

    @alone
    def see_receivers(self, function: types.FunctionType) -> bool:
        """Hides what the function names only to give a method of it to a callback of JAX. True where that is new."""
        is_new = False
        for cell, name, value in receivers(function):
            if name in self.hidden or name in self._shared or name in self.assigned_own:
                continue
            self.hidden.add(name)
            self._receivers.add(name)
            self._receiving.update(nested_codes(function.__code__))
            self._add_class(type(value))
            if cell is not None:
                self._hosts[id(cell)] = cell, name
            else:
                self._bindings.append((self._guards.get(id(function.__globals__), function.__globals__), name))
            self._reads, is_new = None, True
        return is_new

    def _hide(self, code: types.CodeType, inner_codes: set[types.CodeType]) -> bool:
        newly_hidden = only_in(code, inner_codes) - self._shared - self.hidden if inner_codes else set[str]()
        self.hidden |= newly_hidden
        self.assigned_own -= newly_hidden
        self.origins = [
            p for p in self.origins if not p.assigned or p.name not in newly_hidden or p.holder is not self._scope
        ]
        return bool(newly_hidden)

    @alone
    def see_named(self, named: Iterable[type | types.ModuleType]) -> bool:
        """Notes the classes of the objects in a call's roots, classes and modules in them. True for new roots."""
        size_before = self._size
        for value in named:
            if isinstance(value, type):
                self._add_class(value)
            else:
                self.modules.setdefault(id(vars(value)), value)
        self._look_up()
        return self._size != size_before

    # ---- between calls

    @property
    def is_large(self) -> bool:
        """Has it met so much that it is worth beginning anew? Classes that are made for each call do that."""
        return len(self._bindings) > _MOST_BINDINGS

    @alone
    def has(self, functions: Iterable[types.FunctionType]) -> None:
        """The state of these functions is part of the roots already."""
        for function in functions:
            code, scope = function.__code__, function.__globals__
            if not self.known.has(code, scope) and not self._of_graph.has(code, scope):
                self._of_graph.add(code, scope)
                self.add(code, scope, function, False)

    @alone
    def own(self, scope: dict[str, Any], names: Iterable[str], stored: Iterable[str]) -> None:
        """These globals are roots of their own; those that the function stores are assigned ones."""
        self._scope = scope
        for name in set(stored) - self.hidden:
            self.assigned_own.add(name)
            self.assign(Origin(scope, name, True))
        keys = {(id(scope), name) for name in set(names) - self.assigned_own}
        self._own |= keys
        self._seen |= keys

    @alone
    def reads(self) -> _core.Reads:
        """What an entry depends on, with the values of now."""
        if self.see_caches():  # the trace has made objects that a cache keeps: they are roots of the next call
            return _never_holding()
        named, parents = self.named_owners(), self.parents()
        size = len(self._seen), len(self._functions), len(self._cells), len(self._hosts), len(self.abstract_classes)
        size = *size, len(named), len(parents)
        if self._reads is None or self._reads[0] != size or not self._reads[1].holds():
            self._bindings = [b for b in self._bindings if type(b[0]) is not weakref.ref or b[0]() is not None]
            self._reads = (
                size,
                _core.Reads(
                    [*self._bindings, *self.cached.bindings],
                    list(self._functions.values()),
                    [cell for cell, _ in (*self._cells.values(), *self._hosts.values())],
                    self.abstract_classes.pairs,
                    named,
                    [(functools.partial(type.__subclasses__, cls), type.__subclasses__(cls)) for cls in parents],
                ),
            )
        return self._reads[1]

    def named_owners(self) -> list[Any]:
        """The classes and functions that code may ask for their names."""
        return [*self._classes, *self.named.functions()] if self._asks_names else []

    def expect_questions(self, names: bool, subclasses: bool) -> None:
        """Code that has run elsewhere asks classes for their names, or for their subclasses."""
        self._asks_names = self._asks_names or names
        self._attributes |= {"__subclasses__"} if subclasses else set()

    def parents(self) -> list[type]:
        """The classes that code may ask for their subclasses."""
        return list(self._classes) if "__subclasses__" in self._attributes else []

    @alone
    def refresh(self) -> bool:
        """Makes roots of bindings that hold something else by now. True where there are any."""
        if self._reads is None or self._reads[1].holds():
            return False
        size_before = self._size
        reads = self._reads[1]
        for holder, name in reads.changed():
            if id(holder) in self._keywords or self.cached.watches(holder, name) or self.library.text(holder):
                self._reads = None
                continue
            if name == OF_KEYS:
                continue
            if name == OF_NAMES or (isinstance(holder, type) and holder in self._laid_open):
                for cls in [cls for cls in list(self._classes) if holder in cls.__mro__]:
                    self._looked.pop(id(cls), None)
                    self._note_methods(cls)
                self._reads = None
                continue
            if holder is self._scope and name in self._receivers & self.hidden:
                continue
            value = in_class(holder, name)[1] if isinstance(holder, type) else holder.get(name, MISSING)
            users = is_users_class(holder) if isinstance(holder, type) else is_users_scope(holder)
            changes = type(value) is int or type(value) is float  # by assignment, as a counter does
            if isinstance(holder, type) and is_bound_by(value):
                self._looked.clear()  # another descriptor: what it holds counts
            if users and (changes or not is_constant(value) or can_be_equal(value)) and not is_bound_by(value):
                guarded = self._guards.get(id(holder), holder)
                self._bindings = [b for b in self._bindings if b[0] is not guarded or b[1] != name]
                self._seen.discard((id(holder), name))
                owner = in_class(holder, name)[0] if isinstance(holder, type) else None
                self._add_origin(Origin(owner or holder, name))
                if changes:
                    self.changing.add((id(owner or holder), name))
        for cell in reads.changed_cells():
            if id(cell) in self._hosts:
                if self._hosts[id(cell)][1] not in self._receivers:  # another function: it may run elsewhere too
                    self.hidden.discard(self._hosts.pop(id(cell))[1])
                self._reads = None
                return True
            self._add_origin(Origin(self._cells.pop(id(cell))[1], None))
        self._ask_functions()
        for function in list(self._functions.values()):
            self._note_keywords(function)
            if has_state(function):
                self._add_origin(Origin(function, None))
            if not self.known.has(function.__code__, function.__globals__):
                self.add(function.__code__, function.__globals__, function)
                if not self.cached.is_cached(function):  # that is heard of whenever it runs
                    self.known.add(function.__code__, function.__globals__)
        if self._size == size_before:
            return False
        self._reads = None
        return True


def _never_holding() -> _core.Reads:
    scope = {"value": 0}
    reads = _core.Reads([(scope, "value")], [], [])
    scope["value"] = 1
    return reads


def _defaults_of(function: Any) -> tuple[Any, ...]:
    if not isinstance(function, types.FunctionType):
        return ()
    return *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()


def _match_args(cls: type) -> tuple[str, ...]:
    names = in_class(cls, "__match_args__")[1]
    return names if isinstance(names, tuple) else ()


def _is_refused(origin: Origin) -> bool:
    try:
        _core.record((origin.value(),), (origin.text(),))
    except GraftaxError:
        return True
    return False
