# SPDX-License-Identifier: Apache-2.0
"""The rows of a recorded structure: parents, children, paths, and a walk from parents to children."""

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
KeyEntry = Any  # JAX's key entries have no common base class
RootPath = tuple[int, tuple[KeyEntry, ...]]  # the number of a root, and the key path from there

S = TypeVar("S")

# How a walk reached a row: the chain of its parent, and its own number. A shared row has one chain for each path.
Chain = tuple["Chain | None", int]

_CELL = GetAttrKey("cell_contents")


def is_hidden_entry(entry: KeyEntry) -> bool:
    """Is a key entry left out of printed paths? A library's Variable stands for its value."""
    return isinstance(entry, GetAttrKey) and entry.name in UNSPOKEN


class Structure:
    """The rows of a GraphDef or an Outcome, by number. They are read in one pass; paths and values are computed lazily.

    Args:
        program: the GraphDef or Outcome. It may hold statics weakly: only the `value` of a dead one raises.
    """

    def __init__(self, program: _core.GraphDef | _core.Outcome) -> None:
        self.rows: list[Row] = program.rows()

    @property
    def roots(self) -> list[Row]:
        return list(self._siblings(0, len(self.rows)))

    def children(self, row: Row) -> Iterator[Row]:
        """The rows one level below a row. A reference has none: its `target` has them."""
        return self._siblings(row.number + 1, row.end)

    def key_entries(self, number: int) -> list[tuple[KeyEntry, int]]:
        """(key entry, number) of each row one level below a row."""
        return [(child.key_entry, child.number) for child in self.children(self.rows[number])]

    def subtree(self, row: Row) -> list[Row]:
        """All rows of a subtree in pre-order, the row itself first."""
        return self.rows[row.number : row.end]

    def target(self, row: Row) -> Row:
        """The row itself; for a reference or a repeated value, the row of its first occurrence."""
        return self.rows[row.target]

    def reachable_leaves(self, rows: Iterable[Row]) -> set[int]:
        """The leaves below these rows, references followed."""
        # A node may be reached by several references, and a cycle leads back to it.
        leaves, visited, stack = set[int](), set[int](), list(rows)
        while stack:
            row = self.target(stack.pop())
            if row.op is Op.leaf:
                leaves.add(row.leaf)
            elif row.number not in visited:
                visited.add(row.number)
                stack.extend(self.children(row))
        return leaves

    @functools.cached_property
    def leaves(self) -> list[Row]:
        """The rows of leaves, in order: a leaf that stands at two paths has two rows."""
        return [row for row in self.rows if row.op is Op.leaf]

    @functools.cached_property
    def tracked(self) -> dict[int, Row]:
        """The tracked nodes, by the number of their identity."""
        return {row.track: row for row in self.rows if row.op is Op.node and row.track >= 0}

    def statics(self) -> Iterator[tuple[Row, Any]]:
        """The statics with their values; those that are dict keys are not included."""
        return ((row, row.value) for row in self.rows if row.op is Op.static)

    def root_path(self, row: Row) -> RootPath:
        """The number of a row's root and its key path from there. Takes time proportional to the depth."""
        key_entries: list[KeyEntry] = []
        root = row.root
        # Key entries are collected from the row up, so the list is reversed at the end.
        while row.parent >= 0:
            key_entries.append(row.key_entry)
            row = self.rows[row.parent]
        return root, tuple(reversed(key_entries))

    def _siblings(self, number: int, end: int) -> Iterator[Row]:
        rows = self.rows
        while number < end:
            row = rows[number]
            yield row
            # The subtree of a row ends where its next sibling begins.
            number = row.end


def walk(
    starts: Iterable[tuple[int, S]],
    visit: Callable[[Chain, S], tuple[int, S] | None],
    children: Callable[[int], Sequence[tuple[KeyEntry, int]]],
    advance: Callable[[S, KeyEntry], S],
) -> None:
    """Walks down a graph of numbered rows in pre-order, with a state that is updated at each step.

    Args:
        starts: rows to begin with, and the state of each.
        visit: called for each row that is reached. Returns the node whose children come next (for a reference, its
            target) and the state there, or None to go no deeper. It has to notice rows that it has visited before.
        children: (key entry, row) of each child of a node.
        advance: the state after the step to a child; an empty one, where nothing can match, leaves the child out.
    """
    # An explicit stack, because a graph may be deeper than Python's stack. The last entry is the next one visited.
    stack: list[tuple[Chain, S]] = [((None, number), state) for number, state in starts]
    stack.reverse()
    while stack:
        chain, state = stack.pop()
        entered = visit(chain, state)
        if entered is None:
            continue
        node, state = entered
        for entry, child in reversed(children(node)):
            child_state = advance(state, entry)
            if child_state:
                stack.append(((chain, child), child_state))


def written_path(graphdef: _core.GraphDef, nodes: Sequence[int], place: RootPath) -> RootPath:
    """Where an output leaf of an Outcome is that is written into one of these nodes (`outcome.inputs()[2]`)."""
    write, path = place  # root 0 of an Outcome is the result, root i is what node i - 1 is written with
    root, node_path = graphdef._node_place(nodes[write - 1])  # pyright: ignore[reportPrivateUsage]
    return root, (*node_path, *path)


def place_name(root_path: RootPath, names: tuple[str, ...]) -> str:
    """The text of a root path in messages: the name of the root, then the key path as `path_text` prints it."""
    root, path = root_path
    return names[root] + path_text(path)


def path_text(path: Iterable[object]) -> str:
    """The text of a key path in messages: JAX's `keystr`, but a closure cell or a Variable stands for its value."""
    # A captured variable is a cell whose content users think of as the variable itself.
    spoken = [e for e in path if type(e) is not GetAttrKey or not (e == _CELL or is_hidden_entry(e))]
    return keystr(spoken)


def plain_key(entry: object) -> Any:
    """The name, index or key of one of JAX's key entries; any other value as it is."""
    for attribute in ("name", "key", "idx"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return entry
