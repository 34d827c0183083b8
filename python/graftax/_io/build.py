# SPDX-License-Identifier: Apache-2.0
"""Builds new objects from the rows of a file. No code of their classes runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from jax.tree_util import DictKey, GetAttrKey

from graftax import _core
from graftax._base.errors import GraftaxError
from graftax._graph.build import GraphBuilder, Node
from graftax._graph.structure import KeyEntry
from graftax._io.decode_graph import FileGraph
from graftax._io.errors import LoadError, Malformed
from graftax._io.importable_names import MISSING
from graftax._io.json_values import Decoder, are_characters, refuse_collisions
from graftax._io.opaque_keys import OpaqueKey, UnknownKey


class ObjectBuilder:
    """Builds objects from rows. Rows that are referred to more than once become shared objects.

    Args:
        file_graph, decoder: the rows, and the reader of their values.
        array: gives the value of a row that is an array, or that was left out.
    """

    def __init__(self, file_graph: FileGraph, decoder: Decoder, array: Callable[[int], Any]) -> None:
        self._file, self._decoder, self._array = file_graph, decoder, array
        self._nodes: dict[int, Node] = {}
        self._values: dict[int, Any] = {}
        self._failed: set[int] = set()
        self._aux_in_progress: set[int] = set()

    def value(self, number: int) -> Any:
        """The value of a row; MISSING, which is noted, where it needs something that is not known.

        Raises:
            LoadError: if the object cannot be built.
        """
        number = self._file.target(number)
        # Everything is described first: an object with an unknown part is not built at all.
        if not self._describe(number):
            return MISSING
        if number not in self._nodes:
            return self._values[number]
        try:
            return GraphBuilder(
                self._nodes, self._values, lambda row: repr(self._file.path(row) if row >= 0 else row)
            ).build(number)
        except (Malformed, LoadError):
            raise
        # What a damaged file may cause in the core, in NumPy or in the class's own unflatten.
        except (
            GraftaxError,
            ValueError,
            TypeError,
            AttributeError,
            LookupError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise LoadError(f"what the file has at {self._file.path(number)!r} cannot be built: {error}") from error

    def note_unknown(self) -> None:
        """Notes every name and value in the file that is not known, for one error about all of them."""
        for number, row in enumerate(self._file.rows):
            if row.op != "r" and number not in self._nodes and number not in self._values:
                self._describe_row(number)

    def _describe(self, number: int) -> bool:
        """Describes a row and all rows below it. False where something is not known."""
        todo, reached, is_complete = [number], {number}, True
        while todo:
            row = todo.pop()
            if row not in self._nodes and row not in self._values:
                self._describe_row(row)
            # The walk goes on after a failure, to note everything that is not known.
            is_complete = is_complete and row not in self._failed
            node = self._nodes.get(row)
            for _, child in node.children if node is not None else ():
                if child not in reached:
                    reached.add(child)
                    todo.append(child)
        return is_complete

    def _describe_row(self, number: int) -> None:
        row = self._file.rows[number]
        if row.op == "n":
            node = self._node(number)
            if node is not None:
                self._nodes[number] = node
                return
            value = MISSING
        elif row.op == "s":
            value = self._decoder.value(row.arg)
        else:
            value = self._array(number)
        if value is MISSING:
            self._failed.add(number)
        self._values[number] = value

    def _node(self, number: int) -> Node | None:
        row = self._file.rows[number]
        resolver = self._decoder.resolver
        is_noted = row.arg in resolver.unknown
        cls = resolver.resolve_class(row.arg)
        children = [(entry, self._file.target(child)) for entry, child in row.children]
        # With `classes="dict"` the name, which `resolve_class` has noted, is not an error, unless a value needs it too.
        if cls is MISSING and resolver.as_dicts:
            if not is_noted:
                resolver.unknown.pop(row.arg)
            pairs = [(DictKey(e.name) if isinstance(e, GetAttrKey) else e, child) for e, child in children]
            return Node(dict, pairs)
        unknown_keys = [e.key for e, _ in children if isinstance(getattr(e, "key", None), UnknownKey)]
        for key in unknown_keys:
            hint = ", which only like= can give" if isinstance(key, OpaqueKey) else ""
            resolver.note_missing(f"the key {key!r}{hint}")
        if cls is MISSING or unknown_keys:
            return None
        # A function with a name is a value of the file. Here are the others, whose code no file has.
        base = _core.kind_info(cls)[0]
        if base == "function":
            qualname = row.detail.get("qualname") if type(row.detail) is dict else "of a closure"
            resolver.note_missing(f"the function {qualname}, which only like= can give")
            return None
        detail = row.detail
        if base == "registered":
            return self._registered(number, cls, children)
        if base == "set":
            elements = self._decoder.parts(detail, 0)
            if elements is MISSING:
                return None
            refuse_collisions(elements)
            return Node(cls, children, elements)
        if detail is not None:
            detail = self._decoder.value(detail)
            if detail is MISSING:
                return None
            if cls is np.ndarray:
                _check_text_array(detail)
        return Node(cls, children, detail)

    def _registered(self, number: int, cls: type, children: list[tuple[KeyEntry, int]]) -> Node | None:
        """Describes a registered node. Its aux data are built first: the class must not see them unfinished."""
        if number in self._aux_in_progress:
            raise LoadError(f"the aux data of {self._file.path(number)!r} contain the object itself")
        position = next((i for i, (entry, _) in enumerate(children) if entry == GetAttrKey("aux_data")), None)
        if position is None:
            raise LoadError(f"what the file has at {self._file.path(number)!r} has no aux data")
        self._aux_in_progress.add(number)
        aux = self.value(children[position][1])
        self._aux_in_progress.discard(number)
        if aux is MISSING:
            return None
        # The built aux data get a number of their own, which no row has.
        self._values[-number - 1] = aux
        children = [*children[:position], (children[position][0], -number - 1), *children[position + 1 :]]
        return Node(cls, children, (aux,))


def _check_text_array(detail: Any) -> None:
    """Refuses a text array whose bytes do not fit its dtype and shape, or are not characters."""
    dtype, shape, data = detail
    numpy_dtype = np.dtype(dtype)
    size = math.prod(shape)
    # The dtype may be anything in a damaged file, and decides how the bytes are read.
    if dtype != "|V0" and (numpy_dtype.kind not in "USMm" or numpy_dtype.itemsize * size != len(data)):
        raise LoadError("a text array whose bytes do not fit its dtype and shape")
    if not are_characters(numpy_dtype, data):
        raise LoadError("a text array with invalid characters")
    if dtype == "|V0" and size > 1 << 32:
        raise LoadError("an array of void that is too large")


def unknown_names(unknown: Iterable[str], path: str) -> LoadError:
    """The error that lists all names that are not known."""
    return LoadError(
        f"{path} holds classes or functions that are not known here. Loading imports nothing: pass objects of the same "
        "classes as like=, name the classes and functions in classes=[...] (a class, or a pattern of loaded modules "
        'such as "mypkg.*"), or get dicts in their place with classes="dict". Not known:',
        unknown,
    )
