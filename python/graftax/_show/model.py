# SPDX-License-Identifier: Apache-2.0
"""What there is to see of an object graph: rows in pre-order, what stands above and below them, and their sizes."""

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
from graftax._show.library_names import MACHINERY, RAW_VALUES
from graftax._training.optax_repr import is_transformation, transformation_text

_INLINE_ITEMS = 12  # of a container that is written on one line
_INLINE = 60  # characters of it
_CONTAINERS = (list, tuple, dict, set, frozenset)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class Size(NamedTuple):
    """What the arrays below a row are, each array once: how many numbers in inexact ones, and all their bytes."""

    parameters: int
    bytes: int


class Marks(NamedTuple):
    """Words that stand beside places. Arrays and objects are known by identity, a child by its object and its key."""

    objects: dict[int, list[str]]
    children: dict[tuple[int, Any], list[str]]
    rows: dict[int, list[str]]


class Picture:
    """An object graph, read once: the structure at once, names and texts when they are asked for.

    Args:
        obj: the root.
        title: what the root is called; None: by its type.
        values: numbers are read from arrays, which copies from their devices.
        names: of the items of the root, which is a tuple of several roots then.
        marks: words beside places.
        shapes: a `jax.ShapeDtypeStruct` stands for an array that is not there yet.
        whole: what libraries keep for themselves is shown, too.
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
        whole: bool = False,
    ) -> None:
        self.graph = Graph(obj)
        self.rows = self.graph.rows
        self._title, self._values, self._names, self._shapes = title, values, names, shapes
        self._whole = whole
        self.end = self._ends()
        self.first, self.tags = self._shared()
        self._marks = marks(self.graph) if marks is not None else Marks({}, {}, {})
        self.only: set[int] | None = None  # what is drawn, where that is not all
        self._below: dict[int, list[tuple[str, int]]] = {}
        self._texts: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def _ends(self) -> list[int]:
        end = list(range(1, len(self.rows) + 1))
        for number in range(len(self.rows) - 1, 0, -1):
            up = self.rows[number].parent
            end[up] = max(end[up], end[number])
        return end

    def _shared(self) -> tuple[dict[int, int], dict[int, int]]:
        """(of each row that repeats something, the first one; the tag of each such first one)."""
        first: dict[int, int] = {}
        arrays: dict[int, int] = {}
        for number, row in enumerate(self.rows):
            if row.what == "ref":
                first[number] = row.target
            elif row.what == "array" and arrays.setdefault(id(row.value), number) != number:
                first[number] = arrays[id(row.value)]
        return first, {number: i for i, number in enumerate(sorted(set(first.values())), 1)}

    @functools.cached_property
    def repeated(self) -> dict[int, list[int]]:
        """By the first of the rows of one object, the others."""
        found: dict[int, list[int]] = {}
        for number, first in self.first.items():
            found.setdefault(first, []).append(number)
        return found

    @functools.cached_property
    def sizes(self) -> list[Size]:
        """Of each row: what stands below it, an array in several places there counted once."""
        parameters, bytes_ = [0] * len(self.rows), [0] * len(self.rows)
        last: dict[int, int] = {}
        for number, row in enumerate(self.rows):
            size = size_of(row.value) if row.what == "array" else None
            if size is None:
                continue
            parameters[number], bytes_[number] = size
            before = last.get(id(row.value))
            if before is not None:  # counted below both: once too often where their ways meet
                meet = self._meet(before, number)
                parameters[meet] -= size[0]
                bytes_[meet] -= size[1]
            last[id(row.value)] = number
        for number in range(len(self.rows) - 1, 0, -1):
            up = self.rows[number].parent
            parameters[up] += parameters[number]
            bytes_[up] += bytes_[number]
        return [Size(*each) for each in zip(parameters, bytes_, strict=True)]

    def _meet(self, before: int, number: int) -> int:
        """The lowest row above two: the rows below one are those up to its end."""
        while before >= 0:
            if self.end[before] > number:
                return before
            before = self.rows[before].parent
        return 0

    # ---- what is drawn

    def children(self, number: int) -> list[tuple[str, int]]:
        """(label, number) one level below. What a function has beside its code is its closure and its defaults."""
        known = self._below.get(number)
        if known is None:
            known = self._below[number] = self._children(number)
        return known

    def _children(self, number: int) -> list[tuple[str, int]]:
        row = self.rows[number]
        if row.what != "node":
            return []
        found: list[tuple[str, int]] = []
        names = self._names if number == 0 else None
        is_function = isinstance(row.value, types.FunctionType)
        for i, (entry, child) in enumerate(self.graph.key_entries(number)):
            value = self.rows[child].value
            if is_function and (
                value is None or (type(value) is tuple and not value)
            ):  # defaults and a closure that it does not have
                continue
            label = names[i] if names is not None else label_text(entry)
            if not self._whole and label.startswith(MACHINERY):
                continue
            if isinstance(value, types.CellType):  # what is in it stands in its place
                name = f"closure {_closure_name(entry)}" if is_function else label
                found += [(name, inner) for inner in self.graph.children(child)]
            else:
                found.append((label, child))
        return found

    def text(self, number: int) -> str:
        """What a row is: the type of an array or an object, or a value."""
        known = self._texts.get(number)
        if known is None:
            known = self._texts[number] = self._text(number)
        return known

    def _text(self, number: int) -> str:
        row = self.rows[number]
        if number == 0 and self._title is not None:
            return self._title
        if row.what == "array":
            return array_text(row.value, self._values)
        if row.what in ("node", "ref"):
            within = self._wrapped(number)
            name = type_text(row.value)
            return self.inline(number) or (name if within is None else f"{name} {self.text(within)}")
        return array_type(row.value) if self._is_shape(row.value) else value_text(row.value)

    def look(self, number: int) -> str:
        """How a row is drawn: as a node, an array or a value."""
        row = self.rows[number]
        return "node" if row.what == "ref" else "array" if self._is_shape(row.value) else row.what

    def _is_shape(self, value: Any) -> bool:
        return self._shapes and isinstance(value, jax.ShapeDtypeStruct)

    def _wrapped(self, number: int) -> int | None:
        """The array in an object that is nothing but a name for it, as a variable of Flax NNX is."""
        children = self.children(self.rows[number].target)
        if self._whole or len(children) != 1 or children[0][0] not in RAW_VALUES:
            return None
        return children[0][1] if self.rows[children[0][1]].what == "array" else None

    def inline(self, number: int) -> str | None:
        """A container of plain values alone, or a transformation of Optax without arrays, on one line."""
        row, end = self.rows[number], self.end[number]
        if not self._whole and is_transformation(row.value):
            held = any(self.rows[below].what == "array" for below in range(number, end))
            return None if held else transformation_text(row.value)
        if type(row.value) not in _CONTAINERS or end - number > _INLINE_ITEMS:
            return None
        for below in range(number + 1, end):
            what, of = self.rows[below].what, type(plain(self.rows[below].value))
            is_plain = of in (_PLAIN if what == "value" else _CONTAINERS if what == "node" else ())
            if not is_plain or below in self.tags or self.marks(below):
                return None
        text = plain_text(row.value)
        return text if text is not None and len(text) <= _INLINE else None

    def short(self, number: int) -> str:
        """What a row is without its value: by this, rows are alike."""
        row = self.rows[number]
        if row.what == "array":
            return array_text(row.value, values=False)
        if row.what == "node" or not callable(row.value):
            return type_text(row.value)
        return value_text(row.value)

    def is_open(self, number: int) -> bool:
        """Is there something below that is drawn?"""
        if self.rows[number].what != "node" or self.inline(number) is not None:
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
        words = list(marks.rows.get(number, ()))
        if row.parent > 0 and isinstance(self.rows[row.parent].value, types.CellType):
            words += marks.rows.get(row.parent, ())
        if row.what in ("array", "node"):
            words += marks.objects.get(id(row.value), ())
        within = self._wrapped(number) if row.what == "node" else None
        if within is not None:
            words += [word for word in self.marks(within) if word not in words]
        if marks.children and row.parent >= 0:
            self.graph.key_entries(row.parent)
            entry = self.graph._entry.get(number)  # pyright: ignore[reportPrivateUsage]
            words += marks.children.get((id(self.rows[row.parent].value), entry), ())
        return words

    def kind(self, number: int) -> str:
        """array, value, node, or ref: of something that stood before."""
        return "ref" if number in self.first else self.rows[number].what


def label_text(entry: Any) -> str:
    """A key entry as it stands in front of a row: `w` is an attribute, `'w'` a key, `[0]` an index."""
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


def marked_by(words: dict[str, Any]) -> Callable[[Graph], Marks]:
    """Marks by patterns, types and predicates, as `find` takes them."""

    def marks(graph: Graph) -> Marks:
        found = Marks({}, {}, {})
        for word, what in words.items():
            for path, _ in find(graph.rows[0].value, what):
                found.rows.setdefault(graph.number(path), []).append(word)
        return found

    return marks
