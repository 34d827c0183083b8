# SPDX-License-Identifier: Apache-2.0
"""Every layer of Flax NNX, NNX's own functions inside a jitted one, and Variables over `jax.Ref`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors, nnx

import graftax

SEQUENCE, IMAGE, ROW = (2, 5, 4), (2, 6, 6, 4), (3, 4)

LAYERS = {
    "Linear": (lambda r: nnx.Linear(4, 3, rngs=r), ROW),
    "LinearGeneral": (lambda r: nnx.LinearGeneral((5, 4), (2, 3), axis=(-2, -1), rngs=r), SEQUENCE),
    "Einsum": (lambda r: nnx.Einsum("btd,dk->btk", (4, 3), (3,), rngs=r), SEQUENCE),
    "Conv": (lambda r: nnx.Conv(4, 3, (3, 3), rngs=r), IMAGE),
    "ConvTranspose": (lambda r: nnx.ConvTranspose(4, 3, (3, 3), rngs=r), IMAGE),
    "LayerNorm": (lambda r: nnx.LayerNorm(4, rngs=r), ROW),
    "RMSNorm": (lambda r: nnx.RMSNorm(4, rngs=r), ROW),
    "GroupNorm": (lambda r: nnx.GroupNorm(4, num_groups=2, rngs=r), IMAGE),
    "InstanceNorm": (lambda r: nnx.InstanceNorm(4, rngs=r), IMAGE),
    "BatchNorm": (lambda r: nnx.BatchNorm(4, rngs=r), ROW),
    "Dropout": (lambda r: nnx.Dropout(0.5, rngs=r), ROW),
    "MultiHeadAttention": (lambda r: nnx.MultiHeadAttention(2, 4, decode=False, rngs=r), SEQUENCE),
    "LSTMCell in RNN": (lambda r: nnx.RNN(nnx.LSTMCell(4, 3, rngs=r), rngs=r), SEQUENCE),
    "GRUCell in RNN": (lambda r: nnx.RNN(nnx.GRUCell(4, 3, rngs=r), rngs=r), SEQUENCE),
    "SimpleCell in RNN": (lambda r: nnx.RNN(nnx.SimpleCell(4, 3, rngs=r), rngs=r), SEQUENCE),
    "OptimizedLSTMCell in RNN": (lambda r: nnx.RNN(nnx.OptimizedLSTMCell(4, 3, rngs=r), rngs=r), SEQUENCE),
    "Bidirectional": (
        lambda r: nnx.Bidirectional(
            nnx.RNN(nnx.GRUCell(4, 3, rngs=r), rngs=r), nnx.RNN(nnx.GRUCell(4, 3, rngs=r), rngs=r), rngs=r
        ),
        SEQUENCE,
    ),
    "LoRA": (lambda r: nnx.LoRA(4, 2, 3, rngs=r), ROW),
    "LoRALinear": (lambda r: nnx.LoRALinear(4, 3, lora_rank=2, rngs=r), ROW),
    "PReLU": (lambda r: nnx.PReLU(), ROW),
    "SpectralNorm": (lambda r: Spectral(r), ROW),
    "WeightNorm": (lambda r: nnx.WeightNorm(nnx.Linear(4, 3, rngs=r), rngs=r), ROW),
    "Sequential": (
        lambda r: nnx.Sequential(
            nnx.Linear(4, 8, rngs=r), nnx.relu, nnx.Dropout(0.5, rngs=r), nnx.Linear(8, 2, rngs=r)
        ),
        ROW,
    ),
}


class Spectral(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.SpectralNorm(nnx.Linear(4, 3, rngs=rngs), rngs=rngs)

    def __call__(self, x):
        return self.norm(x, update_stats=True)


def leaves(tree):
    keys = [isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(tree)]
    return [
        np.asarray(jax.random.key_data(x) if key else x) for x, key in zip(jax.tree.leaves(tree), keys, strict=True)
    ]


def assert_close(a, b):
    a, b = leaves(a), leaves(b)
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_and_changes_what_it_does_without_jit(name):
    build, shape = LAYERS[name]
    plain, jitted = build(nnx.Rngs(0)), build(nnx.Rngs(0))
    f = graftax.jit(lambda layer, x: layer(x))
    x = jax.random.normal(jax.random.key(1), shape)
    for _ in range(2):
        np.testing.assert_allclose(f(jitted, x), plain(x), rtol=1e-6, atol=1e-6)
        assert_close(nnx.state(jitted), nnx.state(plain))
    assert f.cache_info().traces == 1


@pytest.mark.parametrize("name", LAYERS)
def test_the_arrays_found_are_those_that_nnx_finds(name):
    layer = LAYERS[name][0](nnx.Rngs(0))
    found, graphdef = graftax.flatten(layer)
    assert {id(x) for x in found} == {id(x) for x in jax.tree.leaves(nnx.state(layer))}
    assert {id(x) for x in found} == {id(x) for x in jax.tree.leaves(layer)}
    again = graftax.unflatten(graphdef, found)
    assert graftax.flatten(again)[1] == graphdef
    assert jax.tree.map(np.shape, nnx.state(again)) == jax.tree.map(np.shape, nnx.state(layer))
    again.note = "the trace state is the current one"


@pytest.mark.parametrize("name", LAYERS)
def test_a_fresh_layer_is_the_same_key(name):
    build, _ = LAYERS[name]
    first, second = (graftax.flatten(build(nnx.Rngs(seed)))[1] for seed in (0, 1))
    assert first == second
    assert hash(first) == hash(second)


def test_embeddings_take_integers():
    layer = nnx.Embed(5, 3, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(graftax.jit(lambda m, i: m(i))(layer, jnp.array([1, 4])), layer(jnp.array([1, 4])))
    np.testing.assert_allclose(graftax.jit(lambda m, x: m.attend(x))(layer, jnp.ones(3)), layer.attend(jnp.ones(3)))


@pytest.mark.quick(0)  # a second: a cache is a variable that is changed
def test_decoding_fills_the_cache_of_the_callers_attention():
    def build():
        layer = nnx.MultiHeadAttention(2, 4, decode=True, rngs=nnx.Rngs(0))
        layer.init_cache((1, 3, 4))
        return layer

    plain, jitted = build(), build()
    f = graftax.jit(lambda m, x: m(x))
    for token in jax.random.normal(jax.random.key(0), (3, 1, 1, 4)):
        np.testing.assert_allclose(f(jitted, token), plain(token), rtol=1e-6, atol=1e-6)
    assert jitted.cache_index[...] == 3
    assert_close(nnx.state(jitted), nnx.state(plain))


def test_lists_and_dicts_of_modules_change_as_plain_ones_do():
    def change(rows, table):
        rows.append(nnx.Param(rows[0][...] + 1))
        rows[1] = nnx.Param(jnp.zeros(2))
        table["made"] = nnx.Param(jnp.ones(1))
        del table["gone"]

    def build():
        return nnx.List([nnx.Param(jnp.ones(2)), nnx.Param(jnp.ones(2))]), nnx.Dict(gone=nnx.Param(jnp.ones(1)))

    plain, jitted = build(), build()
    change(*plain)
    graftax.jit(change)(*jitted)
    assert len(jitted[0]) == 3
    assert_close(nnx.state(jitted), nnx.state(plain))
    assert jax.tree.structure(jitted) == jax.tree.structure(plain)


def test_states_and_graphdefs_are_arguments_and_results():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model, nnx.Param)

    @graftax.jit
    def f(graphdef, params, x):
        made = nnx.merge(graphdef, params)
        made.bias[...] = made.bias[...] + x
        return nnx.split(made, nnx.Param)

    new_graphdef, new_params = f(graphdef, params, jnp.ones(2))
    assert new_graphdef == graphdef
    np.testing.assert_array_equal(new_params["bias"].get_value(), [1, 1])
    nnx.update(model, new_params)
    np.testing.assert_array_equal(model.bias[...], [1, 1])
    f(new_graphdef, new_params, jnp.ones(2))
    assert f.cache_info().traces == 1
    other, state = nnx.split(nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match="NoneType"):
        f(other, state, jnp.ones(2))


def test_a_state_is_changed_in_place():
    state = nnx.state(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))

    @graftax.jit
    def f(state):
        state["bias"] = state["bias"].replace(jnp.ones(2))
        state["new"] = nnx.Param(jnp.zeros(1))

    f(state)
    np.testing.assert_array_equal(state["bias"].get_value(), [1, 1])
    assert set(state) == {"bias", "kernel", "new"}


@pytest.mark.quick(0)  # as test_nnx_vmap_and_scan_work_inside
def test_nnx_functions_work_inside():
    model = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.BatchNorm(2, rngs=nnx.Rngs(0)))
    plain = nnx.clone(model)

    def f(model, x):
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        merged = nnx.merge(graphdef, params, rest)
        loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).sum())(merged)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), nnx.state(merged, nnx.BatchStat))
        names = [".".join(map(str, path)) for path, _ in nnx.iter_graph(model)]
        doubled = jax.vmap(lambda row: model.layers[0](row))(x)
        return loss, names, doubled, nnx.clone(model)

    jitted = graftax.jit(f)
    x = jax.random.normal(jax.random.key(0), (4, 2))
    for _ in range(2):
        loss, names, doubled, cloned = jitted(model, x)
        expected = f(plain, x)
        assert_close((loss, doubled, nnx.state(cloned)), (expected[0], expected[2], nnx.state(expected[3])))
        assert names == expected[1]
        assert_close(nnx.state(model), nnx.state(plain))
    assert jitted.cache_info().traces == 1
    cloned.layers[0].kernel[...] = jnp.zeros((2, 2))


@pytest.mark.quick(0)
def test_nnx_vmap_and_scan_work_inside():
    class Stack(nnx.Module):
        def __init__(self, rngs):
            @nnx.split_rngs(splits=3)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def make(rngs):
                return nnx.Linear(2, 2, rngs=rngs)

            self.layers = make(rngs)

        def __call__(self, x):
            @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            def forward(layer, x):
                return nnx.tanh(layer(x))

            return forward(self.layers, x)

    plain = Stack(nnx.Rngs(0))
    made = graftax.jit(lambda key: Stack(nnx.Rngs(key)))(jax.random.key(0))
    assert_close(nnx.state(made), nnx.state(plain))
    x = jnp.ones((1, 2))
    np.testing.assert_allclose(graftax.jit(lambda m, x: m(x))(made, x), plain(x), rtol=1e-6, atol=1e-6)


def test_a_jitted_function_works_inside_nnx_and_jax_transforms():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    @graftax.jit
    def forward(model, x):
        model.count = nnx.BatchStat(jnp.ones(()))
        return model(x)

    x = jnp.ones((3, 2))
    grads = nnx.grad(lambda m: forward(m, x).sum())(model)
    np.testing.assert_allclose(grads["bias"].get_value(), [3, 3])
    assert model.count[...] == 1
    model.count[...] = 5
    graphdef, state = nnx.split(model)
    per_row = jax.vmap(lambda row: forward(nnx.merge(graphdef, state), row))(x)
    np.testing.assert_allclose(per_row, model(x), rtol=1e-6)


def test_a_variable_changed_within_an_outer_trace_keeps_its_mark():
    variable = nnx.Param(jnp.ones(2))
    mark = variable._trace_state
    add = graftax.jit(lambda v: v.set_value(v.get_value() * 2))

    def outer(x):
        inner = nnx.Param(x)
        add(inner)
        inner[...] = inner[...] + 1
        return inner[...].sum()

    np.testing.assert_array_equal(jax.grad(outer)(jnp.ones(2)), [2, 2])
    add(variable)
    assert variable._trace_state is mark
    np.testing.assert_array_equal(variable[...], [2, 2])


@pytest.mark.quick(0)
def test_variables_over_refs_are_changed_in_place():
    def build():
        with nnx.var_defaults(ref=True):
            return nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    def change(model, x):
        model.bias[...] = model.bias[...] + x
        return model(x)

    plain, jitted = build(), build()
    ref = jitted.bias.get_raw_value()
    f = graftax.jit(change)
    for _ in range(2):
        np.testing.assert_allclose(f(jitted, jnp.ones(2)), change(plain, jnp.ones(2)), rtol=1e-6)
    assert jitted.bias.get_raw_value() is ref
    np.testing.assert_array_equal(jitted.bias[...], [2, 2])
    assert f.cache_info().traces == 1


def test_a_hijax_variable_is_one_value_as_for_jax():
    def build():
        with nnx.var_defaults(hijax=True):
            return nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    def rename(model, x):
        model.scale = nnx.Param(x)
        return model(x)

    plain, jitted = build(), build()
    assert len(graftax.flatten(jitted)[0]) == 2
    f = graftax.jit(rename)
    for _ in range(2):
        np.testing.assert_allclose(f(jitted, jnp.ones(2)), rename(plain, jnp.ones(2)), rtol=1e-6)
    np.testing.assert_array_equal(jitted.scale[...], [1, 1])


def test_what_nnx_forbids_inside_a_trace_it_forbids_in_filter_jit():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    @graftax.filter_jit
    def f(x):  # the closure of a by-value function is as in JAX
        model.bias[...] = x

    with pytest.raises(errors.TraceContextError):
        f(jnp.ones(2))
    assert not model.bias[...].any()
