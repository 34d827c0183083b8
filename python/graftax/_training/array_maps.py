# SPDX-License-Identifier: Apache-2.0
"""Functions of the arrays of an object graph, each array once: map, average, cast, count."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np

from graftax._base.errors import StructureError, at_path
from graftax._graph.array_aliases import apply_once
from graftax._graph.edit import paired_rows, selection
from graftax._graph.path import Graph

OTHER_SHAPE = "ema: {path!r} has the shape {expected} in the target, and {actual} in the model."
NO_SUCH_ARRAY = "{name}: {where!r} matches no {what} of this {cls}."

T = TypeVar("T")


def map_leaves(function: Callable[..., Any], graph: T, *graphs: Any, with_path: bool = False) -> T:
    """A copy of a graph with `function` applied to each array. Sharing and cycles are kept.

    Other values stay as they are. The function is called once for an array that occurs in several places, with its
    first path.

    Args:
        function: takes an array, and the value at the same path of each graph in `graphs`.
        graph: any object.
        graphs: objects of the same structure, such as gradients. For None in place of an array, or of everything below
            a node, the function gets None.
        with_path: the function gets the `Path` of the array as its first argument.

    Returns:
        the copy.

    Raises:
        StructureError: if the structures differ; names the path.

    Example:
        >>> layer = {"w": jnp.ones(2), "name": "tied"}
        >>> model = graftax.map_leaves(lambda w: w / 2, {"first": layer, "second": layer})
        >>> model["first"], model["second"] is model["first"]
        ({'w': Array([0.5, 0.5], dtype=float32), 'name': 'tied'}, True)
    """
    # The graphs are walked together, so that each array has its partners by the number of its row.
    base = Graph(graph)
    partners: list[dict[int, Any]] = []
    for source in graphs:
        partner_graph = Graph(source)
        pairs = paired_rows("map_leaves", base, partner_graph)
        partners.append({number: partner_graph.rows[partner].value for number, partner in pairs})

    def apply(number: int, values: tuple[Any, ...]) -> Any:
        try:
            return function(*((base.path(number),) if with_path else ()), *values)
        except Exception as error:
            raise at_path(error, repr(base.path(number)))  # noqa: B904 - the same error

    operands = (
        (number, (base.rows[number].value, *(values.get(number) for values in partners)))
        for number in array_numbers(base)
    )
    return base.core.build(apply_once(apply, operands), all=True)


def ema(target: T, model: Any, decay: Any) -> T:
    """An exponential moving average: `decay * target + (1 - decay) * model` for every floating array of `target`.

    Other arrays, such as counters and keys, are copied from the model. With `decay=0` the target gets the numbers of
    the model in arrays of its own.

    Args:
        target: the average, which is changed in place. Its arrays keep their dtype.
        model: an object of the same structure. Where it has None, the target stays as it is.
        decay: a number or a scalar array.

    Returns:
        `target`, or a new object if nothing mutable holds its arrays (tuples, Equinox modules).

    Raises:
        StructureError: if the structures or the shapes differ; names the path.

    Example:
        >>> model = {"w": jnp.full(2, 4.0)}
        >>> average = graftax.copy(model)
        >>> model["w"] = jnp.zeros(2)
        >>> graftax.ema(average, model, 0.75)
        {'w': Array([3., 3.], dtype=float32)}
    """
    graph, source = Graph(target), Graph(model)
    arrays = set(array_numbers(graph))
    pairs: list[tuple[int, tuple[Any, Any]]] = []
    for number, source_number in paired_rows("ema", graph, source):
        average, value = graph.rows[number].value, source.rows[source_number].value
        # An array that both share has the same average as before.
        if number not in arrays or value is None or value is average:
            continue
        if np.shape(value) != average.shape:
            raise StructureError(
                OTHER_SHAPE.format(path=graph.path(number), expected=average.shape, actual=np.shape(value))
            )
        pairs.append((number, (average, value)))

    def mean(_: int, pair: tuple[Any, ...]) -> Any:
        average, value = pair
        # The mean of arrays of different dtypes has the wider one.
        return (decay * average + (1 - decay) * value).astype(average.dtype) if is_inexact(average) else value

    return graph.write_or_rebuild(apply_once(mean, pairs))


def cast(model: T, dtype: Any, where: Any = None) -> T:
    """A graph with its floating arrays in another dtype. Integers, keys and complex arrays stay as they are.

    Objects with a floating array below them are copied. All others are shared with `model`, so that random streams
    continue in both. In a loss function, gradients are those of the original arrays, in their dtype.

    Args:
        model: any object.
        dtype: the new dtype, such as `jnp.bfloat16`.
        where: the arrays to cast: a pattern, a type or a predicate, as in `graftax.partition`. By default all.

    Returns:
        the new graph.

    Raises:
        StructureError: if `where` matches no floating array.

    Example:
        >>> graftax.cast({"w": jnp.ones(2), "steps": jnp.asarray(3)}, jnp.bfloat16)
        {'w': Array([1, 1], dtype=bfloat16), 'steps': Array(3, dtype=int32...)}
    """
    graph = Graph(model)
    numbers = _chosen_arrays("cast", "floating array", graph, where, is_floating)
    arrays = ((number, (graph.rows[number].value,)) for number in numbers)
    return graph.core.build(apply_once(lambda _, array: array[0].astype(dtype), arrays))


class Count(NamedTuple):
    """What `count` returns."""

    parameters: int  # numbers
    bytes: int
    arrays: int


def count(model: Any, where: Any = None) -> Count:
    """The number of parameters of a model: the numbers in floating arrays, each array counted once.

    In a function of `graftax.jit` arrays have no identity, so an array in two places counts twice. An object that is
    reached twice counts once everywhere.

    Args:
        model: any object, with arrays or `jax.ShapeDtypeStruct`s.
        where: the arrays to count: a pattern, a type or a predicate, as in `graftax.partition`. Then integer arrays and
            keys count, too.

    Returns:
        a named tuple (parameters, bytes, arrays).

    Raises:
        StructureError: if `where` matches no array.

    Example:
        >>> layer = {"w": jnp.ones((3, 4)), "b": jnp.zeros(4)}
        >>> graftax.count([layer, layer])
        Count(parameters=16, bytes=64, arrays=2)
    """
    graph = Graph(model)
    numbers = _chosen_arrays("count", "array", graph, where, is_inexact if where is None else has_dtype, has_dtype)
    # By identity: an array in several places counts once.
    arrays = {id(value): value for value in (graph.rows[number].value for number in numbers)}
    sizes = [(math.prod(value.shape), value.dtype.itemsize) for value in arrays.values()]
    return Count(sum(size for size, _ in sizes), sum(size * width for size, width in sizes), len(sizes))


def array_numbers(graph: Graph) -> Iterator[int]:
    """The rows of the arrays that are traced, by number, in order: not those in static fields and aux data."""
    return (number for number, row in enumerate(graph.rows) if row.category == "array" and not row.aux)


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
        p for p, row in enumerate(rows) if not row.aux and (row.category == "array" or (is_leaf and is_leaf(row.value)))
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
