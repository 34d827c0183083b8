# SPDX-License-Identifier: Apache-2.0
"""`filter_vmap` maps what Equinox's maps, and never touches the caller's objects."""

import collections
import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax

KEYS = jax.random.split(jax.random.key(0), 3)
X = jnp.arange(6.0).reshape(3, 2)


def make(key):
    return eqx.nn.MLP(2, 2, 4, 1, key=key)


def assert_equal(a, b):
    """Equal arrays in the same places of equal trees; what is no array is the same, too."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if eqx.is_array(x):
            assert x.dtype == y.dtype
            np.testing.assert_allclose(x, y, rtol=1e-6)
        else:
            assert x is y or x == y


PROGRAMS = {
    "ensemble": lambda t: t.filter_vmap(make)(KEYS),
    "ensemble on one input": lambda t: t.filter_vmap(lambda m, x: m(x), in_axes=(eqx.if_array(0), None))(
        eqx.filter_vmap(make)(KEYS), X[0]
    ),
    "ensemble on inputs": lambda t: t.filter_vmap(lambda m, x: m(x))(eqx.filter_vmap(make)(KEYS), X),
    "one model on inputs": lambda t: t.filter_vmap(make(KEYS[0]), in_axes=0)(X),
    "another axis": lambda t: t.filter_vmap(lambda x: {"twice": x * 2}, in_axes=1, out_axes=1)(X),
    "a function of the leaf": lambda t: t.filter_vmap(lambda x, s: (x, s), in_axes=(eqx.if_array(1), None))(X, "text"),
    "an axis name": lambda t: t.filter_vmap(lambda x: x - jax.lax.pmean(x, "i"), axis_name="i")(X),
    "an axis size": lambda t: t.filter_vmap(lambda: jnp.ones(2), axis_size=3)(),
    "a decorator": lambda t: t.filter_vmap(out_axes=1)(lambda x: x * 2)(X),
    "under jit": lambda t: t.filter_jit(t.filter_vmap(lambda m, x: m(x)))(eqx.filter_vmap(make)(KEYS), X),
    "of a gradient": lambda t: t.filter_vmap(t.filter_grad(lambda m, x: m(x).sum()))(eqx.filter_vmap(make)(KEYS), X),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_gives_what_equinox_gives(name):
    assert_equal(PROGRAMS[name](graftax), PROGRAMS[name](eqx))


def test_a_change_is_dropped_with_a_warning():
    log = {"x": X}

    def f(log):
        log["x"] = log["x"] + 1
        return log["x"].sum()

    with pytest.warns(graftax.LostChangeWarning, match="changed log"):
        sums = graftax.filter_vmap(f)(log)
    assert sums.shape == (3,) and log["x"] is X


@pytest.mark.quick(0)
def test_functions_are_left_alone_with_what_they_capture():
    start = jnp.arange(2.0)

    def scaled(ravelled):
        return ravelled + start

    def make(key):
        return {"w": jax.random.normal(key, (2,)), "function": scaled, "part": functools.partial(jnp.add, start)}

    for library in (eqx, graftax):
        models = library.filter_vmap(make)(jax.random.split(jax.random.key(0), 3))
        assert models["w"].shape == (3, 2) and models["function"](0).shape == (2,) and models["part"](0).shape == (2,)
        out = library.filter_vmap(lambda layer: layer["function"](layer["w"]))(models)
        np.testing.assert_allclose(out, models["w"] + start)


@dataclasses.dataclass(eq=False)
class Scale:
    """A plain class: a value to Equinox, however many arrays are in it."""

    scale: jax.Array


class Named(dict):
    pass


THREE = jnp.arange(3.0)
TWO = jnp.arange(2.0)
VALUES = {
    "an object": lambda t: t.filter_vmap(lambda s, x: s.scale + x)(Scale(THREE), TWO),
    "in a tree": lambda t: t.filter_vmap(lambda d, x: d["s"].scale + x * d["y"])({"s": Scale(THREE), "y": TWO}, TWO),
    "a tree in it": lambda t: t.filter_vmap(lambda s, x: s.scale["a"] + x)(Scale({"a": THREE}), TWO),
    "a function of the leaf": lambda t: t.filter_vmap(lambda s, x: s.scale + x, in_axes=(eqx.if_array(1), 0))(
        Scale(THREE), TWO
    ),
    "by name": lambda t: t.filter_vmap(lambda s, x: s.scale + x, in_axes={"x": 0})(Scale(THREE), TWO),
    "a deque": lambda t: t.filter_vmap(lambda s, x: s[0] + x)(collections.deque([THREE]), TWO),
    "of a subclass of dict": lambda t: t.filter_vmap(lambda s, x: s["scale"] + x)(Named(scale=THREE), TWO),
    "how often": lambda t: t.filter_vmap(lambda s: s.scale, axis_size=2)(Scale(THREE)),
    "returned": lambda t: t.filter_vmap(lambda s, x: (s, x))(Scale(THREE), TWO)[0].scale,
    "made": lambda t: t.filter_vmap(lambda x: (Scale(THREE), x))(TWO)[0].scale,
    "nothing mapped": lambda t: t.filter_vmap(lambda s, text: s.scale, out_axes=None)(Scale(THREE), "text"),
}


@pytest.mark.quick(20)
@pytest.mark.parametrize("name", VALUES)
def test_objects_of_plain_classes_are_values(name):
    assert_equal(VALUES[name](graftax), VALUES[name](eqx))


def test_an_axis_maps_objects_of_plain_classes():
    out = graftax.filter_vmap(lambda s, x: s.scale + x, in_axes=(0, 0))(Scale(TWO), TWO)
    np.testing.assert_array_equal(out, TWO + TWO)


def test_what_a_value_shares_with_a_tree_is_mapped():
    out = graftax.filter_vmap(lambda tree, s: s.scale + tree[0])([TWO], Scale(TWO))
    assert out.shape == (2, 2)  # an equal array is another one
    pair = [TWO]
    out = graftax.filter_vmap(lambda tree, s: s.scale[0] + tree[0])(pair, Scale(pair))
    np.testing.assert_array_equal(out, TWO + TWO)


def test_a_new_value_that_depends_on_the_axis_is_mapped():
    np.testing.assert_array_equal(graftax.filter_vmap(lambda x: Scale(x + 1))(TWO).scale, TWO + 1)


def test_an_axis_of_the_result_needs_something_mapped():
    for library in (eqx, graftax):
        with pytest.raises(ValueError):
            library.filter_vmap(lambda s: s.scale)(Scale(THREE))
