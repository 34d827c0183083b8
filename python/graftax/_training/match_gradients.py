# SPDX-License-Identifier: Apache-2.0
"""Matches gradients, in each form that users have them, to the parameters of a model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast

import numpy as np

from graftax._base.errors import StructureError, a_type, some
from graftax._graph.edit import pair_children
from graftax._graph.path import Graph, entry_means
from graftax._training.array_maps import has_dtype
from graftax._training.parameter_places import require_no_added

NO_GRADIENT = (
    "Optimizer.update: there is no gradient for {paths}. Differentiate with respect to everything that is"
    " trained, as graftax.grad(loss)(model) does, or say what is trained: graftax.optimizer(tx, model, "
    "wrt=...)."
)
NO_SUCH_PATH = (
    "Optimizer.update: the gradients have {what} at {path!r}, where the model has {there}. They have to be those of "
    "this model, in the structure in which graftax.grad returns them."
)
OTHER_SHAPE = "Optimizer: the {what} {name} has the shape {expected}, and was given {actual}."
OTHER_NAMES = (
    "Optimizer.update: the gradients are {actual}, and the parameters {paths}. Give them as graftax.grad returns them "
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


def gradients_in(
    graph: Graph, numbers: dict[str, list[int]], grads: Any, trained: Collection[int] = ()
) -> dict[str, Any]:
    """The gradients by the names of the parameters. The gradients of an array that occurs several times are added up.

    Args:
        numbers: the rows of each parameter in the model's graph, by name.
        grads: in any form.
        trained: the rows of the arrays that should be trained. None of their gradients may be lost.

    Raises:
        StructureError: if gradients and parameters do not fit; names the path. One more leading axis in all of them, of
            the same length, is left to the transformation.
    """
    gradients = _by_name(graph, numbers, grads, trained)
    shapes = {name: np.shape(graph.rows[numbers[name][0]].value) for name in gradients}
    # Gradients of each example are for a transformation that reduces them; any other one refuses them itself.
    if not _has_rows(gradients, shapes):
        require_shapes(gradients, shapes)
    return gradients


def require_shapes(
    values: Mapping[str, Any], shapes: Mapping[str, Any], noun: str = "gradient of", hint: str = ""
) -> None:
    """Raises StructureError if the value for a parameter has another shape than the parameter."""
    for name, expected in shapes.items():
        value = values[name]
        if np.shape(value) != expected:
            text = f"the shape {np.shape(value)}" if has_dtype(value) else a_type(value)
            raise StructureError(OTHER_SHAPE.format(what=noun, name=name, expected=expected, actual=text) + hint)


def _has_rows(gradients: Mapping[str, Any], shapes: Mapping[str, Any]) -> bool:
    """Do all gradients have a row for each example? `optax.contrib.differentially_private_aggregate` takes these."""
    leading_axes = {np.shape(gradient)[:1] for gradient in gradients.values()}
    return len(leading_axes) == 1 and all(
        np.shape(g) == (*next(iter(leading_axes)), *shapes[n]) for n, g in gradients.items()
    )


def _by_name(graph: Graph, numbers: dict[str, list[int]], grads: Any, trained: Collection[int]) -> dict[str, Any]:
    # What nnx.grad returns is a Mapping, too, but one by the parts of the model.
    of_nnx = type(grads).__name__ == "State"
    # Three forms: a dict by the names of the parameters, a list in their order, an object like the model.
    if not of_nnx and isinstance(grads, Mapping) and set(cast("Mapping[Any, Any]", grads)) == set(numbers):
        return {name: grads[name] for name in numbers}
    if type(grads) in (list, tuple) and not isinstance(graph.rows[0].value, (list, tuple)):
        values = cast("list[Any]", grads)
        # With one pattern, grad(wrt=[pattern]) returns a tuple of one graph.
        if len(values) == 1 and not has_dtype(values[0]):
            return _by_name(graph, numbers, values[0], trained)
        if len(values) != len(numbers):
            hint = VALUE_FIRST if len(values) == 2 and np.shape(values[0]) == () else ""
            grads_text = f"{a_type(grads)} of {len(values)}"
            raise StructureError(
                OTHER_NAMES.format(actual=grads_text, paths=f"{len(numbers)}: {some(list(numbers))}") + hint
            )
        return dict(zip(numbers, values, strict=True))
    grads_graph = Graph(getattr(grads, "_mapping", grads) if of_nnx else grads)
    parameters = {number for rows in numbers.values() for number in rows}
    gradient_row = _match_rows(graph, grads_graph, parameters.union(trained))
    require_no_added(graph, [number for number in gradient_row if number not in parameters])
    missing = [name for name, rows in numbers.items() if not all(number in gradient_row for number in rows)]
    if missing and not gradient_row:
        grads_text = f"{a_type(grads)} without gradients of them"
        raise StructureError(OTHER_NAMES.format(actual=grads_text, paths=some(missing)))
    if missing:
        raise StructureError(NO_GRADIENT.format(paths=some(missing)))
    gradients: dict[str, Any] = {}
    for name, rows in numbers.items():
        values = [grads_graph.rows[gradient_row[number]].value for number in rows]
        # Each place of a tied array has its part of the gradient.
        gradients[name] = sum(values[1:], start=values[0])
    return gradients


def _match_rows(graph: Graph, grads_graph: Graph, parameters: set[int]) -> dict[int, int]:
    """The row of the gradient for each row of a parameter."""
    # The gradients have the structure of the model before the loss changed it, so other differences are ignored. But
    # each gradient needs its array in the model.
    gradient_row: dict[int, int] = {}
    # By pairs of rows, since an object that the model shares may be several in the gradients.
    visited: set[tuple[int, int]] = set()
    stack = [(0, 0)]
    while stack:
        model_row, grads_row = stack.pop()
        number, node = graph.rows[model_row].target, grads_graph.rows[grads_row].target
        model, gradient = graph.rows[number], grads_graph.rows[node]
        if gradient.is_leaf and has_dtype(gradient.value):
            if not model.is_leaf:
                raise _no_such_row(graph, grads_graph, number, grads_row)
            if number in parameters and gradient_row.setdefault(number, node) != node:
                paths = [repr(grads_graph.path(gradient_row[number])), repr(grads_graph.path(node))]
                raise StructureError(UNTIED.format(path=graph.path(number), places=" and ".join(paths)))
        elif gradient.is_leaf:
            if model.category == "value" and model.value is None and gradient.value is not None and not gradient.aux:
                raise StructureError(SWAPPED.format(path=graph.path(number), value=a_type(gradient.value)))
        elif (number, node) not in visited:
            visited.add((number, node))
            stack += _children(graph, grads_graph, number, node)
    return gradient_row


def _children(graph: Graph, grads_graph: Graph, number: int, node: int) -> Iterator[tuple[int, int]]:
    grads_children = grads_graph.key_entries(node)
    model_children = [] if graph.rows[number].is_leaf else graph.key_entries(number)
    pairs = pair_children(model_children, grads_children)
    if pairs is not None:
        yield from ((model_child, grads_child) for model_child, grads_child, _ in pairs)
        return
    # The structures differ here: children correspond by their keys, or by what these mean, as `.w` and `['w']`.
    child_of = dict(model_children)
    for entry, grads_child in grads_children:
        model_child = child_of.get(entry)
        if model_child is None:
            model_child = next(
                (child for model_entry, child in model_children if entry_means(model_entry, entry)), None
            )
        if model_child is not None:
            yield model_child, grads_child
        # A difference without a gradient below it does not matter.
        elif any(
            grads_graph.rows[p].is_leaf and has_dtype(grads_graph.rows[p].value)
            for p in grads_graph.descendants([grads_child])
        ):
            raise _no_such_row(graph, grads_graph, -1, grads_child)


def _no_such_row(graph: Graph, grads_graph: Graph, number: int, grads_row: int) -> StructureError:
    model = "nothing" if number < 0 else a_type(graph.rows[number].value)
    found_text = "a gradient" if grads_graph.rows[grads_row].is_leaf else a_type(grads_graph.rows[grads_row].value)
    return StructureError(NO_SUCH_PATH.format(what=found_text, path=grads_graph.path(grads_row), there=model))
