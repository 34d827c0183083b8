# SPDX-License-Identifier: Apache-2.0
"""The read set of a function: what a trace of it takes in, and what a call compares.

`CodeReads` knows what code names. This module says when it is asked: when code begins to run in a trace, before and
after a trace, and when a call finds that a binding holds something else.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import weakref
from collections.abc import Callable, Generator, Iterable
from typing import Any

from graftax import _core
from graftax._base.missing import MISSING
from graftax._capture.code_by_identity import IdentitySet
from graftax._capture.code_owner import is_never_asked_code, is_of_module, is_users_class, is_users_code, is_users_scope
from graftax._capture.code_reads import CodeReads
from graftax._capture.constant_values import (
    OF_KEYS,
    OF_NAMES,
    can_be_equal,
    cells_of,
    has_defaults,
    has_state,
    in_class,
    is_bound_by,
    is_constant,
    is_generated,
)
from graftax._capture.library_reads import (
    OF_CODE,
    LibraryReads,
    is_asked_by_user,
    module_read,
)
from graftax._capture.locks import Locks
from graftax._capture.origin import Origin
from graftax._capture.read_names import Variables
from graftax._capture.retrace_signals import HeededSignals
from graftax._capture.trace_local import Begun, synchronized
from graftax._graph.types.describe import is_symbol
from graftax._jax.nested_jit import is_inside_jit

_MOST_BINDINGS = 50_000  # beyond these, `is_large` has the function's table cleared


class ReadSet(CodeReads):
    """What the code that ran under the traces of one function names."""

    def __init__(self) -> None:
        super().__init__()
        self.has_inner_jit = False  # does JAX jit a function inside that reads a root?
        self._itself: Callable[[], Any] = lambda: None  # the traced function, where its defaults may change
        self._own_codes = IdentitySet[types.CodeType]()  # the code that it had, then or earlier
        self._ran = IdentitySet[types.CodeType]()  # code with variables of an enclosing call that has run in traces
        self._scanned = IdentitySet[types.CodeType]()  # code of functions that traces made
        self._last: _core.Reads | None = None  # what the last entry depends on
        self._unchanged_since: object = object()  # replaced after each change of that

    # ---- while a trace runs

    @contextlib.contextmanager
    def begun(self, locks: Locks) -> Generator[None]:
        """While entered, a trace runs. The locks that its code knows are noted in `locks`.

        Raises:
            NewReads: at its end, where it was told to begin anew.
        """
        outer_locks, self.thread.locks = self.thread.locks, locks
        self.abstract_classes.begin()
        self.library.begin_body()
        try:
            # Code that is known is not announced again, so what earlier traces have met counts from the start.
            for lock in list(self._locks.values()):
                locks.note(lock)
            with self.cached.begun(), HeededSignals(self.signals):
                yield
        finally:
            self.thread.locks = outer_locks

    def enter(self, present: set[int], code: types.CodeType, scope: dict[str, Any], function: Any, first: Any) -> Any:
        """Notes what code names that begins to run under a trace. The frame hook calls this before the frame runs.

        Args:
            present: the ids of the functions that are part of the trace's roots.
            function: None where the trace itself made it (before Python 3.12: where known code makes such functions).
            first: the first argument of the call.

        Returns:
            What the hook does next. An exception is raised in the frame. None: it tells of this code no more in this
            trace. True: no more of this function, but of others with its code. False: of each frame. NotImplemented: of
            this code no more in any trace.
        """
        # In JAX and the standard library nothing counts, except what its functions read for their caller.
        if is_never_asked_code(code, scope, first):
            if (reads := OF_CODE.get(code)) is not None:
                return self._meet_library(reads(function, first)) if is_asked_by_user() else False
            begins_anew = self.builtins.note_class_check(code, scope)
            if begins_anew is None:
                return NotImplemented
            return self.signals.give() if begins_anew else None
        # A module that is imported in a trace would keep tracers as its arrays: it is imported before the next one.
        if self.library.imports(code, scope):
            return self.signals.give()
        if code.co_freevars:
            self._ran.add(code)
        if self._is_jitted_inside(code, function, present):
            return self.signals.give()
        if self.hosts.reveal(code, code in self._inner):
            return self.signals.give()
        # The function of a cache runs. Where plain Python can compute its result, it does so before the next trace.
        if self.cached.is_cached(function):
            if (error := self.cached.take_error(function, first)) is not None:
                return error
            if is_symbol(first):
                return _refusal_of(first)
            # Its result is to outlive the trace, so it is computed in plain Python. That must not see half of a change.
            if not self._has_changed() and self.cached.fills(function, first):
                with self.lock:  # a program on disk depends on its code
                    self._meet(present, code, scope, function, first)
                return self.signals.give()
            if (original := self.thread.begun.copied(first)) is not None:
                self.cached.note_copy(function, first, original, sys._getframe(1))
        if self.known.has(code, scope):
            return False
        if code in self._own_codes and function is self._itself():
            return self._meet_itself(code, scope, function)
        with self.lock:
            return self._meet(present, code, scope, function, first)

    def _meet(
        self, present: set[int], code: types.CodeType, scope: dict[str, Any], function: object, first: object
    ) -> Any:
        """Notes what code names that is not known yet. Returns what `enter` returns."""
        is_made_in_trace = function is None or bool(code.co_freevars and code in self._inner and not _core.has_watchers)
        # Frames from which nothing is to be noted.
        known_scope = is_of_module(scope) or self.names.is_guarded(scope)
        if not known_scope and (is_made_in_trace or code.co_name == "<module>" or not _core.has_watchers):
            return False  # globals that the trace itself has made, for `eval` or `exec`
        if is_made_in_trace and code.co_freevars:  # a function of the same code may be older than the trace
            if code in self._scanned:
                return False
            self._scanned.add(code)
        is_met = self.names.functions.get(id(function)) is function
        if not is_made_in_trace and (id(function) in present or is_met):
            return False
        if not is_made_in_trace and self.impure.library.has_met(function):  # a library's: only others of its code count
            return code not in self._rooted and not self.cached.is_cached(function)
        # What the code names, what caches give out, and what the names of attributes lead to in classes.
        size_before = self._size
        self.add(code, scope, function, not is_made_in_trace)
        self.see_caches()
        for obj in (first, type(first)):
            if isinstance(obj, type):
                self._add_class(obj)
        self._look_up()
        is_met_each_time = self._is_met_each_time(code, scope, function)
        if not is_met_each_time:
            self.known.add(code, scope)
        if self._is_jitted_inside(code, function, present) or self._has_to_restart(size_before):
            return self.signals.give()
        return False if is_met_each_time else None

    def _is_met_each_time(self, code: types.CodeType, scope: dict[str, Any], function: object) -> bool:
        """Is each frame of this code heard of, although what it names is known?"""
        if code.co_freevars and is_users_code(code, scope) and not is_generated(code, function):
            return True  # another function of this code may hold other state
        if code in self._rooted or self.cached.is_cached(function):
            return True
        if code.co_freevars and self.impure.library.has_met(function):
            return True  # another function of this code may keep something in its closure
        return not is_of_module(scope)  # globals of `exec` may go, and others may get their id

    @synchronized
    def _meet_library(self, reads: LibraryReads) -> Any:
        """Notes what a function of the standard library reads that begins to run."""
        size_before = self._size
        self._note_library(reads)
        return self.signals.give() if self._has_to_restart(size_before) else False

    @synchronized
    def _meet_itself(self, code: types.CodeType, scope: dict[str, Any], function: types.FunctionType) -> Any:
        """The traced function begins. A call by its own code takes the defaults that it has, which are roots then."""
        if not self.thread.runs:
            self.thread.runs = True
            return False
        size_before = self._size
        self.add(code, scope, function)
        self.known.add(code, scope)
        return self.signals.give() if self._has_to_restart(size_before) else False

    def _has_to_restart(self, size_before: tuple[int, ...]) -> bool:
        """Gives the running trace the roots that were found since. True where it has to begin anew with them."""
        take_in = self.thread.begun.take_in
        return self._size != size_before and (take_in is None or not take_in())

    @synchronized
    def note_itself(self, function: types.FunctionType) -> None:
        """Notes what the traced function names. Where its defaults may change, each call of it is heard of."""
        # The call has its defaults as roots; a call by its own code, inside of it, takes those of the function.
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

    @synchronized
    def note_closure(self, function: types.FunctionType) -> None:
        """Notes what another function of known code names through its own variables of an enclosing call."""
        if function.__closure__:
            self.add(function.__code__, function.__globals__, function, False)

    def _is_jitted_inside(self, code: types.CodeType, function: object, present: set[int]) -> bool:
        """Does JAX jit code that reads a root, for the first time in this read set?

        Then the trace begins anew in a user context of JAX, so that JAX's caches keep no tracer of it.
        """
        reads_root = code in self._rooted or (code.co_freevars and id(function) in present)
        if not reads_root and not any(origin.holder is function for origin in self.names.origins):
            return False
        was_known, is_inside = self.has_inner_jit, is_inside_jit(self.thread.trace)
        self.has_inner_jit = was_known or is_inside
        return is_inside and not was_known

    @property
    def _size(self) -> tuple[int, ...]:
        """Sizes of what makes a trace begin anew when it grows."""
        return *self.names.size, *self.builtins.size

    def run_before(self) -> None:
        """Runs in plain Python what a trace must not run: imports modules, and fills caches."""
        self._note_imported(self.library.import_modules())
        if self.cached.fill():
            self.see_caches()

    @synchronized
    def _note_imported(self, modules: Iterable[str] = ()) -> None:
        """Notes modules, and reads code again whose imports have succeeded meanwhile."""
        for name in modules:
            self._note_library(module_read(name))
        for code, scope, reference in self.library.imported():
            self.add(code, scope, reference(), stays=False)

    @synchronized
    def see_caches(self) -> bool:
        """Makes roots of the objects that caches give out. True where they are not those of the last time."""
        objects_before, bindings_before = self.cached.objects, self.cached.bindings
        origins = self.cached.look()
        if self.cached.bindings is not bindings_before:
            self.names.compared = None
        if self.cached.objects is objects_before:
            return False
        # The objects are values of one dict, which is the holder of their origins: a new dict replaces them all.
        self.names.origins = [origin for origin in self.names.origins if origin.holder is not objects_before] + origins
        self.names.compared = None
        return True

    # ---- attributes of classes, modules and functions that the code sets: known only once it has set them

    def begin(self, begun: Begun) -> None:
        """A trace begins: notes what those names hold that its code may set, and that it does not see rebuilt."""
        self.thread.begin(begun)
        self._note_before()

    def end(self) -> bool:
        """The trace has ended: puts back what it has set, and makes roots of that. True where there is any."""
        size_before = self._size
        self._note_imported()
        changed = self.thread.end(self.attributes.sets, self.names.left_out)
        for origin in changed:
            if origin.name is None:
                self.names.add(origin)
            else:
                self.names.assign(origin)
        return bool(changed) or self._size != size_before

    def _has_changed(self) -> bool:
        """Has the trace changed anything so far?"""
        set_names = self.thread.set_names(self.attributes.sets, self.names.left_out)
        return self.thread.begun.has_changed() or next(set_names, None) is not None

    def hide_inner(self, code: types.CodeType) -> bool:
        """As `HostCaptures.hide_inner`."""
        return self.hosts.hide_inner(code)

    @synchronized
    def see_hosts(self, function: types.FunctionType, hosts: set[types.CodeType]) -> bool:
        """Takes out of the roots what only host functions read: these run after the trace. True where that is new.

        A function that has run in a trace is no host function, wherever else it is given.
        """
        return self.hosts.note_functions(
            function, {host for host in hosts if host not in self._ran and host not in self.known}
        )

    @synchronized
    def see_receivers(self, function: types.FunctionType) -> bool:
        """Hides what the function names only to give its methods to callbacks of JAX. True where that is new."""
        values = self.hosts.note_receivers(function)
        for value in values:
            self._add_class(type(value))
        return bool(values)

    @synchronized
    def see_named(self, named: Iterable[type | types.ModuleType]) -> bool:
        """Notes the classes of the objects in a call's roots, and classes and modules there. True for new roots."""
        size_before = self._size
        for value in named:
            if isinstance(value, type):
                self._add_class(value)
            else:
                self.attributes.add_module(value)
        self._look_up()
        return self._size != size_before

    @synchronized
    def see_root_caches(self, caches: Iterable[object]) -> bool:
        """Notes the caches among a call's roots. True where what they give out is a new root."""
        for cache in caches:
            self._note_cache(cache)
        return self.see_caches()

    # ---- between calls

    @property
    def is_large(self) -> bool:
        """Has it met so much that a new one is better? Classes that are made for each call lead to that."""
        return len(self.names.bindings) > _MOST_BINDINGS

    @synchronized
    def note_root_functions(self, functions: Iterable[types.FunctionType]) -> None:
        """Notes what functions among the roots name. Their state is part of the roots already."""
        for function in functions:
            code, scope = function.__code__, function.__globals__
            if not self.known.has(code, scope) and not self.of_graph.has(code, scope):
                self.of_graph.add(code, scope)
                self.add(code, scope, function, False)

    @synchronized
    def reads(self) -> _core.Reads:
        """What an entry depends on besides its roots, with the values of now."""
        # The trace has made objects that a cache keeps: roots of the next call, which therefore must not fit the entry.
        if self.see_caches():
            return _never_holding()
        names, owners, parents = self.names, self.named_owners(), self.attributes.parents()
        hosts = self.hosts.cells
        # Two functions that both count something in a package would make each other's programs stale.
        names.keep_out(self.impure.library.changing)
        containers = [table.values for table in self.impure.library.containers]
        # Entries share one comparison as long as nothing is added to it and it still holds.
        size = (
            *names.compared_size,
            *map(len, (names.bindings, hosts, self.abstract_classes, owners, parents, containers)),
        )
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
                    containers,
                ),
            )
        self._last = names.compared[1]
        return self._last

    def heard_since(self) -> object:
        """A token that stays the same object until something changes that the traces have read."""
        if self._last is not None and not self._last.holds():
            self._last, self._unchanged_since = None, object()
        return self._unchanged_since

    def named_owners(self) -> list[Any]:
        """The classes and functions that code may ask for their names."""
        return [*self.attributes.classes, *self.named.functions()] if self.attributes.asks_names else []

    @synchronized
    def refresh(self) -> bool:
        """Makes roots of bindings that hold something else by now. True where there are any."""
        names = self.names
        if names.compared is None:
            return False
        # Globals of the function itself are roots, so no binding tells that one was made again.
        scope = names.scope or {}
        if any([self._open_if_made_anew(scope, name, scope.get(name)) for name in names.own_closures]):
            names.compared = None
            return True
        if names.compared[1].holds():
            return False
        size_before = self._size
        reads = names.compared[1]
        for holder, name in reads.changed():
            self._refresh_binding(holder, name)
        self._look_up_in_packages()
        # A variable that held a constant holds something else, so its function has state: it is a root from now on.
        for cell in reads.changed_cells():
            if self.hosts.reveal_cell(cell):
                names.compared = None
                return True
            names.add(Origin(names.cells.pop(id(cell))[1], None))
        self._ask_functions(asks_all=True)
        # Functions may have got other code, defaults or variables. Other code is read at once, not when it runs.
        for function in list(names.functions.values()):
            names.note_keywords(function)
            if has_state(function):
                names.add(Origin(function, None))
            if not self.known.has(function.__code__, function.__globals__):
                self.add(function.__code__, function.__globals__, function)
                if not self._is_met_each_time(function.__code__, function.__globals__, function):
                    self.known.add(function.__code__, function.__globals__)
        if self._size == size_before:
            return False
        names.compared = None
        return True

    def _refresh_binding(self, holder: Any, name: str) -> None:
        """A name has another value than an entry was compiled for. One that may change again is a root from now on."""
        names, attributes = self.names, self.attributes
        self._note_settings(self.impure.library.renewed(holder, name))
        # These stay bindings, whatever they hold: a new comparison has the new value.
        is_kept_table = id(holder) in names.keywords or id(holder) in names.jitted
        if is_kept_table or self.cached.watches(holder, name) or self.library.text(holder):
            names.compared = None
            return
        if name == OF_KEYS:
            return
        if name == OF_NAMES:
            self._note_all(attributes.renewed(holder))
            names.compared = None
            return
        if holder is names.scope and self.hosts.is_receiver(name):
            return
        value = in_class(holder, name)[1] if isinstance(holder, type) else holder.get(name, MISSING)
        users = is_users_class(holder) if isinstance(holder, type) else is_users_scope(holder)
        if isinstance(value, type):
            self._add_class(value)
        is_number = type(value) is int or type(value) is float  # which changes by assignment, as a counter does
        if isinstance(holder, type) and is_bound_by(value):
            attributes.look_up_anew()  # another descriptor: what it holds counts
        if users and not isinstance(holder, type) and self._open_if_made_anew(holder, name, value):
            return
        if users and (is_number or not is_constant(value) or can_be_equal(value)) and not is_bound_by(value):
            names.unbind(holder, name)
            owner = in_class(holder, name)[0] if isinstance(holder, type) else None
            names.add(Origin(owner or holder, name))
            if is_number:
                names.changing[id(owner or holder), name] = frozenset()

    def _open_if_made_anew(self, holder: object, name: str, value: object) -> bool:
        """Makes a root of a function that is made again with other numbers, as `schedule = make_schedule(rate)` is."""
        names, key = self.names, (id(holder), name)
        replaced = names.closures.get(key)
        if replaced is None or replaced is value or not isinstance(value, types.FunctionType):
            return False
        names.closures[key] = value
        if value.__code__ is not replaced.__code__:
            return False
        old, new = _numbers_held(replaced), _numbers_held(value)
        # By `repr`, which tells 0.0 from -0.0, and in which a nan equals itself.
        changed = frozenset(v for v in new if type(old.get(v)) is type(new[v]) and repr(old[v]) != repr(new[v]))
        if changed:
            names.open(Origin(holder, name), replaced)
            names.changing[key] = changed
        return bool(changed)


def _refusal_of(symbol: Any) -> TypeError | None:
    """A cache does not find for a symbol what it has for the number, and would compute it anew."""
    try:
        return symbol.refuse()
    except TypeError as error:
        return error


def _never_holding() -> _core.Reads:
    """A comparison that fails, as its only binding has changed."""
    scope = {"value": 0}
    reads = _core.Reads([(scope, "value")], [], [])
    scope["value"] = 1
    return reads


def _numbers_held(
    function: types.FunctionType, holders: tuple[types.FunctionType, ...] = ()
) -> dict[Variables, int | float]:
    """The numbers in the variables of a function, and in those of functions in its variables.

    `holders` are the functions on the way to this one: a function may hold itself.
    """
    numbers = dict[Variables, int | float]()
    for name, value in cells_of(function).items():
        if type(value) in (int, float):
            numbers[(name,)] = value
        elif isinstance(value, types.FunctionType) and value not in holders:
            inner = _numbers_held(value, (*holders, function))
            numbers.update({(name, *variables): number for variables, number in inner.items()})
    return numbers
