# SPDX-License-Identifier: Apache-2.0
"""Object graphs taken apart and changed: sharing and cycles are kept."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar, cast, overload

import jax
import jax.numpy as jnp
import numpy as np

from . import _core
from ._errors import (
    NO_BOOL,
    NO_PLACE,
    NO_POINTING,
    NO_SUCH_BOOL,
    NO_TYPE,
    NOT_SELECTED,
    OTHER_STRUCTURE,
    SET_COUNT,
    TWO_VALUES,
    UNSHARED,
    WHERE_ELSEWHERE,
    StructureError,
    a_type,
    at_path,
    some,
)
from ._trees import short_text
from .compare import leaf_difference, node_difference
from .path import Graph, Path, open_node
from .patterns import is_pattern, nearest

T = TypeVar("T")
V = TypeVar("V")
_Where = str | Path | Callable[[T], Any]


# ---- whole graphs


def copy(obj: T, *, arrays: bool = False) -> T:
    """A copy of an object graph, with the same sharing and cycles; no `__init__` runs.

    Args:
        obj: the root.
        arrays: copies the arrays too, each once, wherever it stands: what donation of the copy needs.

    Raises:
        UnsupportedValueError: for a value that hides state, at its path.

    Example:
        >>> model = {"layers": [[1, 2]]}
        >>> twin = graftax.copy(model)
        >>> twin["layers"][0].append(3)
        >>> twin, model
        ({'layers': [[1, 2, 3]]}, {'layers': [[1, 2]]})
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
        >>> model = {"w": 2, "names": ["x"]}
        >>> params, rest = graftax.partition(model, int)
        >>> graftax.update(model, jax.tree.map(lambda w: w * 10, params))
        {'w': 20, 'names': ['x']}
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
        spec: a function of a leaf; a type or a tuple of types, of leaves or of objects with all that is below them;
            a key-path pattern (`layers[*].w`, `**.bias`) or several; or a tree of bools, in which one stands for
            everything below its place.
        replace: what stands for a leaf that is left out.

    Returns:
        (selected, rest). `combine` puts them together again.

    Raises:
        StructureError: where a pattern matches nothing, or a tree of bools does not fit.

    Example:
        >>> numbers, rest = graftax.partition({"w": 2, "names": ["x"]}, int)
        >>> numbers, rest
        ({'w': 2, 'names': [None]}, {'w': None, 'names': ['x']})
        >>> graftax.combine(numbers, rest)
        {'w': 2, 'names': ['x']}
    """
    graph = Graph(obj)
    chosen = _selection(graph, spec)
    leaves = [place for place, row in enumerate(graph.rows) if row.is_leaf and not row.aux]
    out = {place: replace for place in leaves if place not in chosen}
    into = {place: replace for place in leaves if place in chosen}
    return graph.core.build(out, all=True), graph.core.build(into, all=True)


def combine(*graphs: T) -> T:
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
    nodes = {place: value for place, value in found.items() if not Graph(value).rows[0].is_leaf}
    if nodes:  # all below a None: a copy, so that the result has nothing in common with what it is made of
        found |= dict(zip(nodes, _core.Graph(list(nodes.values())).build({}, all=True), strict=True))
    return first.core.build(found, all=True)


def _side_by_side(name: str, one: Graph, other: Graph) -> Iterator[tuple[int, int]]:
    """Pairs of places, from the roots on: leaves, and a None in one that stands for a node of the other."""
    stack = [(0, 0)]
    seen: dict[int, int] = {}
    while stack:
        a, b = stack.pop()
        x, y = one.rows[a], other.rows[b]
        if x.aux and y.aux and x.is_leaf and y.is_leaf:  # a part of the structure
            if leaf_difference(x.value, y.value) is not None:
                raise _other_structure(name, one, other, a, b)
            continue
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
        differs = node_difference(x.value, y.value)
        if differs is not None:
            text = OTHER_STRUCTURE.format(name=name, path=one.path(a), one=differs[0], other=differs[1])
            raise StructureError(text)
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
    text = OTHER_STRUCTURE.format(name=name, path=one.path(a), one=texts[0], other=texts[1])
    unshared = (one.rows[a].what == "ref") != (other.rows[b].what == "ref")
    return StructureError(text + UNSHARED if unshared else text)


def _what(graph: Graph, place: int) -> str:
    row = graph.rows[place]
    if row.what == "ref":
        return f"the {type(row.value).__qualname__} of {graph.path(row.target)!r} once more"
    if row.what == "node":
        entries = [str(Path((entry,))).lstrip(".") for entry, _ in graph.entries(place)]
        shown = some(entries)
        return f"{a_type(row.value)}({shown})"
    if row.aux:
        return short_text(row.value)
    return "None" if row.value is None else a_type(row.value)


def _selection(graph: Graph, spec: Any) -> set[int]:
    leaves = [place for place, row in enumerate(graph.rows) if row.is_leaf and not row.aux]
    if _is_types(spec):
        parts = [place for place, row in enumerate(graph.rows) if row.what != "ref"]
        return _below(graph, {place for place in parts if isinstance(graph.rows[place].value, spec)}) & set(leaves)
    if isinstance(spec, (str, Path)):
        spec = [spec]
    if isinstance(spec, (list, tuple)) and spec and all(isinstance(s, (str, Path)) for s in cast("list[Any]", spec)):
        tops = {graph.rows[p].target for pattern in cast("list[Any]", spec) for p in _matching(graph, pattern)}
        return _below(graph, tops) & set(leaves)
    a_tree = type(spec) is type(graph.rows[0].value) and not isinstance(spec, _FUNCTIONS)
    if callable(spec) and not a_tree:  # a module of bools can be called, too
        return {place for place in leaves if _asked(spec, graph, place)}
    return _by_bools(graph, spec)


_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)


def _is_types(spec: Any) -> bool:
    """Is it what `isinstance` takes: a type, a union or a tuple of them?

    Raises:
        TypeError: where it is an annotation that `isinstance` does not take, such as `list[int]`.
    """
    if isinstance(spec, tuple):
        return bool(spec) and all(map(_is_types, cast("tuple[Any, ...]", spec)))
    origin = typing.get_origin(spec)
    if origin is not None and origin not in (typing.Union, types.UnionType):
        raise TypeError(NO_TYPE.format(spec=spec, origin=getattr(origin, "__name__", origin)))
    return origin is not None or isinstance(spec, type)


def _asked(function: Callable[[Any], Any], graph: Graph, place: int) -> Any:
    """What a function of the caller's says of a part, as a bool; an error in it gets the path."""
    try:
        return bool(function(graph.rows[place].value))
    except Exception as error:
        raise at_path(error, repr(graph.path(place)))  # noqa: B904 - it is the same one


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
    above = _above_leaves(graph)
    stack: list[tuple[int, Any]] = [(0, spec)]
    seen: dict[tuple[int, int], Any] = {}  # with what was seen: its id is not given to another object meanwhile
    while stack:
        place, wanted = stack.pop()
        if isinstance(wanted, (bool, np.bool_)):
            if wanted:
                chosen |= _below(graph, {place})
            continue
        place = graph.rows[place].target
        if (place, id(wanted)) in seen:
            continue
        seen[place, id(wanted)] = wanted
        if wanted is None and graph.rows[place].value is None:  # what a map over the graph leaves there
            continue
        asked = open_node(wanted)
        below, entries = dict(asked), graph.entries(place)
        if (not below and (entries or not _core.Graph(wanted).rows()[0][0] == "node")) or graph.rows[place].is_leaf:
            raise StructureError(NOT_SELECTED.format(spec=short_text(wanted), path=graph.path(place)))
        known = {entry for entry, _ in entries}
        for entry in below:
            if entry not in known:
                raise StructureError(NO_SUCH_BOOL.format(path=graph.path(place) + (entry,)))
        for entry, child in entries:
            if graph.rows[child].aux and graph.rows[child].target not in above:
                continue  # nothing but structure
            if entry in below:
                stack.append((child, below[entry]))
            else:
                raise StructureError(NO_BOOL.format(path=graph.path(child)))
    return {place for place in chosen if graph.rows[place].is_leaf and not graph.rows[place].aux}


def _above_leaves(graph: Graph) -> set[int]:
    """The leaves for JAX, and every node that one is below."""
    above: set[int] = set()
    for place, row in enumerate(graph.rows):
        at = place if row.is_leaf and not row.aux else -1
        while at >= 0 and at not in above:
            above.add(at)
            at = graph.rows[at].parent
    return above


# ---- places


def at(obj: T) -> At[T]:
    """Places in a graph, to read them, or to have a copy with other values there.

    `at(obj)[where]`: `where` is a path or a pattern (`layers[0].w`, `layers[*].w`, `**.bias`), a `Path`, a function
    that is given the object and returns a part of it or several (`lambda m: m.layers[0].w`), or a tuple of those. What
    it returns has `get()`, `set(value)`, `apply(function)`, `update(value)` and `paths`.

    Example:
        >>> model = {"layers": [{"w": 4}, {"w": 6}], "head": 1}
        >>> graftax.at(model)["layers[*][w]"].apply(lambda w: w / 2)  # a copy; `model` stays as it is
        {'layers': [{'w': 2.0}, {'w': 3.0}], 'head': 1}
        >>> graftax.at(model)[lambda m: m["head"]].set(None)
        {'layers': [{'w': 4}, {'w': 6}], 'head': None}
    """
    return At(obj)


class At(Generic[T]):
    """What `at` returns: `at(obj)[where]` are the places."""

    __slots__ = ("_obj",)

    def __init__(self, obj: T) -> None:
        self._obj = obj

    def __getitem__(self, where: _Where[T] | tuple[_Where[T], ...]) -> Places[T]:
        return Places(self._obj, where)


class Places(Generic[T]):
    """Some places of a graph."""

    def __init__(self, obj: T, where: Any) -> None:
        self._graph = Graph(obj)
        self._several, self._groups = _located(self._graph, where)
        self._where = where

    @property
    def paths(self) -> list[Path]:
        """Where they are. What a function pointed at may stand in several places: then it is one path for each."""
        return [self._graph.path(place) for place in self._places]

    def get(self) -> Any:
        """The value, or a list of them for a pattern or several places."""
        values = [self._graph.rows[group[0]].value for group in self._groups]
        return values if self._several else values[0]

    def set(self, value: Any) -> T:
        """A copy with another value there. Only what contains one of the places is copied: the rest is shared.

        Args:
            value: for several places named one by one, a sequence with a value for each; for a pattern, one for all.
        """
        return self._graph.core.build(self._values(value))

    def apply(self, function: Callable[[Any], Any]) -> T:
        """A copy with `function(value)` in each of the places. It is called once for each object."""
        return self._graph.core.build(self._applied(function))

    def update(self, value: Any) -> None:
        """As `set`, in place. Immutable objects on the way are made anew inside the mutable one that holds them."""
        self._graph.write(self._values(value))

    @property
    def _places(self) -> list[int]:
        return list(dict.fromkeys(place for group in self._groups for place in group))

    def _values(self, value: Any) -> dict[int, Any]:
        if not self._several or isinstance(self._where, (str, Path)):
            values = [value] * len(self._groups)
        else:
            # Not the rows of an array, the letters of a text, or what has no order.
            values = list(cast("Iterable[Any]", value)) if isinstance(value, (list, tuple, Iterator)) else None
            given = a_type(value) if values is None else f"{len(values)} values"
            if values is None or len(values) != len(self._groups):
                raise ValueError(SET_COUNT.format(given=given, places=len(self._groups)))
        changes: dict[int, Any] = {}
        for group, new in zip(self._groups, values, strict=True):
            for place in group:
                if changes.setdefault(place, new) is not new:
                    raise ValueError(TWO_VALUES.format(path=self._graph.path(place)))
        self._graph.refuse_nested(changes)
        return changes

    def _applied(self, function: Callable[[Any], Any]) -> dict[int, Any]:
        rows = self._graph.rows
        self._graph.refuse_nested(dict.fromkeys(self._places))
        made: dict[int, Any] = {}
        changes: dict[int, Any] = {}
        for place in self._places:
            target = rows[place].target
            if target not in made:
                try:
                    made[target] = function(rows[place].value)
                except Exception as error:
                    raise at_path(error, repr(self._graph.path(place)))  # noqa: B904 - it is the same one
            changes[place] = made[target]
        return changes

    def __repr__(self) -> str:
        return f"<places {some([repr(path) for path in self.paths], 8)}>"


def _located(graph: Graph, where: Any) -> tuple[bool, list[list[int]]]:
    """(are these several, for each its places: one, or all places of an object that a function pointed at)."""
    if isinstance(where, Path):
        return False, [[graph.place(where)]]
    if isinstance(where, str):
        return is_pattern(where), [[place] for place in _matching(graph, where)]
    if type(where) in (tuple, list) and where:
        return True, [group for part in cast("list[Any]", where) for group in _located(graph, part)[1]]
    if callable(where):
        return _pointed_at(graph, where)
    raise TypeError(f"at() takes a path, a pattern, a function or several of those, got {where!r}")


def _matching(graph: Graph, pattern: str | Path) -> list[int]:
    """The places that a pattern means, each once."""
    if isinstance(pattern, Path):
        return [graph.place(pattern)]
    if not is_pattern(pattern):
        return [graph.place_of(pattern)]
    found = graph.matching(pattern)
    if not found:
        near = nearest(pattern, (str(graph.path(place)) for place in range(1, len(graph.rows))))
        text = f"It has {near}." if near else "It has no parts."
        cls = type(graph.rows[0].value).__qualname__
        raise StructureError(NO_PLACE.format(cls=cls, where=pattern, near=text))
    return found


def _pointed_at(graph: Graph, where: Callable[[Any], Any]) -> tuple[bool, list[list[int]]]:
    """The places of what `where` returns, by identity.

    One immutable value may stand in several places (a small number, None, an array twice): `where` is called again
    with a graph that has another object in each of these, and all else as it was.
    """
    result = where(graph.rows[0].value)
    several, parts = _parts(graph, result)
    known: dict[int, list[int]] = {}
    for place, row in enumerate(graph.rows):
        if row.what != "ref":
            known.setdefault(id(row.value), []).append(place)
    groups = [known.get(id(part), []) for part in parts]
    if not all(groups):
        raise StructureError(WHERE_ELSEWHERE.format(found=a_type(parts[groups.index([])])))
    doubtful = {place: object() for group in groups if len(group) > 1 for place in group}
    if doubtful:
        paths = ", ".join(repr(graph.path(place)) for place in list(doubtful)[:4])
        whole = {place for place in doubtful if graph.children(place)}  # these are made anew anyway
        marks = {place: mark for place, mark in doubtful.items() if place not in whole}
        root, built = graph.core.twin(marks)
        places = {id(built[place] if place in whole else marks[place]): place for place in doubtful}
        try:
            again = where(root)
        except Exception as error:
            raise StructureError(NO_POINTING.format(paths=paths, error=f"{type(error).__name__}: {error}")) from error
        pointed = list(again) if several else [again]
        if len(pointed) != len(parts):
            raise StructureError(NO_POINTING.format(paths=paths, error=f"it returned {len(pointed)} parts"))
        for i, part in enumerate(pointed):
            if len(groups[i]) > 1:
                if id(part) not in places:
                    raise StructureError(WHERE_ELSEWHERE.format(found=a_type(parts[i])))
                groups[i] = [places[id(part)]]
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
def find(obj: Any, what: Any) -> list[Found[Any]]:
    """Every part of a graph that is an instance of a type, or for which a function says True.

    Args:
        obj: the root, which is looked at too.
        what: a type or a tuple of types; a key-path pattern; or a function of any part, object or leaf.

    Returns:
        (path, value) pairs in the order of the walk, each object once.

    Example:
        >>> [str(path) for path, value in graftax.find({"layers": [2, "x", 3]}, int)]
        ['[layers][0]', '[layers][2]']
    """
    graph = Graph(obj)
    if isinstance(what, (str, Path)):
        try:
            places = list(dict.fromkeys(graph.rows[place].target for place in _matching(graph, what)))
        except StructureError:
            return []
    else:
        parts = [place for place, row in enumerate(graph.rows) if row.what != "ref"]
        if _is_types(what):
            places = [place for place in parts if isinstance(graph.rows[place].value, what)]
        elif callable(what):
            places = [place for place in parts if _asked(what, graph, place)]
        else:
            raise TypeError(f"find() takes a type or several, a pattern, or a function of a part, got {what!r}")
    return [Found(graph.path(place), graph.rows[place].value) for place in places]


class Shared(NamedTuple):
    """An object that stands in several places of a graph."""

    value: Any
    paths: list[Path]


def shared(obj: Any) -> list[Shared]:
    """What is reached more than once: mutable objects, and arrays. Cycles are among them.

    Example:
        >>> layer = ["shared"]
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
    return [Shared(graph.rows[same[0]].value, [graph.path(place) for place in same]) for same in sorted(found)]
