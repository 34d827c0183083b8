# SPDX-License-Identifier: Apache-2.0
"""Random programs on random graphs: through vmap as in a Python loop over the slices."""

from __future__ import annotations

import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import graftax
import oracle
import strategies
from strategies import Program, Recipe

SIZE = 3


def run(f: Any, roots: tuple[Any, ...]) -> tuple[Any, BaseException | None]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice on statics is tested elsewhere
            return f(*roots), None
    except Exception as error:
        return None, error


def deep_copy(graph: Any, leaf: Any) -> Any:
    """A graph of the same structure; roots and nodes are copied together, which keeps what they share."""
    return oracle.deep_copy(graph, leaf=leaf)


def stacked(leaf: Any) -> Any:
    return (np if isinstance(leaf, np.ndarray | np.generic) else jnp).stack([leaf * i for i in range(1, SIZE + 1)])


def assert_stacked(stack: Any, slices: list[Any]) -> None:
    """The whole has the structure of each slice, and its arrays are theirs, stacked."""
    blank = [deep_copy(graph, lambda leaf: 0) for graph in (stack, slices[0])]
    assert oracle.difference(*blank) is None
    for leaf, *parts in zip(arrays(stack), *map(arrays, slices), strict=True):
        np.testing.assert_allclose(leaf, np.stack(parts), rtol=1e-6)


def arrays(graph: Any) -> list[Any]:
    return graftax.flatten(graph)[0]


@pytest.mark.quick(0)
@pytest.mark.parametrize("outer", [lambda f: f, graftax.jit], ids=["plain", "jit"])
@settings(max_examples=settings.default.max_examples // 3)
@given(strategies.graphs().map(strategies.held), strategies.programs().map(strategies.held))
def test_vmap_does_what_a_loop_over_the_slices_does(outer: Any, recipe: Recipe, program: Program) -> None:
    stack = deep_copy(recipe.build(), stacked)
    slices = [deep_copy(stack, lambda leaf, i=i: leaf[i]) for i in range(SIZE)]
    before = [deep_copy(roots, lambda leaf: leaf) for roots in slices]
    mapped = outer(graftax.vmap(lambda *roots: program(roots), axis_size=SIZE))
    result, error = run(mapped, stack[0])
    loop = [run(lambda *roots: program(roots), roots) for roots, _ in slices]
    assert (type(error), str(error)) == (type(loop[0][1]), str(loop[0][1]))
    if error is not None:
        assert_stacked(stack, before)
    else:
        assert_stacked((result, *stack), [(value, *roots) for (value, _), roots in zip(loop, slices, strict=True)])
