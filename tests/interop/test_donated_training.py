# SPDX-License-Identifier: Apache-2.0
"""Training steps of other libraries with `donate="auto"`: what is replaced is donated, weights are as without it."""

from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from flax import nnx

import graftax
from graftax._jax import fast_dispatch

pytestmark = [
    pytest.mark.skipif(not fast_dispatch.counts_buffer_users(), reason="donate='auto' does not work here"),
    pytest.mark.quick(0),  # tests/jit/test_proven_donation.py has the state of Optax
]

WIDTH = 128  # a square of it has 64 kB


class Mlp:
    def __init__(self, key: Any) -> None:
        self.layers = [0.1 * jax.random.normal(k, (WIDTH, WIDTH)) for k in jax.random.split(key)]

    def __call__(self, x: Any) -> Any:
        return jax.nn.relu(x @ self.layers[0]) @ self.layers[1]


def plain_objects(donate: Any) -> tuple[Any, Any, Any]:
    model = Mlp(jax.random.key(0))
    optimizer = graftax.optimizer(optax.adam(1e-2), model)

    @graftax.jit(donate=donate)
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        loss, gradient = graftax.value_and_grad(lambda m, x: (m(x) ** 2).mean())(model, x)
        optimizer.update(model, gradient)
        return loss

    return step, (model, optimizer), lambda: model.layers[0]


def flax_modules(donate: Any) -> tuple[Any, Any, Any]:
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first, self.second = (nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs) for _ in range(2))

        def __call__(self, x: Any) -> Any:
            return self.second(nnx.relu(self.first(x)))

    net = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, optax.adam(1e-2), wrt=nnx.Param)

    @graftax.jit(donate=donate)
    def step(net: Any, optimizer: Any, x: Any) -> Any:
        loss, gradient = nnx.value_and_grad(lambda net: (net(x) ** 2).mean())(net)
        optimizer.update(net, gradient)
        return loss

    return step, (net, optimizer), lambda: net.first.kernel[...]


def equinox_modules(donate: Any) -> tuple[Any, Any, Any]:
    transformation = optax.adam(1e-2)
    keys = jax.random.split(jax.random.key(0))
    layers = [eqx.nn.Linear(WIDTH, WIDTH, use_bias=False, key=key) for key in keys]
    state: dict[str, Any] = {"model": eqx.nn.Sequential(layers)}
    state["optimizer"] = transformation.init(eqx.filter(state["model"], eqx.is_array))
    del layers

    @graftax.jit(donate=donate)
    def step(state: Any, x: Any) -> Any:
        loss, gradient = eqx.filter_value_and_grad(lambda m: (jax.vmap(m)(x) ** 2).mean())(state["model"])
        updates, state["optimizer"] = transformation.update(gradient, state["optimizer"])
        state["model"] = eqx.apply_updates(state["model"], updates)
        return loss

    return step, (state,), lambda: state["model"].layers[0].weight


@pytest.mark.parametrize("prepare", [plain_objects, flax_modules, equinox_modules])
def test_a_training_step_donates_weights_and_moments_and_computes_the_same(prepare):
    x = jax.random.normal(jax.random.key(1), (4, WIDTH))
    step, state, weight = prepare("auto")
    expected_step, expected_state, expected_weight = prepare(None)
    best = expected_best = None
    for i in range(8):
        if i == 5:
            best, expected_best = weight(), np.array(expected_weight())
        loss, expected_loss = step(*state, x), expected_step(*expected_state, x)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-3)
    np.testing.assert_allclose(weight(), expected_weight(), rtol=1e-2, atol=1e-4)
    np.testing.assert_allclose(best, expected_best, rtol=1e-2, atol=1e-4)
    report = step.donation()
    assert len(report.donated) == 6 and not report.kept and report.calls_donated >= 6
