# SPDX-License-Identifier: Apache-2.0
"""The read set: what the code that runs under a trace names, outside of the arguments.

Its parts: `ReadNames` has the bindings and the origins, `AttributeReads` what code asks classes and modules for,
`HostCaptures` what only host functions read. Here is how a trace leads to them, and what a call compares.
"""

from __future__ import annotations

import contextlib
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
from graftax._base.missing import MISSING
from graftax._capture.abstract_classes import AbstractClasses
from graftax._capture.attribute_reads import AttributeReads, NameRead
from graftax._capture.builtin_overrides import StoodIn
from graftax._capture.bytecode import (
    OF_KEYS,
    OF_NAMES,
    PARTS,
    Names,
    absolute_name,
    can_be_equal,
    cells_of,
    has_defaults,
    has_state,
    in_class,
    is_asked_any_time,
    is_bound_by,
    is_constant,
    is_empty,
    is_generated,
    is_never_asked,
    is_of_module,
    is_open_scope,
    is_users_class,
    is_users_code,
    is_users_scope,
    names_of,
    passed_on,
    resolve_lazy_imports,
    texts_in,
)
from graftax._capture.cached_values import CachedValues
from graftax._capture.code_by_identity import CodeSet, MetCode
from graftax._capture.function_attributes import NamedFunctions, function_in
from graftax._capture.host_captures import HostCaptures
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
from graftax._capture.read_names import ReadNames
from graftax._capture.retrace_signals import Signals
from graftax._capture.trace_local import Now, alone
from graftax._capture.user_caches import note_cache
from graftax._jax.nested_jit import is_inside_jit

_MOST_BINDINGS = 50_000


class ReadSet:
    """What the code that ran under the traces of one function names."""

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
        self.has_inner_jit = False  # does JAX jit a function inside that reads a root?
        self._now = Now()
        self._itself: Callable[[], Any] = lambda: None  # the function, where its defaults may change
        self._own_codes = CodeSet()  # those that it had
        self._rooted = CodeSet()  # code that reads a root by its name
        self._ran = CodeSet()  # code with variables of an enclosing call
        self._inner = CodeSet()  # code of functions that known code makes
        self._scanned = CodeSet()  # of functions that traces made
        self._locks: dict[int, Any] = {}  # that bindings lead to
        self._scopes: dict[int, dict[str, Any]] = {}  # of modules whose code has run

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
        if self.hosts.reveal(code, code in self._inner):
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
        known_scope = is_of_module(scope) or self.names.is_guarded(scope)
        if not known_scope and (is_made_in_trace or code.co_name == "<module>" or not _core.has_watchers):
            return False  # globals that the trace itself has made, for `eval` or `exec`
        if is_made_in_trace and code.co_freevars:  # made in this trace; another one of this code may be older
            if code in self._scanned:
                return False
            self._scanned.add(code)
        if not is_made_in_trace and (id(function) in present or self.names.functions.get(id(function)) is function):
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
                self.names.add(origin)
        self.attributes.expect_questions(names=bool(reads.functions), subclasses=False)
        for function in reads.functions:
            if self.note_function(function):
                self.add(function.__code__, function.__globals__, function)
        if reads.module is not None:
            self.attributes.add_module(reads.module)
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
        if not reads_root and not any(origin.holder is function for origin in self.names.origins):
            return False
        was_known, is_inside = self.has_inner_jit, is_inside_jit(self._now.trace)
        self.has_inner_jit = was_known or is_inside
        return is_inside and not was_known

    @property
    def _size(self) -> tuple[int, ...]:
        """Of what a trace has to begin anew for when it grows."""
        return *self.names.size, *self.builtins.size

    def add(self, code: types.CodeType, scope: dict[str, Any], function: Any, stays: bool = True) -> None:
        """Notes what one code object names; of a function that stays also its state, and which code it has."""
        if is_never_asked(code.co_filename):
            return
        users = is_users_code(code, scope) and not is_asked_any_time(code) and not is_generated(code, function)
        names = names_of(code)
        self.attributes.note_any(names)
        self.names.touched.clear()
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
            self.names.guard(scope, function)
        self.builtins.note(code, scope, cells, names, users)
        if users:
            if is_of_module(scope):
                self._scopes.setdefault(id(scope), scope)
            self.impure.note(code, scope, cells, names)
            self.attributes.note_users(names)
            for value in (*cells.values(), *_defaults_of(function)):
                self._note_all(self.attributes.add_in(value))
            for name in names.stored:
                self.names.assign(Origin(scope, name, True))
        elif not is_users_code(code, scope):
            self.attributes.note_library(names)
        for chain in names.chains:
            if self.hosts.is_receiver_in(chain[0], code):
                continue
            if not users and chain[0] in names.stored:  # a library's own counter
                continue
            if chain[0] in code.co_freevars and chain[0] not in cells:  # the trace's own
                continue
            function_named = self._follow(chain, scope, cells, names, users)
            if function_named is not None and self._is_passed_on(chain, code, function_named):
                self.names.add(Origin(function_named, None))  # it may leave the trace, or be compared with a root
        if users and stays and isinstance(function, types.FunctionType) and self._is_older(code):
            self.names.functions.setdefault(id(function), function)
            self.names.note_keywords(function)
            if has_state(function):
                self.names.add(Origin(function, None))
            else:
                self.names.cells.update({id(cell): (cell, function) for cell in function.__closure__ or ()})
        if self.names.touches_root():
            self._rooted.add(code)

    def _is_passed_on(self, chain: tuple[str, ...], code: types.CodeType, function: types.FunctionType) -> bool:
        return len(chain) == 1 and not self.hosts.run_on_host(function.__code__) and chain[0] in passed_on(code)

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
                self.attributes.add_module(value)
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
                    if self.attributes.lay_open(value):
                        self.names.drop(p for p in self.names.origins if p.holder in value.__mro__ and not p.assigned)
                    return None
                owner, value = in_class(value, attribute)
                binding = owner, attribute
            else:
                function = function_in(value) if users else None
                if function is not None and self.note_function(function, binding) and attribute in asked_attributes:
                    self.names.add(Origin(function, None))
                return None
        function = function_in(value) if users else None
        if function is not None and self.note_function(function, binding):
            if not PARTS.isdisjoint(names.attributes):
                self.names.add(Origin(function, None))  # asked under another name, perhaps
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

    def note_function(self, function: types.FunctionType, place: tuple[Any, str] | None = None) -> bool:
        """Notes a function that code may ask for attributes. False where it is the trace's, a root's, a library's."""
        code = function.__code__
        self._note_library(registry_of(function))
        if _core.made_in_trace(function) or not self._is_older(code) or not is_users_code(code, function.__globals__):
            return False
        if place is None and code in self.of_graph:  # what it holds is walked
            return False
        if place is not None:
            self.named.note_place((id(place[0]), place[1]), self.names.guarded(place[0]))
        if self.named.note(function) and not self.names.is_seen((id(function), None)):
            self.names.bind(vars(function), OF_KEYS)
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
            self.names.compared = None
        if self.cached.objects is before:
            return False
        self.names.origins = [origin for origin in self.names.origins if origin.holder is not before] + origins
        self.names.compared = None
        return True

    def _ask_functions(self) -> None:
        """Makes roots of the functions that have an attribute that code asks for."""
        for function in self.named.functions():
            attributes = vars(function).keys()
            asked = self.attributes.attributes
            if not asked.isdisjoint(attributes) or (attributes and self.attributes.reads_names):
                self.names.add(Origin(function, None))
            if "__annotations__" in asked:
                self._note_library(annotations_of(function))
        for cell, function in list(self.names.cells.values()):
            if not is_empty(cell) and self.names.is_seen((id(cell.cell_contents), None)):  # its copy holds the copy
                self.names.add(Origin(function, None))

    def _is_older(self, code: types.CodeType) -> bool:
        """Was a function of this code made before the trace, as far as one can tell?"""
        return _core.has_watchers or code not in self._inner

    def _note(self, holder: Any, name: str, value: Any, can_be_root: bool) -> None:
        self._note_constant(value)
        self.names.note(holder, name, value, can_be_root)

    def _note_all(self, reads: Iterable[NameRead]) -> None:
        for read in reads:
            self._note(*read)

    def _note_constant(self, value: Any) -> None:
        if isinstance(value, operator.attrgetter | operator.methodcaller):
            _, texts, *_ = value.__reduce__()
            self.attributes.attributes |= {part for text in texts if isinstance(text, str) for part in text.split(".")}
        elif isinstance(value, LOCKS):
            self._locks[id(value)] = value
            self._now.locks.note(value)
        elif isinstance(value, logging.Logger):
            self._note_library(levels_of(value))
        elif isinstance(value, jax.custom_jvp | jax.custom_vjp):
            self._note_library(parts_of(value, "the rule of a derivative"))

    def _add_class(self, cls: type) -> None:
        self._note_all(self.attributes.add(cls))

    def _look_up(self) -> None:
        """Notes the attributes that code asks for, in the classes and modules that it knows."""
        attributes = self.attributes
        for cls in attributes.not_looked_up():
            self._note_all(attributes.new_subclasses(cls))
            self._note_all(attributes.all_names(cls, bool(self.builtins.of_vars)))
            for name, owner, value in attributes.asked_of(cls):
                self._note_cache(value)
                self._note_all(attributes.add_in(value))
                if (function := function_in(value)) is not None:
                    self.note_function(function, (owner, name))
                elif is_bound_by(value):
                    self._note_library(parts_of(value, f"{cls.__qualname__}.{name}"))
                self._note(*attributes.read_of(cls, name, owner, value))
            self._note_all(attributes.asked_of_super(cls))
        self._note_all(attributes.asked_of_modules())
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
        size = len(self.attributes.classes), len(self.attributes.modules), len(self._scopes), self.named.size
        if size != self._now.noted:
            self._now.noted = size
            scopes = [vars(module) for module in list(self.attributes.modules.values()) if is_open_scope(vars(module))]
            # Functions that are roots are put back with the other roots.
            functions = [f for f in self.named.functions() if not self.names.is_seen((id(f), None))]
            self._now.note([*self.attributes.classes, *scopes, *self._scopes.values()], functions)

    def end(self) -> bool:
        """The trace has ended: puts back what it has set, and makes roots of that. True where there is any."""
        size_before = self._size
        self._note_imported()
        changed = self._now.end(self.attributes.sets, self.names.left)
        for origin in changed:
            if origin.name is None:
                self.names.add(origin)
            else:
                self.names.assign(origin)
        return bool(changed) or self._size != size_before

    def hide_inner(self, code: types.CodeType) -> bool:
        return self.hosts.hide_inner(code)

    @alone
    def see_hosts(self, function: types.FunctionType, hosts: set[types.CodeType]) -> bool:
        """Notes what only host functions read, which run after the trace: no root. True where that is new.

        A function that ran in the trace itself is none.
        """
        return self.hosts.note_functions(
            function, {host for host in hosts if host not in self._ran and host not in self.known}
        )

    @alone
    def see_receivers(self, function: types.FunctionType) -> bool:
        """Hides what the function names only to give a method of it to a callback of JAX. True where that is new."""
        values = self.hosts.note_receivers(function)
        for value in values:
            self._add_class(type(value))
        return bool(values)

    @alone
    def see_named(self, named: Iterable[type | types.ModuleType]) -> bool:
        """Notes the classes of the objects in a call's roots, classes and modules in them. True for new roots."""
        size_before = self._size
        for value in named:
            if isinstance(value, type):
                self._add_class(value)
            else:
                self.attributes.add_module(value)
        self._look_up()
        return self._size != size_before

    # ---- between calls

    @property
    def is_large(self) -> bool:
        """Has it met so much that it is worth beginning anew? Classes that are made for each call do that."""
        return len(self.names.bindings) > _MOST_BINDINGS

    @alone
    def has(self, functions: Iterable[types.FunctionType]) -> None:
        """The state of these functions is part of the roots already."""
        for function in functions:
            code, scope = function.__code__, function.__globals__
            if not self.known.has(code, scope) and not self.of_graph.has(code, scope):
                self.of_graph.add(code, scope)
                self.add(code, scope, function, False)

    @alone
    def reads(self) -> _core.Reads:
        """What an entry depends on, with the values of now."""
        if self.see_caches():  # the trace has made objects that a cache keeps: they are roots of the next call
            return _never_holding()
        names, owners, parents = self.names, self.named_owners(), self.attributes.parents()
        hosts = self.hosts.cells
        size = *names.compared_size, len(hosts), len(self.abstract_classes), len(owners), len(parents)
        if names.compared is None or names.compared[0] != size or not names.compared[1].holds():
            names.forget_dead()
            names.compared = (
                size,
                _core.Reads(
                    [*names.bindings, *self.cached.bindings],
                    list(names.functions.values()),
                    [*(cell for cell, _ in names.cells.values()), *hosts],
                    self.abstract_classes.pairs,
                    owners,
                    [(functools.partial(type.__subclasses__, cls), type.__subclasses__(cls)) for cls in parents],
                ),
            )
        return names.compared[1]

    def named_owners(self) -> list[Any]:
        """The classes and functions that code may ask for their names."""
        return [*self.attributes.classes, *self.named.functions()] if self.attributes.asks_names else []

    @alone
    def refresh(self) -> bool:
        """Makes roots of bindings that hold something else by now. True where there are any."""
        names = self.names
        if names.compared is None or names.compared[1].holds():
            return False
        size_before = self._size
        reads = names.compared[1]
        for holder, name in reads.changed():
            self._refresh_binding(holder, name)
        for cell in reads.changed_cells():
            if self.hosts.reveal_cell(cell):
                names.compared = None
                return True
            names.add(Origin(names.cells.pop(id(cell))[1], None))
        self._ask_functions()
        for function in list(names.functions.values()):
            names.note_keywords(function)
            if has_state(function):
                names.add(Origin(function, None))
            if not self.known.has(function.__code__, function.__globals__):
                self.add(function.__code__, function.__globals__, function)
                if not self.cached.is_cached(function):  # that is heard of whenever it runs
                    self.known.add(function.__code__, function.__globals__)
        if self._size == size_before:
            return False
        names.compared = None
        return True

    def _refresh_binding(self, holder: Any, name: str) -> None:
        """A name has another value than an entry was compiled for. One that may change again is a root from now on."""
        names, attributes = self.names, self.attributes
        if id(holder) in names.keywords or self.cached.watches(holder, name) or self.library.text(holder):
            names.compared = None
            return
        if name == OF_KEYS:
            return
        if name == OF_NAMES or (isinstance(holder, type) and holder in attributes.laid_open):
            self._note_all(attributes.renewed(holder))
            names.compared = None
            return
        if holder is names.scope and self.hosts.is_receiver(name):
            return
        value = in_class(holder, name)[1] if isinstance(holder, type) else holder.get(name, MISSING)
        users = is_users_class(holder) if isinstance(holder, type) else is_users_scope(holder)
        changes = type(value) is int or type(value) is float  # by assignment, as a counter does
        if isinstance(holder, type) and is_bound_by(value):
            attributes.look_up_anew()  # another descriptor: what it holds counts
        if users and (changes or not is_constant(value) or can_be_equal(value)) and not is_bound_by(value):
            names.unbind(holder, name)
            owner = in_class(holder, name)[0] if isinstance(holder, type) else None
            names.add(Origin(owner or holder, name))
            if changes:
                names.changing.add((id(owner or holder), name))


def _never_holding() -> _core.Reads:
    scope = {"value": 0}
    reads = _core.Reads([(scope, "value")], [], [])
    scope["value"] = 1
    return reads


def _defaults_of(function: Any) -> tuple[Any, ...]:
    if not isinstance(function, types.FunctionType):
        return ()
    return *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
