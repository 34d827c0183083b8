# SPDX-License-Identifier: Apache-2.0
"""Places in an object graph: to read them, to change what stands there, to find parts."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar, cast, overload

import jax
import numpy as np

from graftax import interop
from graftax._base.errors import StructureError, a_type, at_path, some
from graftax._graph.array_aliases import note_made
from graftax._graph.filters import Filter, Seen, filter_of
from graftax._graph.path import Graph, GraphRow, Path
from graftax._graph.patterns import is_pattern, nearest
from graftax._graph.structure import plain_key
from graftax._jax.tracebacks import boundary

NO_PLACE = "nothing in this {cls} matches {where!r}. {near}"
NO_POINTING = (
    "the function given to at() returned the value at {paths}, which stands in several places. To see which one is "
    "meant, it is called again with other objects there, and failed: {error}. Give it the path instead: "
    "at(obj)['layers[0].w']"
)
NOTHING_OF_TYPE = "nothing in this {cls} is an instance of {where!r}."
SET_COUNT = "set() takes a list or tuple with one value for each of the {places} places, got {given}."
TWO_VALUES = (
    "{path!r} is given two values: it is one place, named twice or reached through a shared object. Name it once."
)
WHERE_ELSEWHERE = (
    "the function given to at() must return parts of the object it is called with, nothing computed from them. It "
    "returned {found} that is no part of it. Give a path instead: at(obj)['layers[0].w']"
)

T = TypeVar("T")
V = TypeVar("V")
_Where = str | Path | type | types.UnionType | Callable[[T], Any]


@boundary
def at(obj: T) -> At[T]:
    """Places in a graph, to read them, or to get a copy with other values there.

    In `at(obj)[where]`, `where` is a path or a pattern (`layers[0].w`, `layers[*].w`, `**.bias`), a `Path`, or a tuple
    of those. It may also be a function of the object that returns a part of it or several (`lambda m: m.layers[0].w`).
    The result has `get()`, `set(value)`, `apply(function)`, `update(value)` and `paths`.

    Raises:
        StructureError: if a path or a pattern leads to nothing, with what is there instead.

    Example:
        >>> model = {"layers": [{"w": 4}, {"w": 6}], "head": 1}
        >>> graftax.at(model)["layers[*][w]"].apply(lambda w: w / 2)  # a copy; `model` stays as it is
        {'layers': [{'w': 2.0}, {'w': 3.0}], 'head': 1}
        >>> graftax.at(model)[lambda m: m["head"]].set(None)
        {'layers': [{'w': 4}, {'w': 6}], 'head': None}
    """
    return At(obj)


_VALUES = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, bool, int, float, complex)


class At(Generic[T]):
    """What `at` returns: `at(obj)[where]` are the places."""

    __slots__ = ("_obj",)

    def __init__(self, obj: T) -> None:
        self._obj = obj

    @boundary
    def __getitem__(self, where: _Where[T] | tuple[_Where[T], ...]) -> Places[T]:
        return Places(self._obj, where)


class Places(Generic[T]):
    """Some places of a graph."""

    def __init__(self, obj: T, where: Any) -> None:
        self._graph = Graph(obj)
        self._several, self._groups = _located(self._graph, where)
        self._where = where

    @property
    @boundary
    def paths(self) -> list[Path]:
        """Where they are. What a function pointed at may stand in several places: then it is one path for each."""
        return [self._graph.path(number) for number in self._numbers]

    @boundary
    def get(self) -> Any:
        """The value, or a list of them for a pattern or several places."""
        values = [self._graph.rows[group[0]].value for group in self._groups]
        return values if self._several else values[0]

    @boundary
    def set(self, value: Any) -> T:
        """A copy with another value there. Only what contains one of the places is copied: the rest is shared.

        Args:
            value: for several places named one by one, a sequence with a value for each; for a pattern, one for all.
        """
        return self._graph.core.build(self._values(value))

    @boundary
    def apply(self, function: Callable[[Any], Any]) -> T:
        """A copy with `function(value)` in each of the places. It is called once for each object."""
        return self._graph.core.build(self._applied(function))

    @boundary
    def update(self, value: Any) -> None:
        """As `set`, in place. Immutable objects on the way are made anew inside the mutable one that holds them."""
        self._graph.write(self._values(value))

    @property
    def _numbers(self) -> list[int]:
        return list(dict.fromkeys(number for group in self._groups for number in group))

    @property
    def _written(self) -> list[list[int]]:
        """The groups that are written: `**` at the end means nodes with all that is in them, of which the arrays."""
        if isinstance(self._where, str) and self._where.endswith("**"):
            rows = self._graph.rows
            arrays = [g for g in self._groups if rows[g[0]].what == "array" and not rows[g[0]].aux]
            return arrays or self._groups
        return self._groups

    def _values(self, value: Any) -> dict[int, Any]:
        groups = self._written
        if not self._several or isinstance(self._where, (str, Path)) or _filter(self._where) is not None:
            values = [value] * len(groups)
        else:
            # Not the rows of an array, the letters of a text, or what has no order.
            values = list(cast("Iterable[Any]", value)) if isinstance(value, (list, tuple, Iterator)) else None
            given = a_type(value) if values is None else f"{len(values)} values"
            if values is None or len(values) != len(groups):
                raise ValueError(SET_COUNT.format(given=given, places=len(groups)))
        changes: dict[int, Any] = {}
        for group, new in zip(groups, values, strict=True):
            for number in group:
                if changes.setdefault(number, new) is not new:
                    raise ValueError(TWO_VALUES.format(path=self._graph.path(number)))
        changes = self._inside(changes)
        self._graph.refuse_nested(changes)
        return changes

    def _applied(self, function: Callable[[Any], Any]) -> dict[int, Any]:
        rows = self._graph.rows
        numbers = list(dict.fromkeys(number for group in self._written for number in group))
        self._graph.refuse_nested(dict.fromkeys(numbers))
        made: dict[int, tuple[tuple[Any, ...], Any]] = {}
        changes: dict[int, Any] = {}
        for number in numbers:
            target = id(rows[number].value) if rows[number].what == "array" else rows[number].target
            if target not in made:
                try:
                    made[target] = (rows[number].value,), function(rows[number].value)
                except Exception as error:
                    raise at_path(error, repr(self._graph.path(number)))  # noqa: B904 - it is the same one
            changes[number] = made[target][1]
        note_made(made.values())
        return self._inside(changes)

    def _inside(self, changes: dict[int, Any]) -> dict[int, Any]:
        """An array for what holds one, such as a Variable of NNX, is put into it."""
        graph, placed = self._graph, dict[int, Any]()
        for number, new in changes.items():
            holder = graph.rows[number].target
            field = interop.value_field(graph.rows[holder].value) if isinstance(new, _VALUES) else None
            inside = (child for entry, child in graph.key_entries(holder) if plain_key(entry) == field)
            placed[number if field is None else next(inside, number)] = new
        return placed

    def __repr__(self) -> str:
        return f"<places {some([repr(path) for path in self.paths], 8)}>"


def _located(graph: Graph, where: Any) -> tuple[bool, list[list[int]]]:
    """(are these several, for each the numbers of its rows: one, or all of an object that a function pointed at)."""
    if isinstance(where, Path):
        return False, [[graph.number(where)]]
    if isinstance(where, str):
        return is_pattern(where), [[number] for number in matching(graph, where)]
    wanted = _filter(where)
    if wanted is not None:
        refers, found = graph.refers(), wanted.means(Shown(graph))
        if not found:
            raise StructureError(NOTHING_OF_TYPE.format(cls=type(graph.rows[0].value).__qualname__, where=where))
        return True, [[number, *refers.get(number, ())] for number in found]
    if type(where) in (tuple, list) and where:
        return True, [group for part in cast("list[Any]", where) for group in _located(graph, part)[1]]
    if callable(where):
        return _pointed_at(graph, where)
    raise TypeError(f"at() takes a path, a pattern, a function or several of those, got {where!r}; or a type")


def _filter(where: Any) -> Filter | None:
    return None if isinstance(where, list) else filter_of(where)  # a list means several places, one by one


def matching(graph: Graph, pattern: str | Path) -> list[int]:
    """The numbers of the rows that a pattern means, each once."""
    if isinstance(pattern, Path):
        return [graph.number(pattern)]
    if not is_pattern(pattern):
        return [graph.number_of(pattern)]
    found = graph.matching(pattern)
    if not found:
        near = nearest(pattern, (str(graph.path(number)) for number in range(1, len(graph.rows))))
        text = f"It has {near}." if near else "It has no parts."
        cls = type(graph.rows[0].value).__qualname__
        raise StructureError(NO_PLACE.format(cls=cls, where=pattern, near=text))
    return found


def _pointed_at(graph: Graph, where: Callable[[Any], Any]) -> tuple[bool, list[list[int]]]:
    """The rows of what `where` returns, by identity.

    One immutable value may stand in several places (a small number, None, an array twice): `where` is called again
    with a graph that has another object in each of these, and all else as it was.
    """
    result = where(graph.rows[0].value)
    several, parts = _parts(graph, result)
    known: dict[int, list[int]] = {}
    for number, row in enumerate(graph.rows):
        if row.what != "ref":
            known.setdefault(id(row.value), []).append(number)
    groups = [known.get(id(part), []) for part in parts]
    if not all(groups):
        raise StructureError(WHERE_ELSEWHERE.format(found=a_type(parts[groups.index([])])))
    doubtful = {number: object() for group in groups if len(group) > 1 for number in group}
    if doubtful:
        paths = ", ".join(repr(graph.path(number)) for number in list(doubtful)[:4])
        whole = {number for number in doubtful if graph.children(number)}  # these are made anew anyway
        marks = {number: mark for number, mark in doubtful.items() if number not in whole}
        root, built = graph.core.twin(marks)
        numbers = {id(built[number] if number in whole else marks[number]): number for number in doubtful}
        try:
            again = where(root)
        except Exception as error:
            raise StructureError(NO_POINTING.format(paths=paths, error=f"{type(error).__name__}: {error}")) from error
        pointed = list(again) if several else [again]
        if len(pointed) != len(parts):
            raise StructureError(NO_POINTING.format(paths=paths, error=f"it returned {len(pointed)} parts"))
        for i, part in enumerate(pointed):
            if len(groups[i]) > 1:
                if id(part) not in numbers:
                    raise StructureError(WHERE_ELSEWHERE.format(found=a_type(parts[i])))
                groups[i] = [numbers[id(part)]]
    refers = graph.refers()
    return several, [[group[0], *refers.get(group[0], ())] for group in groups]


def _parts(graph: Graph, result: Any) -> tuple[bool, list[Any]]:
    """What a function pointed at: one part of the graph, or a tuple or list of such, which is no part itself."""
    if isinstance(result, (tuple, list)) and result and not any(row.value is result for row in graph.rows):
        return True, list(cast("list[Any]", result))
    return False, [result]


class Found(NamedTuple, Generic[V]):
    """A part of a graph, and where it is."""

    path: Path
    value: V


@overload
def find(obj: Any, what: type[V] | tuple[type[V], ...]) -> list[Found[V]]: ...
@overload
def find(obj: Any, what: str | Path | types.UnionType | Callable[[Any], object]) -> list[Found[Any]]: ...
@boundary
def find(obj: Any, what: Any) -> list[Found[Any]]:
    """Every part of a graph that is an instance of a type, or for which a function says True.

    Args:
        obj: the root, which is looked at too.
        what: a type or several; a key-path pattern; a filter of Flax NNX (`nnx.PathContains`, `nnx.All`), which means
            Variables; or a function of any part, object or leaf.

    Returns:
        (path, value) pairs in the order of the walk, each object once.

    Raises:
        ValueError: if a text is not a pattern.

    Example:
        >>> [str(path) for path, value in graftax.find({"layers": [2, "x", 3]}, int)]
        ['[layers][0]', '[layers][2]']
    """
    graph = Graph(obj)
    if isinstance(what, (str, Path)):
        try:
            numbers = list(dict.fromkeys(graph.rows[number].target for number in matching(graph, what)))
        except StructureError:
            return []
    else:
        wanted, seen = filter_of(what, of_path=True), Shown(graph)
        if wanted is not None:
            numbers = wanted.means(seen)
        elif callable(what):
            numbers = [number for number in seen.parts() if asked(what, graph, number)]
        else:
            raise TypeError(f"find() takes a type or several, a pattern, or a function of a part, got {what!r}")
    return [Found(graph.path(number), graph.rows[number].value) for number in numbers]


class Shared(NamedTuple):
    """An object that stands in several places of a graph."""

    value: Any
    paths: list[Path]


@boundary
def shared(obj: Any) -> list[Shared]:
    """What is reached more than once: mutable objects, and arrays. Cycles are among them.

    Args:
        obj: the root.

    Returns:
        (value, paths) pairs in the order of the walk.

    Example:
        >>> layer = ["shared"]
        >>> [[str(p) for p in paths] for value, paths in graftax.shared({"a": layer, "b": layer})]
        [['[a]', '[b]']]
    """
    graph = Graph(obj)
    numbers: dict[int, list[int]] = {}
    for number, row in enumerate(graph.rows):
        if row.what == "ref":
            numbers.setdefault(id(row.value), [row.target]).append(number)
        elif row.what == "array":
            numbers.setdefault(id(row.value), []).append(number)
    found = [found for found in numbers.values() if len(found) > 1]
    return [Shared(graph.rows[same[0]].value, [graph.path(number) for number in same]) for same in sorted(found)]


class Shown(Seen):
    """A graph of objects, as a filter sees it."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    @property
    def rows(self) -> list[GraphRow]:
        return self.graph.rows

    def parts(self) -> Iterable[int]:
        return (number for number, row in enumerate(self.rows) if row.what != "ref")

    def parent(self, number: int) -> int:
        return self.rows[number].parent

    def is_a(self, number: int, kinds: Any) -> bool:
        return isinstance(self.rows[number].value, kinds)

    def instances(self, kinds: Any) -> list[int]:
        return self.graph.core.instances(kinds)

    def is_leaf(self, number: int) -> bool:
        return self.rows[number].is_leaf and not self.rows[number].aux

    def path(self, number: int) -> tuple[Any, ...]:
        return tuple(map(plain_key, self.graph.path(number)))

    def value(self, number: int) -> Any:
        return self.rows[number].value


def asked(function: Callable[[Any], Any], graph: Graph, number: int) -> bool:
    """What a function of the caller's says of a part, as a bool; an error in it gets the path."""
    try:
        return bool(function(graph.rows[number].value))
    except Exception as error:
        raise at_path(error, repr(graph.path(number)))  # noqa: B904 - it is the same one
