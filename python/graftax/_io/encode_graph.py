# SPDX-License-Identifier: Apache-2.0
"""Encodes an object graph as the rows of a file: nodes, arrays, values and references, in walk order."""

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
from graftax._graph.structure import KeyEntry, Op, Row, Structure
from graftax._graph.structure_diff import LinkedPath, linked_entries
from graftax._graph.types.pytree_nodes import NoneKey
from graftax._io.importable_names import NameTable, has_name
from graftax._io.json_values import Encoder, Opaque
from graftax._io.tensor import LOGICAL, ArrayToSave, ExternalArray, Leaf, array_to_save

FORMAT = 1
_NUMBERS = (bool, int, float, complex)
_MAX_NAME_LENGTH = 400  # characters of a tensor name: the path of a deep graph may have millions

NO_KEY = (
    "a {cls} that is an element of a set has neither a value nor a name that a file can hold. Use numbers, strings, "
    "tuples of them or enums."
)

ABSTRACT = (
    "a jax.ShapeDtypeStruct, as every array of this object: graftax.eval_shape and the like give shapes without data, "
    "and there is nothing to save. Save what the function itself returns; shapes are for like= of graftax.load"
)


def _is_array(value: object) -> bool:
    """Is a static value an array that can be a tensor of a file?"""
    return isinstance(value, jax.Array) or (isinstance(value, np.ndarray) and value.dtype.name in LOGICAL)


class EncodedGraph:
    """The rows and arrays to be written for an object graph.

    Args:
        obj: the root.
        is_selected: tells whether the array at a path is written; the others are marked as left out.
        dtype: the dtype in which floating arrays are written; None keeps theirs.
        is_external: tells whether an array is stored outside of the file: its row is written, its data are in
            `external_arrays`.

    Raises:
        UnsupportedValueError: for a value that no file can hold; names its path.
    """

    def __init__(
        self,
        obj: Any,
        is_selected: Callable[[Path], bool] | None = None,
        dtype: np.dtype[Any] | None = None,
        is_external: Callable[[ArrayToSave], bool] | None = None,
    ) -> None:
        self._leaves, graphdef = _core.flatten(obj)
        self._structure = Structure(graphdef)
        self._is_selected, self._dtype, self._is_external = is_selected, dtype, is_external
        self.external_arrays: dict[str, Any] = {}
        self._names = NameTable()
        self._encoder = Encoder(self._names)
        self._numbers: dict[int, int] = {}  # row of the structure -> row of the file
        self._tensors: dict[int, int] = {}  # id of an array -> its index in `_described`
        self._used_names: set[str] = {"__metadata__"}  # which the format reserves
        self.rows: list[list[Any]] = []
        self.arrays: list[ArrayToSave] = []
        self._described: list[Leaf] = []
        self._abstract: LinkedPath | Literal[False] = False  # the path of the first array without data
        self._walk(obj)
        # A graph of `eval_shape` has abstract arrays only; a single one beside real arrays is a value.
        if self._abstract is not False and all(row[0] not in "a-" for row in self.rows):
            raise UnsupportedValueError(f"{Path(linked_entries(self._abstract))!r}: {ABSTRACT}")

    def to_json(self) -> dict[str, Any]:
        arrays = [leaf.to_json() for leaf in self._described]
        return {"format": FORMAT, "needs": 1, "names": list(self._names.numbers), "arrays": arrays, "rows": self.rows}

    def _walk(self, obj: object) -> None:
        todo: list[tuple[Row, LinkedPath, Any]] = [(self._structure.rows[0], None, obj)]
        while todo:
            row, path, live = todo.pop()
            try:
                todo += self._visit(row, path, live)
            except Exception as error:
                raise at_path(error, repr(Path(linked_entries(path)))) from error.__cause__

    def _visit(self, row: Row, path: LinkedPath, live: object) -> list[tuple[Row, LinkedPath, Any]]:
        """Writes a row; returns the rows below it in reverse order, each with its path and its live object."""
        # References and repeated values first: they are written as what they refer to, or as its number.
        row = self._structure.target(row)
        # A number is a leaf where its class declares the field as data; a file holds it as a value all the same.
        is_number = row.op is Op.leaf and isinstance(self._leaves[row.leaf], _NUMBERS)
        # An array is a static where the class declares its field as one. Its data are a tensor all the same.
        if row.op is Op.static and _is_array(row.value):
            self.rows.append(self._leaf(row.value, path))
            return []
        if is_number or row.op is Op.static:
            if isinstance(live, jax.ShapeDtypeStruct) and self._abstract is False:
                self._abstract = path
            self.rows.append(["s", self._encoder.value(self._leaves[row.leaf] if is_number else row.value)])
            return []
        if row.op is Op.leaf:
            self.rows.append(self._leaf(self._leaves[row.leaf], path))
            return []
        # The node, or an equal immutable value, was written before.
        if row.number in self._numbers:
            self.rows.append(["r", self._numbers[row.number]])
            return []
        self._numbers[row.number] = len(self.rows)
        if isinstance(live, types.FunctionType) and not self._has_inner_arrays(row, live):
            self.rows.append(["s", self._encoder.value(live)])
            return []
        # Children are walked with their live objects, which have key entries of JAX that the structure does not.
        children = list(self._structure.children(row))
        live_children = _core.children_with_keys(live)
        entries, child_values = [child.key_entry for child in children], [value for _, value in live_children]
        if any(isinstance(entry, FlattenedIndexKey) for entry in entries):
            entries = [entry for entry, _ in open_node(live)]
        self.rows.append(["n", self._names.number(row.type), self._entries(entries), *self._payload(row)])
        triples = zip(children, entries, child_values, strict=True)
        todo: list[tuple[Row, LinkedPath, Any]] = [(child, (path, entry), value) for child, entry, value in triples]
        return todo[::-1]

    def _has_inner_arrays(self, row: Row, function: types.FunctionType) -> bool:
        """Is a function without a name written as a node, because it captures arrays?"""
        return not has_name(function) and any(inner.op is Op.leaf for inner in self._structure.subtree(row))

    def _leaf(self, value: object, path: LinkedPath) -> list[Any]:
        """The row of an array. An array at several paths is one tensor."""
        if self._is_selected is not None and not self._is_selected(Path(linked_entries(path))):
            return ["-"]
        # By id: the graph that is saved keeps its arrays alive meanwhile.
        index = self._tensors.get(id(value))
        if index is None:
            index = self._tensors[id(value)] = len(self._described)
            saved = array_to_save(value, self._name(path), self._dtype, self._is_external is not None)
            self._described.append(saved.leaf)
            if self._is_external is not None and self._is_external(saved):
                key = str(len(self.external_arrays))
                self.external_arrays[key] = saved.array
                external = ExternalArray(key, np.dtype(saved.array.dtype).name, tuple(saved.array.shape))
                self._described[-1] = saved.leaf._replace(dtype=None, outside=external)
            else:
                self.arrays.append(saved)
        return ["a", index]

    def _name(self, linked_path: LinkedPath) -> str:
        """The name of a tensor: the text of its path, made unique, of bounded length and valid UTF-8."""
        path = Path(self._printable_entry(entry) for entry in linked_entries(linked_path, _MAX_NAME_LENGTH))
        text = str(path).removeprefix(".") or "obj"
        text = text.encode("utf-8", "backslashreplace").decode("utf-8").replace("\0", "\\0")
        if len(text) > _MAX_NAME_LENGTH:
            text = f"{text[:200]}…{text[-100:]}"
        # Two paths may have the same text: a long one is shortened, and a lone surrogate looks like its escape.
        name, count = text, 1
        while name in self._used_names:
            count += 1
            name = f"{text}~{count}"
        self._used_names.add(name)
        return name

    def _printable_entry(self, entry: KeyEntry) -> KeyEntry:
        """An opaque key by its number: its own text would contain an address, which differs in each process."""
        key = self._encoder.opaque_key(entry.key) if isinstance(entry, DictKey) else None
        return entry if key is None else DictKey(key)

    def _entries(self, entries: list[KeyEntry]) -> object:
        """The key entries of a node; of a sequence only their number."""
        if all(isinstance(entry, SequenceKey) for entry in entries):
            return len(entries)
        return [self._entry(entry) for entry in entries]

    def _entry(self, entry: KeyEntry) -> object:
        """The JSON of a key entry: a text for an attribute, an integer for an index, a list of one value for a key."""
        if isinstance(entry, GetAttrKey):
            return entry.name
        if isinstance(entry, SequenceKey):
            return entry.idx
        if isinstance(entry, FlattenedIndexKey):
            return {"flat": entry.key}
        if isinstance(entry, (DictKey, NoneKey)):
            return [self._encoder.entry(entry.key)]
        # Key entries of other classes are compared by their text.
        return {"text": str(entry)}

    def _key(self, value: object) -> object:
        try:
            return self._encoder.key(value)
        except Opaque:
            raise UnsupportedValueError(NO_KEY.format(cls=type(value).__qualname__)) from None

    def _payload(self, row: Row) -> Iterator[object]:
        cls = row.type
        if cls is None:
            return
        # What a node of these kinds has besides its children. The aux data of a registered class are a child.
        base, value = _core.kind_info(cls)[0], row.value
        if base == "set":
            yield [self._key(element) for element in value]
        elif base == "function":
            yield {"qualname": value.__qualname__, "variables": list(value.__code__.co_freevars)}
        elif base in ("deque", "buffer", "value") and value is not None:
            yield self._key(value)
