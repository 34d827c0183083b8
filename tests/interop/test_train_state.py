# SPDX-License-Identifier: Apache-2.0
"""Flax's `TrainState`: the count of steps is data, as it is for JAX."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

import graftax


class WithStatistics(TrainState):
    statistics: object = None


def made(cls=TrainState, **more):
    tx = optax.adam(1e-1)
    return cls.create(apply_fn=lambda p, x: p["w"] * x, params={"w": jnp.ones(2)}, tx=tx, **more)


def step(state, x):
    gradient = jax.grad(lambda p: (state.apply_fn(p, x) ** 2).sum())(state.params)
    return state.apply_gradients(grads=gradient)


@pytest.mark.parametrize("jit", [graftax.jit, graftax.filter_jit])
def test_one_trace_as_under_jax(jit):
    ours, theirs, run = made(), made(), jit(step)
    for _ in range(4):
        ours, theirs = run(ours, jnp.ones(2)), step(theirs, jnp.ones(2))
    assert run.cache_info().traces == 1
    assert int(ours.step) == 4 and jnp.allclose(ours.params["w"], theirs.params["w"])


def test_a_state_stays_what_it_is_to_jax():
    state = made(WithStatistics, statistics={"mean": jnp.zeros(2)})
    leaves, structure = graftax.flatten(state)
    assert len(leaves) == len(jax.tree.leaves(state))
    again = graftax.unflatten(structure, leaves)
    assert type(again) is WithStatistics and jax.tree.structure(again) == jax.tree.structure(state)
    assert graftax.copy(state).step == 0
    gradient = graftax.grad(lambda s: (s.params["w"] ** 2).sum())(state)
    assert gradient.step is None and gradient.params["w"].tolist() == [2, 2]
    assert graftax.fori_loop(0, 3, lambda i, s: s.replace(step=s.step + 1), state).step == 3
    xs = jnp.ones((3, 2))
    assert graftax.vmap(lambda s, x: s.apply_fn(s.params, x), in_axes=(None, 0))(state, xs).shape == (3, 2)
