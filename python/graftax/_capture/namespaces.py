# SPDX-License-Identifier: Apache-2.0
"""What the code under a trace sees: rebuilt values where it looks for them, in this thread alone.

Frames get other globals. Attributes of classes and modules lie behind descriptors that tell threads apart.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import gc
import sys
import threading
import types
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from typing import Any

from jax.core import Tracer

from graftax import _core
from graftax._base.class_lookup import in_mro
from graftax._base.missing import MISSING
from graftax._capture.caches_after_traces import holds_tracer
from graftax._capture.caught_errors import ERRORS_OF_TRACERS
from graftax._capture.constant_values import content, fill
from graftax._capture.function_attributes import function_in, in_place_of
from graftax._capture.impure_calls import tell_of_call
from graftax._capture.impure_functions import VARS_OF_MODULE
from graftax._capture.origin import Origin
from graftax._capture.read_set import ReadSet
from graftax._capture.retrace_signals import NewReads
from graftax._capture.trace_local import Begun
from graftax._jax.inner_frames import inner_frames
from graftax._jax.traces import current_trace


class _SeenAttribute:
    """Stands in a class for a rebuilt attribute: the thread that traces sees the rebuilt one, others their own."""

    def __init__(self, origin: Origin, value: object) -> None:
        self.origin, self.value, self.thread = origin, value, threading.get_ident()
        self.original: object = MISSING  # what the class holds, kept up to date by the core
        self._is_covering = False
        self._outer: object = None  # the stand-in of a trace around this one

    def cover(self) -> None:
        """Stands in the class from now on."""
        # A name that the class does not have yet stays absent: else `isinstance` of a protocol would find it there, and
        # Python would call it if it is a special method.
        stands = self.value is not MISSING
        self._outer = _core.cover_class_attribute(self.origin.holder, self.origin.name or "", self, stands)
        self._is_covering = True

    def uncover(self) -> None:
        """The class has its own value again."""
        _core.uncover_class_attribute(self.origin.holder, self.origin.name or "", self, self._outer)
        self._is_covering = False

    def current(self) -> Any:
        """The rebuilt value, or what has been assigned since."""
        # While a class has a stand-in, `vars` shows what that stands for, until code assigns another value.
        return vars(self.origin.holder).get(self.origin.name or "", MISSING) if self._is_covering else self.value

    def get(self) -> Any:
        """What this thread sees."""
        return self.value if threading.get_ident() == self.thread else self.original

    def __get__(self, obj: object, cls: object = None) -> Any:
        value = self.get()
        # The value may be a descriptor itself, such as a function, which has to be bound.
        getter = in_mro(type(value), "__get__")
        return value if getter is None else getter(value, obj, cls)


class _SeenData(_SeenAttribute):
    """The same for a descriptor that takes what is assigned to an attribute of an instance."""

    def __set__(self, obj: object, value: object) -> None:
        self.get().__set__(obj, value)

    def __delete__(self, obj: object) -> None:
        self.get().__delete__(obj)


class _SeenName:
    """Stands in the class of a module for a name that is rebuilt, while a trace runs."""

    def __init__(self, scope: dict[str, Any], frame_scope: dict[str, Any], name: str) -> None:
        self.scope, self.frame_scope, self.name, self.thread = scope, frame_scope, name, threading.get_ident()

    def _scope_of_thread(self) -> dict[str, Any]:
        return self.frame_scope if threading.get_ident() == self.thread else self.scope

    def __get__(self, module: object, cls: object = None) -> Any:
        try:
            return self._scope_of_thread()[self.name]
        except KeyError:
            # Not KeyError: Python then asks the `__getattr__` of the module, if it has one.
            raise AttributeError(f"module has no attribute {self.name!r}") from None

    def __set__(self, module: object, value: object) -> None:
        self._scope_of_thread()[self.name] = value

    def __delete__(self, module: object) -> None:
        del self._scope_of_thread()[self.name]


def _get_attribute(module: object, cls: Any, name: str) -> Any:
    return cls.__getattribute__(module, name)


class _SeenModule:
    """A module whose class is replaced while a trace runs: the new class has descriptors for the rebuilt names."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module, self._own_class = module, type(module)
        # Python 3.15 reads from the module's dict, past its class, unless that has a `__getattribute__` of its own.
        self._names: dict[str, Any] = {"__getattribute__": functools.partialmethod(_get_attribute, self._own_class)}
        self._class: type | None = None  # with these names; None where it has to be made again

    @property
    def is_covered(self) -> bool:
        return type(self._module) is not self._own_class

    def show(self, name: _SeenName) -> None:
        if name.name not in self._names:
            self._names[name.name] = name
            self._class = None

    def cover(self) -> None:
        if self._class is None:
            self._class = type(self._own_class.__name__, (self._own_class,), dict(self._names))
        self._module.__class__ = self._class

    def uncover(self) -> None:
        self._module.__class__ = self._own_class


def with_parts(
    function: types.FunctionType, scope: dict[str, Any], closure: tuple[types.CellType, ...] | None
) -> types.FunctionType:
    """A function of the same code with other globals and another closure."""
    twin = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, closure)
    twin.__kwdefaults__ = function.__kwdefaults__
    twin.__qualname__ = function.__qualname__
    twin.__module__ = function.__module__
    twin.__doc__ = function.__doc__
    return twin


def seen(function: types.FunctionType) -> types.FunctionType:
    """The function as the code of this thread's trace sees it: with rebuilt state and globals."""
    twin = _core.seen_function(function)
    scope = _core.seen_globals(twin.__globals__)
    if scope is not twin.__globals__:
        twin = with_parts(twin, scope, twin.__closure__)
        _core.stands_for(twin, function)
    return twin


OriginRoot = tuple[Origin, Any, Any]  # its rebuilt value, the caller's
_PATCHING = threading.RLock()  # one trace at a time puts what it sees into classes and modules


class Rebuilt:
    """What code under a trace may ask of the rebuilt graph: which functions are in it, and whose copy an object is."""

    def __init__(self, symbolic: bool = False) -> None:
        self.symbolic = symbolic  # are there symbols in it?
        self.functions: set[int] = set()  # the ids of its functions
        self.cells: dict[int, tuple[int, types.CellType]] = {}  # id of a rebuilt cell -> (its root, the caller's cell)
        # id of the globals that frames see -> (those of the module, their names that are roots, with the roots)
        self.scopes: dict[int, tuple[dict[str, Any], dict[str, int]]] = {}
        self.requested_ids: dict[int, int] = {}  # of the caller's objects whose id() was asked for: tracked index -> id
        self.in_keys: dict[int, int] = {}  # the same of objects that are keys of a cache
        self.leaves_ids = False  # does an object or a result hold the id() of a copy when the trace has ended?
        self.raised: list[BaseException] = []  # errors about a tracer, which the code may have caught
        self.changes_in_place = False  # did its code change arrays in place, or arguments that could be NumPy's?
        self.views: Views | None = None  # of the traced function
        self.take_in: Callable[[], bool] | None = None  # gives the trace the roots that its read set has found
        self.answer_calls: Callable[[], None] | None = None  # begins to answer calls in place of their frames
        self.has_changed: Callable[[], bool] = lambda: False  # has the trace changed what was rebuilt?
        self.left_out: Callable[[], list[tuple[str, type, str, bool]]] = list  # as `Trace.left_out`
        # Functions of its frames, with the globals of their module.
        self.made_functions: list[tuple[types.FunctionType, dict[str, Any]]] = []
        self._trace: _core.Trace | None = None  # until its copies are asked for
        self._ids: dict[int, tuple[int, int]] = {}  # id of a copy -> (tracked index, id of the caller's object)

    def begin(self, trace: _core.Trace) -> None:
        """The trace has rebuilt its roots, or more of them."""
        self.functions.update(map(id, trace.functions()))
        self._trace, self.has_changed, self.left_out = trace, trace.has_changed, trace.left_out

    def end(self) -> None:
        self._trace = self.views = self.take_in = self.answer_calls = None
        self.has_changed, self.left_out = lambda: False, list
        self._ids = {}
        self.raised.clear()
        self.made_functions.clear()

    def give_globals(self, except_codes: Collection[types.CodeType] = ()) -> None:
        """Gives functions that the trace has made the globals of their module, instead of what its frames saw of them.

        Functions of the codes in `except_codes` keep theirs: JAX runs these later (`host_callbacks.give_own`).
        """
        for function, scope in self.made_functions:
            if function.__code__ not in except_codes:
                _core.give_parts(function, scope, function.__closure__)
        self.made_functions.clear()

    def _identity(self, obj: object) -> tuple[int, int] | None:
        """Of a copy: the tracked index and the id of the caller's object."""
        if self._trace is not None:  # the first time: most traces never ask
            self._ids, self._trace = self._trace.identities(), None
        return self._ids.get(builtins.id(obj))

    def copied(self, obj: object) -> int | None:
        """Of a copy: the id of the caller's object."""
        identity = self._identity(obj)
        return None if identity is None or identity[1] == builtins.id(obj) else identity[1]

    def note_keys(self, objects: Iterable[object]) -> None:
        """A cache has results for these objects."""
        self.in_keys.update(filter(None, map(self._identity, objects)))

    def id(self, obj: object, /) -> int:
        """What `id` is for code under the trace: of a copy, that of the caller's object."""
        identity = self._identity(obj)
        if identity is None:
            return builtins.id(obj)
        self.requested_ids[identity[0]] = identity[1]
        return identity[1]


class Views:
    """The rebuilt values of origins, where the code under the trace looks for them.

    Args:
        reads: what the code reads; None where the trace is part of one around it, which takes care of that.
        roots: origins, their rebuilt values and the caller's. Of a name that the code assigns, these are cells.
        rebuilt: is asked about rebuilt objects; None for a part of the trace around it.
    """

    def __init__(self, reads: ReadSet | None, roots: list[OriginRoot], rebuilt: Rebuilt | None) -> None:
        self._reads, self._rebuilt, self._is_part = reads, rebuilt or Rebuilt(), rebuilt is None
        self._modules: dict[int, _SeenModule] = {}  # by the id of their dict
        self._scopes: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}  # by id: (globals, what frames see of them)
        self._begun: dict[int, dict[str, Any]] | None = None  # copies of what frames saw at first; None before they run
        self._classes: dict[tuple[int, str | None], _SeenAttribute] = {}
        self.functions: list[tuple[Any, Any]] = []  # (the caller's, the rebuilt one)
        self._assigned: list[tuple[Origin, types.CellType]] = []
        self._shown: list[tuple[Origin, Any]] = []  # all origins with another value than the caller's
        self._roots_in: dict[int, dict[str, int]] = {}  # numbers of roots, by the id of their dict, and by name
        self._patching = contextlib.ExitStack()  # holds _PATCHING while classes and modules have stand-ins
        self._origins: list[tuple[Origin, Any]] = []  # all origins, with the rebuilt values of their roots
        self._show(roots)

    def _show(self, roots: list[OriginRoot]) -> None:
        """Puts these values where the code looks for them; into classes and modules only when the trace runs."""
        reads = self._reads
        assigned = [(origin, cell) for origin, cell, _ in roots if origin.assigned]
        changed = [(origin, value) for origin, value, own in roots if value is not own and not origin.assigned]
        shown_values = [*changed, *((origin, content(cell)) for origin, cell in assigned)]
        self._assigned += assigned
        self._shown += shown_values
        for origin, value in shown_values:
            if origin.name is None:
                self.functions.append((origin.holder, value))
            elif isinstance(origin.holder, type):
                data = hasattr(type(value), "__set__")
                # A data descriptor comes before the dict of an instance, any other one behind it: so does its stand-in.
                self._classes[origin.key] = (_SeenData if data else _SeenAttribute)(origin, value)
            else:
                self._put(origin.holder, origin.name, value)
        # The trace around this one has done the rest for a part of it.
        if reads is not None:
            named = self._see_functions(reads, {origin.key for origin, _ in self._shown})
            shown = [origin for origin, _ in shown_values if isinstance(origin.holder, dict)]
            self._see_modules(reads, [*shown, *named])
            for scope in list(reads.builtins.of_ids.values()):
                self._put(scope, "id", self._rebuilt.id)
            for scope in list(reads.builtins.of_vars.values()):
                self._put(scope, "vars", self.vars)
            for scope, names in reads.builtins.seen_by_symbols() if self._rebuilt.symbolic else ():
                for name, value in names.items():
                    self._put(scope, name, value)

    def _see_functions(self, reads: ReadSet, shown: set[tuple[int, str | None]]) -> list[Origin]:
        """Puts rebuilt functions under the names by which code asks for their parts; gives those in modules."""
        twins = {id(original): twin for original, twin in self.functions if twin is not original}
        origins_in_modules = list[Origin]()
        for origin in reads.named.places() if twins else ():
            value = origin.value()
            twin = twins.get(id(function_in(value)))
            if twin is None or origin.key in shown:
                continue
            twin = in_place_of(value, twin)
            if not isinstance(origin.holder, type):
                self._put(origin.holder, origin.name or "", twin)
                origins_in_modules.append(origin)
            elif origin.key not in self._classes:
                self._classes[origin.key] = _SeenAttribute(origin, twin)
        return origins_in_modules

    def _see_modules(self, reads: ReadSet, origins: list[Origin]) -> None:
        """Shows rebuilt globals to code that reads them as attributes of their module."""
        for holder, name, _ in origins:
            module = reads.attributes.modules.get(id(holder))
            if module is not None and name is not None:
                seen_module = self._modules.setdefault(id(holder), _SeenModule(module))
                seen_module.show(_SeenName(holder, self.scope(holder), name))

    def scope(self, scope: dict[str, Any]) -> dict[str, Any]:
        """What frames of these globals see: a copy, which is made when it is first asked for."""
        pair = self._scopes.get(id(scope))
        if pair is None:
            pair = self._scopes[id(scope)] = scope, dict(scope)
            if self._begun is not None:
                self._begun[id(scope)] = dict(scope)
        return pair[1]

    def _put(self, scope: dict[str, Any], name: str, value: object) -> None:
        """Shows frames of these globals another value under a name."""
        Origin(self.scope(scope), name).put(value)
        # So that the trace does not seem to have assigned it.
        if self._begun is not None:
            Origin(self._begun[id(scope)], name).put(value)

    def vars(self, *arguments: object) -> Any:
        """What `vars` is for code under the trace: of a module, with the rebuilt values."""
        if not arguments:
            # Without arguments it is `locals()`, of the frame that calls.
            return sys._getframe(1).f_locals
        shown = builtins.vars(*arguments)
        if not isinstance(arguments[0], types.ModuleType):
            return shown
        tell_of_call(VARS_OF_MODULE, sys._getframe(1))
        return self.seen(shown)

    def seen(self, scope: dict[str, Any]) -> dict[str, Any]:
        """What frames of these globals see: the globals themselves where no copy was made."""
        return self._scopes[id(scope)][1] if id(scope) in self._scopes else scope

    @property
    def origins(self) -> list[Origin]:
        """All origins that are known by now."""
        return [origin for origin, _ in self._origins]

    def values_now(self, keys: Collection[tuple[int, str | None]] | None = None) -> list[tuple[Origin, Any]]:
        """The origins, or those with these keys, with what the code finds there now."""
        return [
            (origin, value if origin.name is None else self._current_value(origin))
            for origin, value in self._origins
            if keys is None or origin.key in keys
        ]

    def _current_value(self, origin: Origin) -> Any:
        """What the code finds under a name now."""
        if not isinstance(origin.holder, type):
            return self.seen(origin.holder).get(origin.name or "", MISSING)
        return self._classes[origin.key].current() if origin.key in self._classes else origin.value()

    def tell(self, roots: list[OriginRoot], first: int) -> None:
        """Notes roots, whether or not code sees other objects there, and tells the rebuilt graph which globals it sees.

        Args:
            first: the number of the first of them.
        """
        self._origins += ((origin, value) for origin, value, _ in roots)
        for root, (origin, _, _) in enumerate(roots, first):
            if origin.name is not None:
                self._roots_in.setdefault(id(origin.holder), {})[origin.name] = root
        for i, (scope, frame_scope) in self._scopes.items():
            self._rebuilt.scopes[id(frame_scope)] = scope, self._roots_in.setdefault(i, {})

    def root_keys(self) -> set[tuple[int, str | None]]:
        return {origin.key for origin, _ in self._origins}

    def run(self, function: Callable[[], object]) -> Any:
        """Calls a function. Its code, and what it calls, sees the rebuilt values meanwhile.

        Raises:
            NewReads: it has set attributes of classes and modules that are not roots yet.
        """
        if self._reads is None:  # part of the trace around it, if there is one
            for original, copy in (*self._scopes.values(), *self.functions):
                _core.stands_for(copy, original)
            try:
                return function()
            finally:
                self._note_made()
        with self._patching:
            if self._classes or self._modules:
                self._patching.enter_context(_PATCHING)
            return self._run(function, self._reads)

    def _note_made(self) -> None:
        """Notes the functions that frames have made, and that have the globals which these frames saw.

        They may outlive the trace: in its result, in a class, in a cache.
        """
        originals = {id(frame_scope): scope for scope, frame_scope in self._scopes.values()}
        frame_scopes = [frame_scope for _, frame_scope in self._scopes.values()]
        if not frame_scopes:
            return
        functions = _core.made_with(frame_scopes)
        self._rebuilt.made_functions += [
            (function, originals[id(function.__globals__)])
            # Outside of a trace, and on Python 3.11, nothing tells which functions were made. The collector knows what
            # holds these globals, the rebuilt functions among it.
            for function in (gc.get_referrers(*frame_scopes) if functions is None else functions)
            if isinstance(function, types.FunctionType) and id(function.__globals__) in originals
        ]
        if self._is_part:
            self._rebuilt.give_globals()

    @contextlib.contextmanager
    def with_own_classes(self) -> Generator[None]:
        """While entered, modules have the classes that they had when the roots were recorded."""
        covered = [module for module in self._modules.values() if module.is_covered]
        for module in covered:
            module.uncover()
        try:
            yield
        finally:
            for module in covered:
                module.cover()

    def can_extend(self) -> bool:
        """May it put more into classes and modules? Not while the trace of another thread does."""
        # It must not wait for that thread, which may wait for this one.
        is_free = _PATCHING.acquire(blocking=False)
        if is_free:
            self._patching.callback(_PATCHING.release)
        return is_free

    def extend(self, reads: ReadSet, roots: list[OriginRoot], first: int) -> None:
        """Adds roots of the running trace, from number `first` on."""
        patched, scopes, functions, shown = set(self._classes), set(self._scopes), len(self.functions), len(self._shown)
        self._show(roots)
        self.tell(roots, first)
        self._patch([replacement for key, replacement in self._classes.items() if key not in patched])
        new_scopes = [pair for i, pair in self._scopes.items() if i not in scopes]
        reads.builtins.thread.originals.update({id(frame_scope): scope for scope, frame_scope in new_scopes})
        reads.thread.show({origin.key for origin, _ in self._shown[shown:]})
        _core.sees_too(new_scopes, self.functions[functions:])

    def _run(self, function: Callable[[], object], reads: ReadSet) -> Any:
        # Before the frames run: what names hold now, so that it shows afterwards what the trace has set.
        enter = functools.partial(reads.enter, self._rebuilt.functions)
        shown, rebuilt = {origin.key for origin, _ in self._shown}, self._rebuilt
        reads.begin(Begun(shown, rebuilt.take_in, self._has_changed, rebuilt.copied))
        self._begun = {i: dict(frame_scope) for i, (_, frame_scope) in self._scopes.items()}
        held = [
            (origin, origin.value()) for origin, _ in self._shown if isinstance(origin.holder, dict) and origin.name
        ]
        self._patch(list(self._classes.values()))
        try:
            scopes = list(self._scopes.values())
            reads.builtins.thread.originals = {id(frame_scope): scope for scope, frame_scope in scopes}
            arguments = enter, reads.known, scopes, self.functions, inner_frames()
            run = functools.partial(self._answering, function)
            result = _core.run_watched(run, *arguments, telling=ERRORS_OF_TRACERS, raised=self._rebuilt.raised)
        finally:
            # Everything is put back, even after an error. What turns out to be assigned becomes an assigned origin.
            self._take_over(held)
            replaced = [*self._unpatch(reads), *self._set_by_computed_names(reads)]
            for origin in replaced:
                reads.names.assign(origin)
            is_new = reads.end()
        if replaced or is_new:
            raise NewReads
        # The cells of assigned names are roots, so what they hold at the end is written back.
        for origin, cell in self._assigned:
            fill(cell, self._current_value(origin))
        # What `leave_out` has excluded happens once for each trace: in the module itself, now.
        for i, name in reads.names.left_out:
            if i in self._scopes and name is not None:
                scope, frame_scope = self._scopes[i]
                if frame_scope.get(name, MISSING) is not scope.get(name, MISSING):
                    Origin(scope, name).put(frame_scope.get(name, MISSING))
        return result

    def _answering(self, function: Callable[[], Any]) -> Any:
        """Calls a function under the hook."""
        if self._rebuilt.answer_calls is not None:
            self._rebuilt.answer_calls()
        try:
            return function()
        finally:
            self._note_made()

    def _has_changed(self) -> bool:
        """Has the trace changed an object, a global or an attribute of a class by now?"""
        has_set = any(attribute.current() is not attribute.value for attribute in self._classes.values())
        return has_set or self._rebuilt.has_changed() or next(self._set_names(), None) is not None

    def _set_names(self) -> Iterator[Origin]:
        """The globals whose value in what frames see is not the one with which they began."""
        for i, (scope, frame_scope) in self._scopes.items():
            if (begun := (self._begun or {}).get(i)) is not None:
                for name in frame_scope.keys() | begun.keys():
                    if frame_scope.get(name, MISSING) is not begun.get(name, MISSING):
                        yield Origin(scope, name, True)

    def _set_by_computed_names(self, reads: ReadSet) -> list[Origin]:
        """The globals that the trace has set in what its frames see of them, as `globals()[name] = value` does."""
        # `eval` and `exec` put `__builtins__` into the globals that they get.
        known_keys = {origin.key for origin, _ in self._shown} | reads.names.left_out
        return [p for p in self._set_names() if p.key not in known_keys and p.name != "__builtins__"]

    def _take_over(self, held: list[tuple[Origin, Any]]) -> None:
        """Takes out tracers that code has put into a module itself, as `module.__dict__[name] = value` does.

        They become what frames see of the name. `held` are the origins in modules with their values at the beginning.
        """
        ending = current_trace()
        for origin, original in held:
            value = origin.value()
            if value is not original and holds_tracer(value, ending):
                self.scope(origin.holder)[origin.name or ""] = value
                origin.put(original)

    def _patch(self, attributes: list[_SeenAttribute]) -> None:
        """Puts stand-ins into classes and modules."""
        for attribute in attributes:
            attribute.cover()
        for module in self._modules.values():
            module.cover()

    def _unpatch(self, reads: ReadSet) -> list[Origin]:
        """Takes the stand-ins out of classes and modules.

        Returns:
            The origins that the trace has assigned, although no code was known to assign them.
        """
        for module in self._modules.values():
            module.uncover()
        for attribute in self._classes.values():
            origin = attribute.origin
            current = attribute.current()
            if current is not attribute.value:
                # The trace has set it if its code sets such a name, or if it is a tracer; else another thread has.
                if origin.assigned or reads.attributes.sets(origin.name) or isinstance(current, Tracer):
                    attribute.value = current
                else:
                    attribute.original = current
            attribute.uncover()
        return [
            origin._replace(assigned=True)
            for origin, value in self._shown
            if origin.name is not None and not origin.assigned and self._current_value(origin) is not value
        ]
