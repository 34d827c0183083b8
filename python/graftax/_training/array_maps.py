# SPDX-License-Identifier: Apache-2.0
"""Functions of the arrays of an object graph, each array once: map, average, cast, count."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np

from graftax._base.errors import StructureError, at_path
from graftax._graph.array_aliases import note_made
from graftax._graph.edit import selection, side_by_side
from graftax._graph.path import Graph

OTHER_SHAPE = "ema: {path!r} has the shape {expected} in the target, and {given} in the model."
NO_SUCH_ARRAY = "{name}: {where!r} means no {what} of this {cls}."

T = TypeVar("T")


def map_leaves(function: Callable[..., Any], graph: T, *graphs: Any, with_path: bool = False) -> T:
    """A copy of a graph with `function` of each array in its place; sharing and cycles are kept.

    Other values stay. An array that stands in several places is one: the function is called once for it, with the
    path at which it stands first.

    Args:
        function: is given an array, and what stands in its place in each of `graphs`.
        graph: any object.
        graphs: of the same structure, such as gradients. Where one has None, for an array or for all below, the
            function is given None.
        with_path: the `Path` of the array comes before it.

    Raises:
        StructureError: where the structures differ, at the path.

    Example:
        >>> layer = {"w": jnp.ones(2), "name": "tied"}
        >>> model = graftax.map_leaves(lambda w: w / 2, {"first": layer, "second": layer})
        >>> model["first"], model["second"] is model["first"]
        ({'w': Array([0.5, 0.5], dtype=float32), 'name': 'tied'}, True)
    """
    base = Graph(graph)
    partners: list[dict[int, Any]] = []
    for source in graphs:
        partner_graph = Graph(source)
        pairs = side_by_side("map_leaves", base, partner_graph)
        partners.append({number: partner_graph.rows[partner].value for number, partner in pairs})
    results: dict[tuple[int, ...], tuple[tuple[Any, ...], Any]] = {}
    changes: dict[int, Any] = {}
    for number in array_numbers(base):
        values = (base.rows[number].value, *(partner_values.get(number) for partner_values in partners))
        identity = tuple(map(id, values))
        if identity not in results:
            path = (base.path(number),) if with_path else ()
            try:
                results[identity] = values, function(*path, *values)
            except Exception as error:
                raise at_path(error, repr(base.path(number)))  # noqa: B904 - the same error
        changes[number] = results[identity][1]
    note_made(results.values())
    return base.core.build(changes, all=True)


def ema(target: T, model: Any, decay: Any) -> T:
    """Moves a graph towards another one: `decay * target + (1 - decay) * model`, for every floating array.

    Other arrays (counters, keys) are taken over. What the two have in common stays as it is. With `decay=0` the target
    has the numbers of the model, in arrays of its own.

    Args:
        target: is changed in place. Its arrays keep their dtype.
        model: of the same structure; where it has None, the target stays.
        decay: a number or a scalar array.

    Returns:
        `target`, or a new one where no mutable object holds its arrays (tuples, Equinox modules).

    Raises:
        StructureError: where the structures or the shapes differ, at the path.

    Example:
        >>> model = {"w": jnp.full(2, 4.0)}
        >>> average = graftax.copy(model)
        >>> model["w"] = jnp.zeros(2)
        >>> graftax.ema(average, model, 0.75)
        {'w': Array([3., 3.], dtype=float32)}
    """
    graph, source = Graph(target), Graph(model)
    arrays = set(array_numbers(graph))
    results: dict[tuple[int, int], tuple[tuple[Any, ...], Any]] = {}
    changes: dict[int, Any] = {}
    for number, source_number in side_by_side("ema", graph, source):
        average, value = graph.rows[number].value, source.rows[source_number].value
        if number not in arrays or value is None or value is average:
            continue
        if np.shape(value) != average.shape:
            raise StructureError(
                OTHER_SHAPE.format(path=graph.path(number), expected=average.shape, given=np.shape(value))
            )
        identity = (id(average), id(value))
        if identity not in results:
            results[identity] = (average, value), _average(average, value, decay)
        changes[number] = results[identity][1]
    note_made((values, average) for values, average in results.values() if average is not values[1])
    return graph.put(changes)


def _average(average: Any, value: Any, decay: Any) -> Any:
    if not is_inexact(average):
        return value
    return (decay * average + (1 - decay) * value).astype(average.dtype)


def cast(model: T, dtype: Any, where: Any = None) -> T:
    """A graph with its floating arrays in another dtype. Integers, keys and complex arrays stay.

    What holds a floating array is copied, and what holds none is the object that it was: random streams go on where
    they are. Inside of a loss, the gradient is by the arrays of the graph that was given, in their dtype.

    Args:
        model: any object.
        dtype: such as `jnp.bfloat16`.
        where: what is cast: a pattern, a type or a predicate, as in `graftax.partition`. All of it otherwise.

    Raises:
        StructureError: where `where` means no floating array.

    Example:
        >>> graftax.cast({"w": jnp.ones(2), "steps": jnp.asarray(3)}, jnp.bfloat16)
        {'w': Array([1, 1], dtype=bfloat16), 'steps': Array(3, dtype=int32...)}
    """
    graph = Graph(model)
    results: dict[int, tuple[tuple[Any, ...], Any]] = {}
    changes: dict[int, Any] = {}
    for number in _chosen_arrays("cast", "floating array", graph, where, is_floating):
        value = graph.rows[number].value
        if id(value) not in results:
            results[id(value)] = (value,), value.astype(dtype)
        changes[number] = results[id(value)][1]
    note_made((values, cast_value) for values, cast_value in results.values() if cast_value is not values[0])
    return graph.core.build(changes)


class Count(NamedTuple):
    """What `count` returns."""

    parameters: int  # numbers
    bytes: int
    arrays: int


def count(model: Any, where: Any = None) -> Count:
    """How many parameters a model has: numbers in floating arrays, each array once, however often it is reached.

    Within `graftax.jit` arrays have no identity: there one array in two places counts twice; one object counts once.

    Args:
        model: any object, with arrays or `jax.ShapeDtypeStruct`s.
        where: what is counted: a pattern, a type or a predicate, as in `graftax.partition`; integers and keys, too.

    Raises:
        StructureError: where `where` means no array.

    Example:
        >>> layer = {"w": jnp.ones((3, 4)), "b": jnp.zeros(4)}
        >>> graftax.count([layer, layer])
        Count(parameters=16, bytes=64, arrays=2)
    """
    graph = Graph(model)
    numbers = _chosen_arrays("count", "array", graph, where, is_inexact if where is None else has_dtype, has_dtype)
    arrays = {id(value): value for value in (graph.rows[number].value for number in numbers)}
    sizes = [(math.prod(value.shape), value.dtype.itemsize) for value in arrays.values()]
    return Count(sum(size for size, _ in sizes), sum(size * width for size, width in sizes), len(sizes))


def array_numbers(graph: Graph) -> Iterator[int]:
    """The rows of the arrays that are traced, by number, in order: not those in static fields and aux data."""
    return (number for number, row in enumerate(graph.rows) if row.what == "array" and not row.aux)


def _chosen_arrays(
    name: str,
    noun: str,
    graph: Graph,
    where: Any,
    fits: Callable[[Any], bool],
    is_leaf: Callable[[Any], bool] | None = None,
) -> list[int]:
    rows = graph.rows
    numbers = (
        p for p, row in enumerate(rows) if not row.aux and (row.what == "array" or (is_leaf and is_leaf(row.value)))
    )
    chosen = [number for number in numbers if fits(rows[number].value)]
    if where is None:
        return chosen
    chosen = sorted(selection(graph, where, chosen))
    if not chosen:
        raise StructureError(
            NO_SUCH_ARRAY.format(name=name, where=where, what=noun, cls=type(rows[0].value).__qualname__)
        )
    return chosen


def has_dtype(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape")


def is_inexact(leaf: Any) -> bool:
    """Is it an array of a floating or complex dtype?"""
    return has_dtype(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def is_floating(leaf: Any) -> bool:
    return has_dtype(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)
