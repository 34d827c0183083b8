# SPDX-License-Identifier: Apache-2.0
"""Derivatives by object graphs equal JAX's on the same arrays by hand, keep sharing, and bring changes back."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
import zoo
from graftax import _core, grad, hessian, jacfwd, jacrev, jvp, linearize, value_and_grad, vjp


def is_inexact(x):
    return jnp.issubdtype(x.dtype, jnp.inexact)


def measure(leaves):
    """A number that depends on every inexact leaf, on each in another way."""
    return sum(((i + 1) * jnp.sin(x) ** 2).real.sum() for i, x in enumerate(leaves) if is_inexact(x))


def loss_of(obj):
    return measure(graftax.flatten(obj)[0])


def split(obj):
    leaves, graphdef = graftax.flatten(obj)
    inexact = [i for i, x in enumerate(leaves) if is_inexact(x)]

    def flat(diff_leaves):
        filled = list(leaves)
        for i, x in zip(inexact, diff_leaves, strict=True):
            filled[i] = x
        return measure(filled)

    return flat, [leaves[i] for i in inexact], inexact, leaves, graphdef


def close(a, b):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)


class Layer:
    def __init__(self):
        self.w = jnp.asarray([[1.0, 2.0], [3.0, 4.0]])
        self.b = jnp.zeros(2)
        self.name = "layer"
        self.calls = jnp.asarray(0)


class Net:
    """A layer in two places, a back-reference, a counter and statistics that a step updates."""

    def __init__(self):
        self.first = Layer()
        self.tied = self.first
        self.last = Layer()
        self.last.owner = self
        self.mean = jnp.zeros(2)


def run(net, x):
    for layer in (net.first, net.last, net.tied):
        x = jnp.tanh(x @ layer.w + layer.b)
        layer.calls = layer.calls + 1
    net.mean = 0.5 * net.mean + 0.5 * jax.lax.stop_gradient(x)
    return x


def loss(net, x):
    return (run(net, x) ** 2).sum()


def by_hand(w1, b1, w2, b2, x):
    for w, b in ((w1, b1), (w2, b2), (w1, b1)):
        x = jnp.tanh(x @ w + b)
    return (x**2).sum()


X = jnp.asarray([0.5, -1.0])
HAND = (Net().first.w, Net().first.b, Net().last.w, Net().last.b, X)


# ---- laws


@pytest.mark.parametrize("jit", [lambda f: f, graftax.jit], ids=["plain", "jit"])
@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_the_gradient_of_a_graph_is_that_of_its_arrays(build, jit):
    obj = build()
    flat, diff_leaves, inexact, leaves, graphdef = split(obj)
    if not diff_leaves:
        with pytest.raises(TypeError, match="no array of a floating dtype"):
            jit(value_and_grad(loss_of))(obj)
        return
    value, gradient = jit(value_and_grad(loss_of))(obj)
    expected, grads = jax.value_and_grad(flat)(diff_leaves)
    close(value, expected)
    for i, g in zip(inexact, grads, strict=True):
        leaves[i] = g
    leaves = [x if i in inexact else None for i, x in enumerate(leaves)]
    assert _close_graphs(gradient, _core.unflatten(graphdef, leaves, leaves_only=True))


def _close_graphs(a, b):
    (la, ga), (lb, gb) = graftax.flatten(a), graftax.flatten(b)
    for x, y in zip(la, lb, strict=True):
        close(x, y)
    return ga == gb


@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_products_of_a_graph_are_those_of_its_arrays(build):
    obj = build()
    flat, diff_leaves, inexact, leaves, graphdef = split(obj)
    if not diff_leaves:
        return
    rates = [jnp.ones_like(x) * 0.5 for x in diff_leaves]
    tangent = graftax.unflatten(graphdef, [dict(zip(inexact, rates, strict=True)).get(i) for i in range(len(leaves))])
    value, rate = jax.jvp(flat, (diff_leaves,), (rates,))
    for result in (jvp(loss_of, (obj,), (tangent,)), _at(linearize(loss_of, obj), tangent)):
        close(result[0], value)
        close(result[1], rate)
    value, pull = jax.vjp(flat, diff_leaves)
    actual, pull_back = vjp(loss_of, obj)
    close(actual, value)
    (gradient,) = pull_back(jnp.ones_like(value))
    for a, b in zip(graftax.flatten(gradient)[0], pull(jnp.ones_like(value))[0], strict=True):
        close(a, b)


def _at(linear, tangent):
    return linear[0], linear[1](tangent)


@pytest.mark.quick(0)
@pytest.mark.parametrize("transform", ["jacfwd", "jacrev", "hessian"])
def test_jacobians_nest_graphs_as_jax_nests_trees(transform):
    def f(d):
        return {"y": d["w"] @ d["x"], "s": [jnp.sin(d["x"]).sum()]}

    d = {"w": jnp.arange(6.0).reshape(2, 3), "x": jnp.asarray([0.1, 0.2, 0.3])}
    ours = getattr(graftax, transform)(f)({**d, "name": "static"})
    theirs = getattr(jax, transform)(f)(d)
    dropped = jax.tree.map(lambda x: x, ours, is_leaf=lambda x: isinstance(x, str))
    pairs = {jax.tree_util.keystr(p): x for p, x in jax.tree.leaves_with_path(dropped) if not isinstance(x, str)}
    for path, x in jax.tree.leaves_with_path(theirs):
        close(pairs.pop(jax.tree_util.keystr(path)), x)
    assert not pairs


def test_a_static_result_stays_beside_its_jacobian():
    jacobian = jacrev(lambda x: {"y": x**2, "name": "square", "n": 3})(jnp.asarray([1.0, 2.0]))
    close(jacobian["y"], jnp.diag(jnp.asarray([2.0, 4.0])))
    assert (jacobian["name"], jacobian["n"]) == ("square", 3)


# ---- sharing


@pytest.mark.parametrize("jit", [lambda f: f, graftax.jit, jax.jit], ids=["plain", "graftax", "jax"])
def test_tied_weights_get_one_accumulated_gradient(jit):
    if jit is jax.jit:
        gradient = jit(lambda x: vars(grad(loss)(Net(), x).first)["w"])(X)
    else:
        g = jit(grad(loss))(Net(), X)
        assert g.tied is g.first and g.last.owner is g and g.first.name is None and g.first.calls is None
        gradient = g.first.w
    close(gradient, jax.grad(by_hand)(*HAND))


def test_an_array_in_two_places_has_a_gradient_in_each():
    x = jnp.ones(2)
    g = grad(lambda t: (t[0] * 2 + t[1] * 3).sum())((x, x))
    assert g[0].tolist() == [2, 2] and g[1].tolist() == [3, 3]


def test_sharing_between_arguments_is_one_derivative():
    shared = [jnp.asarray(3.0)]

    def f(a, b):
        return a["s"][0] * b["s"][0]

    with pytest.warns(graftax.SharedGradientWarning, match=r"a\['s'\] is also b\['s'\]"):
        first = grad(f)({"s": shared}, {"s": shared})
    with pytest.warns(graftax.SharedGradientWarning, match=r"b\['s'\] is also a\['s'\]"):
        second = grad(f, argnums=1)({"s": shared}, {"s": shared})
    gradients = grad(f, argnums=(0, 1))({"s": shared}, {"s": shared})
    assert first["s"][0] == second["s"][0] == 6 and gradients[0]["s"] is gradients[1]["s"] and gradients[0]["s"][0] == 6


# ---- changes


@pytest.mark.parametrize("jit", [lambda f: f, graftax.jit], ids=["plain", "jit"])
def test_what_the_function_changes_comes_back(jit):
    plain, net, step = Net(), Net(), jit(value_and_grad(loss))
    for _ in range(2):
        value, _ = step(net, X)
        close(value, loss(plain, X))
    close(net.mean, plain.mean)
    assert net.first.calls == plain.first.calls == 4 and net.last.calls == 2


def test_changes_of_captured_state_come_back():
    log, calls = [], 0

    def f(x):
        nonlocal calls
        calls += 1
        log.append(x * 2)
        return (x**2).sum()

    grad(f)(jnp.ones(2))
    graftax.jit(grad(f))(jnp.ones(2))
    assert calls == 2 and [x.tolist() for x in log] == [[2, 2], [2, 2]]


def test_an_exception_leaves_everything_as_it_was():
    net = Net()
    mean = net.mean

    def f(net):
        net.mean = net.mean + 1
        raise KeyError("no")

    with pytest.raises(KeyError):
        grad(f)(net)
    assert net.mean is mean


def test_a_captured_array_is_used_as_it_is_now():
    scale = [jnp.asarray(2.0)]
    f = graftax.jit(grad(lambda x: x * scale[0]))
    assert f(1.0) == 2
    scale[0] = jnp.asarray(5.0)
    assert f(1.0) == 5


def test_a_jitted_function_is_differentiated_compiled():
    @graftax.jit
    def f(net, x):
        return (jnp.tanh(x @ net["w"]) ** 2).sum()

    net, g = {"w": jnp.eye(2), "name": "n"}, grad(f)
    close(g(net, X)["w"], jax.grad(lambda w: (jnp.tanh(X @ w) ** 2).sum())(jnp.eye(2)))
    g(net, X)
    assert f.cache_info().traces == 1


# ---- what is differentiated


def product(a, b, *, c=1.0):
    return (a["x"] * a["y"] * b * c).sum()


A = {"x": jnp.asarray([1.0, 2.0]), "y": jnp.asarray([3.0, 4.0]), "n": jnp.asarray([1, 1]), "s": "t"}
B = jnp.asarray([5.0, 6.0])


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({}, {"x": [15, 24], "y": [5, 12], "n": None, "s": None}),
        ({"argnums": 1}, [3, 8]),
        ({"argnums": -1}, [3, 8]),
        ({"argnums": (1, 0)}, ([3, 8], {"x": [15, 24], "y": [5, 12], "n": None, "s": None})),
        ({"wrt": "b"}, [3, 8]),
        ({"wrt": ("b",)}, ([3, 8],)),
        ({"wrt": "a[x]"}, {"x": [15, 24], "y": None, "n": None, "s": None}),
        ({"wrt": ("a[x]", "b")}, ([3, 8], {"x": [15, 24], "y": None, "n": None, "s": None})),
        ({"wrt": "**[y]"}, {"x": None, "y": [5, 12], "n": None, "s": None}),
        ({"wrt": lambda leaf: leaf is A["y"]}, {"x": None, "y": [5, 12], "n": None, "s": None}),
        ({"wrt": is_inexact, "argnums": 1}, [3, 8]),
    ],
    ids=range(11),
)
def test_what_is_differentiated_can_be_named(choice, expected):
    gradient = grad(product, **choice)(A, B)
    assert jax.tree.map(lambda x: x.tolist() if isinstance(x, jax.Array) else x, gradient) == expected


def test_a_python_number_that_is_the_argument_is_differentiated():
    assert grad(lambda x: x**2)(3.0) == 6 and grad(lambda x, y: x * y, argnums=(0, 1))(2.0, 3.0) == (3, 2)
    assert grad(lambda a, scale: (a * scale).sum(), wrt="scale")(jnp.ones(2), scale=jnp.asarray(2.0)) == 2


def test_keywords_and_defaults_reach_the_function():
    assert grad(product)(A, B, c=jnp.asarray(2.0))["x"].tolist() == [30, 48]
    assert grad(product, wrt="c")(A, B, c=jnp.asarray(2.0)) == 15 + 48


def test_integers_are_differentiated_where_that_is_allowed():
    g = grad(lambda d: (d["x"] * d["n"]).sum(), allow_int=True)({"x": jnp.ones(2), "n": jnp.asarray([2, 3])})
    assert g["x"].tolist() == [2, 3] and g["n"].dtype == jax.dtypes.float0


def test_holomorphic_functions():
    f, z = (lambda d: (d["z"] ** 3).sum()), jnp.asarray([1 + 2j])
    close(grad(f, holomorphic=True)({"z": z})["z"], jax.grad(lambda z: (z**3).sum(), holomorphic=True)(z))


def test_aux_may_be_any_objects():
    class Info:
        pass

    def f(d):
        info = Info()
        info.text, info.twice, info.source = "done", d["x"] * 2, d
        return (d["x"] ** 2).sum(), info

    d = {"x": jnp.ones(2)}
    (value, info), g = value_and_grad(f, has_aux=True)(d)
    assert value == 2 and info.text == "done" and info.twice.tolist() == [2, 2] and info.source is d
    g, info = graftax.jit(grad(f, has_aux=True))(d)
    assert g["x"].tolist() == [2, 2] and info.source is d
    jacobian, info = jacfwd(f, has_aux=True)(d)
    assert jacobian["x"].tolist() == [2, 2] and info.text == "done"
    value, rate, info = jvp(f, (d,), ({"x": jnp.ones(2)},), has_aux=True)
    assert (value, rate) == (2, 4) and info.text == "done"
    value, pull, info = vjp(f, d, has_aux=True)
    assert pull(jnp.asarray(1.0))[0]["x"].tolist() == [2, 2] and info.text == "done"
    value, push, info = linearize(f, d, has_aux=True)
    assert push({"x": jnp.ones(2)}) == 4 and info.text == "done"


# ---- kinds of functions


class Squares:
    def __init__(self):
        self.scale = jnp.asarray(3.0)

    def value(self, x):
        return (self.scale * x**2).sum()

    @functools.partial(grad, argnums=1)
    def slope(self, x):
        return (self.scale * x**2).sum()

    __call__ = value


@pytest.mark.parametrize(
    "f",
    [Squares().value, Squares(), functools.partial(Squares.value, Squares())],
    ids=["method", "callable", "partial"],
)
def test_methods_callables_and_partials(f):
    assert grad(f)(jnp.ones(2)).tolist() == [6, 6]


def test_as_a_method_decorator_the_instance_is_an_argument():
    assert Squares().slope(jnp.ones(2)).tolist() == [6, 6]


def test_a_namedtuple_and_a_registered_class_come_back_as_themselves():
    class Pair(NamedTuple):
        a: jax.Array
        b: str

    g = grad(lambda p: (p.a**2).sum())(Pair(jnp.ones(2), "s"))
    assert type(g) is Pair and g.a.tolist() == [2, 2] and g.b is None
    boxed = grad(lambda p: loss_of(p))(zoo.Registered(jnp.ones(2), "n"))
    assert type(boxed) is zoo.Registered and loss_of(boxed) != 0


def test_what_is_a_leaf_for_jax_is_none_and_what_is_part_of_a_node_stays():
    eqx = pytest.importorskip("equinox")

    class Net(eqx.Module):
        w: jax.Array
        act: object
        name: str = eqx.field(static=True)
        size: int = 3
        inner: object = None

    def f(net):
        return net.act(net.w).sum()

    for act in (jax.nn.relu, lambda x: x * 2, jnp.tanh):
        net = Net(jnp.ones(2), act, "a name", inner=eqx.nn.Dropout(0.5))
        ours, theirs = grad(f)(net), eqx.filter_grad(f)(net)
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)
        close(ours.w, theirs.w)
        assert ours.name == "a name" and ours.size is None and ours.act is None


def test_gradients_fit_optax():
    optax = pytest.importorskip("optax")
    params = {"w": jnp.ones(2), "inner": [jnp.ones(3)]}
    optimizer = optax.sgd(0.1)
    g = grad(lambda p: (p["w"] ** 2).sum() + p["inner"][0].sum())(params)
    updates, _ = optimizer.update(g, optimizer.init(params), params)
    assert optax.apply_updates(params, updates)["w"].tolist() == pytest.approx([0.8, 0.8])


# ---- with each other, and later


def test_derivatives_nest():
    f = lambda d: (d["x"] ** 3).sum()
    inner = lambda d: grad(f)(d)["x"].sum()
    assert grad(inner)({"x": jnp.asarray([1.0, 2.0])})["x"].tolist() == [6, 12]
    assert jax.grad(lambda x: grad(lambda y: y**3)(x))(2.0) == 12
    assert grad(lambda x: jax.grad(lambda y: y**3)(x))(2.0) == 12
    assert jax.vmap(grad(lambda x: x**2))(jnp.arange(3.0)).tolist() == [0, 2, 4]


def test_a_pull_back_does_not_see_later_changes_and_keeps_nothing_alive():
    net = Net()
    value, pull = vjp(lambda net: loss(net, X), net)
    alive = weakref.ref(net)
    net.first.w = net.first.w * 100
    expected = jax.grad(by_hand)(*HAND)
    close(pull(jnp.ones_like(value))[0].first.w, expected)
    del net
    gc.collect()
    assert alive() is None
    close(pull(jnp.ones_like(value))[0].first.w, expected)


def test_a_missing_tangent_is_zero():
    d = {"x": jnp.ones(2), "y": jnp.ones(2), "n": jnp.asarray(1)}
    _, rate = jvp(lambda d: (d["x"] * d["y"]).sum(), (d,), ({"x": jnp.ones(2), "y": None, "n": None},))
    assert rate == 2
    value, pull = vjp(lambda d: [d["x"] * 2, d["y"] * 3, d["n"]], d)
    assert pull([jnp.ones(2), None, None])[0]["y"].tolist() == [0, 0]
    assert value[2] is d["n"] or value[2] == 1


# ---- errors


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda: grad(lambda d: d["x"])({"x": jnp.ones(2)}),
            TypeError,
            r"scalar array, and returned an array of shape \(2,\)",
        ),
        (lambda: grad(lambda d: d)({"x": 1.0}), TypeError, "no array of a floating dtype to differentiate in d"),
        (lambda: grad(lambda d: d)(3), TypeError, "Python numbers inside an argument are static"),
        (lambda: grad(lambda d: d["x"])({"x": jnp.asarray([1, 2])}), TypeError, "no array of a floating dtype"),
        (lambda: grad(lambda d: "text")(1.0), TypeError, "scalar array, and returned str"),
        (lambda: grad(lambda d: d, argnums=2)(1.0), ValueError, "is given no argument 2; it is given d"),
        (lambda: grad(lambda d: d, wrt="x")(1.0), ValueError, "is given no argument 'x'"),
        (lambda: grad(lambda d: d, wrt=(0, "d"))(1.0), ValueError, "names an argument twice"),
        (
            lambda: grad(lambda d: d, wrt="e.x")(1.0),
            ValueError,
            "'e.x' of wrt= covers no floating array .* Available: no array",
        ),
        (lambda: grad(lambda d: d, has_aux=True)(1.0), TypeError, r"has_aux=True the function returns a pair"),
        (lambda: grad(lambda a, b: a)(1.0), TypeError, "missing 1 required positional argument: 'b'"),
        (lambda: grad(3), TypeError, "callable"),
        (
            lambda: jvp(lambda d: d["x"], ({"x": jnp.ones(2)},), ({"x": jnp.ones(3)},)),
            graftax.StructureError,
            r"tangent at d\['x'\] has to be float32\[2\], and is float32\[3\]",
        ),
        (
            lambda: jvp(lambda d: d["x"], ({"x": jnp.ones(2)},), ({"z": jnp.ones(2)},)),
            graftax.StructureError,
            r"tangent at d\['z'\], where nothing.*here at d\['x'\]",
        ),
        (
            lambda: vjp(lambda d: {"y": d["x"]}, {"x": jnp.ones(2)})[1]({"y": jnp.ones(3)}),
            graftax.StructureError,
            r"cotangent at value\['y'\] has to be",
        ),
    ],
    ids=range(15),
)
def test_what_cannot_be_differentiated_says_why(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_names_and_documentation_are_the_functions():
    def f(x):
        """What f does."""
        return x

    for transform in (grad, value_and_grad, jacfwd, jacrev, hessian):
        assert transform(f).__name__ == "f" and transform(f).__doc__ == "What f does."
    assert copy.copy(grad(f))(2.0) == 1


def test_a_container_that_a_config_holds_too_stays_one_in_a_gradient():
    config = zoo.Box(empty=(), sizes=[1], names={"a": "x"})
    gradient = grad(lambda p, config: p[0])((jnp.ones(()), config.empty, config.sizes, config.names), config)
    assert gradient == (1, (), [None], {"a": None})


def test_a_number_is_a_tangent_and_shared_tangents_are_one_for_each_place():
    assert jvp(lambda x: x**2, (3.0,), (1.0,)) == (9, 6)
    rates = [jnp.ones(())]
    value, rate = jvp(
        lambda d: 2 * d["a"][0] + d["b"][0], ({"a": [1.0 * X[0]], "b": [X[0]]},), ({"a": rates, "b": rates},)
    )
    assert (float(value), float(rate)) == (1.5, 3.0)
    with pytest.raises(graftax.StructureError, match="'text'"):
        jvp(lambda d: d["a"], ({"a": X},), ({"a": "text"},))
