# SPDX-License-Identifier: Apache-2.0
"""Decodes the rows of a file: they are read and checked, but names and values are not resolved yet."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from jax.tree_util import FlattenedIndexKey, GetAttrKey, SequenceKey

from graftax._graph.path import Path
from graftax._graph.structure import KeyEntry
from graftax._graph.types.pytree_nodes import dict_key
from graftax._io.errors import Malformed
from graftax._io.importable_names import MISSING
from graftax._io.json_values import Decoder, refuse_collisions
from graftax._io.opaque_keys import OpaqueKey, UnknownKey
from graftax._io.tensor import Leaf

NEEDS = 1  # the latest format that this version can read
_MAX_INDEX = 1 << 31


class OtherKey:
    """A key entry of a class that is not JAX's, by its text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __eq__(self, other: object) -> bool:
        return str(other) == self._text

    def __hash__(self) -> int:
        return hash(self._text)


class FileRow(NamedTuple):
    """A row of a file."""

    op: str  # a: array, -: an array that was left out, s: value, r: reference to an earlier row, n: node
    arg: Any  # a: index of the array, s: its JSON, r: number of the row, n: name of the class
    children: list[tuple[KeyEntry, int]]  # (key entry, number)
    detail: Any
    parent: int


class FileGraph:
    """The graph of a file, as rows.

    Args:
        graph_data: the JSON of the graph.
        decoder: reads names and keys.

    Raises:
        Malformed: for JSON that no `EncodedGraph` writes.
    """

    def __init__(self, graph_data: dict[str, Any], decoder: Decoder) -> None:
        self._decoder = decoder
        self.arrays = [Leaf.from_json(data) for data in _as_list(graph_data.get("arrays"))]
        self.rows: list[FileRow] = []
        self._entries: list[KeyEntry] = [None]  # the key entry of each row
        row_data = _as_list(graph_data.get("rows"))
        self._children_to_come = len(row_data) - 1  # each row but the first is a child of another
        open_nodes: list[tuple[int, int]] = []  # nodes on the current path: number, how many children are still to come
        for number, row in enumerate(row_data):
            parent = -1
            if number:
                # Rows are in pre-order: the parent of a row is the last node that still expects children.
                while open_nodes and not open_nodes[-1][1]:
                    open_nodes.pop()
                if not open_nodes:
                    raise Malformed("rows after the last one")
                parent, missing = open_nodes[-1]
                open_nodes[-1] = (parent, missing - 1)
                # The number of the row takes the place of the -1 that `_row` has put beside its key entry.
                children = self.rows[parent].children
                position = len(children) - missing
                self._entries.append(children[position][0])
                children[position] = (children[position][0], number)
            self.rows.append(self._row(_as_list(row), number, parent))
            if self.rows[-1].op == "n":
                open_nodes.append((number, len(self.rows[-1].children)))
        if not row_data or any(missing for _, missing in open_nodes):
            raise Malformed("rows are missing")
        self._has_arrays: list[bool] | None = None

    def target(self, number: int) -> int:
        row = self.rows[number]
        return row.arg if row.op == "r" else number

    def path(self, number: int) -> Path:
        entries: list[KeyEntry] = []
        while number:
            entries.append(self._entries[number])
            number = self.rows[number].parent
        return Path(reversed(entries))

    def holds_arrays(self, number: int) -> bool:
        """Is a row an array, or an array below it? A reference counts as its target."""
        if self._has_arrays is None:
            self._has_arrays = [row.op in "a-" for row in self.rows]
            # Rows come after their parents, so that one pass from the end reaches all ancestors.
            for child in range(len(self.rows) - 1, 0, -1):
                if self._has_arrays[child]:
                    self._has_arrays[self.rows[child].parent] = True
        return self._has_arrays[self.target(number)]

    def _row(self, row: list[Any], number: int, parent: int) -> FileRow:
        """A checked row of the file. The numbers of its children are -1 until their own rows are read."""
        op, arg = (row[0], row[1] if len(row) > 1 else None) if row else (None, None)
        # Indices have to refer to rows and arrays that exist, and references to earlier rows.
        if (
            op in ("-", "s")
            or (op == "a" and type(arg) is int and 0 <= arg < len(self.arrays))
            or (op == "r" and type(arg) is int and 0 <= arg < number and self.rows[arg].op in "ns")
        ):
            return FileRow(op, arg, [], None, parent)
        if op != "n" or len(row) < 3:
            raise Malformed(f"row {number} does not have the form of a row")
        entries: Any = row[2]
        if type(entries) is int:
            self._expect_children(entries)
            children = [(SequenceKey(i), -1) for i in range(entries)]
        else:
            self._expect_children(len(_as_list(entries)))
            children = [(self._entry(entry), -1) for entry in entries]
            refuse_collisions([entry for entry, _ in children])
        return FileRow("n", self._decoder.name(arg), children, row[3] if len(row) > 3 else None, parent)

    def _expect_children(self, children: int) -> None:
        """Counts children against the rows that are there, before memory is allocated for them."""
        self._children_to_come -= children
        if children < 0 or self._children_to_come < 0:
            raise Malformed("a node announces more children than there are rows")

    def _entry(self, entry: object) -> KeyEntry:
        if type(entry) is str:
            return GetAttrKey(entry)
        if type(entry) is int and 0 <= entry < _MAX_INDEX:
            return SequenceKey(entry)
        if type(entry) is list and len(cast("list[Any]", entry)) == 1:
            key = self._opaque_key(entry[0]) or self._decoder.value(entry[0])
            # A damaged file may have an unhashable value here, but a key entry is hashed with its key.
            try:
                hash(key)
            except TypeError as error:
                raise Malformed(f"an unhashable key: {error}") from None
            return dict_key(UnknownKey(str(entry[0])) if key is MISSING else key)
        form: dict[str, Any] = entry if type(entry) is dict else {}
        if type(form.get("flat")) is int and 0 <= form["flat"] < _MAX_INDEX:
            return FlattenedIndexKey(form["flat"])
        if type(form.get("text")) is str:
            return OtherKey(form["text"])
        raise Malformed(f"an invalid key: {entry!r}")

    def _opaque_key(self, data: object) -> OpaqueKey | None:
        form: dict[str, Any] = data if type(data) is dict else {}
        if form.get("!") != "opaque" or type(form.get("at")) is not int:
            return None
        return OpaqueKey(self._decoder.name(form.get("of")), form["at"])


def _as_list(data: object) -> list[Any]:
    if type(data) is not list:
        raise Malformed("a list was expected")
    return cast("list[Any]", data)
