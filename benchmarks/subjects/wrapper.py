# SPDX-License-Identifier: Apache-2.0
"""The object-wrapper idea: one pytree node around the arguments that hides static leaves in its aux data."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.subjects import by_hand
from benchmarks.subjects.jax_tree import accepts as accepts
from benchmarks.subjects.jax_tree import taken_as as taken_as

NAME = "object wrapper"
DISTRIBUTION = "jax"

_TRACED = (jax.Array, np.ndarray, np.generic)


class Box:
    """Holds one value; its children are the arrays of the value, its aux data is everything else."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def flatten(obj: Any) -> tuple[list[Any], Any]:
    leaves, treedef = jax.tree.flatten(obj)
    static = tuple((i, x) for i, x in enumerate(leaves) if not isinstance(x, _TRACED))
    if static:
        leaves = [x for x in leaves if isinstance(x, _TRACED)]
    return leaves, (treedef, static)


def unflatten(structure: Any, leaves: Any) -> Any:
    treedef, static = structure
    merged = list(leaves)
    for i, x in static:  # ascending, so each one lands at its place
        merged.insert(i, x)
    return jax.tree.unflatten(treedef, merged)


def replay(structure: Any, obj: Any) -> list[Any]:
    return flatten(obj)[0]


jax.tree_util.register_pytree_node(
    Box, lambda box: flatten(box.value), lambda aux, children: Box(unflatten(aux, children))
)


def jit(f: Callable[..., Any]) -> Callable[..., Any]:
    @jax.jit
    def inner(box: Box) -> Box:
        args, kwargs = box.value
        return Box(f(*args, **kwargs))

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        return inner(Box((args, kwargs))).value

    return call


in_place = functools.partial(by_hand, jit)
