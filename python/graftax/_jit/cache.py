# SPDX-License-Identifier: Apache-2.0
"""What is compiled for one function: bounded, shared by every `jit` of it with equal options, gone when it goes."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from graftax import _core
from graftax._capture.impure_calls import Overheard
from graftax._capture.origin import Origin
from graftax._capture.read_set import ReadSet
from graftax._capture.read_set_numbers import OfSymbols
from graftax._explain import History
from graftax._jit.advice import Advice
from graftax._jit.number_policy import Numbers, SymbolicNumbers
from graftax._jit.options import Options

SOMETHING_GONE = "an object that it counted by identity is gone"
NO_ROOM = "more structures came than cache_size={size} keeps"
TOO_MANY_VARIANTS = "too many programs of one structure"
OTHER_CODE = "the function was given other code"
NUMPY_IS_CONSTANT = "its code asks for values of the NumPy arrays that it captures"
MORE_IS_READ = "its code was seen to read more than was known"

_MOST_VARIANTS = 64  # of one structure: bindings that changed in between, sets of another order
_TABLES = "__graftax_tables__"


class CacheInfo(NamedTuple):
    """What a function's table has seen: calls that found an entry, calls that made one, and traces."""

    hits: int
    misses: int
    maxsize: int
    currsize: int
    traces: int


class LoadedPrograms(Protocol):
    """Programs that were compiled in another process, which calls run in place of compiling their own."""

    def make_entry(self, roots: tuple[Any, ...], layout: tuple[Any, ...], context: Any) -> bool:
        """Makes the entry for a call whose structure could not be known beforehand. False: there is none."""
        ...

    def find(
        self, recording: _core.Recording, context: Any, name: str, numbers: SymbolicNumbers | None = None
    ) -> Any | None:
        """What was loaded for a structure and its numbers, as long as all that the code reads is as it was."""
        ...

    def entry(
        self, entry: _core.Entry, context: Any, arguments: int, found: Any, numbers: SymbolicNumbers | None
    ) -> _core.Entry:
        """The entry that runs what `find` gave; what it has no program for, it compiles as `entry` would."""
        ...

    def runs_only(self, entry: _core.Entry) -> bool:
        """Can this entry run the loaded programs and do nothing else? A structure that needs more gets another one."""
        ...

    def forget_unbound(self) -> None:
        """Drops what `make_entry` would make entries of."""
        ...


class FunctionTable(_core.Table):
    """The entries of one function under one set of options: bounded, the least recently used goes first."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.maxsize = options.cache_size
        self.entries: dict[tuple[Any, ...], _core.Entry] = {}
        self.advice = Advice()
        self.history = History()
        self.loaded: LoadedPrograms | None = None  # what `load_compiled` has taken from a file
        self.frozen = False  # a call that would compile raises instead
        self.numpy_is_constant = False  # of captured arrays: the code asks for their values
        self.untied = False  # a warning that shared arrays come back apart was given
        self.numbers = Numbers()
        self._makes_reads = reads_of(options)
        self.reads = self._makes_reads()
        self.heard = Overheard()
        named = bool(options.static or options.dynamic) and options.mutation != "propagate"
        self.as_plain = options.captured and not options.shards and not named
        self.misses = self.found = self.traces = 0
        self.asked: dict[int, dict[int, int]] = {}  # ids that a trace asked for, by that of its Outcome
        self.waiting: set[int] = set()  # the Outcomes of traces with errors of a library in them, by their ids
        self.made: weakref.ref[Any] | None = None  # the first jitted function of it that is alive: a pickle's
        self._roots: tuple[Any, ...] = (0,)  # which origins are roots of its entries, and how many variables are none

    @property
    def origins(self) -> list[Origin]:
        """The roots that code under its traces reads. Entries with fewer do not know what the new ones hold, and go."""
        if self.reads is None:
            return []
        roots = *(origin.what for origin in self.reads.origins), len(self.reads.hidden)
        if self._roots != roots:
            self._roots = roots
            self.generation += 1
            self.clear_entries()
        return self.reads.origins

    @property
    def calls(self) -> int:
        """How many there were."""
        return self.hits + self.found + self.misses

    def entry_of(self, outcomes: list[_core.Outcome]) -> _core.Entry | None:
        """The entry that has these Outcomes."""
        return next((entry for entry in list(self.entries.values()) if entry.outcomes is outcomes), None)

    def loaded_for(
        self, recording: _core.Recording, context: Any, name: str, numbers: SymbolicNumbers | None = None
    ) -> Any | None:
        """What was loaded from a file for a structure and its numbers."""
        return None if self.loaded is None else self.loaded.find(recording, context, name, numbers)

    def store(self, key: tuple[Any, ...], entry: _core.Entry) -> _core.Entry:
        known = self.entries.copy()  # other threads add and drop meanwhile
        for dead in [k for k in known if not k[0]._alive()]:
            self.drop(dead, SOMETHING_GONE)
            del known[dead]
        too_many = len(known) + 1 - self.maxsize
        for oldest in sorted(known, key=lambda k: known[k].used)[:too_many] if too_many > 0 else ():
            self.drop(oldest, NO_ROOM.format(size=self.maxsize))
        return self.entries.setdefault(key, entry)

    def find(self, recording: _core.Recording, context: Any) -> tuple[_core.Entry | None, tuple[Any, ...]]:
        """The entry that serves a structure with the bindings of now, and where it stands, or one would."""
        graphdef = recording.graphdef
        key: tuple[Any, ...] = (graphdef, context)
        for number in range(1, _MOST_VARIANTS):
            entry = self.entries.get(key)
            if entry is None or entry.serves(recording):
                return entry, key
            key = (graphdef, context, number)
        for number in range(1, _MOST_VARIANTS):
            self.drop((graphdef, context, number), TOO_MANY_VARIANTS)
        return None, (graphdef, context, 1)

    def knows(self, recording: _core.Recording, context: Any) -> bool:
        """Is there an entry that serves it? An error of a static's own `__eq__` is for `find` to raise."""
        try:
            return self.find(recording, context)[0] is not None
        except Exception:
            return True

    def drop(self, key: tuple[Any, ...], why: str = "") -> None:
        entry = self.entries.pop(key, None)
        if entry is not None:
            self.history.dropped(entry, why)
            self._forget(entry)

    def clear_entries(self, why: str = MORE_IS_READ) -> None:
        self.history.all_dropped(why)
        if self.loaded is not None:
            self.loaded.forget_unbound()
        self.entries.clear()
        self._forget_all()

    def make_numpy_constant(self, recording: _core.Recording, arguments: int) -> bool:
        """From now on captured NumPy arrays are constants of a program. False: they are, or there are none."""
        if self.numpy_is_constant or len(recording.names) <= arguments:
            return False
        places = recording.graphdef.leaf_places()
        captured = (leaf for leaf, place in zip(recording.leaves, places, strict=True) if place[0] >= arguments)
        if not any(isinstance(leaf, np.ndarray | np.generic) for leaf in captured):
            return False
        self.numpy_is_constant = True
        self.generation += 1
        self.clear_entries(NUMPY_IS_CONSTANT)
        return True

    def replace_code(self) -> None:
        """The function has other code: no entry is one of it."""
        self.generation += 1
        self.clear_entries(OTHER_CODE)

    def clear(self) -> None:
        self.clear_entries()
        self.reads = self._makes_reads()  # it holds classes and functions
        self.advice, self.untied = Advice(), False
        self.history = self.history.anew()
        self.loaded = None
        self.numpy_is_constant = False
        self.numbers = Numbers()
        self.misses = self.found = self.traces = 0


def reads_of(options: Options) -> Callable[[], ReadSet | None]:
    """What makes the read set of a function with these options."""
    if options.captured:
        return ReadSet
    return OfSymbols if options.numbers == "symbolic" else lambda: None


class _Tables:
    """What hangs on a function. `owner` tells it from one that `functools.update_wrapper` copied."""

    def __init__(self, owner: types.FunctionType) -> None:
        self.owner = weakref.ref(owner)
        self.tables: dict[tuple[Options, tuple[Any, ...]], FunctionTable] = {}
        self.made: tuple[types.FunctionType, tuple[Any, ...]] | None = None  # what it is made of, and how

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return (types.NoneType, ())


def table_of(function: types.FunctionType, may_hang: bool, options: Options) -> FunctionTable:
    if not may_hang:
        return FunctionTable(options)
    tables, key = _tables_of(function), ()
    while tables.made is not None and not options.captured:  # what it captures is no part of the key
        of, by = tables.made
        tables, key = _tables_of(of), (*by, *key)
    try:
        return tables.tables.setdefault((options, key), FunctionTable(options))
    except TypeError:  # an option that does not hash
        return FunctionTable(options)


def note_made(function: types.FunctionType, of: Any, *by: Any) -> None:
    """Says what a transform made a function of, and with which options: where these are equal, so is what they do."""
    if isinstance(of, types.FunctionType):
        _tables_of(function).made = of, by


def _tables_of(function: types.FunctionType) -> _Tables:
    tables = function.__dict__.get(_TABLES)
    if not isinstance(tables, _Tables) or tables.owner() is not function:
        tables = function.__dict__[_TABLES] = _Tables(function)
    return tables


def without_table(attributes: dict[str, Any]) -> None:
    """Takes a table away that `functools.update_wrapper` copied from a function to its wrapper."""
    attributes.pop(_TABLES, None)
