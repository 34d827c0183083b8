# SPDX-License-Identifier: Apache-2.0
"""The compile cache of one function: bounded, shared by every `jit` of it with equal options, freed with it."""

from __future__ import annotations

import dataclasses
import functools
import threading
import types
import weakref
from collections.abc import Callable, Set
from typing import Any, NamedTuple, Protocol

import numpy as np

from graftax import _core
from graftax._capture.code_by_identity import IdentitySet
from graftax._capture.impure_calls import Overheard
from graftax._capture.origin import Origin
from graftax._capture.read_set import ReadSet
from graftax._capture.read_set_numbers import OfSymbols
from graftax._capture.traces_ahead import is_ahead
from graftax._explain import History, compile_events
from graftax._jit.branches_ahead import ProgramsAhead
from graftax._jit.number_policy import SymbolicNumbers
from graftax._jit.options import Options
from graftax._jit.same_function import Sharing, entries_before_edit, leave, sharing_of

IDENTITY_COLLECTED = "an object that was compared by identity no longer exists"
CACHE_FULL = "there were more structures than cache_size={size}"
TOO_MANY_VARIANTS = "too many programs of one structure"
CODE_REPLACED = "the code of the function was replaced"
NUMPY_IS_CONSTANT = "its code needs values of the NumPy arrays that it captures or has as defaults"
NEW_READS_FOUND = "its code was found to read more globals or captures than before"

_MAX_VARIANTS = 64  # entries of one structure, which differ in global bindings or in the order of sets
_TABLES = "__graftax_tables__"


class CacheInfo(NamedTuple):
    """The result of `Jitted.cache_info`: hits and misses of calls, the cache's sizes, and the number of traces.

    `shared` counts the programs that were taken over from an equal function. They count as hits. `disk` counts the
    programs that were found in the cache of `graftax.cache` and not compiled. `compiling` counts those that are being
    compiled in the background.
    """

    hits: int
    misses: int
    maxsize: int
    currsize: int
    traces: int
    shared: int = 0
    disk: int = 0
    compiling: int = 0


class LoadedPrograms(Protocol):
    """Programs compiled in another process, which calls run instead of compiling their own."""

    def make_entry(self, roots: tuple[object, ...], layout: tuple[object, ...], context: object) -> bool:
        """Makes the entry of a call whose structure was unknown when the file was loaded. False if no program fits."""
        ...

    def find(
        self, recording: _core.Recording, context: object, name: str, numbers: SymbolicNumbers | None = None
    ) -> Any | None:
        """The program for a structure and its numbers, if everything that the code reads is unchanged."""
        ...

    def entry(
        self, entry: _core.Entry, context: object, arguments: int, program: object, numbers: SymbolicNumbers | None
    ) -> _core.Entry:
        """An entry that runs the `program` from `find`, and compiles for other leaves as `entry` does."""
        ...

    def runs_only(self, entry: _core.Entry) -> bool:
        """Is this entry unable to compile anything besides its loaded programs? It is then replaced where needed."""
        ...

    def forget_unbound(self) -> None:
        """Drops the programs that `make_entry` has not bound to a structure yet."""
        ...


@dataclasses.dataclass
class Findings:
    """What a trace has found besides its Outcome. Its entry is not known while it runs, and gets this afterwards."""

    alike: list[list[list[int]]]  # leaves that the code found to be one array
    repeated: list[str]  # which parts share a program, as texts
    is_blocking: bool = False  # an error check of a library needs the result of a call
    requested_ids: dict[int, int] = dataclasses.field(default_factory=dict[int, int])  # that user code read
    numpy_leaves: list[bool] | None = None  # where the code changes arrays in place


class FunctionTable(_core.Table):
    """The entries of one function under one set of options. The least recently used entry is dropped first."""

    def __init__(self, options: Options, function: object = None) -> None:
        super().__init__()
        self.maxsize = options.cache_size
        self.entries: dict[tuple[Any, ...], _core.Entry] = {}
        self.outgrown: list[_core.Entry] = []  # with fewer roots, until the next trace has been compared with them
        self.history = History()  # what was compiled and why, for `explain`
        self.ahead = ProgramsAhead()
        self.loaded: LoadedPrograms | None = None  # from `load_compiled`, or from the cache on disk
        self.frozen = False  # a call that would compile raises instead
        self.numpy_is_constant = False  # of captured arrays: the code asks for their values
        self.warned_of_lost_sharing = False
        self.warned_of_captured: set[str] = set()  # the paths of big NumPy arrays
        self.has_warned = False  # a trace has warned about the code
        self.unrepeated = IdentitySet[types.CodeType]()  # of functions whose calls cannot share a program
        self.unrepeated_reasons: dict[str, str] = {}  # the reasons, by the names of the functions
        self._make_read_set = read_set_factory(options)
        self._join(sharing_of(function, options, self._make_read_set))
        self.before_edit = entries_before_edit(function, options)
        self.impure_calls_only = Overheard()
        # Within another trace the plain function runs, as a part of that trace, if the options ask for nothing else.
        names_arguments = bool(options.static or options.dynamic) and options.mutation != "propagate"
        self.as_plain = options.captured and not options.shards and not names_arguments
        self.misses = self.slow_hits = self.traces = self.shared = self.disk = 0
        self.restarting: set[int] = set()  # threads whose call begins anew: it has been counted already
        self.findings: weakref.WeakKeyDictionary[_core.Outcome, Findings] = weakref.WeakKeyDictionary()
        self.original: weakref.ref[Any] | None = None  # the first live jitted function: unpickling returns it
        self._roots = self._known_roots()  # the origins that are roots now, and the number of hidden ones

    def _join(self, sharing: Sharing) -> None:
        self.sharing, self.reads, self.numbers = sharing, sharing.reads, sharing.numbers
        # A function that replaces an equal one, such as one in a cell that is run again, runs what that has compiled.
        tables, self.inherited = sharing.join(self)
        self.numpy_is_constant = any(table.numpy_is_constant for table in tables)

    def stop_sharing(self) -> None:
        """From now on the function shares nothing: neither programs nor what its code reads."""
        leave(self.sharing)
        self.sharing.part_from(self)
        self._join(Sharing(self._make_read_set))

    def check_sharing(self) -> None:
        """Leaves the sharing if variables were found in it that are compared for one function alone."""
        if self.sharing.is_shareable or self.reads is None:
            return
        leave(self.sharing)
        if self.sharing.has_several:  # a table that has it for itself may go on with it
            self.generation += 1
            self.clear_entries()
            self.stop_sharing()

    def _known_roots(self) -> tuple[object, ...]:
        reads = self.reads
        return (0,) if reads is None else (*(origin.what for origin in reads.names.origins), len(reads.names.hidden))

    @property
    def origins(self) -> list[Origin]:
        """The globals and captures that traced code reads: they are roots of every call.

        Entries made before a root was known do not check its value, so they are dropped when one is added.
        """
        if self.reads is None:
            return []
        roots = self._known_roots()
        if self._roots != roots:
            self._roots = roots
            self.generation += 1
            self.outgrown = list(self.entries.values())
            self.clear_entries()
        return self.reads.names.origins

    @property
    def calls(self) -> int:
        """The number of calls so far."""
        return self.hits + self.slow_hits + self.misses

    def begins_call(self) -> bool:
        """Is this the first attempt of a call that looks for an entry, and not one that has to begin anew?"""
        thread = threading.get_ident()
        # A trace that runs ahead is no call of the user's, so it is not counted either.
        begins = thread not in self.restarting and not is_ahead()
        self.restarting.discard(thread)
        return begins

    def key_of(self, outcomes: list[_core.Outcome]) -> tuple[object, ...] | None:
        """The key of the entry that owns this list of Outcomes."""
        return next((key for key, entry in list(self.entries.items()) if entry.outcomes is outcomes), None)

    def entry_of(self, outcomes: list[_core.Outcome]) -> _core.Entry | None:
        """The entry that owns this list of Outcomes."""
        return self.entries.get(self.key_of(outcomes) or ())

    def loaded_for(
        self, recording: _core.Recording, context: object, name: str, numbers: SymbolicNumbers | None = None
    ) -> Any | None:
        """The program that was loaded from a file for a structure and its numbers, if there is one."""
        return None if self.loaded is None else self.loaded.find(recording, context, name, numbers)

    def store(self, key: tuple[object, ...], entry: _core.Entry) -> _core.Entry:
        entries = self.entries.copy()  # other threads add and drop meanwhile
        # A structure with an object that is gone cannot come again.
        for dead in [k for k in entries if not k[0]._alive()]:
            self.drop(dead, IDENTITY_COLLECTED)
            del entries[dead]
        too_many = len(entries) + 1 - self.maxsize
        for oldest in sorted(entries, key=lambda k: entries[k].used)[:too_many] if too_many > 0 else ():
            self.drop(oldest, CACHE_FULL.format(size=self.maxsize))
        # Another thread may have stored one: the first remains. One that cannot compile is not for equal functions.
        stored = self.entries.setdefault(key, entry)
        if self.loaded is None or not self.loaded.runs_only(stored):
            self.sharing.add(key, stored)
        return stored

    def note_traced(self, entry: _core.Entry) -> None:
        """Hands an entry what its traces have left for it in this table."""
        for outcome in entry.outcomes:
            findings = self.findings.pop(outcome, None)
            if findings is None:
                continue
            entry.waits = entry.waits or findings.is_blocking
            entry.note_identities(findings.requested_ids)
            # An entry serves calls of all its traces, so the guards of one hold for the others, too.
            known_groups = entry.alike
            entry.alike = [*known_groups, *(groups for groups in findings.alike if groups not in known_groups)]
            if findings.numpy_leaves is not None:
                entry.numpy_leaves = findings.numpy_leaves

    def find(self, recording: _core.Recording, context: object) -> tuple[_core.Entry | None, tuple[object, ...]]:
        """(entry, key): the entry that serves this recording, or None and the key to store a new one under."""
        # Entries of one structure are numbered: they may differ in what else they depend on, such as globals.
        graphdef = recording.graphdef
        key: tuple[object, ...] = (graphdef, context)
        for number in range(1, _MAX_VARIANTS):
            entry = self.entries.get(key)
            if entry is None or entry.serves(recording):
                return entry, key
            key = (graphdef, context, number)
        # A value that is another one at each call would fill the table: begin once more with the first.
        for number in range(1, _MAX_VARIANTS):
            self.drop((graphdef, context, number), TOO_MANY_VARIANTS)
        return None, (graphdef, context, 1)

    def share(self, recording: _core.Recording, context: object, name: str) -> _core.Entry | None:
        """Takes over the entry of an equal function that serves this recording, if there is one."""
        entry = self.sharing.entry_for(recording, context)
        if entry is None:
            return None
        key = self.find(recording, context)[1]
        entry = self.store((entry.graphdef, *key[1:]), entry)
        self.slow_hits += self.begins_call()
        self.shared += 1
        compile_events.record_ready(self, entry, name, recording, "shared")
        return entry

    def has_entry_for(self, recording: _core.Recording, context: object) -> bool:
        """Is there an entry that serves it?"""
        try:
            return self.find(recording, context)[0] is not None
        except Exception:  # raised by the `__eq__` of a static value: the caller's own `find` reports it
            return True

    def drop(self, key: tuple[object, ...], reason: str = "") -> None:
        entry = self.entries.pop(key, None)
        if entry is not None:
            self.history.dropped(entry, reason)
            self.sharing.discard(entry)
            self.inherited = [other for other in self.inherited if other is not entry]
            self._forget(entry)

    def clear_entries(self, reason: str = NEW_READS_FOUND) -> None:
        self.history.all_dropped(reason)
        if self.loaded is not None:
            self.loaded.forget_unbound()
        for entry in list(self.entries.values()):
            self.sharing.discard(entry)
        self.inherited.clear()
        self.entries.clear()
        self._forget_all()

    def earlier_entries(self) -> list[_core.Entry]:
        """The entries whose program a new one may turn out to have: of this function, of equal ones, before an edit."""
        return [*self.entries.values(), *self.outgrown, *self.inherited, *self.sharing.entries(), *self.before_edit]

    def make_numpy_constant(self, recording: _core.Recording, arguments: Set[int]) -> bool:
        """From now on captured NumPy arrays, and defaults, are constants. False if they are already, or there are none.

        `arguments` are the roots that the caller passed: neither defaults nor what a bound method is bound to.
        """
        if self.numpy_is_constant or not _has_numpy(recording, set(range(len(recording.names))) - arguments):
            return False
        self.numpy_is_constant = True
        self.generation += 1
        self.clear_entries(NUMPY_IS_CONSTANT)
        return True

    def make_defaults_constant(self, recording: _core.Recording, defaults: Set[int]) -> bool:
        """Drops the entry of a call with these defaults if they are NumPy arrays: it traces arrays in their places."""
        if not _has_numpy(recording, defaults):
            return False
        for key in [key for key in self.entries if key[0] == recording.graphdef]:
            self.drop(key, NUMPY_IS_CONSTANT)
        return True

    def replace_code(self) -> None:
        """Drops all entries, because the function's `__code__` was replaced."""
        # The core binds a call again whose binding has an older generation, before and after it has found an entry.
        self.generation += 1
        self.clear_entries(CODE_REPLACED)
        self.stop_sharing()

    def clear(self) -> None:
        self.clear_entries()
        self.outgrown, self.before_edit = [], []
        self.stop_sharing()  # for a new read set, because the old one keeps classes and functions alive
        self.warned_of_captured.clear()
        self.warned_of_lost_sharing = self.has_warned = False
        self.unrepeated = IdentitySet[types.CodeType]()
        self.unrepeated_reasons.clear()
        self.history = self.history.fresh()
        self.loaded = None
        self.numpy_is_constant = False
        self.misses = self.slow_hits = self.traces = self.shared = self.disk = 0


def _has_numpy(recording: _core.Recording, roots: Set[int]) -> bool:
    """Are there NumPy arrays among the leaves of these roots?"""
    if not roots:
        return False
    places = recording.graphdef.leaf_places()
    leaves = (leaf for leaf, place in zip(recording.leaves, places, strict=True) if place[0] in roots)
    return any(isinstance(leaf, np.ndarray | np.generic) for leaf in leaves)


def read_set_factory(options: Options) -> Callable[[], ReadSet | None]:
    """A function that makes the empty read set of a function with these options."""
    if options.captured:
        return ReadSet
    return OfSymbols if options.numbers == "symbolic" else lambda: None


class _Tables:
    """The tables of a function, kept in its `__dict__`. `owner` is that function."""

    def __init__(self, owner: types.FunctionType) -> None:
        self.owner = weakref.ref(owner)
        self.tables: dict[tuple[Options, object], FunctionTable] = {}  # by the options, and what a transform was given
        self.transform_of: tuple[types.FunctionType, tuple[object, ...]] | None = None  # (source function, options)

    # The attributes of a function may be copied or pickled: the copy has no tables.

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return (types.NoneType, ())


def table_of(callable_: object, function: types.FunctionType, can_hold_table: bool, options: Options) -> FunctionTable:
    """The table of a callable, behind which is this Python function."""
    if not can_hold_table:
        func = callable_.func if type(callable_) is functools.partial else None
        if not isinstance(func, types.FunctionType):
            return FunctionTable(options)
        # What a partial holds are arguments of each call, so that all partials of a function have one table.
        return _get_or_make(_tables_of(func), (options, functools.partial), lambda: FunctionTable(options))
    # The function that a transform returns is new on each use. Its tables are found under the function it was made of.
    # With captures its closure would be part of the key, too.
    tables, key = _tables_of(function), ()
    while tables.transform_of is not None and not options.captured:
        source, transform = tables.transform_of
        tables, key = _tables_of(source), (*transform, *key)
    return _get_or_make(tables, (options, key), lambda: FunctionTable(options, function))


def _get_or_make(tables: _Tables, key: tuple[Options, object], make: Callable[[], FunctionTable]) -> FunctionTable:
    try:
        return tables.tables.get(key) or tables.tables.setdefault(key, make())
    except TypeError:  # an unhashable option
        return make()


def record_transform_of(function: types.FunctionType, source: object, *transform: object) -> None:
    """Records that a transform made `function` of `source`, with these options: equal ones share compiled code."""
    if isinstance(source, types.FunctionType):
        _tables_of(function).transform_of = source, transform


def _tables_of(function: types.FunctionType) -> _Tables:
    # `functools.update_wrapper` copies the dict: such a copy has the tables of the function that it wraps.
    tables = function.__dict__.get(_TABLES)
    if not isinstance(tables, _Tables) or tables.owner() is not function:
        tables = function.__dict__[_TABLES] = _Tables(function)
    return tables


def remove_copied_table(attributes: dict[str, object]) -> None:
    """Removes the table that `functools.update_wrapper` copied from a function to its wrapper."""
    attributes.pop(_TABLES, None)
