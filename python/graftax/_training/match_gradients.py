# SPDX-License-Identifier: Apache-2.0
"""Gradients, in the forms in which they are given, matched to the places of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np

from graftax._base.errors import StructureError, a_type, some
from graftax._graph.edit import paired
from graftax._graph.path import Graph, same_entry
from graftax._training.array_maps import has_dtype

NO_GRADIENT = (
    "Optimizer.update: there is no gradient for {paths}. Differentiate by all that is trained, as "
    "graftax.grad(loss)(model) does, or say what is trained: graftax.optimizer(tx, model, wrt=...)."
)
NO_SUCH_PLACE = (
    "Optimizer.update: the gradients have {what} at {path!r}, where the model has {there}. They have to be those of "
    "this model, in the structure in which graftax.grad returns them."
)
OTHER_SHAPE = "Optimizer: the {what} {name} has the shape {expected}, and was given {given}."
OTHER_NAMES = (
    "Optimizer.update: the gradients are {given}, and the parameters {paths}. Give them as graftax.grad returns them "
    "for the model, as a dict by the names of opt.parameters(model), or as a list in their order."
)
VALUE_FIRST = " The first of the two is a scalar: value_and_grad returns (value, gradients)."
UNTIED = (
    "Optimizer.update: {path!r} of the model is one array, and the gradients have several for it, at {places}. "
    "jax.tree.map copies what is shared: graftax.map_leaves(f, grads) keeps it. (jax.grad gives a shared layer a "
    "part of its gradient in each place: use graftax.grad.)"
)
SWAPPED = (
    "Optimizer.update(model, grads): the first one has None at {path!r}, where the second has {value}, as if the first "
    "were the gradients and the second the model."
)


def gradients_in(graph: Graph, numbers: dict[str, list[int]], grads: Any) -> dict[str, Any]:
    """The gradients by the names of the parameters; the parts of an array that stands in several places are added.

    Raises:
        StructureError: where gradients and parameters do not fit, at the path. One more axis in all of them, of one
            length, is left to the transformation.
    """
    found = _by_name(graph, numbers, grads)
    shapes = {name: np.shape(graph.rows[numbers[name][0]].value) for name in found}
    if not _has_rows(found, shapes):
        require_shapes(found, shapes)
    return found


def require_shapes(gradients: Mapping[str, Any], shapes: Mapping[str, Any]) -> None:
    """Raises a StructureError where a gradient is not of the shape of its parameter."""
    for name, gradient in gradients.items():
        if np.shape(gradient) != shapes[name]:
            raise StructureError(other_shape("gradient of", name, shapes[name], gradient))


def _has_rows(gradients: Mapping[str, Any], shapes: Mapping[str, Any]) -> bool:
    """Is there a row for each example in all of them? `differentially_private_aggregate` of Optax takes these."""
    found = {np.shape(gradient)[:1] for gradient in gradients.values()}
    return len(found) == 1 and all(np.shape(g) == (*next(iter(found)), *shapes[n]) for n, g in gradients.items())


def other_shape(what: str, name: str, expected: Any, given: Any) -> str:
    shape = f"the shape {np.shape(given)}" if has_dtype(given) else a_type(given)
    return OTHER_SHAPE.format(what=what, name=name, expected=expected, given=shape)


def _by_name(graph: Graph, numbers: dict[str, list[int]], grads: Any) -> dict[str, Any]:
    of_nnx = type(grads).__name__ == "State"  # what nnx.grad returns, also a Mapping
    if not of_nnx and isinstance(grads, Mapping) and set(cast("Mapping[Any, Any]", grads)) == set(numbers):
        return {name: grads[name] for name in numbers}
    if type(grads) in (list, tuple) and not isinstance(graph.rows[0].value, (list, tuple)):
        values = cast("list[Any]", grads)
        if len(values) == 1 and not has_dtype(values[0]):  # of one argument, as grad(wrt=[pattern]) returns it
            return _by_name(graph, numbers, values[0])
        if len(values) != len(numbers):
            hint = VALUE_FIRST if len(values) == 2 and np.shape(values[0]) == () else ""
            given = f"{a_type(grads)} of {len(values)}"
            raise StructureError(OTHER_NAMES.format(given=given, paths=f"{len(numbers)}: {some(list(numbers))}") + hint)
        return dict(zip(numbers, values, strict=True))
    other = Graph(getattr(grads, "_mapping", grads) if of_nnx else grads)
    at = _beside(graph, other, {number for where in numbers.values() for number in where})
    missing = [name for name, where in numbers.items() if not all(number in at for number in where)]
    if missing and not at:
        given = f"{a_type(grads)} without gradients of them"
        raise StructureError(OTHER_NAMES.format(given=given, paths=some(missing)))
    if missing:
        raise StructureError(NO_GRADIENT.format(paths=some(missing)))
    found: dict[str, Any] = {}
    for name, where in numbers.items():
        values = [other.rows[at[number]].value for number in where]
        found[name] = values[0] if len(values) == 1 else sum(values[1:], start=values[0])
    return found


def _beside(graph: Graph, other: Graph, wanted: set[int]) -> dict[int, int]:
    """By the numbers of the rows of parameters, those of their gradients.

    The structure of the gradients is that of the model before the loss changed it, so what else is in the model plays
    no part. What there is a gradient for has to be in the model.
    """
    found: dict[int, int] = {}
    met: set[tuple[int, int]] = set()
    stack = [(0, 0)]
    while stack:
        at, there = stack.pop()
        number, node = graph.rows[at].target, other.rows[there].target
        mine, given = graph.rows[number], other.rows[node]
        if given.is_leaf and has_dtype(given.value):
            if not mine.is_leaf:
                raise _no_such_row(graph, other, number, there)
            if number in wanted and found.setdefault(number, node) != node:
                paths = [repr(other.path(found[number])), repr(other.path(node))]
                raise StructureError(UNTIED.format(path=graph.path(number), places=" and ".join(paths)))
        elif given.is_leaf:
            if mine.what == "value" and mine.value is None and given.value is not None and not given.aux:
                raise StructureError(SWAPPED.format(path=graph.path(number), value=a_type(given.value)))
        elif (number, node) not in met:
            met.add((number, node))
            stack += _children(graph, other, number, node)
    return found


def _children(graph: Graph, other: Graph, number: int, node: int) -> Iterator[tuple[int, int]]:
    right = other.key_entries(node)
    left = [] if graph.rows[number].is_leaf else graph.key_entries(number)
    pairs = paired(left, right)
    if pairs is not None:
        yield from ((mine, given) for mine, given, _ in pairs)
        return
    known = dict(left)
    for entry, given in right:
        mine = known.get(entry)
        if mine is None:
            mine = next((child for there, child in left if same_entry(there, entry)), None)
        if mine is not None:
            yield mine, given
        elif any(other.rows[p].is_leaf and has_dtype(other.rows[p].value) for p in other.below([given])):
            raise _no_such_row(graph, other, -1, given)


def _no_such_row(graph: Graph, other: Graph, number: int, there: int) -> StructureError:
    model = "nothing" if number < 0 else a_type(graph.rows[number].value)
    what = "a gradient" if other.rows[there].is_leaf else a_type(other.rows[there].value)
    return StructureError(NO_SUCH_PLACE.format(what=what, path=other.path(there), there=model))
