# SPDX-License-Identifier: Apache-2.0
"""`stack`, `unstack` and `each`: objects of the same structure as one object, each of whose arrays is a stack."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import jax.numpy as jnp
import numpy as np

from graftax import _core, interop
from graftax._base.errors import StructureError
from graftax._base.key_path import keystr
from graftax._graph.array_aliases import apply_once
from graftax._graph.module import Module
from graftax._graph.structure_diff import differences_text
from graftax._jax.tree_registry import tree_functions

NOTHING = "graftax.stack takes at least one object."
OTHER_STRUCTURE = (
    "{name}: the objects have to be of one structure, and number {number} differs from the first:\n{lines}"
)
NO_ARRAYS = "graftax.unstack: this object holds no array, so the number of objects is not known."

T = TypeVar("T")


def stack(objects: Iterable[T]) -> T:
    """Combines objects of one structure into one object, with their arrays stacked along a new first axis.

    Args:
        objects: objects with equal types, static values and sharing, and arrays of equal shapes and dtypes.

    Returns:
        the new object.

    Raises:
        StructureError: if they differ; names the object and the path.

    Example:
        >>> model = graftax.stack([{"w": jnp.zeros(2), "name": "net"}, {"w": jnp.ones(2), "name": "net"}])
        >>> model["w"].shape, model["name"]
        ((2, 2), 'net')
    """
    return stack_named("graftax.stack", list(objects))


def stack_named(name: str, objects: list[Any]) -> Any:
    """As `stack`; errors name the function `name`."""
    if not objects:
        raise ValueError(NOTHING)
    flat = [_core.flatten(obj) for obj in objects]
    text = mismatch_text(name, flat)
    if text is not None:
        raise StructureError(text)
    return stack_flat(flat)


Flat = tuple[list[Any], _core.GraphDef]


def mismatch_text(name: str, flat: list[Flat]) -> str | None:
    """The message for the first of some flattened objects that differs from the first one; None if none does."""
    first_leaves, graphdef = flat[0]
    # Structures first: leaves can be paired only if these are equal.
    for number, (_, structure) in enumerate(flat):
        if structure != graphdef:
            lines = differences_text(graphdef, structure)
            return OTHER_STRUCTURE.format(name=name, number=number, lines=lines)
    for number, (leaves, _) in enumerate(flat):
        for i, (leaf, expected) in enumerate(zip(leaves, first_leaves, strict=True)):
            if np.shape(leaf) != np.shape(expected) or leaf.dtype != expected.dtype:
                path = f"obj{keystr(graphdef.leaf_places()[i][1])}"
                texts = [f"{array.dtype}{list(np.shape(array))}" for array in (expected, leaf)]
                return f"{name}: {path} is {texts[0]} in the first object, and {texts[1]} in number {number}."
    return None


def stack_flat(flat: list[Flat]) -> Any:
    """The stack of flattened objects of the same structure."""
    # An array that stands at two places of each object is stacked once, and is one array in the result.
    rows = zip(*(leaves for leaves, _ in flat), strict=True)
    stacked = apply_once(lambda _, arrays: jnp.stack(arrays), enumerate(rows))
    return _core.unflatten(flat[0][1], list(stacked.values()))


def unstack(obj: T) -> list[T]:
    """The inverse of `stack`: a list of new objects, each with a row of every array.

    Args:
        obj: an object of stacked arrays.

    Returns:
        the list of objects.

    Raises:
        StructureError: if the arrays do not have the same number of rows.

    Example:
        >>> graftax.unstack({"w": jnp.arange(2.0), "name": "net"})
        [{'w': Array(0., dtype=float32), 'name': 'net'}, {'w': Array(1., dtype=float32), 'name': 'net'}]
    """
    leaves, graphdef = _core.flatten(obj)
    if not leaves:
        raise StructureError(NO_ARRAYS)
    paths = [f"obj{keystr(path)}" for _, path in graphdef.leaf_places()]
    # As texts: "no rows" is what the message says of an array without dimensions, which differs from one of 0 rows.
    counts = [f"{np.shape(leaf)[0]} rows" if np.shape(leaf) else "no rows" for leaf in leaves]
    for path, count in zip(paths, counts, strict=True):
        if count != counts[0] or count == "no rows":
            raise StructureError(
                f"graftax.unstack: {path} has {count}, and {paths[0]} {counts[0]}: all arrays need one row per object."
            )
    objects: list[T] = []
    for i in range(np.shape(leaves[0])[0]):
        rows = apply_once(lambda _, leaf, row=i: leaf[0][row], enumerate((leaf,) for leaf in leaves))
        objects.append(_core.unflatten(graphdef, list(rows.values())))
    return objects


class Each(Generic[T]):
    """The result of `each`."""

    def __init__(self, objects: list[T]) -> None:
        self.objects = objects

    def __repr__(self) -> str:
        return f"graftax.each({self.objects!r})"


def each(objects: Iterable[T]) -> Each[T]:
    """Lets `graftax.scan`, `map` and `vmap` go over objects of one structure, such as the layers of a model.

    The function is traced once for all of them, and what a step changes in its object is changed in the caller's.
    `graftax.scan` and `map` treat a plain list of layers this way by themselves, and so does `graftax.vmap` if the list
    has no axis to map. `each` requests it for any objects, such as dicts, and raises an error if they differ.
    Each call stacks their arrays; a model that keeps its layers stacked (`stack`) avoids that.

    Args:
        objects: as for `stack`.

    Returns:
        a marked list, to be an argument of one of these transforms.

    Raises:
        StructureError: by the transform, if the objects have different structures; names the path.

    Example:
        >>> layers = [{"w": jnp.full(2, 2.0), "calls": jnp.array(0)} for _ in range(3)]
        >>> def apply(x, layer):
        ...     layer["calls"] += 1
        ...     return x * layer["w"], None
        >>> x, _ = graftax.scan(apply, jnp.ones(2), graftax.each(layers))
        >>> x, layers[2]["calls"]
        (Array([8., 8.], dtype=float32), Array(1, dtype=int32...))
    """
    return Each(list(objects))


def is_layer(obj: object) -> bool:
    """Is this a module of a known library, or an object of a class unknown to JAX, rather than data?"""
    cls = type(obj)
    # Containers, functions and classes registered with a flatten are data.
    if _core.kind_info(cls)[0] != "object":
        return False
    return isinstance(obj, Module) or interop.is_module(obj) or tree_functions(cls) is None
