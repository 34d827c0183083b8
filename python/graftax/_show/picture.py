# SPDX-License-Identifier: Apache-2.0
"""The model behind `graftax.show`: the rows of an object graph in pre-order, their relations, and their sizes."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from graftax._graph.path import Graph
from graftax._graph.select import find
from graftax._graph.structure import place_name, plain_key
from graftax._graph.types.describe import plain
from graftax._show.format import array_text, array_type, plain_text, size_of, type_text, value_text
from graftax._training.optax_repr import is_transformation, transformation_text

_INLINE_ITEMS = 12  # of a container that is written on one line
_INLINE = 60  # characters of it
_CONTAINERS = (list, tuple, dict, set, frozenset)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
# Of Flax NNX, which is not imported here: its internal fields by their first letters, and those in which a Variable
# has its array.
_MACHINERY = ("_pytree__", "_object__", "_trace_state", "_var_metadata")
_RAW_VALUES = ("_raw_value", "raw_value")


class Size(NamedTuple):
    """The size of the arrays below a row, each counted once: the numbers in inexact arrays, and the bytes of all."""

    parameters: int
    bytes: int


class Marks(NamedTuple):
    """Words shown beside rows: by the id of an array or an object, by (id of the parent, key), or by the row."""

    objects: dict[int, list[str]]
    children: dict[tuple[int, Any], list[str]]
    rows: dict[int, list[str]]


class Picture:
    """An object graph that is read once. The structure is computed at once, names and texts on demand.

    Args:
        obj: the root.
        title: the text of the root; None: its type.
        values: shows numbers of each array, which are copied from its device.
        names: the labels of the root's items; the root is then a tuple of several roots.
        marks: computes the words beside rows.
        shapes: a `jax.ShapeDtypeStruct` is drawn as an array.
        show_internals: shows fields that libraries keep for themselves, too.
    """

    def __init__(
        self,
        obj: Any,
        *,
        title: str | None = None,
        values: bool = False,
        names: Sequence[str] | None = None,
        marks: Callable[[Graph], Marks] | None = None,
        shapes: bool = False,
        show_internals: bool = False,
    ) -> None:
        self.graph = Graph(obj)
        self.rows = self.graph.rows
        self._title, self._values, self._names, self._shapes = title, values, names, shapes
        self._show_internals = show_internals
        self.end = self._ends()
        self.first_rows, self.tags = self._shared()
        self._marks = marks(self.graph) if marks is not None else Marks({}, {}, {})
        self.shown_rows: set[int] | None = None  # the rows that are drawn; None for all
        self._children_of: dict[int, list[tuple[str, int]]] = {}
        self._texts: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def _ends(self) -> list[int]:
        end = list(range(1, len(self.rows) + 1))
        # Backwards: a row comes after its parent, so its own end is final when it is passed on.
        for number in range(len(self.rows) - 1, 0, -1):
            parent = self.rows[number].parent
            end[parent] = max(end[parent], end[number])
        return end

    def _shared(self) -> tuple[dict[int, int], dict[int, int]]:
        """(by a row that repeats an object or array, its first row; by such a first row, its tag)."""
        first_rows: dict[int, int] = {}
        arrays: dict[int, int] = {}
        for number, row in enumerate(self.rows):
            if row.category == "ref":
                first_rows[number] = row.target
            elif row.category == "array" and arrays.setdefault(id(row.value), number) != number:
                first_rows[number] = arrays[id(row.value)]
        return first_rows, {number: i for i, number in enumerate(sorted(set(first_rows.values())), 1)}

    @functools.cached_property
    def repeated(self) -> dict[int, list[int]]:
        """By the first row of an object, the rows that repeat it."""
        rows: dict[int, list[int]] = {}
        for number, first_row in self.first_rows.items():
            rows.setdefault(first_row, []).append(number)
        return rows

    @functools.cached_property
    def sizes(self) -> list[Size]:
        """The size below each row. An array that occurs there several times is counted once."""
        parameters, bytes_ = [0] * len(self.rows), [0] * len(self.rows)
        last_row: dict[int, int] = {}
        for number, row in enumerate(self.rows):
            size = size_of(row.value) if row.category == "array" else None
            if size is None:
                continue
            parameters[number], bytes_[number] = size
            previous = last_row.get(id(row.value))
            # From the common ancestor on both occurrences are added up, so one is subtracted there.
            if previous is not None:
                ancestor = self._common_ancestor(previous, number)
                parameters[ancestor] -= size[0]
                bytes_[ancestor] -= size[1]
            last_row[id(row.value)] = number
        for number in range(len(self.rows) - 1, 0, -1):
            parent = self.rows[number].parent
            parameters[parent] += parameters[number]
            bytes_[parent] += bytes_[number]
        return [Size(*size) for size in zip(parameters, bytes_, strict=True)]

    def _common_ancestor(self, previous: int, number: int) -> int:
        """The lowest row above both. Rows are in pre-order, so a row's descendants end at `end`."""
        while previous >= 0:
            if self.end[previous] > number:
                return previous
            previous = self.rows[previous].parent
        return 0

    # ---- what is drawn

    def children(self, number: int) -> list[tuple[str, int]]:
        """(label, row) of each child. The children of a function are its closure and its defaults."""
        children = self._children_of.get(number)
        # Kept, since a page, a text and a drawing ask for the same rows many times.
        if children is None:
            children = self._children_of[number] = self._children(number)
        return children

    def _children(self, number: int) -> list[tuple[str, int]]:
        row = self.rows[number]
        if row.category != "node":
            return []
        children: list[tuple[str, int]] = []
        names = self._names if number == 0 else None
        is_function = isinstance(row.value, types.FunctionType)
        for i, (entry, child) in enumerate(self.graph.key_entries(number)):
            value = self.rows[child].value
            # Defaults and a closure that it does not have.
            if is_function and (value is None or (type(value) is tuple and not value)):
                continue
            label = names[i] if names is not None else label_text(entry)
            if not self._show_internals and label.startswith(_MACHINERY):
                continue
            # A cell is Python's way to share a variable between functions: what is in it is shown in its place.
            if isinstance(value, types.CellType):
                name = f"closure {_closure_name(entry)}" if is_function else label
                children += [(name, inner) for inner in self.graph.children(child)]
            else:
                children.append((label, child))
        return children

    def text(self, number: int) -> str:
        """The text of a row: the type of an array or an object, or a value."""
        text = self._texts.get(number)
        if text is None:
            text = self._texts[number] = self._text(number)
        return text

    def _text(self, number: int) -> str:
        row = self.rows[number]
        if number == 0 and self._title is not None:
            return self._title
        if row.category == "array":
            return array_text(row.value, self._values)
        if row.category in ("node", "ref"):
            wrapped = self._wrapped(number)
            name = type_text(row.value)
            return self.inline(number) or (name if wrapped is None else f"{name} {self.text(wrapped)}")
        return array_type(row.value) if self._is_shape(row.value) else value_text(row.value)

    def style(self, number: int) -> str:
        """How a row is drawn: as a node, an array or a value."""
        row = self.rows[number]
        return "node" if row.category == "ref" else "array" if self._is_shape(row.value) else row.category

    def _is_shape(self, value: object) -> bool:
        return self._shapes and isinstance(value, jax.ShapeDtypeStruct)

    def _wrapped(self, number: int) -> int | None:
        """The array of an object that only wraps it, such as a Variable of Flax NNX."""
        children = self.children(self.rows[number].target)
        if self._show_internals or len(children) != 1 or children[0][0] not in _RAW_VALUES:
            return None
        return children[0][1] if self.rows[children[0][1]].category == "array" else None

    def inline(self, number: int) -> str | None:
        """A container of plain values alone, or a transformation of Optax without arrays, on one line."""
        row, end = self.rows[number], self.end[number]
        # The closures of a transformation say less than its numbers, which the text has.
        if not self._show_internals and is_transformation(row.value):
            has_arrays = any(self.rows[descendant].category == "array" for descendant in range(number, end))
            return None if has_arrays else transformation_text(row.value)
        if type(row.value) not in _CONTAINERS or end - number > _INLINE_ITEMS:
            return None
        for descendant in range(number + 1, end):
            row_kind, value_type = self.rows[descendant].category, type(plain(self.rows[descendant].value))
            is_plain = value_type in (_PLAIN if row_kind == "value" else _CONTAINERS if row_kind == "node" else ())
            # An object that is shared, or that has a mark, needs a row of its own to show it.
            if not is_plain or descendant in self.tags or self.marks(descendant):
                return None
        text = plain_text(row.value)
        return text if text is not None and len(text) <= _INLINE else None

    def short(self, number: int) -> str:
        """A row without its value. Siblings with the same text are grouped."""
        row = self.rows[number]
        if row.category == "array":
            return array_text(row.value, values=False)
        if row.category == "node" or not callable(row.value):
            return type_text(row.value)
        return value_text(row.value)

    def is_open(self, number: int) -> bool:
        """Does the row have children that are drawn?"""
        if self.rows[number].category != "node" or self.inline(number) is not None:
            return False
        return bool(self.children(number)) and self._wrapped(number) is None

    def path(self, number: int) -> str:
        """The key path of a row."""
        path: tuple[Any, ...] = tuple(self.graph.path(number))
        if self._names is not None and path:
            return place_name((path[0].idx, path[1:]), tuple(self._names))
        text = place_name((0, path), ("",))
        return text[1:] if text.startswith(".") else text or "the root"

    def marks(self, number: int) -> list[str]:
        """The words beside a row."""
        row, marks = self.rows[number], self._marks
        texts = list(marks.rows.get(number, ()))
        # A cell has no row of its own in the picture: its content is shown, with the marks of both.
        if row.parent > 0 and isinstance(self.rows[row.parent].value, types.CellType):
            texts += marks.rows.get(row.parent, ())
        if row.category in ("array", "node"):
            texts += marks.objects.get(id(row.value), ())
        # The array of a wrapper has no row of its own, so its marks stand beside the wrapper.
        wrapped = self._wrapped(number) if row.category == "node" else None
        if wrapped is not None:
            texts += [text for text in self.marks(wrapped) if text not in texts]
        if marks.children and row.parent >= 0:
            # The graph knows the key of a row once its parent was asked for the keys of its children.
            self.graph.key_entries(row.parent)
            entry = self.graph._entry_of_row.get(number)  # pyright: ignore[reportPrivateUsage]
            texts += marks.children.get((id(self.rows[row.parent].value), entry), ())
        return texts


def label_text(entry: Any) -> str:
    """The label of a row: `w` for an attribute, `'w'` for a key, `[0]` for an index."""
    if isinstance(entry, GetAttrKey):
        return entry.name
    if isinstance(entry, SequenceKey):
        return f"[{entry.idx}]"
    if isinstance(entry, DictKey):
        return plain_text(entry.key) or f"{type(entry.key).__qualname__} key"
    return str(entry)


def _closure_name(entry: Any) -> str:
    text = str(plain_key(entry))
    return text.split("'")[1] if text.count("'") >= 2 else text


def marked_by(patterns: dict[str, Any]) -> Callable[[Graph], Marks]:
    """Marks by patterns, types and predicates, as `find` takes them."""

    def marks(graph: Graph) -> Marks:
        marks = Marks({}, {}, {})
        for mark, pattern in patterns.items():
            for path, _ in find(graph.rows[0].value, pattern):
                marks.rows.setdefault(graph.number(path), []).append(mark)
        return marks

    return marks
