# SPDX-License-Identifier: Apache-2.0
"""A gradient has the structure that JAX's trees give it: what Optax maps over parameters, it maps over gradients."""

from __future__ import annotations

import collections
import copy
import functools
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import graftax


class Config:
    """JAX counts it as a leaf."""

    def __init__(self, **fields):
        self.__dict__.update(fields)


class Rows(list):
    """JAX counts it as a leaf too, unlike a list."""


class Table(dict):
    pass


@jax.tree_util.register_pytree_node_class
class Pair:
    def __init__(self, one, other):
        self.one, self.other = one, other

    def tree_flatten(self):
        return (self.one, self.other), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


Point = collections.namedtuple("Point", "x y")
PARTS = {
    "an Equinox module": eqx.nn.Dropout(0.5),
    "a registered node": Pair(1, "b"),
    "a list": [1, "a"],
    "a dict": {"a": 1, "b": None},
    "an ordered dict": collections.OrderedDict(b=1, a=2),
    "a named tuple": Point(1, "y"),
    "a subclass of list": Rows([1, 2]),
    "a subclass of dict": Table(a=1),
    "a deque": collections.deque([1]),
    "a config": Config(rate=0.1),
    "a function": len,
    "a bound method": Config(rate=0.1).__init__,
    "a string": "text",
    "a number": 3,
    "nothing": None,
    "a set": {1, 2},
    "a namespace": types.SimpleNamespace(a=1),
}


def loss(params):
    return (params["w"] ** 2).sum()


def in_config(value):
    """The value is reached from an object without arrays as well, and so handed over as itself."""
    return {"w": jnp.ones(2), "part": value, "config": Config(value=value)}


def without_config(value):
    return {"w": jnp.ones(2), "part": value, "config": None}


def with_integers(value):
    return {"w": jnp.ones(2), "part": value, "config": jnp.arange(2)}


@pytest.mark.parametrize("build", [without_config, in_config, with_integers])
@pytest.mark.parametrize("name", PARTS)
def test_the_structure_is_that_of_the_arrays_that_equinox_would_filter(name, build):
    params = build(copy.copy(PARTS[name]))
    wanted = eqx.filter(params, eqx.is_inexact_array)
    gradients = [graftax.grad(loss)(params), graftax.vjp(loss, params)[1](jnp.ones(()))[0]]
    gradients += [graftax.jacrev(loss)(params), graftax.filter_grad(loss)(params)]
    for gradient in gradients:
        assert jax.tree.structure(gradient) == jax.tree.structure(wanted)
        np.testing.assert_allclose(gradient["w"], [2, 2])


def test_optax_takes_the_gradient():
    params = {"w": jnp.ones(2), **{name: copy.copy(value) for name, value in PARTS.items()}}
    params["all"] = Config(parts=[*params.values()][1:])
    arrays = eqx.filter(params, eqx.is_inexact_array)
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
    updates, _ = optimiser.update(graftax.grad(loss)(params), optimiser.init(arrays), arrays)
    new = eqx.apply_updates(params, updates)
    expected, _ = optimiser.update({"w": 2 * params["w"]}, optimiser.init({"w": params["w"]}), {"w": params["w"]})
    np.testing.assert_allclose(new["w"], params["w"] + expected["w"], rtol=1e-6)
    assert all(new[name] is params[name] for name in ("a subclass of list", "a config", "a string", "a set"))


def test_a_subclass_of_list_that_holds_arrays_stays():
    shared = Rows([jnp.ones(2)])
    params = {"rows": Rows([jnp.ones(2), "a"]), "inner": Rows([shared, 1]), "again": shared}
    gradient = graftax.grad(lambda p: (p["rows"][0] * p["inner"][0][0]).sum() + p["again"][0].sum())(params)
    assert [type(gradient[name]) for name in params] == [Rows] * 3
    np.testing.assert_allclose([gradient["rows"][0], gradient["again"][0]], [[1, 1], [2, 2]])
    assert gradient["rows"][1] is None and gradient["inner"][0] is gradient["again"]


def scale(multiplier, x):
    return multiplier * x


def closing_over(multiplier):
    return lambda x: multiplier * x


class Scaled:
    def __init__(self, multiplier):
        self.multiplier = multiplier

    def __call__(self, x):
        return self.multiplier * x

    def twice(self, x):
        return 2 * self.multiplier * x


BY = jnp.full(2, 3.0)
CALLABLES = {
    "a partial": (lambda: functools.partial(scale, BY), lambda f: f.args[0], 1),
    "a partial of a method": (lambda: functools.partial(Scaled(BY).twice), lambda f: f.func.__self__.multiplier, 2),
    "a partial of an object": (lambda: functools.partial(Scaled(BY)), lambda f: f.func.multiplier, 1),
    "a partial with a keyword": (lambda: functools.partial(scale, x=BY), lambda f: f.keywords["x"], 1),
    "a bound method": (lambda: Scaled(BY).twice, lambda f: f.__self__.multiplier, 2),
    "an object": (lambda: Scaled(BY), lambda f: f.multiplier, 1),
    "a closure": (lambda: closing_over(BY), lambda f: f.__closure__[0].cell_contents, 1),
    "a default": (lambda: lambda x, multiplier=BY: multiplier * x, lambda f: f.__defaults__[0], 1),
    "a method of a list": (lambda: [BY, "a"].__getitem__, lambda f: f.__self__[0], 0),
}


@pytest.mark.parametrize("name", CALLABLES)
def test_a_callable_that_holds_arrays_has_a_gradient_like_it(name):
    build, array_in, factor = CALLABLES[name]

    def apply(parts, x):
        value = parts["f"](x) if factor else parts["f"](0)
        return value.sum(), parts["f"]

    x = jnp.asarray([1.0, 2.0])
    for transform in (graftax.grad, lambda f, has_aux: graftax.jit(graftax.grad(f, has_aux=True))):
        parts = {"f": build(), "helper": scale}
        parts["g"] = parts["f"]
        gradient, aux = transform(apply, has_aux=True)(parts, x)
        np.testing.assert_allclose(array_in(gradient["f"]), factor * x if factor else [1, 1])
        assert type(gradient["f"]) is type(aux) is type(parts["f"])
        assert gradient["helper"] is None
    _, pull = graftax.vjp(lambda parts: apply(parts, x)[0], parts)
    np.testing.assert_allclose(array_in(pull(jnp.ones(()))[0]["f"]), array_in(gradient["f"]))
    value, rate = graftax.jvp(lambda parts: apply(parts, x)[0], (parts,), (parts,))
    np.testing.assert_allclose(value, rate)  # linear


def test_variables_of_nnx_keep_their_metadata():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    model.kernel.set_metadata(tag="mine")
    graphdef, state = nnx.split(model)
    gradient = graftax.grad(lambda state: nnx.merge(graphdef, state)(jnp.ones(2)).sum())(state)
    assert jax.tree.structure(gradient) == jax.tree.structure(state)
    assert gradient["kernel"].get_metadata()["tag"] == "mine"
    new = jax.tree.map(lambda p, g: p - 0.1 * g, state, gradient)
    np.testing.assert_allclose(new["bias"][...], -0.1 * jnp.ones(3))
