# SPDX-License-Identifier: Apache-2.0
"""Which numbers of a call its trace has changed: in objects that it writes, and in results that are like arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from graftax import _core
from graftax._capture.numbers.symbols import is_symbol
from graftax._graph.structure import Op, RootPath, Row, Structure, written_path


def changed_numbers(
    recording: _core.Recording, outcome: _core.Outcome, outputs: Sequence[object], arguments: int
) -> tuple[set[RootPath], list[int | float]]:
    """(where numbers of a call are that its trace has changed, all numbers among its results).

    Most likely the next call will have the new ones.

    Args:
        outputs: the output leaves of the trace.
        arguments: how many of the roots are arguments; the others are captured.
    """
    comparison = _Comparison(Structure(recording.graphdef), Structure(outcome), outputs)
    before, after = comparison.before, comparison.after
    written = outcome.inputs()[2]
    places = {before.root_path(row): row for row in before.rows if _is_number(row)}
    changed = set[RootPath]()
    for row in after.rows if written else ():
        if row.root > 0 and row.op in (Op.static, Op.leaf):
            place = written_path(recording.graphdef, written, after.root_path(row))
            if place in places and comparison.differ(places[place], row):
                changed.add(place)
    result = after.roots[0]
    for one in (result, *after.children(result)):
        for root in before.roots[:arguments]:
            changed.update(map(before.root_path, comparison.changed_below(root, one)))
    return changed, [row.value for row in after.rows if _is_number(row)]


class _Comparison(NamedTuple):
    before: Structure
    after: Structure
    outputs: Sequence[object]

    def changed_below(self, one: Row, other: Row) -> Iterator[Row]:
        """The numbers that differ between two graphs, where their nodes are of the same classes with the same keys."""
        waiting, visited = [(one, other)], set[int]()
        while waiting:
            one, other = waiting.pop()
            one, other = self.before.target(one), self.after.target(other) if other.op is Op.ref else other
            if one.op is not Op.node or other.op is not Op.node or one.type is not other.type or one.number in visited:
                continue
            visited.add(one.number)
            ones, others = list(self.before.children(one)), list(self.after.children(other))
            if [row.key_entry for row in ones] == [row.key_entry for row in others]:
                pairs = list(zip(ones, others, strict=True))
                waiting += pairs
                yield from (a for a, b in pairs if _is_number(a) and self.differ(a, b))

    def differ(self, number: Row, row: Row) -> bool:
        """Is there another number in this row of the result, or one that is computed of symbols?"""
        if row.op is Op.leaf:
            return is_symbol(self.outputs[row.leaf])
        return row.op is Op.static and type(row.value) is type(number.value) and repr(row.value) != repr(number.value)


def _is_number(row: Row) -> bool:
    return row.op is Op.static and type(row.value) in (int, float)
