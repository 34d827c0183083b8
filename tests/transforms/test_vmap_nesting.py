# SPDX-License-Identifier: Apache-2.0
"""vmap in and around other transforms, of all kinds of callables, and of models of other libraries."""

from __future__ import annotations

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import graftax
from zoo import Box

XS = jnp.arange(6.0).reshape(3, 2)


def total(model: Any, x: Any) -> Any:
    model["calls"] += 1
    return (model["w"] ** 2 * x).sum()


def model() -> Any:
    return {"w": jnp.array([1.0, 2.0]), "calls": 0}


# ---- transforms


def test_gradients_of_each_slice() -> None:
    net = model()
    grads = graftax.vmap(graftax.grad(total), in_axes=(None, 0))(net, XS)
    np.testing.assert_allclose(grads["w"], 2 * net["w"] * XS)
    assert net["calls"] == 1
    value, grads = graftax.vmap(graftax.value_and_grad(total), in_axes=(None, 0))(net, XS)
    np.testing.assert_allclose(value, (net["w"] ** 2 * XS).sum(1))
    np.testing.assert_allclose(grads["w"], 2 * net["w"] * XS)


def test_gradient_of_a_mapped_function() -> None:
    net = model()
    loss = lambda net, xs: graftax.vmap(total, in_axes=(None, 0))(net, xs).sum()
    np.testing.assert_allclose(graftax.grad(loss)(net, XS)["w"], 2 * net["w"] * XS.sum(0))
    assert net["calls"] == 1
    w = jax.grad(lambda w: loss({"w": w, "calls": 0}, XS))(net["w"])
    np.testing.assert_allclose(w, 2 * net["w"] * XS.sum(0))


@pytest.mark.parametrize("outer", [graftax.jacrev, graftax.jacfwd])
def test_jacobian_of_a_mapped_function_that_changes_its_model(outer: Any) -> None:
    net = {"w": XS, "calls": 0}

    def step(net: Any, x: Any) -> Any:
        net["w"], net["calls"] = net["w"] * x, net["calls"] + 1
        return net["w"].sum()

    rows = outer(graftax.vmap(step))(net, XS)
    np.testing.assert_allclose(rows["w"], jnp.einsum("ij,ik->ijk", jnp.eye(3), XS))
    assert net["calls"] == 1
    np.testing.assert_allclose(net["w"], XS * XS)


def test_mapping_twice_maps_two_axes() -> None:
    grid = {"w": jnp.arange(12.0).reshape(2, 3, 2), "calls": 0}
    before = grid["w"]

    def step(net: Any, x: Any) -> Any:
        net["w"], net["calls"] = net["w"] + x, net["calls"] + 1
        net["new"] = x
        return x.sum()

    out = graftax.vmap(graftax.vmap(step, in_axes=(0, None)), in_axes=(0, 0))(grid, XS[:2])
    np.testing.assert_allclose(out, jnp.broadcast_to(XS[:2].sum(1)[:, None], (2, 3)))
    np.testing.assert_allclose(grid["w"], before + XS[:2, None])
    np.testing.assert_allclose(grid["new"], jnp.broadcast_to(XS[:2, None], (2, 3, 2)))
    assert grid["calls"] == 1


def test_an_inner_axis_may_change_what_the_outer_one_does_not_map() -> None:
    state = {"sum": jnp.zeros(2), "n": 0}

    def add(x: Any) -> Any:
        state["sum"], state["n"] = state["sum"] + jax.lax.psum(x, "inner"), state["n"] + 1
        return x

    inner = graftax.vmap(add, axis_name="inner")
    inner(XS)
    np.testing.assert_allclose(state["sum"], XS.sum(0))
    with pytest.raises(graftax.MutationError, match=r"closure .*\['state'\]\['sum'\]"):
        graftax.vmap(inner)(XS[None])
    assert state["n"] == 1


def test_in_and_around_jax_vmap() -> None:
    net = model()
    mapped = graftax.vmap(total, in_axes=(None, 0))
    np.testing.assert_allclose(jax.vmap(lambda x: mapped(net, x))(XS[None]), mapped(net, XS)[None])
    assert net["calls"] == 2
    inner = graftax.vmap(lambda x: jax.vmap(lambda y: total(net, y))(x))
    np.testing.assert_allclose(inner(XS[None]), mapped(model(), XS)[None])


def test_in_and_around_scan() -> None:
    def step(carry: Any, x: Any) -> Any:
        state = {"w": carry}

        def add(state: Any, x: Any) -> Any:
            state["w"] = state["w"] + x
            return state["w"]

        out = graftax.vmap(add)(state, x)
        return state["w"], out

    steps = jnp.stack([XS, XS * 2])
    carry, outs = jax.lax.scan(step, jnp.zeros((3, 2)), steps)
    np.testing.assert_allclose(carry, XS * 3)
    np.testing.assert_allclose(outs, jnp.stack([XS, XS * 3]))
    state = {"w": jnp.zeros(3)}

    def run(state: Any, xs: Any) -> Any:
        state["w"], out = jax.lax.scan(lambda c, x: (c + x, c), state["w"], xs)
        return out

    assert graftax.vmap(run)(state, XS).shape == (3, 2)
    np.testing.assert_allclose(state["w"], XS.sum(1))


def test_under_jit_one_trace_serves_every_call() -> None:
    ensemble = Box(w=XS, log=[jnp.zeros(3)], config=Box(rate=0.5, names=["a"]))

    def step(net: Any, x: Any) -> Any:
        net.w = net.w - net.config.rate * x
        net.log[0] = net.w.sum()
        return net

    run = graftax.jit(graftax.vmap(step, in_axes=(0, None)))
    expected = XS
    for _ in range(3):
        assert run(ensemble, jnp.ones(2)) is ensemble
        expected = expected - 0.5
        np.testing.assert_allclose(ensemble.w, expected)
        np.testing.assert_allclose(ensemble.log[0], expected.sum(1))
    assert run.cache_info().traces == 1


def test_a_captured_specification_is_read_by_a_jitted_call() -> None:
    axes = {"x": 0, "y": None}
    run = graftax.jit(graftax.vmap(lambda x, y: x * y, in_axes=axes))
    assert run(XS, jnp.ones((3, 2))).shape == (3, 3, 2)
    axes["y"] = 0
    assert run(XS, jnp.ones((3, 2))).shape == (3, 2)


def test_a_name_for_the_devices_is_passed_on() -> None:
    net = {"w": jnp.ones(2), "n": 0}

    def step(net: Any, x: Any) -> Any:
        net["n"] += 1
        return net["w"] * x

    run = graftax.vmap(step, in_axes=(None, 0), spmd_axis_name="devices")
    np.testing.assert_allclose(run(net, XS), XS)
    assert net["n"] == 1


def test_random_keys_are_mapped() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    state = Box(key=keys, n=0)

    def draw(state: Any) -> Any:
        state.key, sub = jax.random.split(state.key)
        return jax.random.normal(sub, (2,))

    out = graftax.vmap(draw)(state)
    split = jax.vmap(jax.random.split)(keys)
    np.testing.assert_array_equal(out, jax.vmap(lambda k: jax.random.normal(k, (2,)))(split[:, 1]))
    assert (state.key == split[:, 0]).all()


# ---- callables


class Scale:
    def __init__(self, w: Any) -> None:
        self.w, self.calls = w, 0

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        return self.w * x

    @graftax.vmap
    def each(self, x: Any) -> Any:
        self.w = self.w * 2
        return self.w * x


def test_callable_objects_and_bound_methods_are_not_mapped() -> None:
    scale = Scale(jnp.array([1.0, 2.0]))
    for function in (scale, scale.__call__, functools.partial(Scale.__call__, scale)):
        np.testing.assert_allclose(graftax.vmap(function)(XS), scale.w * XS)
    assert scale.calls == 3


def test_a_mapped_method_maps_its_object() -> None:
    scale = Scale(XS)
    np.testing.assert_allclose(scale.each(XS), 2 * XS * XS)
    np.testing.assert_allclose(scale.w, 2 * XS)


def test_partial_arguments_are_not_mapped() -> None:
    run = graftax.vmap(functools.partial(lambda w, x, *, b: w * x + b, jnp.ones((3, 2)), b=jnp.ones(2)))
    assert run(XS).shape == (3, 3, 2)


def test_jitted_functions_can_be_mapped() -> None:
    @graftax.jit
    def step(net: Any, x: Any) -> Any:
        net["w"], net["n"] = net["w"] + x, net["n"] + 1
        return net["w"].sum()

    net = {"w": XS, "n": 0}
    np.testing.assert_allclose(graftax.vmap(step)(net, XS), 2 * XS.sum(1))
    assert net["n"] == 1
    named = graftax.vmap(step, in_axes={"net": 0, "x": None})
    np.testing.assert_allclose(named(net, XS[0]), (2 * XS + XS[0]).sum(1))
    np.testing.assert_allclose(graftax.vmap(jax.jit(jnp.sum))(XS), XS.sum(1))
    np.testing.assert_allclose(graftax.vmap(jnp.sum)(XS), XS.sum(1))


def test_defaults_and_extra_arguments_reach_the_function() -> None:
    def combine(x: Any, y: Any = 2, *positional: Any, scale: Any = 1, **keywords: Any) -> Any:
        return x * y + sum(positional) + scale + keywords.get("shift", 0)

    np.testing.assert_allclose(graftax.vmap(combine)(XS), XS * 2 + 1)
    np.testing.assert_allclose(graftax.vmap(combine)(XS, XS, XS, shift=XS), XS * XS + XS + 1 + XS)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        graftax.vmap(combine)()


def test_the_wrapper_looks_like_the_function() -> None:
    def named(x: Any) -> Any:
        "Doc."
        return x

    mapped = graftax.vmap(named)
    assert (mapped.__name__, mapped.__doc__, mapped.__wrapped__) == ("named", "Doc.", named)
    with pytest.raises(TypeError, match=r"graftax\.vmap expects a callable"):
        graftax.vmap(3)  # type: ignore[arg-type]


def test_a_constructor_can_be_mapped() -> None:
    scales = graftax.vmap(Scale)(XS)
    assert (type(scales), scales.calls) == (Scale, 0)
    np.testing.assert_array_equal(scales.w, XS)


# ---- Equinox


@pytest.mark.quick(0)
def test_an_ensemble_is_made_and_run_as_by_equinox() -> None:
    def make(key: Any) -> Any:
        return eqx.nn.MLP(2, 1, 4, 1, key=key)

    keys = jax.random.split(jax.random.key(0), 3)
    ensemble, expected = graftax.vmap(make)(keys), eqx.filter_vmap(make)(keys)
    assert eqx.tree_equal(ensemble, expected)
    for axes in (0, eqx.if_array(0)):
        out = graftax.vmap(lambda net, x: net(x), in_axes=(axes, None))(ensemble, XS[0])
        expected = eqx.filter_vmap(lambda net, x: net(x), in_axes=(eqx.if_array(0), None))(ensemble, XS[0])
        np.testing.assert_allclose(out, expected, rtol=1e-6)
    np.testing.assert_allclose(graftax.vmap(make(keys[0]))(XS), jax.vmap(make(keys[0]))(XS), rtol=1e-6)


@pytest.mark.quick(0)
def test_equinox_state_is_mapped() -> None:
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, axis_name="batch", mode="batch")
    _, other = eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, axis_name="batch", mode="batch")
    run = graftax.vmap(lambda x, state: norm(x, state), in_axes=(0, None), out_axes=(0, None), axis_name="batch")
    out, after = run(XS, state)
    expected, expected_after = jax.vmap(norm, in_axes=(0, None), out_axes=(0, None), axis_name="batch")(XS, other)
    np.testing.assert_allclose(out, expected)
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(expected_after), strict=True):
        np.testing.assert_allclose(a, b)


# ---- Flax NNX


class Net(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.linear = nnx.Linear(2, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.dropout(self.norm(self.linear(x)))


@pytest.mark.quick(0)  # as the ensemble of Equinox
def test_an_nnx_ensemble_is_made_and_trained_as_by_nnx() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    make = lambda key: Net(nnx.Rngs(key))
    ensemble, expected = graftax.vmap(make)(keys), nnx.vmap(make)(keys)
    x = jnp.arange(10.0).reshape(5, 2)
    run = nnx.vmap(lambda net, x: net(x), in_axes=(0, None))
    for apply in (graftax.vmap(lambda net, x: net(x), in_axes=(0, None)), graftax.jit(run_each)):
        np.testing.assert_allclose(apply(ensemble, x), run(expected, x), rtol=1e-5, atol=1e-6)
        for left, right in zip(jax.tree.leaves(nnx.state(ensemble)), jax.tree.leaves(nnx.state(expected)), strict=True):
            assert left.shape == right.shape
            if not jnp.issubdtype(left.dtype, jax.dtypes.prng_key):
                np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)


def run_each(ensemble: Any, x: Any) -> Any:
    return graftax.vmap(lambda net, x: net(x), in_axes=(0, None))(ensemble, x)


@pytest.mark.quick(0)
def test_dropout_draws_for_each_slice_where_its_keys_are_split() -> None:
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    inputs = jnp.ones((3, 20))
    masks = graftax.vmap(lambda x: dropout(x))(inputs)
    assert (masks[0] == masks[1]).all()
    assert int(dropout.rngs.count[...]) == 1
    keys = jax.random.split(jax.random.key(1), 3)
    layers = graftax.vmap(lambda key: nnx.Dropout(0.5, rngs=nnx.Rngs(key)))(keys)
    drawn = graftax.vmap(lambda layer, x: layer(x))(layers, inputs)
    assert (drawn[0] != drawn[1]).any()
    assert layers.rngs.count[...].tolist() == [1, 1, 1]


@pytest.mark.quick(0)
def test_statistics_that_each_slice_would_change_are_refused() -> None:
    net = Net(nnx.Rngs(0))
    batches = jnp.ones((3, 5, 2))
    with pytest.raises(graftax.MutationError, match=r"net\.norm\.mean.* not mapped"):
        graftax.vmap(lambda x: net(x))(batches)
    net.eval()
    assert graftax.vmap(net)(batches).shape == (3, 5, 4)
