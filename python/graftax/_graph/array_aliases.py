# SPDX-License-Identifier: Apache-2.0
"""Arrays that are one where those are that they were made of: `ema`, `map_leaves` and `cast` make one for all places.

In a trace each place of an array has a tracer of its own, and so a result of its own. What it was made of is noted.
When the trace ends, its Outcome is told which of its arrays are one where a call is given one array for several inputs.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Generator, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from graftax._jax.compat import current_trace

_RUNNING = threading.local()  # .ties: of the traces that run, the outermost first


class Source(NamedTuple):
    """What an array was made of. Two of one `way` are one array where their inputs are."""

    way: Hashable
    inputs: tuple[int, ...]  # input leaves of the trace, by number
    order: int


class Ties:
    """The notes of one trace.

    Args:
        trace: that of JAX in which it runs.
        given: what the caller has in the places of its leaves.
        leaves: these.
    """

    def __init__(self, trace: Any, given: Sequence[Any], leaves: Sequence[Any]) -> None:
        self.trace = trace
        self._given, self._leaves = given, leaves
        self._notes: dict[int, tuple[int, Any, Hashable, tuple[Any, ...]]] = {}

    def note(self, made: Any, way: Hashable, operands: tuple[Any, ...]) -> None:
        self._notes.setdefault(id(made), (len(self._notes), made, way, operands))

    def extend(self, given: Sequence[Any], leaves: Sequence[Any]) -> None:
        """The trace has more leaves by now: these are all of them."""
        self._given, self._leaves = given, leaves

    def end(self, around: Ties | None) -> None:
        """Hands the notes over where the trace around is a part of the same one of JAX, as the step of a loop is."""
        if around is not None and around.trace is self.trace:
            for _, made, way, operands in self._notes.values():
                around.note(made, way, operands)
        self.trace, self._given, self._leaves = None, (), ()
        self._notes.clear()

    def outside(self, values: Sequence[Any]) -> list[Any]:
        """Of each value what the caller has in its place: the value itself, where it is no leaf."""
        given = {id(leaf): value for leaf, value in zip(self._leaves, self._given, strict=False)}
        return [given.get(id(value), value) for value in values]

    def sources(self, values: Sequence[Any]) -> list[Source | None]:
        """Of each value what it was made of; None where that is not noted."""
        if not self._notes:
            return [None] * len(values)
        numbers = {id(leaf): i for i, leaf in enumerate(self._leaves)}
        return [self._source(value, numbers) if id(value) in self._notes else None for value in values]

    def _source(self, value: Any, numbers: dict[int, int]) -> Source:
        number, note = numbers.get(id(value)), self._notes.get(id(value))
        if number is not None:
            return Source("input", (number,), 0)
        if note is None:
            return Source(id(value), (), 0)
        order, made, way, operands = note
        parts = [self._source(operand, numbers) for operand in operands]
        ways = (way, jax.typeof(made), *(part.way for part in parts))
        return Source(ways, tuple(i for part in parts for i in part.inputs), order)


@contextlib.contextmanager
def noting(given: Sequence[Any], leaves: Sequence[Any]) -> Generator[Ties]:
    """While a trace runs: the notes of what is made in it."""
    around, ties = getattr(_RUNNING, "ties", ()), Ties(current_trace(), given, leaves)
    _RUNNING.ties = (*around, ties)
    try:
        yield ties
    finally:
        _RUNNING.ties = around
        ties.end(around[-1] if around else None)


def note_made(made: Iterable[tuple[tuple[Any, ...], Any]]) -> None:
    """Notes (operands, the array made of them) of one call that makes one array for operands that are the same."""
    running = getattr(_RUNNING, "ties", ())
    if running:
        way = object()
        for operands, value in made:
            if isinstance(value, jax.Array):
                running[-1].note(value, way, operands)


def outside(values: Sequence[Any]) -> list[Any]:
    """Of each value what is in its place outside of all traces; what was made in one stands for itself."""
    for ties in reversed(getattr(_RUNNING, "ties", ())):
        values = ties.outside(values)
    return list(values)


def groups(sources: Sequence[Source | None]) -> list[list[tuple[int, list[int]]]]:
    """The values that may be one array, by number, with the inputs that have to be: as an Outcome is told."""
    found: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)
    for number, source in enumerate(sources):
        if source is not None and source.inputs:
            found[source.way].append((source.order, number))
    several = (sorted(members) for members in found.values() if len(members) > 1)
    return [[(number, list(_inputs(sources[number]))) for _, number in members] for members in several]


def _inputs(source: Source | None) -> tuple[int, ...]:
    return source.inputs if source is not None else ()


def together(made: Iterable[tuple[Hashable, tuple[Any, ...], Any]]) -> list[Any]:
    """Of (way, operands, value) the values: one for all that were made of the same in one way. Others are noted."""
    one: dict[Hashable, Any] = {}
    notes: dict[Hashable, list[tuple[tuple[Any, ...], Any]]] = defaultdict(list)
    values: list[Any] = []
    for way, operands, value in made:
        value = one.setdefault((way, *map(id, operands)), value)
        notes[way].append((operands, value))
        values.append(value)
    for noted in notes.values():
        note_made(noted)
    return values
