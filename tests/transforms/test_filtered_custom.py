# SPDX-License-Identifier: Apache-2.0
"""Filtered derivative rules are Equinox's: rules written for it give the same derivatives."""

from __future__ import annotations

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters import ad

import graftax

LIBRARIES = pytest.mark.parametrize("library", [graftax, eqx], ids=["graftax", "equinox"])
TRANSFORMS = pytest.mark.parametrize(
    "transform",
    [eqx.filter_grad, graftax.filter_grad, lambda f: graftax.filter_jit(graftax.filter_grad(f)), jax.grad],
    ids=["equinox", "graftax", "jit", "jax"],
)
X = jnp.asarray([0.5, -1.0])


# ---- tangents


def call_of(library, received):
    @library.filter_custom_jvp
    def call(x, y, *, fn):
        return fn(x, y)

    def rule(primals, tangents, *, fn):
        x, y = primals
        tx, ty = tangents
        received.append((tx is None, ty is None))
        rate = 0 if tx is None else 2 * tx
        return call(x, y, fn=fn), rate if ty is None else rate + 3 * ty

    call.def_jvp(rule)
    return call


@pytest.mark.quick(1)
@LIBRARIES
@TRANSFORMS
def test_a_tangent_that_is_not_there_is_none(library, transform):
    received = []
    call = call_of(library, received)
    args = jnp.asarray(2.0), jnp.asarray(5.0)
    assert call(*args, fn=jnp.multiply) == 10
    assert transform(lambda x: call(x, args[1], fn=lambda a, b: a * b))(args[0]) == 2
    assert transform(lambda y: call(args[0], y, fn=lambda a, b: a * b))(args[1]) == 3
    assert transform(lambda x: call(x, x, fn=lambda a, b: a * b))(args[0]) == 5
    assert received == [(False, True), (True, False), (False, False)]


@LIBRARIES
def test_a_model_is_an_argument(library):
    model = eqx.nn.MLP(2, 2, 3, 1, key=jax.random.key(0))

    @library.filter_custom_jvp
    def run(model, x):
        return model(x)

    def rule(primals, tangents):
        model, x = primals
        assert tangents[0].activation is None
        assert tangents[1] is None
        rates = [t for t in jax.tree.leaves(tangents[0]) if eqx.is_array(t)]
        return run(model, x), sum(t.sum() for t in rates) * jnp.ones(2)

    run.def_jvp(rule)
    gradient = eqx.filter_grad(lambda model: run(model, X).sum())(model)
    for leaf in jax.tree.leaves(gradient):
        np.testing.assert_array_equal(leaf, 2 * jnp.ones_like(leaf))


@LIBRARIES
def test_keyword_arguments_have_no_derivative(library):
    call = library.filter_custom_jvp(lambda x, *, scale: x * scale["w"])
    call.def_jvp(lambda p, t, *, scale: (p[0] * scale["w"], t[0] * scale["w"]))
    assert jax.grad(lambda x: call(x, scale={"w": jnp.asarray(3.0)}))(1.0) == 3
    with pytest.raises((ValueError, TypeError), match=r"keyword tangent|differentiated with respect to scale\['w'\]"):
        jax.grad(lambda w: call(X[0], scale={"w": w}))(jnp.asarray(1.0))


def shaped_of(library, received):
    @library.filter_custom_jvp
    def shaped(f, x):
        return {"y": f(x)}

    def rule(primals, tangents):
        f, x = primals
        received.append((type(x), type(tangents[1])))
        return shaped(f, x), {"y": 10 * tangents[1] if x > 0 else -tangents[1]}

    shaped.def_jvp(rule)
    return shaped


@LIBRARIES
@pytest.mark.parametrize("number", [float, np.float32], ids=["python", "numpy"])
def test_outside_of_a_trace_a_rule_is_given_the_numbers_of_its_caller(library, number):
    received = []
    shaped = shaped_of(library, received)
    value, rate = jax.jvp(lambda x: shaped(lambda a: a * a + 1, x)["y"], (number(2),), (number(3),))
    assert received == [(number, number)]
    assert (float(value), type(rate), rate) == (5, number, 30)
    if number is float:
        assert type(value) is float
    value, rate = jax.jvp(lambda x: shaped(jnp.sin, x)["y"], (number(2),), (number(3),))
    assert isinstance(value, jax.Array) and (type(rate), rate) == (number, 30)


@LIBRARIES
@pytest.mark.parametrize("x", [2.0, np.float32(2), np.full((), 2, np.float32)], ids=["python", "scalar", "array"])
def test_a_rule_may_ask_for_a_number_that_is_no_tracer(library, x):
    received = []
    shaped = shaped_of(library, received)
    assert jax.linearize(lambda x: shaped(jnp.sin, x)["y"], x)[1](1.0) == 10
    assert jax.linearize(lambda x: shaped(jnp.sin, x)["y"], -x)[1](1.0) == -1
    assert [of_primal for of_primal, _ in received] == [type(x), type(-x)]


def test_a_rule_of_any_objects_is_given_numbers_too():
    received = []

    @graftax.custom_jvp
    def area(box):
        return {"area": box["side"] ** 2, "unit": box["unit"], "times": 2}

    @area.defjvp
    def area_jvp(primals, tangents):
        received.append((type(primals[0]["side"]), tangents[0]))
        return area(*primals), {"area": 2 * primals[0]["side"] * tangents[0]["side"]}

    def area_of(side):
        out = area({"side": side, "unit": "m", "depth": 1.5})
        assert (out["unit"], out["times"]) == ("m", 2)
        return out["area"]

    assert jax.jvp(area_of, (3.0,), (0.5,)) == (9.0, 3.0)
    assert received == [(float, {"side": 0.5, "unit": None, "depth": 0.0})]
    assert jax.grad(area_of)(3.0) == jax.jit(jax.grad(area_of))(3.0) == 6


def test_a_rule_with_defjvps_adds_up_numbers():
    product = graftax.custom_jvp(lambda x, y: x * y)
    product.defjvps(lambda t, out, x, y: t * y, lambda t, out, x, y: x * t)
    assert jax.jvp(product, (2.0, 5.0), (1.0, 3.0)) == (10.0, 11.0)


# ---- cotangents


def clip_of(library, received):
    @library.filter_custom_vjp
    def clip(tree, limit, *, name):
        return {"y": jnp.sin(tree["x"]), "name": name, "n": tree["n"]}

    def fwd(perturbed, tree, limit, *, name):
        received.append(perturbed)
        return clip(tree, limit, name=name), {"cos": jnp.cos(tree["x"]), "kept": name}

    def bwd(residuals, grad, perturbed, tree, limit, *, name):
        received.append(perturbed)
        assert (residuals["kept"], name) == ("a", "a")
        assert (grad["name"], grad["n"]) == (None, None)
        return {"x": jnp.clip(residuals["cos"] * grad["y"], -limit, limit), "n": None, "z": None, "s": None}

    clip.def_fwd(fwd)
    clip.def_bwd(bwd)
    return clip


@LIBRARIES
@TRANSFORMS
def test_a_rule_by_the_first_argument_is_used(library, transform):
    received = []
    clip = clip_of(library, received)

    def f(x):
        out = clip({"x": x, "n": jnp.arange(2), "z": jnp.ones(3), "s": "text"}, 0.5, name="a")
        assert out["name"] == "a"
        return out["y"].sum()

    np.testing.assert_allclose(transform(f)(X), np.minimum(np.cos(X), 0.5), rtol=1e-6)
    assert received == 2 * [{"x": True, "n": False, "z": False, "s": False}]


@LIBRARIES
def test_a_cotangent_that_is_not_there_is_none(library):
    received = []

    @library.filter_custom_vjp
    def two(x):
        return x["a"] * 1, x["b"] * 1

    two.def_fwd(lambda perturbed, x: (two(x), None))

    def bwd(residuals, grad, perturbed, x):
        received.append([g is None for g in grad])
        return {"a": grad[0] * 7, "b": None}

    two.def_bwd(bwd)
    gradient = jax.grad(lambda x: two(x)[0])({"a": jnp.asarray(1.0), "b": jnp.asarray(2.0)})
    assert (gradient["a"], gradient["b"]) == (7, 0)
    assert received == [[False, True]]


@LIBRARIES
@pytest.mark.parametrize("cotangent", [np.float32(2), 2.0], ids=["numpy", "python"])
def test_a_number_is_a_cotangent(library, cotangent):
    @library.filter_custom_vjp
    def double(x, name):
        return 2 * x, name, 3.5

    def bwd(residuals, grad, perturbed, x, name):
        assert grad[1:] == (None, None)
        return None if grad[0] is None else 2 * grad[0]

    double.def_fwd(lambda perturbed, x, name: (double(x, name), None))
    double.def_bwd(bwd)
    assert jax.vjp(lambda x: double(x, "a")[0], jnp.asarray(1.0))[1](cotangent) == (4,)


@pytest.mark.parametrize("transform", [graftax.filter_jit, lambda f: f], ids=["jit", "plain"])
def test_a_python_float_is_differentiated_by_the_rule(transform):
    double = graftax.filter_custom_vjp(lambda x: 2 * x)
    double.def_fwd(lambda perturbed, x: (double(x), perturbed))
    double.def_bwd(lambda perturbed, grad, _, x: 7 * grad if perturbed else None)
    assert transform(jax.grad(double))(1.0) == 7


@LIBRARIES
def test_other_arguments_have_no_derivative(library):
    clip = clip_of(library, [])
    tree = {"x": X, "n": jnp.arange(2), "z": jnp.ones(3), "s": "text"}
    with pytest.raises(Exception, match=r"cannot be autodifferentiated|differentiated with respect to limit"):
        jax.grad(lambda limit: clip(tree, limit, name="a")["y"].sum())(0.5)


# ---- the old forms


@LIBRARIES
def test_the_old_form_of_a_tangent_rule_gets_zeros(library):
    call = library.filter_custom_jvp(lambda x, y: x * y["v"])
    with pytest.warns((UserWarning, DeprecationWarning), match="def_jvp"):
        call.defjvp(lambda p, t: (p[0] * p[1]["v"], 2 * t[0] + 3 * t[1]["v"]))
    assert jax.grad(lambda x: call(x, {"v": jnp.asarray(2.0)}))(1.0) == 2
    with pytest.raises(NotImplementedError, match="defjvps"):
        call.defjvps(None)


@LIBRARIES
def test_the_old_form_of_a_cotangent_rule_gets_zeros(library):
    two = library.filter_custom_vjp(lambda x, n: (x["a"] * 1, x["b"] * 1, n))
    with pytest.warns((UserWarning, DeprecationWarning), match="def_fwd"):
        two.defvjp(
            lambda x, n: ((x["a"] * 1, x["b"] * 1, n), "rest"),
            lambda residuals, grad, x, n: {"a": grad[0] * 7 + grad[1], "b": grad[1]},
        )
    gradient = jax.grad(lambda x: two(x, 3)[0])({"a": jnp.asarray(1.0), "b": jnp.asarray(2.0)})
    assert (gradient["a"], gradient["b"]) == (7, 0)


# ---- what Equinox leaves open


def test_a_missing_rule_is_named():
    with pytest.raises(RuntimeError, match="has no rule"):
        graftax.filter_custom_jvp(lambda x: x)(1.0)
    with pytest.raises(RuntimeError, match="def_fwd and def_bwd"):
        graftax.filter_custom_vjp(lambda x: x)(1.0)


def test_a_rule_is_a_method():
    class Model(eqx.Module):
        w: jax.Array

        @graftax.filter_custom_jvp
        def run(self, x):
            return self.w * x

        @run.def_jvp
        def _(primals, tangents):
            return primals[0].w * primals[1], 5 * tangents[0].w

    assert graftax.filter_grad(lambda m: m.run(2.0))(Model(jnp.asarray(1.0))).w == 5


def test_a_change_to_an_argument_is_dropped_and_told_of():
    @graftax.filter_custom_jvp
    def f(d):
        d["n"] += 1
        return d["x"]

    f.def_jvp(lambda p, t: (p[0]["x"], t[0]["x"]))
    d = {"x": jnp.asarray(1.0), "n": 0}
    with pytest.warns(graftax.LostChangeWarning, match="d"):
        f(d)
    assert d["n"] == 0


# ---- what JAX does not open


class Scaled:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, x):
        return x * self.scale


HOLDERS = {
    "a function": lambda w: lambda x: x * w,
    "an object": Scaled,
    "a method": lambda w: Scaled(w).__call__,
    "a partial": lambda w: functools.partial(lambda scale, x: x * scale, w),
}


def with_cotangents(library):
    @library.filter_custom_vjp
    def applied(arguments):
        return arguments["f"](arguments["x"])

    applied.def_fwd(lambda perturbed, arguments: (arguments["f"](arguments["x"]), None))
    applied.def_bwd(lambda residuals, grad, perturbed, arguments: {"f": None, "x": 2 * grad})
    return lambda f, x: applied({"f": f, "x": x})


def with_tangents(library):
    @library.filter_custom_jvp
    def applied(f, x):
        return f(x)

    applied.def_jvp(lambda primals, tangents: (applied(*primals), 2 * tangents[1]))
    return applied


RULES = pytest.mark.parametrize("rule", [with_cotangents, with_tangents])


@RULES
@TRANSFORMS
@pytest.mark.parametrize("holder", HOLDERS)
def test_no_derivative_by_what_a_value_holds(rule, transform, holder):
    """Its rule has no place for it: the derivative would be zero without a word."""
    applied, make_holder = rule(graftax), HOLDERS[holder]
    with pytest.raises(
        RuntimeError, match=r"differentiated with respect to .*, which its rule does not cover"
    ) as caught:
        transform(lambda w: applied(make_holder(w), X[0]))(X[0])
    assert isinstance(caught.value, ad.CustomVJPException)  # what JAX raises of a function's closure
    with pytest.raises(Exception, match=r"closed-over value|unexpected tracer|was differentiated"):
        eqx.filter_grad(lambda w: rule(eqx)(make_holder(w), X[0]))(X[0])


@RULES
@LIBRARIES
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_value_that_is_not_differentiated_is_used(rule, library, holder):
    applied, make_holder = rule(library), HOLDERS[holder]
    assert library.filter_grad(lambda w: applied(make_holder(X[1]), w))(X[0]) == 2
