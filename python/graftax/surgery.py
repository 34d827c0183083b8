# SPDX-License-Identifier: Apache-2.0
"""Object graphs taken apart and changed: sharing and cycles are kept."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from . import _core
from ._errors import NO_PLACE, NOT_SELECTED, OTHER_STRUCTURE, SET_COUNT, WHERE_ELSEWHERE, StructureError
from .path import Graph, Path, glob

T = TypeVar("T")


# ---- whole graphs


def copy(obj: T, *, arrays: bool = False) -> T:
    """A copy of an object graph, with the same sharing and cycles; no `__init__` runs.

    Args:
        obj: the root.
        arrays: copies the arrays too, each once, wherever it stands: what donation of the copy needs.

    Raises:
        UnsupportedValueError: for a value that hides state, at its path.

    Example:
        >>> twin = graftax.copy(model)
        >>> twin.layers[0].w = new  # `model` stays as it is
    """
    leaves, graphdef = _core.flatten(obj)
    if arrays:
        made = {id(leaf): _copied(leaf) for leaf in leaves}
        leaves = [made[id(leaf)] for leaf in leaves]
    return _core.unflatten(graphdef, leaves)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    return jnp.array(leaf, copy=True) if isinstance(leaf, jax.Array) else leaf


def update(obj: T, source: Any) -> T:
    """Writes the leaves of a graph into another one, in place. All values are made before the first is written.

    Args:
        obj: its mutable objects are written to; immutable ones inside them (tuples, frozen modules) are made anew.
        source: a graph of the same structure. Where it has None, the leaf (or all below it) stays.

    Returns:
        `obj`.

    Raises:
        StructureError: where the structures differ, at the path.
        TypeError: where no mutable object holds a leaf. Use `graftax.combine`.

    Example:
        >>> params, rest = graftax.partition(model, "**.w")
        >>> graftax.update(model, jax.tree.map(lambda w: w * 0.9, params))
    """
    graph, other = Graph(obj), Graph(source)
    changes: dict[int, Any] = {}
    for place, there in _side_by_side("update", graph, other):
        value = other.rows[there].value
        if value is not None and value is not graph.rows[place].value:
            changes[place] = value
    if changes:
        graph.write(changes)
    return obj


# ---- parts


def partition(obj: T, spec: Any, *, replace: Any = None) -> tuple[T, T]:
    """Two copies of a graph: one with the selected leaves, one with the others; None stands for what is left out.

    Leaves are arrays and all other values that are no objects to look into. What JAX counts as structure (aux data,
    static fields) is in both. Both have the sharing and the cycles of `obj`, and no mutable object in common with it.

    Args:
        obj: the root.
        spec: a function of a leaf; a type or a tuple of types; a key-path pattern (`layers[*].w`, `**.bias`) or
            several; or a tree of bools, in which one stands for everything below its place.
        replace: what stands for a leaf that is left out.

    Returns:
        (selected, rest). `combine` puts them together again.

    Raises:
        StructureError: where a pattern matches nothing, or a tree of bools does not fit.

    Example:
        >>> arrays, rest = graftax.partition(model, jax.Array)
        >>> graftax.equal(graftax.combine(arrays, rest), model)
        True
    """
    graph = Graph(obj)
    chosen = _selection(graph, spec)
    leaves = [place for place, row in enumerate(graph.rows) if row.is_leaf and not row.aux]
    out = {place: replace for place in leaves if place not in chosen}
    into = {place: replace for place in leaves if place in chosen}
    return graph.core.build(out, all=True), graph.core.build(into, all=True)


def combine(*graphs: Any) -> Any:
    """A graph with, at each place, the first leaf that is not None.

    Args:
        graphs: of one structure, such as those that `partition` returns.

    Raises:
        StructureError: where the structures differ, at the path.
    """
    if not graphs:
        raise TypeError("combine() needs at least one graph")
    first = Graph(graphs[0])
    found: dict[int, Any] = {}
    for source in graphs[1:]:
        other = Graph(source)
        for place, there in _side_by_side("combine", first, other):
            if first.rows[place].value is None and place not in found and other.rows[there].value is not None:
                found[place] = other.rows[there].value
    return first.core.build(found, all=True)


def _side_by_side(name: str, one: Graph, other: Graph) -> Iterator[tuple[int, int]]:
    """Pairs of places, from the roots on: leaves, and a None in one that stands for a node of the other."""
    stack = [(0, 0)]
    seen: dict[int, int] = {}
    while stack:
        a, b = stack.pop()
        x, y = one.rows[a], other.rows[b]
        if (x.is_leaf and (y.is_leaf or x.value is None)) or (y.is_leaf and y.value is None):
            yield a, b
            continue
        if x.is_leaf or y.is_leaf or type(x.value) is not type(y.value):
            raise _other_structure(name, one, other, a, b)
        if seen.setdefault(x.target, y.target) != y.target:
            raise _other_structure(name, one, other, a, b)
        if x.what == "ref" or y.what == "ref":
            if x.what != y.what:
                raise _other_structure(name, one, other, a, b)
            continue
        left, right = one.entries(a), other.entries(b)
        pairs = _paired(left, right)
        if pairs is None:
            raise _other_structure(name, one, other, a, b)
        stack.extend(reversed(pairs))


def _paired(left: list[tuple[Any, int]], right: list[tuple[Any, int]]) -> list[tuple[int, int]] | None:
    """The children of two nodes by their keys; None where these are not the same."""
    if len(left) != len(right):
        return None
    if all(a == b for (a, _), (b, _) in zip(left, right, strict=True)):
        return [(a, b) for (_, a), (_, b) in zip(left, right, strict=True)]
    there = dict(right)
    if any(entry not in there for entry, _ in left):
        return None
    return [(place, there[entry]) for entry, place in left]


def _other_structure(name: str, one: Graph, other: Graph, a: int, b: int) -> StructureError:
    texts = [_what(graph, place) for graph, place in ((one, a), (other, b))]
    return StructureError(OTHER_STRUCTURE.format(name=name, path=one.paths[a], one=texts[0], other=texts[1]))


def _what(graph: Graph, place: int) -> str:
    row = graph.rows[place]
    if row.what == "ref":
        return f"the {type(row.value).__qualname__} of {graph.paths[row.target]!r} once more"
    if row.what == "node":
        entries = [str(entry).lstrip(".") for entry, _ in graph.entries(place)]
        shown = ", ".join(entries[:6]) + (", ..." if len(entries) > 6 else "")
        return f"a {type(row.value).__qualname__}({shown})"
    return "None" if row.value is None else f"a {type(row.value).__qualname__}"


def _selection(graph: Graph, spec: Any) -> set[int]:
    leaves = [place for place, row in enumerate(graph.rows) if row.is_leaf and not row.aux]
    if isinstance(spec, type) or (
        isinstance(spec, tuple) and spec and all(isinstance(t, type) for t in cast(Any, spec))
    ):
        return {place for place in leaves if isinstance(graph.rows[place].value, cast(Any, spec))}
    if isinstance(spec, (str, Path)):
        spec = [spec]
    if isinstance(spec, (list, tuple)) and spec and all(isinstance(s, (str, Path)) for s in cast("list[Any]", spec)):
        tops = {place for pattern in cast("list[Any]", spec) for place in _matching(graph, pattern)}
        return _below(graph, tops) & set(leaves)
    if callable(spec):
        return {place for place in leaves if spec(graph.rows[place].value)}
    return _by_bools(graph, spec)


def _below(graph: Graph, tops: set[int]) -> set[int]:
    """All places below some, through references."""
    reached: set[int] = set()
    stack = list(tops)
    while stack:
        place = graph.rows[stack.pop()].target
        if place not in reached:
            reached.add(place)
            stack += graph.children(place)
    return reached


def _by_bools(graph: Graph, spec: Any) -> set[int]:
    """The leaves for which a prefix tree of bools says True."""
    chosen: set[int] = set()
    stack: list[tuple[int, Any]] = [(0, spec)]
    seen: set[tuple[int, int]] = set()
    while stack:
        place, wanted = stack.pop()
        if isinstance(wanted, (bool, np.bool_)):
            if wanted:
                chosen |= _below(graph, {place})
            continue
        place = graph.rows[place].target
        if (place, id(wanted)) in seen:
            continue
        seen.add((place, id(wanted)))
        below = dict((entry, child) for entry, child in _core.children_with_keys(wanted))
        entries = graph.entries(place)
        if wanted is None or not below or graph.rows[place].is_leaf:
            raise StructureError(NOT_SELECTED.format(spec=wanted, path=graph.paths[place]))
        for entry, child in entries:
            if entry in below:
                stack.append((child, below[entry]))
            elif not graph.rows[child].aux:
                raise StructureError(NOT_SELECTED.format(spec=wanted, path=graph.paths[child]))
    return {place for place in chosen if graph.rows[place].is_leaf}


# ---- places


def at(obj: T) -> At[T]:
    """Places in a graph, to read them, or to have a copy with other values there.

    `at(obj)[where]`: `where` is a path or a pattern (`layers[0].w`, `layers[*].w`, `**.bias`), a `Path`, a function
    that is given the object and returns a part of it or several (`lambda m: m.layers[0].w`), or a tuple of those. What
    it returns has `get()`, `set(value)`, `apply(function)`, `update(value)` and `paths`.

    Example:
        >>> graftax.at(model)["layers[*].w"].apply(lambda w: 0.5 * w)  # a copy; `model` stays as it is
        >>> graftax.at(model)[lambda m: m.head.bias].set(None)
    """
    return At(obj)


class At(Generic[T]):
    """What `at` returns: `at(obj)[where]` are the places."""

    __slots__ = ("_obj",)

    def __init__(self, obj: T) -> None:
        self._obj = obj

    def __getitem__(self, where: Any) -> Places[T]:
        return Places(self._obj, where)


class Places(Generic[T]):
    """Some places of a graph."""

    def __init__(self, obj: T, where: Any) -> None:
        self._graph = Graph(obj)
        self._several, self._places = _located(self._graph, where)
        self._where = where

    @property
    def paths(self) -> list[Path]:
        """Where they are: for an object that stands in several places, the first."""
        return [self._graph.paths[place] for place in self._places]

    def get(self) -> Any:
        """The value, or a list of them for a pattern or several places."""
        values = [self._graph.rows[place].value for place in self._places]
        return values if self._several else values[0]

    def set(self, value: Any) -> T:
        """A copy with another value there. Only what contains one of the places is copied: the rest is shared.

        Args:
            value: for several places named one by one, a sequence with a value for each; for a pattern, one for all.
        """
        return self._graph.core.build(self._values(value))

    def apply(self, function: Callable[[Any], Any]) -> T:
        """A copy with `function(value)` in each of the places."""
        rows = self._graph.rows
        return self._graph.core.build({place: function(rows[place].value) for place in self._places})

    def update(self, value: Any) -> None:
        """As `set`, in place. Immutable objects on the way are made anew inside the mutable one that holds them."""
        self._graph.write(self._values(value))

    def _values(self, value: Any) -> dict[int, Any]:
        if not self._several or isinstance(self._where, (str, Path)):
            return dict.fromkeys(self._places, value)
        values = list(value)
        if len(values) != len(self._places):
            raise ValueError(SET_COUNT.format(given=len(values), places=len(self._places)))
        return dict(zip(self._places, values, strict=True))

    def __repr__(self) -> str:
        return f"<places {', '.join(map(repr, self.paths))}>"


def _located(graph: Graph, where: Any) -> tuple[bool, list[int]]:
    """(are these several, the places)."""
    if isinstance(where, Path):
        return False, [graph.place(where)]
    if isinstance(where, str):
        return "*" in where, _matching(graph, where)
    if isinstance(where, tuple) and type(where) is tuple:
        return True, [place for part in cast("tuple[Any, ...]", where) for place in _located(graph, part)[1]]
    if callable(where):
        return _pointed_at(graph, where)
    raise TypeError(f"at() takes a path, a pattern or a function, got {type(where).__qualname__}: {where!r}")


def _matching(graph: Graph, pattern: str | Path) -> list[int]:
    """The places that a pattern means, each once."""
    if isinstance(pattern, Path):
        return [graph.place(pattern)]
    if "*" not in pattern:
        return [graph.place(Path.parse(pattern))]
    fits = glob(pattern)
    found = {graph.rows[place].target: None for place, path in enumerate(graph.paths) if fits(str(path))}
    found |= {place: None for place, path in _by_other_ways(graph) if fits(str(path))}
    if not found:
        names = [str(path) for path in graph.paths[1:]]
        near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or names[:5]
        near_text = f"It has {', '.join(near)}{', ...' if len(names) > len(near) else ''}."
        cls = type(graph.rows[0].value).__qualname__
        raise StructureError(NO_PLACE.format(cls=cls, where=pattern, near=near_text))
    return sorted(found)


def _by_other_ways(graph: Graph) -> Iterator[tuple[int, Path]]:
    """Places below a node that is referred to, by the path through the reference."""
    for number, row in enumerate(graph.rows):
        if row.what != "ref":
            continue
        cut = len(graph.paths[row.target])
        stack = list(graph.children(row.target))
        while stack:
            place = stack.pop()
            yield graph.rows[place].target, graph.paths[number] + graph.paths[place][cut:]
            stack += graph.children(place)


def _pointed_at(graph: Graph, where: Callable[[Any], Any]) -> tuple[bool, list[int]]:
    """The places of what `where` returns, by identity: where that is not enough, in a copy without equal leaves."""
    result = where(graph.rows[0].value)
    places = _by_identity([(row.value, row.target) for row in graph.rows], result)
    if any(len(found) != 1 for found in places[1]):
        root, built = graph.core.distinct()
        objects = [(value, row.target) for value, row in zip(built, graph.rows, strict=True) if row.what != "ref"]
        places = _by_identity(objects, where(root))
    several, candidates = places
    for found in candidates:
        if len(found) != 1:
            raise StructureError(WHERE_ELSEWHERE.format(found=type(result).__qualname__))
    return several, [found[0] for found in candidates]


def _by_identity(objects: Sequence[tuple[Any, int]], result: Any) -> tuple[bool, list[list[int]]]:
    known: dict[int, dict[int, None]] = {}
    for value, place in objects:
        known.setdefault(id(value), {})[place] = None
    if id(result) not in known and isinstance(result, (tuple, list)):
        return True, [list(known.get(id(part), {})) for part in cast("list[Any]", result)]
    return False, [list(known.get(id(result), {}))]


class Found(NamedTuple):
    """A part of a graph, and where it is."""

    path: Path
    value: Any


def find(obj: Any, what: Any) -> list[Found]:
    """Every part of a graph that is an instance of a type, or for which a function says True.

    Args:
        obj: the root, which is looked at too.
        what: a type or a tuple of types; a key-path pattern; or a function of any part, object or leaf.

    Returns:
        (path, value) pairs in the order of the walk, each object once.

    Example:
        >>> [str(path) for path, layer in graftax.find(model, Linear)]
        ['.layers[0]', '.layers[1]']
    """
    graph = Graph(obj)
    if isinstance(what, (str, Path)):
        try:
            places: Sequence[int] = _matching(graph, what)
        except StructureError:
            return []
    else:
        by_type = isinstance(what, (type, tuple))
        parts = [(place, row.value) for place, row in enumerate(graph.rows) if row.what != "ref"]
        places = [place for place, value in parts if (isinstance(value, what) if by_type else what(value))]
    return [Found(graph.paths[place], graph.rows[place].value) for place in places]


class Shared(NamedTuple):
    """An object that stands in several places of a graph."""

    value: Any
    paths: list[Path]


def shared(obj: Any) -> list[Shared]:
    """What is reached more than once: mutable objects, and arrays. Cycles are among them.

    Example:
        >>> [[str(p) for p in paths] for value, paths in graftax.shared({"a": layer, "b": layer})]
        [['[a]', '[b]']]
    """
    graph = Graph(obj)
    places: dict[int, list[int]] = {}
    for place, row in enumerate(graph.rows):
        if row.what == "ref":
            places.setdefault(id(row.value), [row.target]).append(place)
        elif row.what == "array":
            places.setdefault(id(row.value), []).append(place)
    found = [found for found in places.values() if len(found) > 1]
    return [Shared(graph.rows[same[0]].value, [graph.paths[place] for place in same]) for same in sorted(found)]
