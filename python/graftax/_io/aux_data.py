# SPDX-License-Identifier: Apache-2.0
"""Aux data of registered classes when loading into `like`. They may name the children, so both must match."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.tree_util import DictKey, GetAttrKey

from graftax._base.errors import some
from graftax._graph.path import Graph
from graftax._graph.structure import KeyEntry
from graftax._graph.structure_diff import short_text
from graftax._io.build import ObjectBuilder
from graftax._io.decode_graph import FileGraph
from graftax._io.importable_names import MISSING
from graftax._io.json_values import Decoder
from graftax._io.mismatches import LazyPath, Mismatches

OTHER_ORDER = (
    "{file} in the file, {like} in like, and the aux data differ as well: it is not clear which "
    "children match. Give an object whose children are in the order of the file"
)

AUX = GetAttrKey("aux_data")


class AuxData:
    """The registered nodes of `like`, each paired with its node in the file.

    Args:
        graph: the graph of `like`.
        file_graph, decoder: the rows of the file, and the reader of their values.
    """

    def __init__(self, graph: Graph, file_graph: FileGraph, decoder: Decoder) -> None:
        self._graph, self._file, self._decoder = graph, file_graph, decoder
        self._pairs: list[tuple[int, int, LazyPath]] = []
        self._arrays: dict[int, int] = {}  # arrays: row in the file -> row in `like`
        self._unchanged: set[int] = set()  # nodes of `like` that keep their aux data
        self.replaced: set[int] = set()  # rows of aux data that the file replaces

    def add_pair(self, like_number: int, file_number: int, path: LazyPath) -> None:
        """Adds a node of `like` and its node in the file."""
        self._pairs.append((like_number, file_number, path))

    def add_array(self, like_number: int, file_number: int) -> None:
        self._arrays[file_number] = like_number

    def compare(self, changed: Callable[[int], bool], mismatches: Mismatches) -> set[int]:
        """Adds aux data that do not fit the children to `mismatches`.

        Args:
            changed: tells whether a row of `like` has another value in the file.
            mismatches: the differences between the file and `like`.

        Returns:
            the rows of aux data in `like` that stay as they are.
        """
        unchanged: set[int] = set()
        for like_number, file_number, path in self._pairs:
            like_children = [(entry, child) for entry, child in self._graph.key_entries(like_number) if entry != AUX]
            file_children = [(entry, child) for entry, child in self._file.rows[file_number].children if entry != AUX]
            like_names, file_names = [entry for entry, _ in like_children], [entry for entry, _ in file_children]
            aux_rows = self._graph.descendants([self._aux_of(like_number)])
            # Equal children fit either aux data, and equal aux data fit either children.
            if like_names == file_names or not any(map(changed, aux_rows)):
                continue
            # Aux data that only list the names: each side keeps its own order, and children are matched by name.
            if self._are_names(like_number, like_names) and self._lists_names(file_number, file_names):
                unchanged |= aux_rows
                self._unchanged.add(like_number)
            # Aux data may refer to the children by position.
            elif set(like_names) == set(file_names):
                texts = {"file": _text(file_names), "like": _text(like_names)}
                mismatches.differ(path, f"a registered class with the children {OTHER_ORDER.format(**texts)}")
            else:
                text = short_text(self._graph.rows[self._aux_of(like_number)].value)
                mismatches.differ(path, f"its aux data are {text} in like, and others in the file, for other children")
        return unchanged

    def write(self, changes: dict[int, Any], mismatches: Mismatches) -> None:
        """Adds differing aux data to `changes` as a whole: a dict in them would be filled after the class saw it."""
        # Arrays within aux data were loaded with all others, and are part of `changes`.
        build = ObjectBuilder(
            self._file, self._decoder, lambda number: changes.get(self._arrays.get(number, -1), MISSING)
        )
        for like_number, file_number, path in self._pairs:
            aux_row = self._aux_of(like_number)
            parts = self._graph.descendants([aux_row])  # itself among them
            if (
                like_number in self._unchanged
                or self._graph.rows[aux_row].is_leaf
                or not any(part in changes for part in parts)
            ):
                continue
            file_aux = self._file_aux(file_number)
            value = MISSING if self._holds_opaque(file_aux) else build.value(file_aux)
            if value is not MISSING:
                changes[aux_row] = value
                self.replaced.add(aux_row)
            # Mutable aux data would be changed in place, although the file does not hold all of them.
            elif any(isinstance(self._graph.rows[part].value, (dict, list)) for part in parts):
                text = short_text(self._graph.rows[aux_row].value)
                mismatches.differ(
                    path, f"its aux data are {text} in like, and differ in the file, which does not hold all of them"
                )

    def _aux_of(self, like_number: int) -> int:
        child = next(child for entry, child in self._graph.key_entries(like_number) if entry == AUX)
        return self._graph.rows[child].target

    def _are_names(self, like_number: int, names: list[KeyEntry]) -> bool:
        value = self._graph.rows[self._aux_of(like_number)].value
        return type(value) in (tuple, list) and list(value) == list(map(_name, names))

    def _lists_names(self, file_number: int, names: list[KeyEntry]) -> bool:
        # Aux data that are the list of the names, as those of a plain flatten function often are.
        aux = self._file.rows[self._file.target(self._file_aux(file_number))]
        aux_children = [self._file.rows[self._file.target(child)] for _, child in aux.children]
        return [row.arg if row.op == "s" else None for row in aux_children] == list(map(_name, names))

    def _file_aux(self, file_number: int) -> int:
        return next(child for entry, child in self._file.rows[file_number].children if entry == AUX)

    def _holds_opaque(self, file_number: int) -> bool:
        """Does a part of the file need an object that only `like` has?"""
        todo = [self._file.target(file_number)]
        while todo:
            row = self._file.rows[todo.pop()]
            if row.op == "s" and type(row.arg) is dict and row.arg.get("!") in ("opaque", "one_device"):
                return True
            todo += [self._file.target(child) for _, child in row.children]
        return False


def _name(entry: KeyEntry) -> Any:
    return entry.name if isinstance(entry, GetAttrKey) else entry.key if isinstance(entry, DictKey) else None


def _text(entries: list[KeyEntry]) -> str:
    return some([str(entry) for entry in entries])
