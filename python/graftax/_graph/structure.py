# SPDX-License-Identifier: Apache-2.0
"""A recorded structure, read by name: its rows, what is above and below them, where they stand; one walk down."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from jax.tree_util import GetAttrKey

from graftax import _core
from graftax._base.key_path import keystr
from graftax.interop import UNSPOKEN

Op = _core.Op
Row = _core.Row
Place = tuple[int, tuple[Any, ...]]  # the number of a root, and the key path from there

S = TypeVar("S")

# A row in a walk: the chain of the row above, and its own number. A row that is reached by two ways has two chains.
Chain = tuple["Chain | None", int]

_CELL = GetAttrKey("cell_contents")


def is_unspoken(entry: Any) -> bool:
    """Does this part of a key path go without saying? A Variable of a library stands for what is in it."""
    return isinstance(entry, GetAttrKey) and entry.name in UNSPOKEN


class Structure:
    """The rows of a GraphDef or an Outcome, by number. Costs one pass; paths and values are made when asked for.

    Args:
        program: what is read. With weak statics it may be read too: only the `value` of one that is gone raises.
    """

    def __init__(self, program: _core.GraphDef | _core.Outcome) -> None:
        self.rows: list[Row] = program.rows()

    @property
    def roots(self) -> list[Row]:
        return list(self._in_a_row(0, len(self.rows)))

    def children(self, row: Row) -> Iterator[Row]:
        """The rows one level below; none below a reference, which its `target` is asked for."""
        return self._in_a_row(row.number + 1, row.end)

    def key_entries(self, number: int) -> list[tuple[Any, int]]:
        """(key entry, number) of the rows one level below."""
        return [(child.key_entry, child.number) for child in self.children(self.rows[number])]

    def below(self, row: Row) -> list[Row]:
        """All rows of a subtree, the row itself first."""
        return self.rows[row.number : row.end]

    def target(self, row: Row) -> Row:
        """The row itself; of a reference or a repetition, the row that was met first."""
        return self.rows[row.target]

    def leaves_reached(self, rows: Iterable[Row]) -> set[int]:
        """The leaves below these rows, and below what they refer to."""
        found, seen, stack = set[int](), set[int](), list(rows)
        while stack:
            row = self.target(stack.pop())
            if row.op is Op.leaf:
                found.add(row.leaf)
            elif row.number not in seen:
                seen.add(row.number)
                stack.extend(self.children(row))
        return found

    @functools.cached_property
    def leaves(self) -> list[Row]:
        """The rows of arrays, in order: an array that is one leaf in two places has two."""
        return [row for row in self.rows if row.op is Op.leaf]

    @functools.cached_property
    def tracked(self) -> dict[int, Row]:
        """The nodes that have an identity, by its number."""
        return {row.track: row for row in self.rows if row.op is Op.node and row.track >= 0}

    def statics(self) -> Iterator[tuple[Row, Any]]:
        """The statics that are no keys, and their values."""
        return ((row, row.value) for row in self.rows if row.op is Op.static)

    def place(self, row: Row) -> Place:
        """Where a row stands, in time that grows with its depth."""
        key_entries: list[Any] = []
        root = row.root
        while row.parent >= 0:
            key_entries.append(row.key_entry)
            row = self.rows[row.parent]
        return root, tuple(reversed(key_entries))

    def _in_a_row(self, number: int, end: int) -> Iterator[Row]:
        rows = self.rows
        while number < end:
            row = rows[number]
            yield row
            number = row.end


def walk(
    starts: Iterable[tuple[int, S]],
    visit: Callable[[Chain, S], tuple[int, S] | None],
    children: Callable[[int], Sequence[tuple[Any, int]]],
    step: Callable[[S, Any], S | None],
) -> None:
    """Goes down a graph of numbered rows, in order, with a state that each step changes.

    Args:
        starts: rows, and the state in each.
        visit: is told of each row that is reached. Answers the node to go below, behind a reference another one, and
            the state there; None ends this way. What was reached before is for `visit` to know.
        children: (key entry, row) one level below a node.
        step: the state after a step to the child of a key entry; None where it leads nowhere.
    """
    stack: list[tuple[Chain, S]] = [((None, place), state) for place, state in starts]
    stack.reverse()
    while stack:
        chain, state = stack.pop()
        entered = visit(chain, state)
        if entered is None:
            continue
        node, state = entered
        for entry, child in reversed(children(node)):
            below = step(state, entry)
            if below is not None:
                stack.append(((chain, child), below))


def place_name(place: Place, names: tuple[str, ...]) -> str:
    """The text of a place, as messages print it: a closure cell is what is in it, and so is a Variable of NNX."""
    root, path = place
    return names[root] + path_text(path)


def path_text(path: Iterable[Any]) -> str:
    """The text of a key path, as messages print it: that of JAX's `keystr`, without what goes without saying."""
    spoken = [e for e in path if type(e) is not GetAttrKey or not (e == _CELL or is_unspoken(e))]
    return keystr(spoken)


def plain_key(entry: Any) -> Any:
    """The name, index or key of one of JAX's key entries; of anything else, itself."""
    for attribute in ("name", "key", "idx"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return entry
