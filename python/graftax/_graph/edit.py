# SPDX-License-Identifier: Apache-2.0
"""Object graphs taken apart and changed: sharing and cycles are kept."""

from __future__ import annotations

import functools
import types
from collections.abc import Generator, Iterable, Iterator
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from graftax import _core
from graftax._base.errors import StructureError, a_type, some
from graftax._graph import prefix_tree
from graftax._graph.array_aliases import note_made
from graftax._graph.filters import filter_of
from graftax._graph.object_diff import leaf_difference, node_difference
from graftax._graph.path import Graph, Path
from graftax._graph.select import Shown, asked, matching
from graftax._graph.structure_diff import Way, lockstep, short_text
from graftax._jax.tracebacks import boundary

OTHER_STRUCTURE = (
    "{name}: the graphs do not have the same structure at {path!r}: {one} in the first, {other} in another."
)
UNSHARED = (
    " jax.tree makes a tree, in which a shared object is several. For a map over each array once: "
    "graftax.map_leaves(f, obj), or the leaves that graftax.flatten(obj) gives."
)

T = TypeVar("T")


# ---- whole graphs


@boundary
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
        made = {id(leaf): ((leaf,), _copied(leaf)) for leaf in leaves}
        note_made(made.values())
        leaves = [made[id(leaf)][1] for leaf in leaves]
    return _core.unflatten(graphdef, leaves, anew=True)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    return jnp.array(leaf, copy=True) if isinstance(leaf, jax.Array) else leaf


@boundary
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
    graph = Graph(obj)
    if graph.core.update(source):
        return obj
    changes = {
        number: value
        for number, own, value in pairs("update", graph, Graph(source))
        if value is not None and value is not own
    }
    if changes:
        graph.write(changes)
    return obj


# ---- parts


@boundary
def partition(obj: T, spec: Any, *, replace: Any = None) -> tuple[T, T]:
    """Two copies of a graph: one with the selected leaves, one with the others; None stands for what is left out.

    Leaves are arrays and all other values that are no objects to look into. What JAX counts as structure (aux data,
    static fields) is in both. Both have the sharing and the cycles of `obj`, and no mutable object in common with it.

    Args:
        obj: the root.
        spec: a function of a leaf; a type or several, of leaves or of objects with all that is below them; a filter of
            Flax NNX (`nnx.PathContains`, `nnx.All`); `...` for all leaves; a key-path pattern (`layers[*].w`,
            `**.bias`) or several; or a tree of bools, in which one stands for everything below its place.
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
    chosen = selection(graph, spec)
    leaves, _ = graph.core.values()
    out = {number: replace for number in leaves if number not in chosen}
    into = {number: replace for number in leaves if number in chosen}
    return graph.core.build(out, all=True), graph.core.build(into, all=True)


@boundary
def combine(*graphs: T) -> T:
    """A graph with, at each place, the first leaf that is not None.

    Args:
        graphs: of one structure, such as those that `partition` returns.

    Raises:
        StructureError: where the structures differ, at the path.

    Example:
        >>> params, rest = graftax.partition({"w": jnp.ones(2), "name": "net"}, jax.Array)
        >>> graftax.combine(params, rest)
        {'w': Array([1., 1.], dtype=float32), 'name': 'net'}
    """
    if not graphs:
        raise TypeError("combine() needs at least one graph")
    first = Graph(graphs[0])
    found: dict[int, Any] = {}
    for source in graphs[1:]:
        other = Graph(source)
        for number, own, value in pairs("combine", first, other):
            if own is None and value is not None:
                found.setdefault(number, value)
    nodes = {number: value for number, value in found.items() if _core.is_node(value)}
    if nodes:  # all below a None: a copy, so that the result has nothing in common with what it is made of
        found |= dict(zip(nodes, _core.GraphEditor(list(nodes.values())).build({}, all=True), strict=True))
    return first.core.build(found, all=True)


def pairs(name: str, one: Graph, other: Graph) -> Iterable[tuple[int, Any, Any]]:
    """(number in the first, what stands there in both) of each leaf, and of each None that stands for a node.

    Raises:
        StructureError: where the structures differ, at the path.
    """
    if one.core.is_alike(other.core):
        return zip(*one.core.values(), other.core.values()[1], strict=True)
    return ((a, one.rows[a].value, other.rows[b].value) for a, b in side_by_side(name, one, other))


def side_by_side(name: str, one: Graph, other: Graph) -> Iterator[tuple[int, int]]:
    """Pairs of rows, by number, from the roots on: leaves, and a None in one that stands for a node of the other."""
    seen: dict[int, int] = {}

    def meet(a: int, b: int, way: Way) -> Generator[tuple[int, int], None, list[tuple[int, int, Any]]]:
        x, y = one.rows[a], other.rows[b]
        if x.aux and y.aux and x.is_leaf and y.is_leaf:  # a part of the structure
            if leaf_difference(x.value, y.value) is not None:
                raise _other_structure(name, one, other, a, b)
            return []
        if (x.is_leaf and (y.is_leaf or x.value is None)) or (y.is_leaf and y.value is None):
            yield a, b
            return []
        apart = x.is_leaf or y.is_leaf or type(x.value) is not type(y.value) or x.what != y.what
        if apart or seen.setdefault(x.target, y.target) != y.target:
            raise _other_structure(name, one, other, a, b)
        if x.what == "ref":
            return []
        pairs = paired(one.key_entries(a), other.key_entries(b))
        if pairs is None:
            raise _other_structure(name, one, other, a, b)
        differs = node_difference(x.value, y.value)
        if differs is not None:
            text = OTHER_STRUCTURE.format(name=name, path=one.path(a), one=differs[0], other=differs[1])
            raise StructureError(text)
        return pairs

    return lockstep(meet, 0, 0)


def paired(left: list[tuple[Any, int]], right: list[tuple[Any, int]]) -> list[tuple[int, int, Any]] | None:
    """The children of two nodes by their keys; None where these are not the same."""
    if len(left) != len(right):
        return None
    if all(a == b for (a, _), (b, _) in zip(left, right, strict=True)):
        return [(a, b, entry) for (entry, a), (_, b) in zip(left, right, strict=True)]
    there = dict(right)
    if any(entry not in there for entry, _ in left):
        return None
    return [(number, there[entry], entry) for entry, number in left]


def _other_structure(name: str, one: Graph, other: Graph, a: int, b: int) -> StructureError:
    texts = [_what(graph, number) for graph, number in ((one, a), (other, b))]
    text = OTHER_STRUCTURE.format(name=name, path=one.path(a), one=texts[0], other=texts[1])
    unshared = (one.rows[a].what == "ref") != (other.rows[b].what == "ref")
    return StructureError(text + UNSHARED if unshared else text)


def _what(graph: Graph, number: int) -> str:
    row = graph.rows[number]
    if row.what == "ref":
        return f"the {type(row.value).__qualname__} of {graph.path(row.target)!r} once more"
    if row.what == "node":
        texts = [str(Path((entry,))).lstrip(".") for entry, _ in graph.key_entries(number)]
        shown = some(texts)
        return f"{a_type(row.value)}({shown})"
    if row.aux:
        return short_text(row.value)
    return "None" if row.value is None else a_type(row.value)


def selection(graph: Graph, spec: Any, among: Iterable[int] | None = None) -> set[int]:
    """The numbers of the leaves that a pattern, a filter, a predicate or a tree of bools means; of all, or of some."""
    numbers, _ = graph.core.values()
    wanted = filter_of(spec, of_path=True)
    leaves = set(numbers) if among is None else set(numbers).intersection(among)
    if wanted is not None:
        return graph.below(wanted.means(Shown(graph))) & leaves
    if isinstance(spec, (str, Path)):
        spec = [spec]
    if isinstance(spec, (list, tuple)) and spec and all(isinstance(s, (str, Path)) for s in cast("list[Any]", spec)):
        return graph.below(p for pattern in cast("list[Any]", spec) for p in matching(graph, pattern)) & leaves
    a_tree = type(spec) is type(graph.rows[0].value) and not isinstance(spec, _FUNCTIONS)
    if callable(spec) and not a_tree:  # a module of bools can be called, too
        return {number for number in leaves if asked(spec, graph, number)}
    return graph.below(prefix_tree.chosen(graph, spec)) & leaves


_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)
