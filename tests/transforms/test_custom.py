# SPDX-License-Identifier: Apache-2.0
"""A derivative rule is given objects, and its derivative is the one that counts."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
import oracle
import zoo
from graftax import custom_jvp, custom_vjp, grad, jvp, value_and_grad, vjp

JITS = pytest.mark.parametrize("jit", [lambda f: f, graftax.jit], ids=["plain", "jit"])


def is_inexact(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def loss_of(obj):
    leaves = [x for x in graftax.flatten(obj)[0] if is_inexact(x)]
    return sum(((i + 1) * jnp.sin(x) ** 2).sum() for i, x in enumerate(leaves))


def close(a, b):
    (actual, first), (expected, second) = graftax.flatten(a), graftax.flatten(b)
    assert first == second
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def scaled(graph, factor):
    leaves, graphdef = graftax.flatten(graph)
    return graftax.unflatten(graphdef, [x * factor for x in leaves])


# ---- laws: a rule that gives three times the derivative


def named_loss(obj):
    return {"loss": loss_of(obj), "name": "n"}


with_tangents = custom_jvp(named_loss)


@with_tangents.defjvp
def rule(primals, tangents):
    (obj,) = primals
    value, rate = jvp(loss_of, (obj,), tangents)
    return {"loss": value, "name": "n"}, {"loss": 3 * rate}


with_cotangents = custom_vjp(named_loss)
with_cotangents.defvjp(
    lambda obj: (named_loss(obj), {"obj": obj, "text": "kept"}),
    lambda residuals, cotangent: (scaled(grad(loss_of)(residuals["obj"]), 3 * cotangent["loss"]),),
)


@pytest.mark.quick(1)
@JITS
@pytest.mark.parametrize("fun", [with_tangents, with_cotangents], ids=["jvp", "vjp"])
@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_the_derivative_by_a_graph_is_that_of_the_rule(build, fun, jit):
    obj = build()
    assert jit(fun)(obj)["name"] == "n"
    if not any(is_inexact(x) for x in graftax.flatten(obj)[0]):
        return
    expected = value_and_grad(loss_of)(obj)
    value, gradient = jit(value_and_grad(lambda obj: fun(obj)["loss"]))(obj)
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    close(gradient, scaled(expected[1], 3))
    assert oracle.difference(obj, build()) is None


# ---- as JAX's own, by arrays


def by_hand(kind):
    if kind == "jvp":
        fun = jax.custom_jvp(lambda w, x: {"y": jnp.sin(w @ x)})
        fun.defjvp(lambda p, t: ({"y": jnp.sin(p[0] @ p[1])}, {"y": 2 * (t[0] @ p[1]) + t[1].sum()}))
    else:
        fun = jax.custom_vjp(lambda w, x: {"y": jnp.sin(w @ x)})
        fun.defvjp(
            lambda w, x: (fun(w, x), (w, x)),
            lambda residuals, c: (jnp.outer(c["y"], residuals[1]) * 5, c["y"].sum() * jnp.ones_like(residuals[1])),
        )
    return lambda w, x: fun(w, x)["y"].sum() ** 2


class Model:
    def __init__(self, w):
        self.w, self.name, self.scale, self.me = w, "model", 2.0, self

    @custom_jvp
    def forward(self, x):
        return {"y": jnp.sin(self.w @ x), "of": self.name}

    @forward.defjvp
    def forward_rule(primals, tangents):
        (self, x), (rate, dx) = primals, tangents
        assert rate.me is rate
        assert (rate.scale, rate.name) == (0.0, None)
        return {"y": jnp.sin(self.w @ x), "of": self.name}, {"y": 2 * (rate.w @ x) + dx.sum()}

    @custom_vjp
    def backward(self, x):
        return {"y": jnp.sin(self.w @ x), "of": self.name}

    def _fwd(self, x):
        return self.backward(x), (self, x)

    def _bwd(residuals, cotangent):
        self, x = residuals
        assert (self.me is self, self.name, cotangent["of"]) == (True, "model", None)
        self = Model(jnp.outer(cotangent["y"], x) * 5)
        return self, cotangent["y"].sum() * jnp.ones_like(x)

    backward.defvjp(_fwd, _bwd)


def of_model(kind):
    def f(w, x):
        model = Model(w)
        return (model.forward(x) if kind == "jvp" else model.backward(x))["y"].sum() ** 2

    return f


W, X = jnp.arange(6.0).reshape(3, 2) / 3, jnp.asarray([0.5, -1.0])
BY = (0, 1)


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["jvp", "vjp"])
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: f,
        lambda f: jax.grad(f, BY),
        lambda f: jax.jit(jax.grad(f, BY)),
        lambda f: jax.grad(jax.jit(f), BY),
        lambda f: graftax.grad(f, BY),
        lambda f: graftax.jit(graftax.grad(graftax.jit(f), BY)),
        lambda f: lambda w, x: jax.vmap(jax.grad(f, BY), (None, 0))(w, jnp.stack([x, 2 * x])),
        lambda f: lambda w, x: jax.grad(lambda w: jax.vmap(f, (None, 0))(w, jnp.stack([x, 2 * x])).sum())(w),
        lambda f: jax.hessian(f) if f.kind == "jvp" else jax.jacrev(jax.jacrev(f)),
        lambda f: jax.grad(lambda w, x: jax.lax.scan(lambda c, _: (c + f(w, x), None), 0.0, None, 3)[0], BY),
        lambda f: jax.grad(jax.checkpoint(f), BY),
        lambda f: jax.grad(lambda w, x: jax.lax.cond(x[0] > 0, f, lambda w, x: 0.0, w, x), BY),
    ],
    ids=lambda f: None,
)
def test_a_rule_is_used_where_jax_uses_its_own(kind, transform):
    mine, hand = of_model(kind), by_hand(kind)
    mine.kind = hand.kind = kind
    for a, b in zip(jax.tree.leaves(transform(mine)(W, X)), jax.tree.leaves(transform(hand)(W, X)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_forward_mode_uses_the_rule():
    rates = (jnp.ones_like(W), jnp.ones_like(X))
    close(jax.jvp(of_model("jvp"), (W, X), rates), jax.jvp(by_hand("jvp"), (W, X), rates))


# ---- arguments


def test_python_control_flow_on_values_works_where_it_does_in_jax():
    @custom_jvp
    def f(d):
        return d["x"] if d["x"] > 0 else -d["x"]

    @f.defjvp
    def _(primals, tangents):
        ((d,), (t,)) = primals, tangents
        return f(d), 10 * t["x"] if d["x"] > 0 else -10 * t["x"]

    assert f({"x": jnp.asarray(-2.0)}) == 2
    assert grad(lambda d: f(d))({"x": jnp.asarray(-2.0)})["x"] == -10


def test_arguments_without_derivative_come_first():
    power = custom_jvp(lambda x, n: x["v"] ** n["by"], nondiff_argnums=(1,))

    @power.defjvp
    def _(n, primals, tangents):
        return primals[0]["v"] ** n["by"], 100.0 * n["by"] * tangents[0]["v"]

    assert grad(lambda x: power(x, {"by": 3}))({"v": jnp.asarray(1.0)})["v"] == 300
    root = custom_vjp(lambda n, x: x["v"] * n["by"], nondiff_argnums=0)
    root.defvjp(lambda n, x: (x["v"] * n["by"], "nothing"), lambda n, residuals, c: ({"v": c * 7 * n["by"]},))
    n = {"by": jnp.asarray(2.0), "text": kept_text}
    assert grad(lambda x: root(n, x))({"v": jnp.asarray(1.0)})["v"] == 14
    assert jax.jit(jax.grad(lambda v: root(n, {"v": v})))(1.0) == 14
    with pytest.raises(TypeError, match=r"differentiated with respect to n\['by'\].*nondiff_argnums"):
        grad(lambda n: root(n, {"v": jnp.asarray(1.0)}))({"by": jnp.asarray(2.0)})


kept_text = "some text"


def test_keywords_and_defaults_have_their_positions():
    f = custom_jvp(lambda x, y=2.0, *, z=None: x * y)
    f.defjvp(lambda primals, tangents: (primals[0] * primals[1], 9.0 * tangents[0]))
    with pytest.raises(TypeError, match="keyword-only"):
        f(jnp.asarray(1.0), z=1)
    f = custom_jvp(lambda x, y=2.0: x * y)
    f.defjvp(lambda primals, tangents: (primals[0] * primals[1], 9.0 * tangents[0]))
    assert f(y=3.0, x=jnp.asarray(1.0)) == 3
    assert jax.grad(lambda x: f(y=3.0, x=x))(1.0) == 9
    assert jax.grad(f)(1.0) == 9


def test_a_shared_leaf_accumulates():
    @custom_vjp
    def f(a, b):
        return a["w"] * b["x"]["w"]

    f.defvjp(lambda a, b: (f(a, b), None), lambda residuals, c: ({"w": 2 * c}, None))
    shared = {"w": jnp.asarray(3.0)}
    assert grad(lambda s: f(s, {"x": s}))(shared)["w"] == 2


def test_a_rule_for_each_argument():
    f = custom_jvp(lambda x, y: {"z": x["v"] * y, "n": 1})
    f.defjvps(lambda t, value, x, y: {"z": 2 * t["v"] * y}, None)
    args = {"v": jnp.asarray(3.0)}, jnp.asarray(5.0)
    gradient = grad(lambda x, y: f(x, y)["z"], argnums=(0, 1))(*args)
    assert (gradient[0]["v"], gradient[1]) == (10, 0)
    f.defjvps(lambda t, value, x, y: {"z": 2 * t["v"] * y}, lambda t, value, x, y: {"z": 7 * t})
    assert grad(lambda y: f(args[0], y)["z"])(args[1]) == 7


def test_symbolic_zeros_are_given_to_those_who_ask():
    types = []
    f = custom_jvp(lambda a, b: a["x"] * b["x"])

    def rule(primals, tangents):
        types.append(type(tangents[1]["x"]))
        return primals[0]["x"] * primals[1]["x"], 4 * tangents[0]["x"]

    f.defjvp(rule, symbolic_zeros=True)
    args = {"x": jnp.asarray(2.0)}, {"x": jnp.asarray(3.0)}
    assert grad(f)(*args)["x"] == 4
    f.defjvp(rule)
    assert grad(f)(*args)["x"] == 4
    assert types[0] is jax.custom_derivatives.SymbolicZero
    assert issubclass(types[1], jax.Array)

    g = custom_vjp(lambda a, b: (a["x"], b["x"]))

    def fwd(a, b):
        assert (a["x"].perturbed, b["x"].perturbed) == (True, False)
        return (a["x"].value, b["x"].value), None

    def bwd(residuals, cotangent):
        assert type(cotangent[1]) is jax.custom_derivatives.SymbolicZero
        return {"x": 6 * cotangent[0]}, None

    g.defvjp(fwd, bwd, symbolic_zeros=True)
    assert grad(lambda a, b: g(a, b)[0])(*args)["x"] == 6


def test_residuals_are_any_objects():
    class Kept:
        def __init__(self, pull):
            self.pull, self.names, self.me = pull, {"a", "b"}, self

    f = custom_vjp(lambda p: jnp.sin(p["w"]).sum())

    def fwd(p):
        value, pull = vjp(lambda p: jnp.sin(p["w"]).sum(), p)
        return value, Kept(pull)

    def bwd(residuals, c):
        assert residuals.me is residuals
        assert residuals.names == {"a", "b"}
        return (scaled(residuals.pull(c)[0], 2),)

    f.defvjp(fwd, bwd)
    for run in (grad(f), graftax.jit(grad(f)), grad(graftax.jit(f))):
        np.testing.assert_allclose(run({"w": X})["w"], 2 * jnp.cos(X), rtol=1e-6)


def test_arrays_that_are_not_floating_have_no_derivative():
    f = custom_vjp(lambda d: {"y": d["x"] * d["n"], "n": d["n"], "key": d["key"]})
    f.defvjp(lambda d: (f(d), d["n"]), lambda n, c: ({"x": c["y"] * n, "n": None},))
    g = custom_jvp(lambda d: {"y": d["x"] * d["n"], "n": d["n"], "key": d["key"]})
    g.defjvp(lambda p, t: (g(p[0]), {"y": t[0]["x"] * p[0]["n"], "n": t[0]["n"]}))
    d = {"x": jnp.asarray(2.0), "n": jnp.asarray(3), "key": jax.random.key(0)}
    for fun in (f, g):
        gradient = graftax.jit(grad(lambda d, fun=fun: fun(d)["y"]))(d)
        assert (gradient["x"], gradient["n"], gradient["key"]) == (3, None, None)


# ---- changes


class Layer:
    def __init__(self):
        self.w, self.calls, self.last, self.inputs = jnp.ones(2), 0, jnp.zeros(2), []

    def body(self, x):
        self.calls += 1
        self.last = self.w * x
        self.inputs.append(x)
        return jnp.sin(self.w * x).sum()


def custom_layer(kind):
    if kind == "jvp":
        fun = custom_jvp(lambda layer, x: layer.body(x))
        fun.defjvp(lambda p, t: (fun(*p), 3 * (t[0].w * p[1]).sum()))
        return fun
    fun = custom_vjp(lambda layer, x: layer.body(x))

    def bwd(residuals, c):
        layer, x = residuals
        layer = Layer()
        layer.w, layer.last, layer.inputs = 3 * c * x, None, None
        return layer, None

    fun.defvjp(lambda layer, x: (fun(layer, x), (layer, x)), bwd)
    return fun


@pytest.mark.quick(1)
@JITS
@pytest.mark.parametrize("kind", ["jvp", "vjp"])
def test_what_the_function_changes_comes_back_once(kind, jit):
    fun, plain = custom_layer(kind), Layer()
    plain.body(X)
    layer = Layer()
    jit(fun)(layer, X)
    assert oracle.difference(layer, plain) is None
    layer = Layer()
    gradient = jit(grad(lambda layer, x: fun(layer, x)))(layer, X)
    assert oracle.difference(layer, plain) is None
    np.testing.assert_allclose(gradient.w, 3 * X)
    # Differentiated after the call has ended.
    layer = Layer()
    gradient = jit(grad(graftax.jit(lambda layer, x: fun(layer, x))))(layer, X)
    assert oracle.difference(layer, plain) is None
    np.testing.assert_allclose(gradient.w, 3 * X)


@pytest.mark.parametrize("kind", ["jvp", "vjp"])
@pytest.mark.parametrize("inner", [lambda f: f, graftax.jit], ids=["plain", "jit"])
def test_what_the_function_writes_has_its_own_derivative(kind, inner):
    fun = custom_layer(kind)

    def loss(layer, x):
        value = inner(lambda layer, x: fun(layer, x))(layer, x)
        return value + (layer.last**2).sum()

    np.testing.assert_allclose(grad(loss)(Layer(), X).w, 3 * X + 2 * X**2)


def test_a_change_to_what_the_function_captures_comes_back():
    log = []
    f = custom_jvp(lambda d: log.append("called") or d["x"])
    f.defjvp(lambda p, t: (p[0]["x"], 2 * t[0]["x"]))
    assert graftax.jit(grad(f))({"x": jnp.asarray(1.0)})["x"] == 2
    assert log == ["called"]


@pytest.mark.parametrize("outer", [lambda f: f, graftax.jit, jax.jit], ids=["plain", "jit", "jax"])
def test_a_rule_that_changes_its_arguments_is_an_error(outer):
    def rule(primals, tangents):
        primals[0]["n"] = 1
        return primals[0]["x"], tangents[0]["x"]

    f = custom_jvp(lambda d: d["x"] * 1)
    f.defjvp(rule)
    with pytest.raises(graftax.MutationError, match=r"rule of custom_jvp of <lambda> changed d\."):
        jax.grad(outer(lambda x: f({"x": x, "n": 0})))(1.0)
    g = custom_vjp(lambda d: d["x"] * 1)
    g.defvjp(lambda d: (d["x"], d.update(n=1)), lambda residuals, c: ({"x": c},))
    with pytest.raises(graftax.MutationError, match=r"rule of custom_vjp of <lambda> changed d\."):
        jax.grad(outer(lambda x: g({"x": x, "n": 0})))(1.0)
    g.defvjp(lambda d: (d["x"], d), lambda residuals, c: ({"x": residuals.pop("x") * c},))
    with pytest.raises(graftax.MutationError, match=r"bwd of custom_vjp of <lambda> changed"):
        jax.grad(outer(lambda x: g({"x": x, "n": 0})))(1.0)


def test_a_later_change_does_not_reach_a_rule_that_runs_later():
    f = custom_jvp(lambda d: d["x"] * d["scale"])
    f.defjvp(lambda p, t: (p[0]["x"] * p[0]["scale"], t[0]["x"] * p[0]["scale"]))

    @jax.jit
    def late(x):
        d = {"x": x, "scale": 2}
        y = f(d)
        d["scale"], d["more"] = 100, [1]
        return y

    assert jax.grad(late)(1.0) == 2


def test_a_call_keeps_nothing_of_the_callers_objects():
    fun, alive = custom_layer("vjp"), []

    def f(x):
        layer = Layer()
        alive.append(weakref.ref(layer))
        return fun(layer, x)

    jaxpr = jax.make_jaxpr(f)(X)
    gc.collect()
    assert alive[0]() is None
    assert "custom_vjp" in str(jaxpr)


# ---- errors


def test_a_missing_rule_is_named():
    with pytest.raises(AttributeError, match=r"custom_jvp of <lambda> has no rule.*defjvp"):
        custom_jvp(lambda x: x)(1.0)
    with pytest.raises(AttributeError, match=r"custom_vjp of <lambda> has no rule.*defvjp"):
        custom_vjp(lambda x: x)(1.0)


def test_a_derivative_by_what_is_captured_is_an_error():
    state = {"w": jnp.asarray(2.0)}
    f = custom_jvp(lambda x: x["v"] * state["w"])
    f.defjvp(lambda p, t: (p[0]["v"] * state["w"], t[0]["v"] * state["w"]))
    assert grad(f)({"v": jnp.asarray(1.0)})["v"] == 2

    def loss(w):
        state["w"] = w
        return f({"v": jnp.asarray(1.0)})

    with pytest.raises(TypeError, match=r"differentiated with respect to closure state\S*\['w'\]"):
        grad(loss)(jnp.asarray(3.0))


def test_a_returned_argument_is_an_error_that_says_what_to_write():
    f = custom_vjp(lambda params, limit: params)
    f.defvjp(lambda params, limit: (params, None), lambda residuals, c: (c, None))
    with pytest.raises(graftax.StructureError, match=r"value\['w'\].*jax.tree.map"):
        f({"w": X}, 1.0)
    f = custom_vjp(lambda params, limit: jax.tree.map(lambda x: x, params))
    f.defvjp(lambda params, limit: (dict(params), limit), lambda limit, c: (jax.tree.map(lambda g: g * limit, c), None))
    assert grad(lambda p: f(p, 4.0)["w"].sum())({"w": X})["w"].tolist() == [4, 4]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda p, t: p[0]["x"], "has to return a pair"),
        (lambda p, t: ([p[0]["x"]], t[0]["x"]), r"value: expected an array, given list"),
        (lambda p, t: (jnp.ones(3), t[0]["x"]), r"value of the rule at value has to be float32\[\]"),
        (lambda p, t: (p[0]["x"], jnp.ones(3)), r"tangent at value has to be float32\[\], and is float32\[3\]"),
        (lambda p, t: (p[0]["x"], {"x": t[0]["x"]}), r"there is a tangent at"),
        (lambda p, t: (p[0]["x"], "text"), r"tangent at value has to be float32\[\], and is 'text'"),
    ],
)
def test_a_wrong_rule_for_tangents_is_named(rule, message):
    f = custom_jvp(lambda d: d["x"] * 1)
    f.defjvp(rule)
    with pytest.raises((TypeError, graftax.StructureError), match=message):
        grad(f)({"x": jnp.asarray(1.0)})


@pytest.mark.parametrize(
    ("bwd", "message"),
    [
        (lambda residuals, c: {"x": c}, "tuple of 1 cotangents"),
        (lambda residuals, c: ({"x": c}, None), "tuple of 1 cotangents.*2 of them"),
        (
            lambda residuals, c: ({"x": jnp.ones(3)},),
            r"cotangent at d\['x'\] has to be float32\[\], and is float32\[3\]",
        ),
        (lambda residuals, c: ({"y": c},), r"there is a cotangent at d\['y'\].*here at d\['x'\]"),
    ],
)
def test_a_wrong_rule_for_cotangents_is_named(bwd, message):
    f = custom_vjp(lambda d: d["x"] * 1)
    f.defvjp(lambda d: (d["x"], None), bwd)
    with pytest.raises((TypeError, graftax.StructureError), match=message):
        grad(f)({"x": jnp.asarray(1.0)})


def test_a_number_is_a_tangent_and_a_cotangent():
    f = custom_jvp(lambda d: d["x"] * 1)
    f.defjvp(lambda p, t: (p[0]["x"], 0.0))
    assert grad(f)({"x": jnp.asarray(1.0)})["x"] == 0
    g = custom_vjp(lambda d: d["x"] * 1)
    g.defvjp(lambda d: (d["x"], None), lambda residuals, c: ({"x": 5.0},))
    assert grad(g)({"x": jnp.asarray(1.0)})["x"] == 5


def test_the_wrapper_looks_like_its_function():
    @custom_jvp
    def documented(x):
        """Says what it does."""
        return x

    assert (documented.__name__, documented.__doc__) == ("documented", "Says what it does.")
    assert "custom_jvp of <function" in repr(documented)
