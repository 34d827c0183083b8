# SPDX-License-Identifier: Apache-2.0
"""Rules for cotangents: what they are told of the changes that a function makes, and what they may say of integers."""

import jax
import jax.numpy as jnp
import pytest

import graftax
from graftax import custom_vjp, grad


class Model:
    def __init__(self, w, total):
        self.w, self.total, self.steps = w, total, jnp.array(0)


@custom_vjp
def run(model, x):
    model.total = model.total * 2.0
    model.steps = model.steps + 1
    return jnp.sin(model.w) * x


def forward(model, x):
    return run(model, x), (jnp.cos(model.w), model, x)


def backward(residuals, cotangent, *, updates_g):
    cosine, model, x = residuals
    changed, of_x = updates_g
    assert changed.w is None and of_x is None and changed.steps.dtype == jax.dtypes.float0
    out = graftax.copy(model)  # its count of steps says nothing
    out.w, out.total = cosine * x * cotangent, 10 * changed.total
    return out, jnp.zeros_like(x)


run.defvjp(forward, backward)


@pytest.mark.parametrize("around", [lambda f: f, graftax.jit], ids=["plain", "jit"])
def test_a_rule_that_asks_for_updates_is_given_their_cotangents(around):
    def loss(model, x):
        out = run(model, x)
        return out + 3 * model.total

    model = Model(jnp.array(1.0), jnp.array(4.0))
    gradient = around(grad(loss))(model, jnp.array(2.0))
    assert jnp.allclose(gradient.w, 2 * jnp.cos(1.0)) and gradient.total == 30
    assert model.total == 8 and model.steps == 1


def test_updates_that_nothing_depends_on_are_zero():
    model = Model(jnp.array(1.0), jnp.array(4.0))
    assert grad(run)(model, jnp.array(2.0)).total == 0


@pytest.mark.parametrize("cotangent_of_n", [jnp.array(1), jnp.array(1.5), True, jax.random.key(0)], ids=str)
@pytest.mark.parametrize("argument", [jnp.array(3), jax.random.key(0)], ids=["integer", "key"])
def test_what_a_rule_says_of_an_integer_is_left_alone(argument, cotangent_of_n):
    double = custom_vjp(lambda n, x: x * 2)
    double.defvjp(lambda n, x: (x * 2, None), lambda residuals, cotangent: (cotangent_of_n, cotangent * 2))
    assert grad(double, argnums=1)(argument, jnp.array(1.0)) == 2


def test_in_nnx_an_unchanged_variable_is_none():
    nnx = pytest.importorskip("flax.nnx")

    class Module(nnx.Module):
        def __init__(self):
            self.w, self.total = nnx.Param(jnp.array(1.0)), nnx.BatchStat(jnp.array(4.0))

    def gradient(library, **modes):
        def changing(m):
            m.total[...] *= 2.0
            return jnp.sin(m.w[...])

        f = library.custom_vjp(changing, **modes)

        def bwd(m, cotangent, updates_g):
            (changed,) = updates_g
            assert changed.w is None and isinstance(changed.total, nnx.BatchStat)
            out = nnx.clone(m)
            out.w[...], out.total[...] = cotangent * jnp.cos(m.w[...]), changed.total[...]
            return (out,)

        f.defvjp(lambda m: (f(m), m), bwd)
        return library.grad(lambda m: f(m) + 3 * m.total[...], **modes)(Module())

    ours, theirs = gradient(graftax), gradient(nnx, graph_updates=False)
    assert ours.w[...] == theirs.w[...] and ours.total[...] == theirs.total[...] == 3
