# SPDX-License-Identifier: Apache-2.0
"""Aux data of classes that are registered with JAX: they may say what the children are, so both come from one side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.tree_util import DictKey, GetAttrKey

from graftax._base.errors import some
from graftax._graph.path import Graph
from graftax._graph.structure_diff import short_text
from graftax._io.build import Build
from graftax._io.decode_graph import Rows
from graftax._io.importable_names import MISSING
from graftax._io.json_values import Decoder
from graftax._io.lazy_path import Where
from graftax._io.mismatches import Differences

OTHER_ORDER = (
    "{theirs} in the file, {mine} in like, and the aux data differ as well: nothing says which of the children are "
    "meant. Give an object whose children stand in the order of the file"
)
IN_PART = "its aux data are {mine} in like, and others in the file, for other children"
NOT_WHOLE = "its aux data are {mine} in like, and differ in the file, which does not hold all of them"

AUX = GetAttrKey("aux_data")


class AuxData:
    """The registered nodes of `like` that have met those of a file.

    Args:
        graph: that of `like`.
    """

    def __init__(self, graph: Graph, rows: Rows, decoder: Decoder) -> None:
        self._graph, self._rows, self._decoder = graph, rows, decoder
        self._pairs: list[tuple[int, int, Where]] = []
        self._arrays: dict[int, int] = {}  # of the file, and of `like`
        self._kept: set[int] = set()  # aux data of `like` that stay
        self.replaced: set[int] = set()

    def meet(self, a: int, b: int, path: Where) -> None:
        """Notes a node on both sides."""
        self._pairs.append((a, b, path))

    def meet_array(self, a: int, b: int) -> None:
        self._arrays[b] = a

    def compare(self, changed: Callable[[int], bool], found: Differences) -> set[int]:
        """Notes what does not fit. Answers the rows of `like` that stay as they are.

        Args:
            changed: is a row of `like` another value in the file?
        """
        stay: set[int] = set()
        for a, b, path in self._pairs:
            mine = [(entry, child) for entry, child in self._graph.key_entries(a) if entry != AUX]
            theirs = [(entry, child) for entry, child in self._rows.all[b].children if entry != AUX]
            names, others = [entry for entry, _ in mine], [entry for entry, _ in theirs]
            below = self._inside(self._aux_of(a))
            if names == others or not any(map(changed, below)):
                continue
            if self._are_names(a, names) and self._lists_names(b, others):  # each side has its own order
                stay |= below
                self._kept.add(a)
            elif set(names) == set(others):
                texts = {"mine": _text(names), "theirs": _text(others)}
                found.differ(path, f"a registered class with the children {OTHER_ORDER.format(**texts)}")
            else:
                value = self._graph.rows[self._aux_of(a)].value
                found.differ(path, IN_PART.format(mine=short_text(value)))
        return stay

    def write(self, changes: dict[int, Any], found: Differences) -> None:
        """Puts aux data that differ into `changes` as a whole: a part of them may be a dict that is made too late."""
        build = Build(self._rows, self._decoder, lambda number: changes.get(self._arrays.get(number, -1), MISSING))
        for a, b, path in self._pairs:
            at = self._aux_of(a)
            if a in self._kept or self._graph.rows[at].is_leaf or not any(n in changes for n in self._inside(at)):
                continue
            there = next(child for entry, child in self._rows.all[b].children if entry == AUX)
            new = MISSING if self._holds_opaque(there) else build.value(there)
            if new is not MISSING:
                changes[at] = new
                self.replaced.add(at)
            elif any(isinstance(self._graph.rows[n].value, (dict, list)) for n in self._inside(at)):
                found.differ(path, NOT_WHOLE.format(mine=short_text(self._graph.rows[at].value)))

    def _aux_of(self, a: int) -> int:
        child = next(child for entry, child in self._graph.key_entries(a) if entry == AUX)
        return self._graph.rows[child].target

    def _inside(self, a: int) -> set[int]:
        return self._graph.below([a]) | {a}

    def _are_names(self, a: int, names: list[Any]) -> bool:
        value = self._graph.rows[self._aux_of(a)].value
        return type(value) in (tuple, list) and list(value) == list(map(_name, names))

    def _lists_names(self, b: int, names: list[Any]) -> bool:
        at = next(child for entry, child in self._rows.all[b].children if entry == AUX)
        rows = [self._rows.all[self._rows.target(child)] for _, child in self._rows.all[self._rows.target(at)].children]
        return [row.arg if row.op == "s" else None for row in rows] == list(map(_name, names))

    def _holds_opaque(self, b: int) -> bool:
        todo = [self._rows.target(b)]
        while todo:
            row = self._rows.all[todo.pop()]
            if row.op == "s" and type(row.arg) is dict and row.arg.get("!") in ("opaque", "one_device"):
                return True
            todo += [self._rows.target(child) for _, child in row.children]
        return False


def _name(entry: Any) -> Any:
    return entry.name if isinstance(entry, GetAttrKey) else entry.key if isinstance(entry, DictKey) else None


def _text(entries: list[Any]) -> str:
    return some([str(entry) for entry in entries])
