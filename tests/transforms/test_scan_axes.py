# SPDX-License-Identifier: Apache-2.0
"""`graftax.scan` as a decorator: which argument is the carry, which go over rows, which are the same in all steps."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import graftax
from graftax import Carry

XS = jnp.arange(6.0).reshape(2, 3)


@pytest.mark.quick(1)
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("reverse", [False, True])
def test_rows_along_an_axis(axis, reverse):
    def step(total, x):
        return total + x, total * 2

    run = graftax.scan(step, in_axes=(Carry, axis), out_axes=(Carry, axis), reverse=reverse)
    last, ys = run(jnp.zeros(XS.shape[1 - axis % 2]), XS)
    expected, rows = jax.lax.scan(step, jnp.zeros(XS.shape[1 - axis % 2]), jnp.moveaxis(XS, axis, 0), reverse=reverse)
    np.testing.assert_array_equal(last, expected)
    np.testing.assert_array_equal(ys, jnp.moveaxis(rows, 0, axis))


@pytest.mark.parametrize("carry", [Carry, nnx.Carry])
def test_the_carry_stands_anywhere(carry):
    @graftax.scan(in_axes=(0, carry, None), out_axes=(0, carry))
    def run(x, state, scale):
        return state["sum"], {"sum": state["sum"] + x * scale["by"], "name": state["name"]}

    ys, state = run(jnp.arange(3.0), {"sum": 0.0, "name": "a"} | {"sum": jnp.array(0.0)}, {"by": 2.0})
    assert (float(state["sum"]), state["name"]) == (6, "a")
    np.testing.assert_array_equal(ys, [0, 0, 2])


def test_a_carry_alone_and_no_carry():
    assert graftax.scan(lambda c: c * 2, in_axes=Carry, out_axes=Carry, length=3)(1) == 8
    assert graftax.scan(lambda x: x + 1, in_axes=0, out_axes=1)(XS).shape == (3, 2)
    assert graftax.scan(lambda x: x + 1, in_axes=None, out_axes=0, length=4)(XS).shape == (4, 2, 3)
    assert graftax.scan(lambda x: x.sum(), in_axes=0, out_axes=None)(XS) == 12


class Model:
    def __init__(self, weight):
        self.weight, self.seen, self.name = weight, jnp.array(0), "m"


def test_what_a_step_changes_comes_back():
    layers, shared = Model(jnp.arange(1.0, 4.0)), Model(jnp.array(2.0))
    layers.seen = jnp.zeros(3, int)

    @graftax.scan(in_axes=(Carry, 0, None), out_axes=Carry)
    def run(x, layer, other):
        layer.seen = layer.seen + other.seen
        other.seen = other.seen + 1
        return x * layer.weight * other.weight

    assert run(jnp.array(1.0), layers, shared) == 48
    assert int(shared.seen) == 3
    np.testing.assert_array_equal(layers.seen, [0, 1, 2])
    assert graftax.jit(run)(jnp.array(1.0), layers, shared) == 48
    assert int(shared.seen) == 6
    np.testing.assert_array_equal(layers.seen, [3, 5, 7])


def test_an_object_as_the_carry():
    model = Model(jnp.array(1.0))

    @graftax.scan(in_axes=(Carry, 0), out_axes=(Carry, 0))
    def run(m, x):
        m.weight = m.weight + x
        return m, m.weight

    result_model, ys = run(model, jnp.arange(3.0))
    assert result_model is model and float(model.weight) == 4
    np.testing.assert_array_equal(ys, [1, 2, 4])


def test_gradients_go_through():
    layers = Model(jnp.arange(1.0, 4.0))
    layers.seen = jnp.zeros(3, int)
    run = graftax.scan(lambda x, layer: x * layer.weight, in_axes=(Carry, 0), out_axes=Carry)
    gradient = graftax.grad(lambda m: run(jnp.array(1.0), m))(layers)
    np.testing.assert_allclose(gradient.weight, [6, 3, 2])


def test_no_steps():
    last, ys = graftax.scan(lambda c, x: ((c[1], c[0]), x))((1.0, 2.0), jnp.zeros((0, 3)))
    assert (float(last[0]), float(last[1]), ys.shape) == (1, 2, (0, 3))


@pytest.mark.quick(0)
def test_filters_choose_rows():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.count = nnx.Linear(2, 2, rngs=rngs), nnx.BatchStat(jnp.array(0))

    blocks = graftax.vmap(lambda rngs: Block(rngs), out_axes={nnx.Param: 0, ...: None})(nnx.Rngs(0).split(3))
    axes = nnx.StateAxes({nnx.Param: 0, ...: None})

    @graftax.scan(in_axes=(axes, Carry), out_axes=Carry)
    def run(block, x):
        block.count[...] += 1
        return block.linear(x)

    x = jnp.ones(2)
    expected = x
    for i in range(3):
        expected = expected @ blocks.linear.kernel[i] + blocks.linear.bias[i]
    np.testing.assert_allclose(run(blocks, x), expected, rtol=1e-5)
    assert int(blocks.count[...]) == 3


def test_what_does_not_fit_is_said():
    with pytest.raises(ValueError, match="whole entry 2 times"):
        graftax.scan(lambda a, b: a, in_axes=(Carry, Carry), out_axes=Carry)
    with pytest.raises(ValueError, match="in in_axes and not in out_axes"):
        graftax.scan(lambda a, b: a, out_axes=0)
    with pytest.raises(ValueError, match="pass length="):
        graftax.scan(lambda a: a, in_axes=Carry, out_axes=Carry)(1.0)
    with pytest.raises(graftax.StructureError, match="carry"):
        graftax.scan(lambda c, x: ({"a": c}, x))(jnp.array(1.0), XS)
    with pytest.raises(ValueError, match="tuple of 2"):
        graftax.scan(lambda c, x: c)(jnp.array(1.0), XS)
    with pytest.raises(ValueError, match=r"has 2 along axis 0.*has 3|has 3 along axis 0.*has 2"):
        graftax.scan(lambda c, x, y: (c, x), in_axes=(Carry, 0, 0))(1.0, XS, jnp.ones(3))

    def grows(m, x):
        m.extra = x
        return x

    with pytest.raises(graftax.StructureError, match=r"m\.extra"):
        graftax.scan(grows, in_axes=(None, 0), out_axes=0)(Model(jnp.ones(())), XS)


def test_keyword_arguments_with_an_entry():
    run = graftax.scan(lambda c, x: (c + x, c), in_axes=(Carry, 1))
    np.testing.assert_array_equal(run(jnp.zeros(2), x=XS)[0], XS.sum(1))
    assert graftax.vmap(lambda a, b: a + b, in_axes=(None, 1))(jnp.ones(2), b=XS).shape == (3, 2)


def test_the_carry_as_rows_too():
    last, ys = graftax.scan(lambda c, x: ({"a": c["a"] + x},) * 2)({"a": jnp.array(0.0)}, jnp.arange(3.0))
    assert float(last["a"]) == 3
    np.testing.assert_array_equal(ys["a"], [0, 1, 3])


def test_a_number_in_a_variable_is_an_array_in_each_step():
    count = nnx.BatchStat(0)

    @graftax.scan(in_axes=(None, 0), out_axes=0)
    def run(count, x):
        count[...] += 1
        return x * count[...]

    np.testing.assert_array_equal(run(count, jnp.ones(3)), [1, 2, 3])
    assert int(count[...]) == 3
    assert graftax.vmap(lambda c, x: c[...] * x, in_axes=(None, 0))(nnx.BatchStat(2), jnp.ones(3)).sum() == 6


@pytest.mark.quick(0)
def test_filters_choose_what_is_made_inside():
    axes = nnx.StateAxes({(nnx.Param, nnx.RngState): 0, ...: None})

    class Layers(nnx.Module):
        @graftax.vmap(in_axes=(axes, 0))
        def __init__(self, key):
            self.linear, self.node = nnx.Linear(3, 3, rngs=nnx.Rngs(key)), nnx.Variable(jnp.ones(2))

        @graftax.scan(in_axes=(axes, Carry), out_axes=Carry)
        def __call__(self, x):
            return nnx.gelu(self.linear(x))

    layers = Layers(key=jax.random.split(jax.random.key(0), 5))
    assert (layers.linear.kernel.shape, layers.node.shape) == ((5, 3, 3), (2,))
    assert layers(jnp.ones((1, 3))).shape == (1, 3)


@pytest.mark.quick(0)
def test_names_of_axes_are_kept_by_the_transform_of_metadata():
    @graftax.vmap
    @nnx.transform_metadata(in_axes=0, out_axes=0, partition="layers")
    def make(key):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("in", "out"), eager_sharding=False)
        return nnx.Linear(2, 3, kernel_init=init, rngs=nnx.Rngs(key))

    layers = make(jax.random.split(jax.random.key(0), 4))
    assert layers.kernel.get_metadata()["out_sharding"] == ("layers", "in", "out")

    @graftax.scan(in_axes=(0, None), out_axes=0)
    @nnx.transform_metadata(in_axes=(0, None), out_axes=0, partition="layers")
    def run(layer, x):
        assert layer.kernel.get_metadata()["out_sharding"] == ("in", "out")
        return layer(x)

    assert run(layers, jnp.ones(2)).shape == (4, 3)
    assert layers.kernel.get_metadata()["out_sharding"] == ("layers", "in", "out")


class Counted:
    def __init__(self):
        self.n, self.seen = 0, []
        self.first, self.second = {"v": jnp.ones(1)}, {"v": jnp.zeros(1)}


def count(s: Any, x: Any) -> Any:
    s.n += 1
    return x * s.n


def collect(s: Any, x: Any) -> Any:
    s.seen.append(1)
    return x * len(s.seen)


def exchange(s: Any, x: Any) -> Any:
    s.first, s.second = s.second, s.first
    return x * s.first["v"][0]


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(
    ("step", "place"),
    [(count, "s.n: expected 0, given 1"), (collect, "s.seen[0]"), (exchange, "s.second in")],
)
def test_what_is_the_same_for_all_steps_changes_in_arrays_alone(step: Any, place: str, captured: bool):
    s = Counted()

    def run(xs: Any) -> Any:
        if captured:
            return graftax.scan(lambda x: step(s, x), in_axes=(0,), out_axes=0)(xs)
        return graftax.scan(step, in_axes=(None, 0), out_axes=0)(s, xs)

    for call in (run, graftax.jit(run)):
        with pytest.raises(graftax.StructureError, match=re.escape(place)):
            call(jnp.ones(3))
    assert (s.n, s.seen, float(s.first["v"][0])) == (0, [], 1.0)


def test_a_number_of_an_object_that_goes_by_rows_belongs_to_each():
    layers = Model(jnp.arange(3.0))
    layers.n, layers.seen = 0, jnp.zeros(3)
    assert graftax.scan(lambda s, x: count(s, x) * s.weight, in_axes=(0, 0), out_axes=0)(
        layers, jnp.ones(3)
    ).tolist() == [0, 1, 2]
    assert layers.n == 1
