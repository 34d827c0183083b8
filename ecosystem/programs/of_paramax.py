# SPDX-License-Identifier: Apache-2.0
"""Parameterizations: wrapped, unwrapped under transforms, trained."""

from __future__ import annotations

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import paramax

X = jnp.linspace(-1.0, 1.0, 6).reshape(3, 2)
WRAPPED = {
    "parameterize": lambda: paramax.Parameterize(jnp.exp, jnp.log(jnp.asarray([1.0, 2.0]))),
    "parameterize lambda": lambda: paramax.Parameterize(lambda x, y: x * y, jnp.ones(2), jnp.full(2, 3.0)),
    "non_trainable": lambda: paramax.non_trainable({"a": jnp.ones(2), "b": "text"}),
    "weight_norm": lambda: paramax.WeightNormalization(jnp.ones((3, 2))),
    "nested": lambda: paramax.Parameterize(jnp.square, paramax.Parameterize(jnp.exp, jnp.zeros(2))),
    "linear": lambda: eqx.tree_at(
        lambda m: m.weight, eqx.nn.Linear(2, 3, key=jax.random.key(0)), replace_fn=paramax.WeightNormalization
    ),
}


def unwrapped(name: str) -> Any:
    return eqx.filter_jit(paramax.unwrap)(WRAPPED[name]())


def made(name: str) -> Any:
    """The wrapper is a result of one function and an argument of the next."""
    return eqx.filter_jit(lambda w: paramax.unwrap(w))(eqx.filter_jit(WRAPPED[name])())


def gradient(name: str) -> Any:
    def loss(tree: Any) -> Any:
        return sum(jnp.sum(x**2) for x in jax.tree.leaves(eqx.filter(paramax.unwrap(tree), eqx.is_inexact_array)))

    return eqx.filter_grad(loss)(WRAPPED[name]())


def several(name: str) -> Any:
    """One for each row, as NumPyro's and flowjax's stacked layers are made."""
    keys = jax.random.split(jax.random.key(0), 3)

    def one(key: Any) -> Any:
        scale = jax.random.uniform(key)
        return jax.tree.map(lambda x: x * scale if eqx.is_inexact_array(x) else x, WRAPPED[name]())

    return eqx.filter_jit(paramax.unwrap)(eqx.filter_vmap(one)(keys))


def trained() -> Any:
    model = WRAPPED["linear"]()

    @eqx.filter_jit
    def step(model: Any) -> Any:
        gradient = eqx.filter_grad(lambda m: (jax.vmap(paramax.unwrap(m))(X) ** 2).mean())(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradient))

    for _ in range(3):
        model = step(model)
    return paramax.unwrap(model)


PROGRAMS = {
    **{f"unwrapped {n}": functools.partial(unwrapped, n) for n in WRAPPED},
    **{f"made {n}": functools.partial(made, n) for n in WRAPPED},
    **{f"gradient {n}": functools.partial(gradient, n) for n in WRAPPED},
    **{f"several {n}": functools.partial(several, n) for n in WRAPPED},
    "trained": trained,
}
