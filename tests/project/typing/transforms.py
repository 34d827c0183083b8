# SPDX-License-Identifier: Apache-2.0
"""What a type checker knows of functions under a transform: their parameters, and what they return. Never run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, assert_type

import jax
import jax.numpy as jnp
import optax

import graftax


class Model:
    def __init__(self) -> None:
        self.w = jnp.ones(3)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.w * x


def loss(model: Model, x: jax.Array, scale: float = 1.0) -> jax.Array:
    return (model(x) * scale).sum()


def loss_and_more(model: Model, x: jax.Array) -> tuple[jax.Array, dict[str, int]]:
    return model(x).sum(), {"n": 1}


def derivatives(model: Model, x: jax.Array) -> None:
    assert_type(graftax.grad(loss)(model, x), Model)
    assert_type(graftax.grad(loss)(model, x, scale=2.0), Model)
    assert_type(graftax.value_and_grad(loss)(model, x), tuple[jax.Array, Model])
    assert_type(graftax.grad(loss_and_more, has_aux=True)(model, x), tuple[Model, dict[str, int]])
    value, grads = graftax.value_and_grad(loss_and_more, has_aux=True)(model, x)
    assert_type(value, tuple[jax.Array, dict[str, int]])
    assert_type(grads, Model)
    assert_type(graftax.grad(loss, argnums=1)(model, x), Any)
    assert_type(graftax.value_and_grad(loss, argnums=(0, 1))(model, x), tuple[Any, Any])
    assert_type(graftax.grad(loss, wrt="model.w")(model, x), Any)
    assert_type(graftax.grad(loss, wrt=jax.Array)(model, x), Model)
    assert_type(graftax.jit(graftax.value_and_grad(loss))(model, x), tuple[jax.Array, Model])


@graftax.grad
def slope(x: jax.Array, power: int) -> jax.Array:
    return x**power


@graftax.value_and_grad(has_aux=True)
def both(model: Model) -> tuple[jax.Array, str]:
    return model.w.sum(), "w"


@graftax.vmap(in_axes=(None, 0))
def rows(model: Model, x: jax.Array) -> dict[str, jax.Array]:
    return {"y": model(x)}


@graftax.checkpoint(prevent_cse=False)
def cheap(model: Model, x: jax.Array) -> jax.Array:
    return model(x)


def wrapped(model: Model, x: jax.Array) -> None:
    assert_type(slope(x, 2), jax.Array)
    assert_type(both(model), tuple[tuple[jax.Array, str], Model])
    assert_type(rows(model, x), dict[str, jax.Array])
    assert_type(graftax.vmap(loss)(model, x), jax.Array)
    assert_type(cheap(model, x), jax.Array)
    assert_type(graftax.remat(loss)(model, x), jax.Array)


def step(state: Model, x: jax.Array) -> tuple[Model, list[jax.Array]]:
    return state, [x]


def of_layer(x: jax.Array, layer: Model) -> tuple[jax.Array, None]:
    return layer(x), None


def loops(model: Model, layers: list[Model], x: jax.Array, f: Callable[..., Any]) -> None:
    state, ys = graftax.scan(step, model, x)
    assert_type(state, Model)
    assert_type(ys, list[jax.Array])
    assert_type(graftax.scan(of_layer, x, graftax.each(layers))[0], jax.Array)
    assert_type(graftax.while_loop(lambda m: m.w.sum() < 3, lambda m: m, model), Model)
    assert_type(graftax.fori_loop(0, 3, lambda i, m: m, model), Model)
    graftax.scan(f, model, x)


def branches(model: Model, x: jax.Array) -> None:
    assert_type(graftax.cond(x.sum() > 0, Model.__call__, Model.__call__, model, x), jax.Array)
    assert_type(graftax.cond(True, lambda: "a", lambda: "b"), str)
    assert_type(graftax.switch(0, [loss_and_more, loss_and_more], model, x), tuple[jax.Array, dict[str, int]])


def training(model: Model) -> None:
    opt = graftax.optimizer(optax.adam(1e-3), model)
    assert_type(opt, graftax.Optimizer)
    params, rest = graftax.partition(model, jax.Array)
    assert_type(params, Model)
    assert_type(rest, Model)
    assert_type(graftax.at(model)["w"].set(jnp.ones(3)), Model)


def wrong(model: Model, x: jax.Array) -> None:
    graftax.grad(loss)(x, x)  # expect: "Array" is not assignable to "Model"
    graftax.vmap(loss)(model)  # expect: Argument missing for parameter "x"
    graftax.checkpoint(loss)(model, x, scale="big")  # expect: cannot be assigned to parameter "scale"
    graftax.cond(True, loss_and_more, loss_and_more, model)  # expect: cannot be assigned to parameter
    graftax.switch(0, loss, model)  # expect: cannot be assigned to parameter "branches"
