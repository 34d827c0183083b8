# SPDX-License-Identifier: Apache-2.0
"""Which Python numbers of a call are symbolic: those that were seen to change while everything else stayed the same."""

from __future__ import annotations

import collections
import copy
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graftax import _core
from graftax._capture.caches_after_traces import keeping_cached
from graftax._capture.caught_errors import catching
from graftax._capture.counters import find_counters, name_of
from graftax._capture.number_flow import Name, Variable
from graftax._capture.numbers.host_program import HostProgram
from graftax._capture.numbers.symbols import SymbolTrace, is_symbol
from graftax._capture.read_names import Variables
from graftax._capture.read_set import ReadSet
from graftax._capture.retrace_signals import NewReads
from graftax._capture.traces_ahead import is_ahead
from graftax._graph.patterns import Pattern, coverage_test
from graftax._graph.structure import Op, RootPath, Structure, place_name

if TYPE_CHECKING:
    from graftax._jit.cache import FunctionTable

_LOCK = threading.RLock()
_MOST_FAMILIES = 64  # of one function
_MOST_COMPARED = 4  # families, for numbers that changed together with the structure
_MOST_RETRACED = 8  # families whose first trace may begin anew: later ones are of structures that keep changing
_MOST_PINS = 4  # variants for single values of one number, before it is static again

Number = int | float
NumberRules = Sequence[tuple[Pattern, bool]]  # (what it covers, whether numbers there are symbolic)


class Family:
    """Structures of one function that differ in Python numbers alone.

    A number is identified by its index among the numbers of the structure. At first all are static. A number with
    another value than its first one is symbolic from then on, unless it has turned out that it cannot be.
    """

    def __init__(self, values: tuple[Number, ...]) -> None:
        self._first = self._latest = values
        self.names: tuple[str, ...] = ()  # their key paths
        self._symbolic: set[int] = set()  # known to change; less what is in `_static`
        self._static: set[int] = set()  # for good
        self._failed: tuple[Number, ...] | None = None  # a trace with symbols has raised for these
        self._pins: collections.Counter[int] = collections.Counter()
        self._suspected: list[int] = []  # may be counters: what the first trace returns will tell
        self._has_run = False
        self._changed: list[str] = []  # names of those for which the call has begun anew
        self.capacity: dict[type, int] = {}  # how long the vectors from the host have to be, where that was too little

    def symbolic(self, values: tuple[Number, ...]) -> list[int]:
        """Which of these numbers are symbolic in a call that has them."""
        for i, (value, first) in enumerate(zip(values, self._first, strict=True)):
            if not same(value, first):
                self._symbolic.add(i)
        self._latest = values
        # A static trace for the same values: if that raises as well, the symbols are not the cause.
        if self._failed is not None and all(map(same, values, self._failed)):
            return []
        return sorted(self._symbolic - self._static)

    def expect(self, numbers: Iterable[int]) -> None:
        """These are known to change, from what happened before or outside of these structures."""
        self._symbolic.update(numbers)

    @property
    def is_new(self) -> bool:
        """Has no trace of these structures ended?"""
        return not self._has_run

    def suspect(self, numbers: list[int]) -> None:
        """Code may assign these. Whether they are symbolic is decided when a trace without symbols has ended."""
        self._suspected = numbers

    def has_run(self, changed: Collection[str], results: Sequence[Number]) -> bool:
        """The first trace has ended. Does it have to begin anew, with symbols?

        Args:
            changed: the names of the numbers that it has given other values.
            results: the numbers that it has come to.
        """
        if self._has_run:
            return False
        self._has_run = True
        numbers = {i for i, name in enumerate(self.names) if name in changed}
        # A suspected counter counts if the results have another number of its type, which may be its next value.
        for i in self._suspected:
            value = self._latest[i]
            if any(type(result) is type(value) and not same(result, value) for result in results):
                numbers.add(i)
        is_new = not numbers <= self._symbolic | self._static and self._failed is None
        self.expect(numbers)
        self._changed = [self.names[i] for i in sorted(numbers - self._static)] if is_new else []
        return is_new

    def take_changed(self) -> list[str]:
        """The names of the numbers for which this call has begun anew."""
        names, self._changed = self._changed, []
        return names

    def changes(self) -> Iterator[tuple[str, Number, bool]]:
        """(name, latest value, whether it is known to change) of each number that a symbol may stand for."""
        for i, (name, value) in enumerate(zip(self.names, self._latest, strict=False)):
            if i not in self._static and not self._pins[i]:
                yield name, value, i in self._symbolic

    def direction(self, number: int) -> int:
        """Is the latest value of a number above the first (1), below (-1), or neither?"""
        first, latest = self._first[number], self._latest[number]
        return (latest > first) - (latest < first)

    def forgetting(self) -> Callable[[], None]:
        """A function that forgets all that is learnt from now on."""
        # A trace that runs ahead has assumed its numbers: what goes wrong with them says nothing of real calls.
        before = copy.deepcopy(vars(self))
        return lambda: vars(self).update(before)

    def make_static(self, numbers: Sequence[int]) -> None:
        self._static.update(numbers)

    def fail(self, values: tuple[Number, ...]) -> None:
        """A trace with symbols has raised for these values. A static one will tell whether symbols are the cause."""
        self._failed = values

    def settle(self) -> None:
        """A static trace has succeeded: if one with symbols has failed before, there will be no other with them."""
        if self._failed is not None:
            self.make_static(list(self._symbolic))
            self._failed = None

    def pin(self, numbers: Sequence[int]) -> None:
        """A variant was made for single values of these numbers."""
        self._pins.update(numbers)
        self.make_static([number for number in numbers if self._pins[number] >= _MOST_PINS])


def same(number: Number, other: Number) -> bool:
    """Are they one number to a program? A nan is, and 0.0 and -0.0 are not."""
    return number is other or repr(number) == repr(other)


class Numbers:
    """The families of one function's table."""

    def __init__(self) -> None:
        self._families: collections.OrderedDict[tuple[object, ...], Family] = collections.OrderedDict()
        self._recent: tuple[Family, ...] = ()  # the last ones, without their keys: comparing these runs the user's code
        self._expected: set[frozenset[str]] = set()  # places of numbers that were symbolic in another process

    def expect(self, places: frozenset[str]) -> None:
        """Numbers in these places are symbolic from the start, where a structure has all of them."""
        if places:
            self._expected.add(places)

    @property
    def expects(self) -> bool:
        return bool(self._expected)

    def would_be_symbolic(
        self, recording: _core.Recording, rules: NumberRules, function: types.FunctionType | None
    ) -> SymbolicNumbers | None:
        """What `symbolic` would return for a call that is not made. Nothing is learnt from it."""
        key = self._key(recording, None)
        with _LOCK:  # of any trace context: the second part of the key
            families = [family for other, family in self._families.items() if other[::2] == key[::2]]
        # What a family learns changes it, so the question is put to a copy.
        scratch = Numbers()
        scratch._expected = self._expected
        if families:
            scratch._families[key] = copy.deepcopy(families[-1])
        else:
            scratch._recent = copy.deepcopy(self._recent)
        return scratch.symbolic(recording, None, rules=rules, function=function)

    @staticmethod
    def _key(recording: _core.Recording, context: object) -> tuple[object, ...]:
        graphdef = recording.graphdef
        return graphdef.without_numbers(), context, tuple(type(value) for _, value in graphdef.numbers())

    def symbolic(
        self,
        recording: _core.Recording,
        context: object,
        changing: Mapping[int, frozenset[Variables]] = types.MappingProxyType({}),
        fixed: Collection[int] = (),
        rules: NumberRules = (),
        function: types.FunctionType | None = None,
    ) -> SymbolicNumbers | None:
        """The numbers that are symbolic in a call of this structure, which has no static entry; None if none is.

        Args:
            changing: roots that have changed: numbers, and functions with the variables that have.
            fixed: roots that a trace has as they are, and not as copies.
            rules: the option `numbers=`; the first rule that covers a number decides.
            function: its counters are symbolic from the first call on.
        """
        numbers = recording.graphdef.numbers()
        if not numbers:
            return None
        number_rows, values = [row for row, _ in numbers], tuple(value for _, value in numbers)
        family = self.family_of(recording, context, rules, function)
        if changing:
            family.expect(_changed(Structure(recording.graphdef), changing, number_rows))
        if fixed:
            family.make_static(_numbers_of(Structure(recording.graphdef), fixed, number_rows))
        chosen = family.symbolic(values)
        if not chosen:
            return None
        # An equal immutable value, such as a tuple, is recorded once: a symbol in it would be in all of its places.
        structure = Structure(recording.graphdef)
        repeated = [structure.target(row) for row in structure.rows if row.op is Op.same]
        rows = {i: number_rows[i] for i in chosen}
        in_two_places = [i for i, row in rows.items() if any(r.number <= row < r.end for r in repeated)]
        family.make_static(in_two_places)
        places = {structure.root_path(structure.rows[row]): i for i, row in rows.items() if i not in in_two_places}
        return SymbolicNumbers(family, places, values) if places else None

    def is_new(self, recording: _core.Recording, context: object) -> bool:
        """Has no call of this structure been traced, and not too many of others?"""
        with _LOCK:
            family = self._families.get(self._key(recording, context))
            ended = sum(not family.is_new for family in self._families.values())
        return (family is None or family.is_new) and ended < _MOST_RETRACED

    def family_of(
        self, recording: _core.Recording, context: object, rules: NumberRules, function: types.FunctionType | None
    ) -> Family:
        """The family of a call. If no call had this structure before, it is new, and learns what is known already."""
        numbers = recording.graphdef.numbers()
        key, values = self._key(recording, context), tuple(value for _, value in numbers)
        with _LOCK:  # keys compare objects of the user's, whose code may let another thread in
            family = self._families.get(key)
            is_new = family is None
            if family is None:
                family = self._families[key] = Family(values)
                while len(self._families) > _MOST_FAMILIES:
                    self._families.popitem(last=False)
            self._families.move_to_end(key)
            earlier = [recent for recent in self._recent if recent is not family]
            self._recent = (*earlier[-_MOST_COMPARED:], family)
        if not is_new:
            return family
        structure = Structure(recording.graphdef)
        rows = [structure.rows[row] for row, _ in numbers]
        paths = list(map(structure.root_path, rows))
        family.names = tuple(place_name(path, recording.names) for path in paths)
        family.expect(self._seen_elsewhere(family.names))
        family.expect(self._changed_since(family, values))
        if function is not None:
            counters, is_plain = _counters(structure, rows, family.names, function)
            (family.expect if is_plain else family.suspect)(counters)
        chosen_by_rules = list(_choose(rules, paths, recording.names))
        family.expect(i for i, is_symbolic in enumerate(chosen_by_rules) if is_symbolic)
        family.make_static([i for i, is_symbolic in enumerate(chosen_by_rules) if is_symbolic is False])
        return family

    def _seen_elsewhere(self, names: Sequence[str]) -> list[int]:
        fitting = [places for places in self._expected if places <= set(names)]
        expected = max(fitting, key=len, default=frozenset[str]())
        return [i for i, name in enumerate(names) if name in expected]

    def _changed_since(self, family: Family, values: tuple[Number, ...]) -> list[int]:
        """What has another value than in the structure before, as a counter has while its object is set up."""
        earlier_values: dict[str, tuple[Number, bool]] = {}
        for earlier in [recent for recent in self._recent if recent is not family]:
            earlier_values.update({name: (value, changes) for name, value, changes in earlier.changes()})
        changed: list[int] = []
        for i, (name, value) in enumerate(zip(family.names, values, strict=True)):
            earlier_value, changes = earlier_values.get(name, (None, False))
            if type(earlier_value) is not type(value) or earlier_value is None:
                continue
            if changes or not same(earlier_value, value):
                changed.append(i)
        return changed

    def settle(self) -> None:
        for family in self._recent[-1:]:
            family.settle()


def _name(structure: Structure, row: _core.Row, path: str) -> Name | None:
    """The name under which code may assign the number in a row; None if it cannot."""
    if row.parent < 0:
        return Variable(path)  # a parameter
    if structure.rows[row.parent].type is types.CellType:
        return Variable(path.removeprefix("closure "))
    return name_of(row.key_entry)


def _changed(
    structure: Structure, changing: Mapping[int, frozenset[Variables]], numbers: Sequence[int]
) -> Iterator[int]:
    """Which of these rows are such roots, or the content of such variables."""
    roots = {
        root.number: {(), *(tuple(f"__closure__[{name!r}]" for name in variables) for variables in changing[i])}
        for i, root in enumerate(structure.roots)
        if i in changing
    }
    for i, number in enumerate(numbers):
        # Upwards from the number, through cells and the functions that have them, to one of the roots.
        holder, variables = number, tuple[str, ...]()
        while holder >= 0 and holder not in roots and (cell := structure.rows[holder].parent) >= 0:
            variables = (getattr(structure.rows[cell].key_entry, "name", ""), *variables)
            holder = structure.rows[cell].parent
        if variables in roots.get(holder, ()):
            yield i


def _counters(
    structure: Structure, rows: Sequence[_core.Row], paths: Sequence[str], function: types.FunctionType
) -> tuple[list[int], bool]:
    """Which of the numbers in these rows are counters, and whether the first call takes them as symbols."""
    names = [_name(structure, row, path) for row, path in zip(rows, paths, strict=True)]
    if all(name is None for name in names):
        return [], True
    classes_and_functions = {
        row.value if row.type is types.FunctionType else row.type for row in structure.rows if row.type is not None
    }
    types_around = [structure.rows[row.parent].type if row.parent >= 0 else None for row in rows]
    pairs = [(name, cls) for name, cls in zip(names, types_around, strict=True) if name is not None]
    tallied = {name for name, cls in pairs if cls is collections.Counter}
    counters, is_plain = find_counters({name for name, _ in pairs}, function, classes_and_functions, tallied)
    return [i for i, name in enumerate(names) if name in counters], is_plain


def _choose(rules: NumberRules, paths: Sequence[RootPath], names: Sequence[str]) -> Iterator[bool | None]:
    """For each path whether the rules make the number there symbolic; None if they say nothing about it."""
    tests = [(coverage_test([pattern], names), is_symbolic) for pattern, is_symbolic in rules]
    for path in paths:
        yield next((is_symbolic for covers, is_symbolic in tests if covers is not None and covers(path)), None)


def _numbers_of(structure: Structure, roots: Collection[int], numbers: Sequence[int]) -> list[int]:
    """Which of these rows are below the roots; all, if a root leads to an object that another root has, too."""
    root_rows = [row for i, row in enumerate(structure.roots) if i in roots]
    for row in structure.rows:
        holder = next((root for root in root_rows if root.number <= row.number < root.end), None)
        if holder is not None and row.op is Op.ref and not holder.number <= structure.target(row).number < holder.end:
            return list(range(len(numbers)))
    return [i for i, n in enumerate(numbers) if any(root.number <= n < root.end for root in root_rows)]


class NotSymbolic(NewReads):
    """Raised out of a trace with symbols: the call begins anew, without them or with more room for them."""


class SymbolicNumbers:
    """The symbolic numbers of one entry.

    Args:
        family: the family of the call.
        places: the places of the symbolic numbers, with the index of each in the family.
        values: the values of all numbers in the call that it is made for.
    """

    def __init__(self, family: Family, places: dict[RootPath, int], values: tuple[Number, ...]) -> None:
        self.places = places
        self.family, self._values = family, values
        self._forget: Callable[[], None] = lambda: None  # drops the entry, once it is stored
        # One item for each symbol, in the same order: its index in the family, its leaf, its place.
        self._numbers: list[int] = []
        self.leaves: list[int] = []
        self.paths: list[RootPath] = []
        self.assumed = frozenset[int]()  # which of them have values that no call has, in a trace that runs ahead

    def found_in(self, recording: _core.Recording) -> bool:
        """Finds the leaves of the symbolic numbers in a recording that has them. False if one cannot be a leaf."""
        structure = Structure(recording.graphdef)
        self.leaves, self.paths, self._numbers = [], [], []
        for row in structure.leaves:
            path = structure.root_path(row) if row.is_number else None
            number = self.places.get(path) if path is not None else None
            if path is not None and number is not None:
                self.leaves.append(row.leaf)
                self.paths.append(path)
                self._numbers.append(number)
        left_out = set(self.places.values()) - set(self._numbers)
        self.family.make_static(sorted(left_out))
        return not left_out

    @property
    def directions(self) -> list[int]:
        """For each symbol: does the number grow (1), shrink (-1), or neither, as far as is known?"""
        return [self.family.direction(number) for number in self._numbers]

    def refuse(self) -> None:
        """From now on these numbers are static: the objects that hold them cannot be rebuilt around symbols."""
        self.family.make_static(list(self.places.values()))

    def begin(self) -> HostProgram:
        kinds = tuple(type(self._values[number]) for number in self._numbers)
        self.program = HostProgram(kinds, self.family.capacity)
        self.program.leaves = self.leaves
        self.program.give_up = self._fail
        return self.program

    def _fail(self, error: BaseException | None) -> None:
        """Begins the call anew without symbols: tracing or compiling with them has raised, or code caught an error."""
        self.family.fail(self._values)
        self._forget()
        raise NotSymbolic from error

    def _retry_without(self, symbols: Collection[int]) -> None:
        """Begins the call anew with plain numbers in place of these symbols, if there are any."""
        if symbols:
            self.family.make_static([self._numbers[symbol] for symbol in symbols])
            self._forget()
            raise NotSymbolic

    def resume(self, program: HostProgram) -> None:
        """Goes on with the host program of the entry, which another call or another process has made."""
        self.program = program

    def inputs_for(self, leaves: Sequence[object]) -> list[object]:
        """The inputs of an executable for such leaves, without the values: a number is 0, and the vectors are empty."""
        vectors = self.program.vectors((), ())
        return [*(np.int32(0) if i in self.leaves else leaf for i, leaf in enumerate(leaves)), *vectors]

    def stored(self, table: FunctionTable, key: tuple[object, ...]) -> None:
        """The entry is stored in this table: if its trace fails, it is dropped from there."""
        table_reference = weakref.ref(table)  # the table owns the entry, which owns this

        def forget() -> None:
            live_table = table_reference()
            if live_table is not None:
                live_table.sharing.forget(live_table.entries.get(key))

        self._forget = forget

    @keeping_cached
    def run(
        self,
        reads: ReadSet,
        recording: _core.Recording,
        leaves: Sequence[Any],
        computed: tuple[Any, ...] | None,
        trace: Callable[[list[Any]], tuple[_core.Outcome, list[Any]]],
    ) -> tuple[_core.Outcome, list[Any]]:
        """Traces with symbols in place of the numbers. The Outcome knows which output leaves are numbers.

        Raises:
            NotSymbolic: if the trace raises, or if it needs longer vectors of numbers from the host than it has.
        """
        inputs, vectors = list(leaves[:-2]), {int: leaves[-2], float: leaves[-1]}
        values = [recording.leaves[leaf] for leaf in self.leaves]
        arrays = None if computed is None else {int: computed[0], float: computed[1]}
        assumed = self.assumed if is_ahead() else frozenset[int]()
        symbols = SymbolTrace(self.program, values, vectors, arrays, reads, assumed)
        # They are taken out one by one, so that nothing here holds one when the trace ends.
        while symbols.roots:
            symbol = symbols.roots.pop()
            inputs[self.leaves[len(symbols.roots)]] = symbol
            del symbol
        try:
            with catching() as caught:
                outcome, outputs = trace(inputs)
            self._retry_without(symbols.refused)
            if caught.is_suspect:  # a handler of the code may have run because of a symbol
                self._fail(None)
            # The host computes the symbols among the results, so they are not outputs of the program.
            outcome.numbers = [
                (leaf, self.program.output(symbols.node(value)))
                for leaf, value in enumerate(outputs)
                if is_symbol(value)
            ]
            outputs = [value for value in outputs if not is_symbol(value)]
            # `close` finds out which objects still hold a symbol: this list is none of the user's.
            inputs.clear()
            self._retry_without(symbols.close())
        except NewReads:
            if not reads.builtins.tells_types:  # the code takes no symbols, as is known now
                self._forget()
            raise
        except Exception as error:
            self._retry_without(symbols.refused)
            self._fail(error)
            raise
        finally:
            inputs.clear()
            symbols.end()
        if symbols.lacks:
            for kind in symbols.lacks:  # twice as many as were needed this time
                self.family.capacity[kind] = 2 * len(self.program.inputs[kind])
            self._forget()
            raise NotSymbolic
        self.family.pin([self._numbers[symbol] for symbol in self.program.pinned()])
        return outcome, outputs
