# SPDX-License-Identifier: Apache-2.0
"""An object graph as the rows of a file: nodes, arrays, values and references, in walk order."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import numpy as np
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from graftax import _core
from graftax._base.errors import UnsupportedValueError, at_path
from graftax._graph.path import Path, open_node
from graftax._graph.structure import Op, Row, Structure
from graftax._graph.structure_diff import Way
from graftax._graph.types.pytree_nodes import NoneKey
from graftax._io.importable_names import Names, has_name
from graftax._io.json_values import Encoder, Opaque
from graftax._io.lazy_path import path_of
from graftax._io.tensor import LOGICAL, Leaf, Outgoing, Outside, outgoing

FORMAT = 1
_NUMBERS = (bool, int, float, complex)
_LONGEST_NAME = 400

NO_KEY = (
    "a {cls} that is an element of a set has neither a value nor a name that a file can hold. Use numbers, texts, "
    "tuples of them or enums."
)

ABSTRACT = (
    "a jax.ShapeDtypeStruct, as every array of this object: graftax.eval_shape and the like give shapes without data, "
    "and there is nothing to save. Save what the function itself returns; shapes are for like= of graftax.load"
)


def _is_array(value: Any) -> bool:
    """Is a static value an array that a file can hold as one?"""
    return isinstance(value, jax.Array) or (isinstance(value, np.ndarray) and value.dtype.name in LOGICAL)


class Outline:
    """What is written of one object graph.

    Args:
        obj: the root.
        wanted: is an array at this path written? The others are noted as left out.
        dtype: of floating arrays, where it is not their own.
        beside: does an array lie beside the file? Its rows are in the file, its data are in `outside`.

    Raises:
        UnsupportedValueError: for what no file can hold, at its path.
    """

    def __init__(
        self,
        obj: Any,
        wanted: Callable[[Path], bool] | None,
        dtype: np.dtype[Any] | None,
        beside: Callable[[Outgoing], bool] | None = None,
    ) -> None:
        self._leaves, graphdef = _core.flatten(obj)
        self._structure = Structure(graphdef)
        self._wanted, self._dtype, self._beside = wanted, dtype, beside
        self.outside: dict[str, Any] = {}
        self._names = Names()
        self._encoder = Encoder(self._names)
        self._numbers: dict[int, int] = {}  # of the rows of the structure, among those of the file
        self._tensors: dict[int, int] = {}  # of the arrays, by id
        self._taken: set[str] = {"__metadata__"}
        self.rows: list[list[Any]] = []
        self.arrays: list[Outgoing] = []
        self._described: list[Leaf] = []
        self._abstract: Way | Literal[False] = False  # where the first array without data is
        self._walk(obj)
        if self._abstract is not False and all(row[0] not in "a-" for row in self.rows):
            raise UnsupportedValueError(f"{path_of(self._abstract)!r}: {ABSTRACT}")

    def to_json(self) -> dict[str, Any]:
        arrays = [leaf.to_json() for leaf in self._described]
        return {"format": FORMAT, "needs": 1, "names": list(self._names.all), "arrays": arrays, "rows": self.rows}

    def _walk(self, obj: Any) -> None:
        todo: list[tuple[Row, Way, Any]] = [(self._structure.rows[0], None, obj)]
        while todo:
            row, way, live = todo.pop()
            try:
                todo += self._visit(row, way, live)
            except Exception as error:
                raise at_path(error, repr(path_of(way))) from error.__cause__

    def _visit(self, row: Row, way: Way, live: Any) -> list[tuple[Row, Way, Any]]:
        """Writes a row; returns those below it, last first."""
        row = self._structure.target(row)
        number = row.op is Op.leaf and isinstance(self._leaves[row.leaf], _NUMBERS)  # that its class calls data
        if row.op is Op.static and _is_array(row.value):
            self.rows.append(self._leaf(row.value, way))
            return []
        if number or row.op is Op.static:
            if isinstance(live, jax.ShapeDtypeStruct) and self._abstract is False:
                self._abstract = way
            self.rows.append(["s", self._encoder.value(self._leaves[row.leaf] if number else row.value)])
            return []
        if row.op is Op.leaf:
            self.rows.append(self._leaf(self._leaves[row.leaf], way))
            return []
        if row.number in self._numbers:
            self.rows.append(["r", self._numbers[row.number]])
            return []
        self._numbers[row.number] = len(self.rows)
        if isinstance(live, types.FunctionType) and not self._is_opened(row, live):
            self.rows.append(["s", self._encoder.value(live)])
            return []
        children = list(self._structure.children(row))
        opened = _core.children_with_keys(live)
        entries, below = [child.key_entry for child in children], [value for _, value in opened]
        if any(isinstance(entry, FlattenedIndexKey) for entry in entries):
            entries = [entry for entry, _ in open_node(live)]
        self.rows.append(["n", self._names.number(row.type), self._entries(entries), *self._detail(row)])
        found = zip(children, entries, below, strict=True)
        todo: list[tuple[Row, Way, Any]] = [(child, (way, entry), value) for child, entry, value in found]
        return todo[::-1]

    def _is_opened(self, row: Row, function: types.FunctionType) -> bool:
        """A function without a name counts by what it captures where there are arrays in it."""
        return not has_name(function) and any(below.op is Op.leaf for below in self._structure.below(row))

    def _leaf(self, value: Any, way: Way) -> list[Any]:
        if self._wanted is not None and not self._wanted(path_of(way)):
            return ["-"]
        known = self._tensors.get(id(value))
        if known is None:
            known = self._tensors[id(value)] = len(self._described)
            array = outgoing(value, self._name(way), self._dtype, self._beside is not None)
            self._described.append(array.leaf)
            if self._beside is not None and self._beside(array):
                place = str(len(self.outside))
                self.outside[place] = array.held
                held = Outside(place, np.dtype(array.held.dtype).name, tuple(array.held.shape))
                self._described[-1] = array.leaf._replace(dtype=None, outside=held)
            else:
                self.arrays.append(array)
        return ["a", known]

    def _name(self, way: Way) -> str:
        path = Path(self._by_number(entry) for entry in path_of(way, _LONGEST_NAME))
        text = str(path).removeprefix(".") or "obj"
        text = text.encode("utf-8", "backslashreplace").decode("utf-8").replace("\0", "\\0")
        if len(text) > _LONGEST_NAME:
            text = f"{text[:200]}…{text[-100:]}"
        name, count = text, 1
        while name in self._taken:
            count += 1
            name = f"{text}~{count}"
        self._taken.add(name)
        return name

    def _by_number(self, entry: Any) -> Any:
        """A key that no file holds by its number: its text has an address, which says nothing."""
        key = self._encoder.numbered(entry.key) if isinstance(entry, DictKey) else None
        return entry if key is None else DictKey(key)

    def _entries(self, entries: list[Any]) -> Any:
        if all(isinstance(entry, SequenceKey) for entry in entries):
            return len(entries)
        return [self._entry(entry) for entry in entries]

    def _entry(self, entry: Any) -> Any:
        """An attribute as a text, a key in a list, numbers as numbers."""
        if isinstance(entry, GetAttrKey):
            return entry.name
        if isinstance(entry, SequenceKey):
            return entry.idx
        if isinstance(entry, FlattenedIndexKey):
            return {"flat": entry.key}
        if isinstance(entry, (DictKey, NoneKey)):
            return [self._encoder.entry(entry.key)]
        return {"text": str(entry)}

    def _key(self, value: Any) -> Any:
        try:
            return self._encoder.key(value)
        except Opaque:
            raise UnsupportedValueError(NO_KEY.format(cls=type(value).__qualname__)) from None

    def _detail(self, row: Row) -> Iterator[Any]:
        cls = row.type
        if cls is None:
            return
        base = _core.kind_info(cls)[0]
        value = row.value
        if base == "set":
            yield [self._key(element) for element in value]
        elif base == "function":
            yield {"qualname": value.__qualname__, "variables": list(value.__code__.co_freevars)}
        elif base in ("deque", "buffer", "value") and value is not None:
            yield self._key(value)
