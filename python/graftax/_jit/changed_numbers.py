# SPDX-License-Identifier: Apache-2.0
"""Which numbers of a call its trace has changed: in objects that it writes, and in results built like arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from graftax import _core
from graftax._capture.numbers.symbols import is_symbol
from graftax._graph.structure import Op, RootPath, Row, Structure, written_path
from graftax._jit.call_plan import TracedCall


def changed_numbers(
    call: TracedCall, outcome: _core.Outcome, outputs: Sequence[object]
) -> tuple[set[RootPath], list[int | float]]:
    """(the places of the numbers of a call that its trace has changed, all numbers among its results)."""
    # Most likely the next call will have the new ones.
    recording = call.recording
    comparison = _Comparison(Structure(recording.graphdef), Structure(outcome), outputs)
    before, after = comparison.before, comparison.after
    written = outcome.inputs()[2]
    places = {before.root_path(row): row for row in before.rows if _is_number(row)}
    changed = set[RootPath]()
    # Numbers in objects that the function writes. Root 0 of an Outcome is the result, the others are written nodes.
    for row in after.rows if written else ():
        if row.root > 0 and row.op in (Op.static, Op.leaf):
            place = written_path(recording.graphdef, written, after.root_path(row))
            if place in places and comparison.differ(places[place], row):
                changed.add(place)
    # Numbers in a new object that is returned for an argument, as in `state = step(state)`: the result, or an item of
    # it.
    result = after.roots[0]
    for candidate in (result, *after.children(result)):
        for root in before.roots[: call.arguments]:
            changed.update(map(before.root_path, comparison.changed_below(root, candidate)))
    return changed, [row.value for row in after.rows if _is_number(row)]


class _Comparison(NamedTuple):
    before: Structure
    after: Structure
    outputs: Sequence[object]

    def changed_below(self, node: Row, new_node: Row) -> Iterator[Row]:
        """The numbers that differ between two graphs, where their nodes are of the same classes with the same keys."""
        waiting, visited = [(node, new_node)], set[int]()
        while waiting:
            node, new_node = waiting.pop()
            node = self.before.target(node)
            new_node = self.after.target(new_node) if new_node.op is Op.ref else new_node
            is_alike = node.op is Op.node and new_node.op is Op.node and node.type is new_node.type
            if not is_alike or node.number in visited:
                continue
            visited.add(node.number)
            children, new_children = list(self.before.children(node)), list(self.after.children(new_node))
            if [row.key_entry for row in children] == [row.key_entry for row in new_children]:
                pairs = list(zip(children, new_children, strict=True))
                waiting += pairs
                yield from (row for row, new_row in pairs if _is_number(row) and self.differ(row, new_row))

    def differ(self, number: Row, row: Row) -> bool:
        """Does this row of the result hold another number, or one that the host computes from symbols?"""
        if row.op is Op.leaf:
            return is_symbol(self.outputs[row.leaf])
        # By `repr`: a nan equals itself, and 0.0 differs from -0.0.
        return row.op is Op.static and type(row.value) is type(number.value) and repr(row.value) != repr(number.value)


def _is_number(row: Row) -> bool:
    return row.op is Op.static and type(row.value) in (int, float)
