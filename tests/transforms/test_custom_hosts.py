# SPDX-License-Identifier: Apache-2.0
"""A function with a derivative rule that tells a host function something, and changes its arguments."""

from __future__ import annotations

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from graftax import custom_jvp, custom_vjp, grad, io_callback, pure_callback

JITS = pytest.mark.parametrize("jit", [lambda f: f, graftax.jit, jax.jit], ids=["plain", "jit", "jax"])
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


def by_w(cotangent):
    return {"w": cotangent, "kept": None, "sum": None}


def ruled(kind, f, rule=lambda params: params["w"] ** 2):
    """`f` with a rule that gives five times the cotangent, and whose value `rule` computes."""
    if kind == "jvp":
        with_rule = custom_jvp(f)
        with_rule.defjvp(lambda primals, tangents: (rule(*primals), 5 * tangents[0]["w"]))
    else:
        with_rule = custom_vjp(f)
        with_rule.defvjp(lambda params: (rule(params), None), lambda residuals, cotangent: (by_w(5 * cotangent),))
    return with_rule


def fresh():
    return {"w": jnp.asarray([1.0, 2.0]), "kept": jnp.zeros(3), "sum": jnp.ones(()), "calls": 0}


TOLD = []


def tell(w):
    TOLD.append(w.tolist())


def host_sum(params):
    """A number that a host function computes."""
    return pure_callback(lambda x: np.sum(x, dtype=np.float32), SCALAR, params["w"])


def square(params):
    params["calls"] += 1
    params["sum"] = params["sum"] + (params["w"] ** 2).sum()
    return params["w"] ** 2


@JITS
@pytest.mark.parametrize("kind", ["jvp", "vjp"])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("inner", [lambda f: f, graftax.jit, jax.jit], ids=["plain", "jit", "jax"])
def test_what_is_told_to_a_host_function_does_not_stand_in_the_way(kind, jit, ordered, inner):
    log = []

    def f(params):
        inner(lambda w: io_callback(lambda w: log.append(w.tolist()), None, w, ordered=ordered))(params["w"])
        return square(params)

    def step(params):
        gradient = grad(lambda params: ruled(kind, f)(params).sum() + params["sum"])(params)
        return gradient["w"], params["sum"]

    params = fresh()
    actual, total = jit(step)(params)
    np.testing.assert_allclose(actual, 5 + 2 * params["w"])  # the rule's, and that of what was written
    assert total == 6
    jax.effects_barrier()
    assert log == []  # JAX runs the rule instead of the function
    if jit is not jax.jit:  # which gives the function copies
        assert (params["calls"], params["sum"]) == (1, 6)


@JITS
@pytest.mark.parametrize("kind", ["jvp", "vjp"])
def test_a_rule_that_calls_its_function_tells_the_host_once(kind, jit):
    TOLD.clear()

    def f(params):
        io_callback(tell, None, params["w"])
        return square(params)

    with_rule = ruled(kind, f, f)
    actual = jit(lambda params: grad(lambda params: with_rule(params).sum())(params)["w"])(fresh())
    np.testing.assert_allclose(actual, [5, 5])
    jax.effects_barrier()
    assert TOLD == [[1, 2]]


@pytest.mark.parametrize("kind", ["jvp", "vjp"])
def test_what_a_host_function_changes_meanwhile_is_named(kind):
    log = []  # a rule for cotangents may change what nothing else does, and so may the host then

    def f(params):
        io_callback(lambda w: log.append(w.tolist()), None, params["w"])
        return square(params)

    with_rule = ruled(kind, f, f)
    with pytest.raises(graftax.ConcurrentChangeError, match=r"log.*host function") if kind == "jvp" else nullcontext():
        grad(lambda params: with_rule(params).sum())(fresh())
    if kind == "vjp":
        jax.effects_barrier()
        assert log == [[1, 2]]


@JITS
@pytest.mark.parametrize("kind", ["jvp", "vjp"])
def test_the_result_of_a_host_function_has_the_derivative_of_the_rule(kind, jit):
    def f(params):
        square(params)
        return host_sum(params)

    def rule(params):
        return params["w"].sum()

    with_rule = custom_jvp(f)
    with_rule.defjvp(lambda primals, tangents: (rule(*primals), 5 * tangents[0]["w"].sum()))
    if kind == "vjp":
        with_rule = custom_vjp(f)
        with_rule.defvjp(lambda p: (rule(p), None), lambda residuals, c: (by_w(jnp.full(2, 5 * c)),))
    actual = jit(lambda params: grad(lambda params: with_rule(params) + params["sum"])(params)["w"])(fresh())
    np.testing.assert_allclose(actual, 5 + 2 * fresh()["w"])


@pytest.mark.parametrize("kind", ["jvp", "vjp"])
def test_code_that_asks_for_values_is_run_as_it_is(kind):
    def f(params):
        params["big"] = params["w"] * 2 if params["w"][0] > 0 else params["w"]
        return square(params)

    params = fresh()
    actual = grad(lambda params: ruled(kind, f)(params).sum() + params["big"].sum())(params)["w"]
    np.testing.assert_allclose(actual, [7, 7])


@JITS
@pytest.mark.parametrize("kind", ["jvp", "vjp"])
def test_a_change_computed_by_a_host_function_has_no_derivative(kind, jit):
    def f(params):
        params["sum"] = params["sum"] + host_sum(params)
        return params["w"] ** 2

    with pytest.raises(ValueError, match=r"changes params.*host function.*stop_gradient"):
        jit(lambda params: grad(lambda params: ruled(kind, f)(params).sum())(params)["w"])(fresh())

    def stopped(params):
        params["sum"] = params["sum"] + host_sum(jax.lax.stop_gradient(params))
        return params["w"] ** 2

    actual = jit(lambda params: grad(lambda params: ruled(kind, stopped)(params).sum())(params)["w"])(fresh())
    np.testing.assert_allclose(actual, [5, 5])
