# SPDX-License-Identifier: Apache-2.0
"""The objects that the rows of a file describe, made anew: no code of their classes runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, cast

import numpy as np
from jax.tree_util import DictKey, GetAttrKey

from graftax import _core
from graftax._base.errors import GraftaxError
from graftax._graph.build import Assembly, Node
from graftax._io.decode_graph import Rows
from graftax._io.errors import LoadError, Malformed
from graftax._io.importable_names import MISSING
from graftax._io.json_values import Decoder, are_characters, refuse_collisions
from graftax._io.opaque_keys import OpaqueKey, UnknownKey


class Build:
    """Makes objects of rows; one that is met again is the same object.

    Args:
        array: the value of a row that is an array, or was left out.
    """

    def __init__(self, rows: Rows, decoder: Decoder, array: Callable[[int], Any]) -> None:
        self._rows, self._decoder, self._array = rows, decoder, array
        self._nodes: dict[int, Node] = {}
        self._values: dict[int, Any] = {}
        self._failed: set[int] = set()
        self._open: set[int] = set()

    def value(self, number: int) -> Any:
        """The value of a row; MISSING where something in it is not known, which is noted then.

        Raises:
            LoadError: where no such object can be.
        """
        number = self._rows.target(number)
        if not self._describe(number):
            return MISSING
        if number not in self._nodes:
            return self._values[number]
        try:
            return Assembly(self._nodes, self._values, lambda at: repr(self._rows.path(at) if at >= 0 else at)).build(
                number
            )
        except (Malformed, LoadError):
            raise
        except (
            GraftaxError,
            ValueError,
            TypeError,
            AttributeError,
            LookupError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise LoadError(f"what the file has at {self._rows.path(number)!r} cannot be built: {error}") from error

    def note_unknown(self) -> None:
        """Notes everything in the file that is not known."""
        for number, row in enumerate(self._rows.all):
            if row.op != "r" and number not in self._nodes and number not in self._values:
                self._one(number)

    def _describe(self, number: int) -> bool:
        """Describes a row and all below it. False where something is not known."""
        todo, reached, fine = [number], {number}, True
        while todo:
            at = todo.pop()
            if at not in self._nodes and at not in self._values:
                self._one(at)
            fine = fine and at not in self._failed
            node = self._nodes.get(at)
            for _, child in node.children if node is not None else ():
                if child not in reached:
                    reached.add(child)
                    todo.append(child)
        return fine

    def _one(self, number: int) -> None:
        row = self._rows.all[number]
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
        row = self._rows.all[number]
        known = self._decoder.known
        cls = known.a_class(row.arg)
        children = [(entry, self._rows.target(child)) for entry, child in row.children]
        if cls is MISSING and known.as_dicts:
            known.unknown.pop(row.arg)
            return Node(dict, [(_as_key(entry), child) for entry, child in children])
        if cls is MISSING or any(isinstance(getattr(entry, "key", None), UnknownKey) for entry, _ in children):
            for entry, _ in children:
                key = getattr(entry, "key", None)
                if isinstance(key, UnknownKey):
                    known.missing(
                        f"the key {key!r}{', which only like= can give' if isinstance(key, OpaqueKey) else ''}"
                    )
            return None
        base = _core.kind_info(cls)[0]
        if base == "function":
            known.missing(f"the function {self._qualname(row.detail)}, which only like= can give")
            return None
        detail = row.detail
        if base == "registered":
            return self._registered(number, cls, children)
        if base == "set":
            found = self._decoder.parts(detail, 0)
            if found is MISSING:
                return None
            refuse_collisions(found)
            return Node(cls, children, found)
        if detail is not None:
            detail = self._decoder.value(detail)
            if detail is MISSING:
                return None
            if cls is np.ndarray:
                _refuse_memory(detail)
        return Node(cls, children, detail)

    def _registered(self, number: int, cls: type, children: list[tuple[Any, int]]) -> Node | None:
        """The aux data are whole before the class is given them: a dict in them would be empty otherwise."""
        if number in self._open:
            raise LoadError(f"the aux data of {self._rows.path(number)!r} reach the object itself")
        at = next((i for i, (entry, _) in enumerate(children) if entry == GetAttrKey("aux_data")), None)
        if at is None:
            raise LoadError(f"what the file has at {self._rows.path(number)!r} has no aux data")
        self._open.add(number)
        aux = self.value(children[at][1])
        self._open.discard(number)
        if aux is MISSING:
            return None
        self._values[-number - 1] = aux
        return Node(cls, [*children[:at], (children[at][0], -number - 1), *children[at + 1 :]], (aux,))

    def _qualname(self, detail: Any) -> str:
        return str(cast("dict[str, Any]", detail).get("qualname")) if type(detail) is dict else "of a closure"


def _as_key(entry: Any) -> Any:
    return DictKey(entry.name) if isinstance(entry, GetAttrKey) else entry


def _refuse_memory(detail: Any) -> None:
    """A text array holds as many bytes as it says, and is of texts or dates."""
    dtype, shape, data = detail
    found = np.dtype(dtype)
    size = math.prod(shape)
    if dtype != "|V0" and (found.kind not in "USMm" or found.itemsize * size != len(data)):
        raise LoadError("a text array that holds something else")
    if not are_characters(found, data):
        raise LoadError("a text array of what are no characters")
    if dtype == "|V0" and size > 1 << 32:
        raise LoadError("an array of nothing that is too large")


def unknown_names(unknown: Iterable[str], path: str) -> LoadError:
    """The one error for all names that lead nowhere."""
    return LoadError(
        f"{path} holds what is not known here. Loading imports nothing: give objects of the same classes as like=, the "
        'classes and functions as classes=[...] (a class, or a pattern of loaded modules such as "mypkg.*"), or '
        'classes="dict" for dicts in their place. Not known:',
        unknown,
    )
