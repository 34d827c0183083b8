# SPDX-License-Identifier: Apache-2.0
"""Aliases among computed arrays: `ema`, `map_leaves`, `cast` and `stack` turn one array at several paths into one.

A trace has a tracer for each input leaf, even where a call passes the same array for several. So an operation that
runs once for each array runs once for each tracer, and its results are different tracers. What they were computed
from is recorded. The Outcome of the trace then knows which results are one array if the inputs of a call are.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core

from graftax._jax.traces import current_trace, is_of_trace

_ACTIVE = threading.local()  # .recorders: those of the running traces, the outermost first


class Source(NamedTuple):
    """What an array was computed from. Two arrays of the same operation are one array if their inputs are."""

    operation: Hashable
    inputs: tuple[int, ...]  # input leaves of the trace, by number
    order: int  # in which the arrays of a trace were computed


class Computed(NamedTuple):
    """An array that was computed in a recorded trace, and is not one of its inputs."""

    array: Any


class AliasRecorder:
    """Records how the arrays of one trace were computed.

    Args:
        trace: the trace of JAX in which it runs.
        caller_leaves: the caller's arrays that the input leaves stand for.
        leaves: the input leaves of the trace.
    """

    def __init__(self, trace: Any, caller_leaves: Sequence[Any], leaves: Sequence[Any]) -> None:
        self.trace = trace
        self._caller_leaves, self._leaves = caller_leaves, leaves
        self._records: dict[int, tuple[int, Any, Hashable, tuple[Any, ...]]] = {}
        # Groups of input leaves that code of the trace has found to be one array. What it did holds only for calls in
        # which they are.
        self.alike: list[list[list[int]]] = []

    def record(self, array: object, operation: Hashable, operands: tuple[object, ...]) -> None:
        # The array is kept in the record, so that its id is not reused.
        self._records.setdefault(id(array), (len(self._records), array, operation, operands))

    def extend(self, caller_leaves: Sequence[object], leaves: Sequence[object]) -> None:
        """Takes the leaves of a trace that has got more of them while it runs: these are all of them."""
        self._caller_leaves, self._leaves = caller_leaves, leaves

    def close(self, enclosing: AliasRecorder | None) -> None:
        """Ends the recording. The enclosing recorder takes over the records if both run in the same trace of JAX."""
        # The step of a loop is traced by itself, but may be part of the same trace of JAX.
        if enclosing is not None and enclosing.trace is self.trace:
            for _, array, operation, operands in self._records.values():
                enclosing.record(array, operation, operands)
        self.trace, self._caller_leaves, self._leaves = None, (), ()
        self._records.clear()

    def caller_values(self, values: Sequence[object]) -> list[Any]:
        """The caller's array for each value that is an input leaf; any other value as it is."""
        by_id = {id(leaf): value for leaf, value in zip(self._leaves, self._caller_leaves, strict=False)}
        return [by_id.get(id(value), value) for value in values]

    def identities(self, values: Sequence[object], is_outermost: bool) -> list[Any]:
        """What identifies each value: for an input leaf the caller's array, for a new array `Computed`, or None.

        None is for the result of a recorded operation: whether it is another array depends on the operands of a call.

        Args:
            values: arrays of this trace or of others.
            is_outermost: no enclosing recorder has the same trace of JAX, whose input leaves they could be.
        """
        by_id = {id(leaf): value for leaf, value in zip(self._leaves, self._caller_leaves, strict=False)}

        def identity(value: object) -> Any:
            if id(value) in by_id:
                return by_id[id(value)]
            if id(value) in self._records:
                return None
            return Computed(value) if is_outermost and is_of_trace(value, self.trace) else value

        return [identity(value) for value in values]

    def note_alike(self, values: Sequence[object], keys: Sequence[object]) -> None:
        """Notes which input leaves among these values are one array: those with equal keys."""
        numbers = {id(leaf): i for i, leaf in enumerate(self._leaves)}
        groups: dict[Any, list[int]] = defaultdict(list)
        for value, key in zip(values, keys, strict=True):
            if id(value) in numbers and key is not None:
                groups[key].append(numbers[id(value)])
        if sum(map(len, groups.values())) > 1 and list(groups.values()) not in self.alike:
            self.alike.append(list(groups.values()))

    def sources(self, values: Sequence[object]) -> list[Source | None]:
        """What each value was computed from; None where nothing was recorded."""
        if not self._records:
            return [None] * len(values)
        # Tracers are identified by id while the recorder keeps them alive.
        numbers = {id(leaf): i for i, leaf in enumerate(self._leaves)}
        end = len(self._records)
        return [self._source(value, numbers, end) if id(value) in self._records else None for value in values]

    def _source(self, value: object, numbers: dict[int, int], end: int) -> Source:
        """What a value was computed from by the operations before number `end`."""
        number, record = numbers.get(id(value)), self._records.get(id(value))
        if number is not None:  # an input leaf: the beginning of a chain of operations
            return Source("input", (number,), 0)
        # Neither an input nor recorded: the array is a source of its own. So is an operand that is recorded as a result
        # only later: a function that swaps two arrays returns each of them for the other. An array that a nested call
        # has used before it was recorded loses its chain, too.
        if record is None or record[0] >= end:
            return Source(id(value), (), 0)
        order, array, operation, operands = record
        parts = [self._source(operand, numbers, order) for operand in operands]
        # The aval is part of it: results of different dtypes or shapes are never aliases.
        operations = (operation, jax.typeof(array), *(part.operation for part in parts))
        return Source(operations, tuple(i for part in parts for i in part.inputs), order)


@contextlib.contextmanager
def recording_aliases(caller_leaves: Sequence[object], leaves: Sequence[object]) -> Generator[AliasRecorder]:
    """Records, while a trace runs, how arrays are computed in it."""
    enclosing, recorder = getattr(_ACTIVE, "recorders", ()), AliasRecorder(current_trace(), caller_leaves, leaves)
    _ACTIVE.recorders = (*enclosing, recorder)
    try:
        yield recorder
    finally:
        _ACTIVE.recorders = enclosing
        recorder.close(enclosing[-1] if enclosing else None)


def record_alias_sources(pairs: Iterable[tuple[tuple[object, ...], object]]) -> None:
    """Records (operands, result) pairs of one operation, whose results are one array where the operands are."""
    recorders = getattr(_ACTIVE, "recorders", ())
    if recorders:
        operation = object()
        for operands, value in pairs:
            # A result that is one of the operands is an array that has a source already.
            if isinstance(value, jax.Array) and all(value is not operand for operand in operands):
                recorders[-1].record(value, operation, operands)


def apply_once(
    function: Callable[[int, tuple[Any, ...]], Any], operands: Iterable[tuple[int, tuple[object, ...]]]
) -> dict[int, Any]:
    """The results of `function(number, values)` by number, with one call for each tuple of the same objects.

    So an array at two paths stays one. In a trace it may have two tracers: what is computed from them is recorded.
    """
    calls: dict[tuple[int, ...], tuple[tuple[Any, ...], Any]] = {}
    results: dict[int, Any] = {}
    for number, values in operands:
        identity = tuple(map(id, values))
        if identity not in calls:
            calls[identity] = values, function(number, values)
        results[number] = calls[identity][1]
    record_alias_sources(calls.values())
    return results


def caller_values(values: Sequence[object]) -> list[Any]:
    """The values outside of all running traces that these stand for; a value computed in a trace stays as it is."""
    # From the innermost trace outward: the leaves of one trace are the caller's values of the next.
    for recorder in reversed(getattr(_ACTIVE, "recorders", ())):
        values = recorder.caller_values(values)
    return list(values)


def array_identities(values: Sequence[object]) -> list[Any]:
    """A key for each array: the same one if both are one array outside of all traces; None where that is unknown."""
    # From the innermost trace outward, as in `caller_values`, and noting for each trace what its values were.
    identities, recorders = list(values), getattr(_ACTIVE, "recorders", ())
    inputs: list[tuple[AliasRecorder, list[Any]]] = []
    for i in reversed(range(len(recorders))):
        inputs.append((recorders[i], identities))
        is_outermost = i == 0 or recorders[i - 1].trace is not recorders[i].trace
        identities = recorders[i].identities(identities, is_outermost)
    keys = [
        None if value is None or isinstance(value, jax.core.Tracer) else id(getattr(value, "array", value))
        for value in identities
    ]
    # What code does next may depend on the answer, so each trace notes which of its inputs the answer was about.
    for recorder, its_values in inputs:
        recorder.note_alike(its_values, keys)
    return keys


def alias_groups(sources: Sequence[Source | None]) -> list[list[tuple[int, list[int]]]]:
    """Groups of values that are one array if their inputs are: (number of the value, its inputs), as in an Outcome."""
    members_of_operation: dict[Hashable, list[tuple[int, int, list[int]]]] = defaultdict(list)
    for number, source in enumerate(sources):
        if source is not None and source.inputs:
            members_of_operation[source.operation].append((source.order, number, list(source.inputs)))
    # A value without another one of the same operation can never be an alias.
    groups = (sorted(members) for members in members_of_operation.values() if len(members) > 1)
    return [[(number, inputs) for _, number, inputs in members] for members in groups]


def merge_aliases(computed: Iterable[tuple[Hashable, tuple[object, ...], object]]) -> list[Any]:
    """The values of (operation, operands, value) triples, a single one for the same operation on the same operands.

    All are recorded: where a call passes one array for different operands, their values are merged by that call.
    """
    shared_values: dict[Hashable, Any] = {}
    pairs_of_operation: dict[Hashable, list[tuple[tuple[Any, ...], Any]]] = defaultdict(list)
    values: list[Any] = []
    for operation, operands, value in computed:
        value = shared_values.setdefault((operation, *map(id, operands)), value)
        pairs_of_operation[operation].append((operands, value))
        values.append(value)
    for pairs in pairs_of_operation.values():
        record_alias_sources(pairs)
    return values
