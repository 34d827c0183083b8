# SPDX-License-Identifier: Apache-2.0
"""`copy`, `update`, `partition` and `combine`: whole-graph operations that keep sharing and cycles."""

from __future__ import annotations

import functools
import types
from collections.abc import Generator, Iterable, Iterator
from typing import Any, TypeVar, cast

import numpy as np

from graftax import _core
from graftax._base.errors import StructureError, a_type, some
from graftax._graph import prefix_tree
from graftax._graph.array_aliases import apply_once
from graftax._graph.filters import as_filter
from graftax._graph.object_diff import leaf_difference, node_difference
from graftax._graph.packed_buffers import copy_array
from graftax._graph.path import Graph, Path
from graftax._graph.select import ObjectView, matching, predicate_holds
from graftax._graph.structure import KeyEntry
from graftax._graph.structure_diff import LinkedPath, lockstep, short_text
from graftax._jax.tracebacks import boundary

OTHER_STRUCTURE = (
    "{name}: the graphs do not have the same structure at {path!r}: {one} in the first, {other} in another."
)
UNSHARED = (
    " jax.tree makes a tree, in which a shared object appears several times. To map over each array once: "
    "graftax.map_leaves(f, obj), or the leaves that graftax.flatten(obj) gives."
)

FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)

T = TypeVar("T")


# ---- whole graphs


@boundary
def copy(obj: T, *, arrays: bool = False) -> T:
    """A copy of an object graph, with the same sharing and cycles; no `__init__` runs.

    Args:
        obj: the root.
        arrays: copies the arrays too, each of them once. A copy that will be donated needs this.

    Returns:
        the copy.

    Raises:
        UnsupportedValueError: for a value that hides state; names its path.

    Example:
        >>> model = {"layers": [[1, 2]]}
        >>> twin = graftax.copy(model)
        >>> twin["layers"][0].append(3)
        >>> twin, model
        ({'layers': [[1, 2, 3]]}, {'layers': [[1, 2]]})
    """
    leaves, graphdef = _core.flatten(obj)
    if arrays:
        leaves = list(apply_once(lambda _, leaf: _copied(*leaf), enumerate((leaf,) for leaf in leaves)).values())
    return _core.unflatten(graphdef, leaves, anew=True)


def _copied(leaf: object) -> object:
    return leaf.copy() if isinstance(leaf, np.ndarray) else copy_array(leaf)


@boundary
def update(obj: T, source: object) -> T:
    """Writes the leaves of a graph into another one, in place. Nothing is written until every value is known.

    Args:
        obj: its mutable objects are written to; immutable ones inside them (tuples, frozen modules) are rebuilt.
        source: a graph of the same structure. Where it has None, the leaf (or everything below) stays.

    Returns:
        `obj`.

    Raises:
        StructureError: if the structures differ; names the path.
        TypeError: if no mutable object holds a leaf. Use `graftax.combine`.

    Example:
        >>> model = {"w": 2, "names": ["x"]}
        >>> params, rest = graftax.partition(model, int)
        >>> graftax.update(model, jax.tree.map(lambda w: w * 10, params))
        {'w': 20, 'names': ['x']}
    """
    graph = Graph(obj)
    if graph.core.update(source):  # graphs of exactly one structure, in a single pass
        return obj
    # All differing structures raise here, before anything is written.
    changes = {
        number: value
        for number, current, value in leaf_pairs("update", graph, Graph(source))
        if value is not None and value is not current
    }
    if changes:
        graph.write(changes)
    return obj


# ---- parts


@boundary
def partition(obj: T, spec: object, *, replace: object = None) -> tuple[T, T]:
    """Two copies of a graph: one with the selected leaves, one with the others; None replaces the leaves left out.

    Leaves are arrays and all other values without children. What JAX counts as structure (aux data, static fields) is
    in both. Both have the sharing and the cycles of `obj`, and no mutable object in common with it.

    Args:
        obj: the root.
        spec: a function of a leaf; a type or several, of leaves or of objects with all that is below them; a filter of
            Flax NNX (`nnx.PathContains`, `nnx.All`); `...` for all leaves; a key-path pattern (`layers[*].w`,
            `**.bias`) or several; or a tree of bools, in which one bool may stand for a whole subtree.
        replace: the value in place of a leaf that is left out.

    Returns:
        (selected, rest). `combine` puts them together again.

    Raises:
        StructureError: if a pattern matches nothing, or a tree of bools does not fit.

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
    # Both results are full rebuilds: a node that they shared would be changed in both.
    rest_replaced = {number: replace for number in leaves if number not in chosen}
    selected_replaced = {number: replace for number in leaves if number in chosen}
    return graph.core.build(rest_replaced, all=True), graph.core.build(selected_replaced, all=True)


@boundary
def combine(*graphs: T) -> T:
    """A graph with, at each place, the first leaf that is not None.

    Args:
        graphs: of one structure, such as those that `partition` returns.

    Returns:
        the new graph.

    Raises:
        StructureError: if the structures differ; names the path.

    Example:
        >>> params, rest = graftax.partition({"w": jnp.ones(2), "name": "net"}, jax.Array)
        >>> graftax.combine(params, rest)
        {'w': Array([1., 1.], dtype=float32), 'name': 'net'}
    """
    if not graphs:
        raise TypeError("combine() needs at least one graph")
    # The first graph gives the structure; the others fill the places where it has None.
    base = Graph(graphs[0])
    values: dict[int, Any] = {}
    for source in graphs[1:]:
        for number, current, value in leaf_pairs("combine", base, Graph(source)):
            if current is None and value is not None:
                values.setdefault(number, value)
    # A subtree that replaces a None is copied, so that the result shares no mutable object with the arguments.
    nodes = {number: value for number, value in values.items() if _core.is_node(value)}
    if nodes:
        values |= dict(zip(nodes, _core.GraphEditor(list(nodes.values())).build({}, all=True), strict=True))
    return base.core.build(values, all=True)


def leaf_pairs(name: str, graph: Graph, source: Graph) -> Iterable[tuple[int, Any, Any]]:
    """(row in `graph`, its value, the value in `source`) of each leaf, and of each None in place of a node.

    Raises:
        StructureError: if the structures differ; names the path.
    """
    # Graphs of exactly one structure have their values in the same order.
    if graph.core.is_alike(source.core):
        return zip(*graph.core.values(), source.core.values()[1], strict=True)
    return ((a, graph.rows[a].value, source.rows[b].value) for a, b in paired_rows(name, graph, source))


def paired_rows(name: str, graph: Graph, source: Graph) -> Iterator[tuple[int, int]]:
    """The paired rows of two graphs, by number: leaves, and a None in one graph in place of a node in the other."""
    paired: dict[int, int] = {}

    def compare_pair(
        number: int, source_number: int, path: LinkedPath
    ) -> Generator[tuple[int, int], None, list[tuple[int, int, KeyEntry]]]:
        row, source_row = graph.rows[number], source.rows[source_number]
        # Values that are part of the structure have to be equal; `update` and `combine` do not touch them.
        if row.aux and source_row.aux and row.is_leaf and source_row.is_leaf:
            if leaf_difference(row.value, source_row.value) is not None:
                raise _other_structure(name, graph, source, number, source_number)
            return []
        if (row.is_leaf and (source_row.is_leaf or row.value is None)) or (
            source_row.is_leaf and source_row.value is None
        ):
            yield number, source_number
            return []
        # The same rows have to be references on both sides, and to nodes that were paired before.
        differ = (
            row.is_leaf
            or source_row.is_leaf
            or type(row.value) is not type(source_row.value)
            or row.category != source_row.category
        )
        if differ or paired.setdefault(row.target, source_row.target) != source_row.target:
            raise _other_structure(name, graph, source, number, source_number)
        if row.category == "ref":
            return []
        children = pair_children(graph.key_entries(number), source.key_entries(source_number))
        if children is None:
            raise _other_structure(name, graph, source, number, source_number)
        differs = node_difference(row.value, source_row.value)
        if differs is not None:
            text = OTHER_STRUCTURE.format(name=name, path=graph.path(number), one=differs[0], other=differs[1])
            raise StructureError(text)
        return children

    return lockstep(compare_pair, 0, 0)


def pair_children(
    left_entries: list[tuple[KeyEntry, int]], right_entries: list[tuple[KeyEntry, int]]
) -> list[tuple[int, int, KeyEntry]] | None:
    """The children of two nodes, matched by key: (left, right, key entry); None if the keys differ."""
    if len(left_entries) != len(right_entries):
        return None
    # Usually the keys have the same order; otherwise they are matched by a dict.
    if all(a == b for (a, _), (b, _) in zip(left_entries, right_entries, strict=True)):
        return [(a, b, entry) for (entry, a), (_, b) in zip(left_entries, right_entries, strict=True)]
    right_numbers = dict(right_entries)
    if any(entry not in right_numbers for entry, _ in left_entries):
        return None
    return [(number, right_numbers[entry], entry) for entry, number in left_entries]


def _other_structure(name: str, graph: Graph, source: Graph, number: int, source_number: int) -> StructureError:
    graph_text, source_text = _row_text(graph, number), _row_text(source, source_number)
    text = OTHER_STRUCTURE.format(name=name, path=graph.path(number), one=graph_text, other=source_text)
    # A common cause: `jax.tree.map` returned the other graph, which unshares objects.
    unshared = (graph.rows[number].category == "ref") != (source.rows[source_number].category == "ref")
    return StructureError(text + UNSHARED if unshared else text)


def _row_text(graph: Graph, number: int) -> str:
    row = graph.rows[number]
    if row.category == "ref":
        return f"the {type(row.value).__qualname__} of {graph.path(row.target)!r} once more"
    if row.category == "node":
        texts = [str(Path((entry,))).lstrip(".") for entry, _ in graph.key_entries(number)]
        shown = some(texts)
        return f"{a_type(row.value)}({shown})"
    if row.aux:
        return short_text(row.value)
    return "None" if row.value is None else a_type(row.value)


def selection(graph: Graph, spec: object, among: Iterable[int] | None = None) -> set[int]:
    """The numbers of the leaves that a pattern, a filter, a predicate or a tree of bools selects, among all or some."""
    numbers, _ = graph.core.values()
    # The first kind of selector that `spec` can be, from the most to the least specific: a filter of a library may be
    # callable, and a tree of bools may be anything.
    leaf_filter = as_filter(spec, allow_path_functions=True)
    leaves = set(numbers) if among is None else set(numbers).intersection(among)
    if leaf_filter is not None:
        return graph.descendants(leaf_filter.select(ObjectView(graph))) & leaves
    # Patterns come before the tree of bools: a list of texts may be either.
    if isinstance(spec, (str, Path)):
        spec = [spec]
    if isinstance(spec, (list, tuple)) and spec and all(isinstance(s, (str, Path)) for s in cast("list[Any]", spec)):
        return graph.descendants(p for pattern in cast("list[Any]", spec) for p in matching(graph, pattern)) & leaves
    # A tree of bools may be callable as well: a module whose leaves are bools has the type of the graph's root.
    is_tree_of_bools = type(spec) is type(graph.rows[0].value) and not isinstance(spec, FUNCTIONS)
    if callable(spec) and not is_tree_of_bools:
        return {number for number in leaves if predicate_holds(spec, graph, number)}
    return graph.descendants(prefix_tree.selected_rows(graph, spec)) & leaves
