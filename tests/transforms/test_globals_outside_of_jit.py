# SPDX-License-Identifier: Apache-2.0
"""Transforms outside of `jit`, of functions that assign globals."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import graftax

COUNT = 0
CACHE = jnp.ones(3)


def counting(x: Any) -> Any:
    global COUNT
    COUNT += 1
    return x.sum()


def assigning_sometimes(x: Any, reset: bool = False) -> Any:
    global CACHE
    if reset:
        CACHE = jnp.zeros(3)
    return (x + CACHE).sum()


TRANSFORMS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "grad": graftax.grad,
    "value_and_grad": graftax.value_and_grad,
    "vmap": graftax.vmap,
    "checkpoint": graftax.checkpoint,
    "jvp": lambda f: lambda x: graftax.jvp(f, (x,), (x,)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_an_assigned_global_is_an_error(name: str):
    with pytest.raises(graftax.MutationError, match="assigns the global COUNT"):
        TRANSFORMS[name](counting)(jnp.ones((2, 3)))
    assert COUNT == 0


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_branch_that_assigns_one_and_does_not_run_is_none(name: str):
    before = CACHE
    TRANSFORMS[name](assigning_sometimes)(jnp.ones((2, 3)))
    assert CACHE is before
