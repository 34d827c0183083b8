# SPDX-License-Identifier: Apache-2.0
"""The rows that a file describes a graph by, read and checked: nothing in them is trusted, nothing is resolved yet."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from jax.tree_util import FlattenedIndexKey, GetAttrKey, SequenceKey

from graftax._graph.path import Path
from graftax._graph.types.pytree_nodes import dict_key
from graftax._io.errors import Malformed
from graftax._io.importable_names import MISSING
from graftax._io.json_values import Decoder, refuse_collisions
from graftax._io.opaque_keys import OpaqueKey, UnknownKey
from graftax._io.tensor import Leaf

NEEDS = 1  # what this version can read
_MOST_INDEX = 1 << 31


class OtherKey:
    """A key entry of a class of somebody else's, by its text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __eq__(self, other: object) -> bool:
        return str(other) == self._text

    def __hash__(self) -> int:
        return hash(self._text)


class FileRow(NamedTuple):
    """One row."""

    op: str  # a: array, -: an array that was left out, s: value, r: a node met before, n: node
    arg: Any  # a: number of the array, s: its JSON, r: number of the row, n: name of the class
    children: list[tuple[Any, int]]  # (key entry, number)
    detail: Any
    parent: int


class Rows:
    """The graph of a file.

    Args:
        held: the JSON.
        names: reads names and keys.

    Raises:
        Malformed: for anything that is not as it is written.
    """

    def __init__(self, held: dict[str, Any], decoder: Decoder) -> None:
        self._decoder = decoder
        self.arrays = [Leaf.from_json(found) for found in _list(held.get("arrays"))]
        self.all: list[FileRow] = []
        self._above: list[Any] = [None]  # the key entry of each row
        rows = _list(held.get("rows"))
        self._to_come = len(rows) - 1
        above: list[tuple[int, int]] = []  # of each open node: its number, how many children are still to come
        for number, row in enumerate(rows):
            parent = -1
            if number:
                while above and not above[-1][1]:
                    above.pop()
                if not above:
                    raise Malformed("rows after the last one")
                parent, left = above[-1]
                above[-1] = (parent, left - 1)
                children = self.all[parent].children
                at = len(children) - left
                self._above.append(children[at][0])
                children[at] = (children[at][0], number)
            self.all.append(self._row(_list(row), number, parent))
            if self.all[-1].op == "n":
                above.append((number, len(self.all[-1].children)))
        if not rows or any(left for _, left in above):
            raise Malformed("rows are missing")
        self._holds: list[bool] | None = None

    def target(self, number: int) -> int:
        row = self.all[number]
        return row.arg if row.op == "r" else number

    def path(self, number: int) -> Path:
        """Where a row stands."""
        steps: list[Any] = []
        while number:
            steps.append(self._above[number])
            number = self.all[number].parent
        return Path(reversed(steps))

    def holds_arrays(self, number: int) -> bool:
        """Is there an array below, or behind a reference to something not above?"""
        if self._holds is None:
            self._holds = [row.op in "a-" for row in self.all]
            for at in range(len(self.all) - 1, 0, -1):
                if self._holds[at]:
                    self._holds[self.all[at].parent] = True
        return self._holds[self.target(number)]

    def _row(self, row: list[Any], number: int, parent: int) -> FileRow:
        op, arg = (row[0], row[1] if len(row) > 1 else None) if row else (None, None)
        if op == "-":
            return FileRow("-", None, [], None, parent)
        if op == "s":
            return FileRow("s", arg, [], None, parent)
        if op == "a" and type(arg) is int and 0 <= arg < len(self.arrays):
            return FileRow("a", arg, [], None, parent)
        if op == "r" and type(arg) is int and 0 <= arg < number and self.all[arg].op in "ns":
            return FileRow("r", arg, [], None, parent)
        if op != "n" or len(row) < 3:
            raise Malformed(f"row {number} is none of this format")
        entries: Any = row[2]
        if type(entries) is int:
            self._promise(entries)
            children = [(SequenceKey(i), -1) for i in range(entries)]
        else:
            self._promise(len(_list(entries)))
            children = [(self._entry(entry), -1) for entry in entries]
            refuse_collisions([entry for entry, _ in children])
        return FileRow("n", self._decoder.name(arg), children, row[3] if len(row) > 3 else None, parent)

    def _promise(self, children: int) -> None:
        """No memory is taken for children that do not come."""
        self._to_come -= children
        if children < 0 or self._to_come < 0:
            raise Malformed("a number of children that do not come")

    def _entry(self, entry: Any) -> Any:
        if type(entry) is str:
            return GetAttrKey(entry)
        if type(entry) is int and 0 <= entry < _MOST_INDEX:
            return SequenceKey(entry)
        if type(entry) is list and len(cast("list[Any]", entry)) == 1:
            key = self._opaque_key(entry[0]) or self._decoder.value(entry[0])
            try:
                hash(key)
            except TypeError as error:
                raise Malformed(f"a key without a hash: {error}") from None
            return dict_key(UnknownKey(str(entry[0])) if key is MISSING else key)
        held: dict[str, Any] = entry if type(entry) is dict else {}
        if type(held.get("flat")) is int and 0 <= held["flat"] < _MOST_INDEX:
            return FlattenedIndexKey(held["flat"])
        if type(held.get("text")) is str:
            return OtherKey(held["text"])
        raise Malformed(f"a key that is none: {entry!r}")

    def _opaque_key(self, found: Any) -> OpaqueKey | None:
        held: dict[str, Any] = found if type(found) is dict else {}
        if held.get("!") != "opaque" or type(held.get("at")) is not int:
            return None
        return OpaqueKey(self._decoder.name(held.get("of")), held["at"])


def _list(found: Any) -> list[Any]:
    if type(found) is not list:
        raise Malformed("a list was expected")
    return cast("list[Any]", found)
