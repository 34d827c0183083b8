# SPDX-License-Identifier: Apache-2.0
"""`checkpoint` changes when things are computed, and nothing else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
import oracle
import zoo
from graftax import checkpoint, grad, remat

JITS = pytest.mark.parametrize("jit", [lambda f: f, graftax.jit], ids=["plain", "jit"])


def loss_of(obj):
    leaves = [x for x in graftax.flatten(obj)[0] if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum(((i + 1) * jnp.sin(x) ** 2).sum() for i, x in enumerate(leaves))


def close(a, b):
    (actual, first), (expected, second) = graftax.flatten(a), graftax.flatten(b)
    assert first == second
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


@JITS
@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_a_graph_goes_through_as_it_is(build, jit):
    obj = build()
    assert jit(checkpoint(lambda obj: obj))(obj) is obj or not oracle.is_mutable(obj)
    assert oracle.difference(obj, build()) is None


@JITS
@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_the_gradient_is_that_of_the_plain_function(build, jit):
    obj = build()
    if any(jnp.issubdtype(x.dtype, jnp.floating) for x in graftax.flatten(obj)[0]):
        close(jit(grad(checkpoint(loss_of)))(obj), grad(loss_of)(obj))


def layer(params, x, *, scale):
    params["calls"] += 1
    params["seen"].append(x)
    return jnp.tanh(params["w"] @ x) * scale


def network():
    return {"w": jnp.arange(4.0).reshape(2, 2), "calls": 0, "seen": []}


X = jnp.asarray([0.5, -1.0])


@JITS
def test_changes_come_back_once(jit):
    plain, changed = network(), network()
    layer(plain, X, scale=2.0)
    jit(checkpoint(layer))(changed, X, scale=2.0)
    assert oracle.difference(plain, changed) is None
    jit(grad(lambda params: checkpoint(layer)(params, X, scale=2.0).sum()))(changed)
    assert changed["calls"] == 2
    assert len(changed["seen"]) == 2


def residuals(policy):
    def f(w):
        params = {**network(), "w": w}
        return checkpoint(layer, policy=policy)(params, X, scale=1.0).sum()

    return str(jax.make_jaxpr(lambda w: jax.vjp(f, w)[1](1.0))(jnp.ones((2, 2))))


def test_a_policy_decides_what_is_kept():
    assert "remat" in residuals(None) or "checkpoint" in residuals(None)
    everything = residuals(jax.checkpoint_policies.everything_saveable)
    nothing = residuals(jax.checkpoint_policies.nothing_saveable)
    assert everything.count("tanh") == 1
    assert nothing.count("tanh") == 2


def test_prevent_cse_reaches_jax():
    def text(prevent):
        f = checkpoint(lambda x: jnp.sin(x["a"]), prevent_cse=prevent)
        return str(jax.make_jaxpr(lambda a: f({"a": a}))(1.0))

    assert "prevent_cse=False" in text(False)
    assert "prevent_cse=True" in text(True)


def test_under_jax_jit_vmap_and_grad():
    def f(w, x):
        return checkpoint(layer)({"w": w, "calls": 0, "seen": []}, x, scale=3.0).sum()

    def by_hand(w, x):
        return (jnp.tanh(w @ x) * 3.0).sum()

    w, xs = network()["w"], jnp.stack([X, 2 * X])
    for fun, other in ((jax.grad(f), jax.grad(by_hand)), (jax.hessian(f), jax.hessian(by_hand))):
        mapped, expected = (jax.jit(jax.vmap(g, (None, 0)))(w, xs) for g in (fun, other))
        np.testing.assert_allclose(mapped, expected, rtol=1e-5, atol=1e-6)


def test_the_arrays_of_a_static_argument_are_constants():
    f = checkpoint(lambda x, config: x * config["n"], static_argnums=1)
    assert f(jnp.ones(()), {"n": 3}) == 3
    assert f(jnp.ones(()), {"n": jnp.full((), 2.0)}) == 2 and f(jnp.ones(()), {"n": jnp.full((), 4.0)}) == 4


def test_a_method_keeps_its_object():
    class Model:
        def __init__(self):
            self.w, self.calls = jnp.ones(2), 0

        @remat
        def __call__(self, x):
            self.calls += 1
            return jnp.sin(self.w * x).sum()

    model = Model()
    gradient = grad(lambda model: model(2.0))(model)
    np.testing.assert_allclose(gradient.w, 2 * np.cos(2 * np.ones(2)), rtol=1e-6)
    assert model.calls == 1
