# SPDX-License-Identifier: Apache-2.0
"""Every class of ``equinox.nn``: read as Equinox flattens it, and run as Equinox runs it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import equinox.nn as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax

pytestmark = pytest.mark.quick(1)

FUNCTIONS = {"delete_init_state", "inference_mode", "make_with_state"}


@dataclasses.dataclass(frozen=True)
class Example:
    """A module, arguments, and how it is called with them."""

    make: Callable[[jax.Array], Any]
    args: tuple[Any, ...]
    call: Callable[..., Any] = lambda m, *args: m(*args)
    weights: bool = True  # has parameters that the result depends on


def x(*shape: int) -> jax.Array:
    return jnp.array(np.linspace(-1.0, 2.0, int(np.prod(shape)), dtype=np.float32).reshape(shape))


def over_batch(pair, batch):
    layer, state = pair
    return jax.vmap(layer, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(batch, state)


def batch_norm(weights=True, **options):
    make = nn.make_with_state(nn.BatchNorm)
    return Example(lambda key: make(3, "batch", **options), (x(4, 3),), over_batch, weights)


def with_state(pair, *args):
    layer, state = pair
    return layer(*args, state)


def tied(key):
    a, b = jax.random.split(key)
    pair = (nn.Embedding(4, 3, key=a), nn.Linear(3, 4, use_bias=False, key=b))
    return nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight)


def run_tied(shared, token):
    embedding, linear = shared()
    return linear(embedding(token))


class Counting(nn.StatefulLayer):
    count: nn.StateIndex
    scale: jax.Array

    def __init__(self, key):
        self.count = nn.StateIndex(jnp.array(2.0))
        self.scale = jax.random.normal(key, (3,))

    def __call__(self, x, state, *, key=None):
        n = state.get(self.count)
        return x * self.scale * n, state.set(self.count, n + 1)


class OnlyWeights(nn.StatefulLayer):
    w: jax.Array

    def __call__(self, x, state, *, key=None):
        return x * self.w, state

    def is_stateful(self):
        return False


def sequence_of_all_sorts(key):
    a, b, c = jax.random.split(key, 3)
    norm = nn.SpectralNorm(nn.Linear(3, 3, key=a), "weight", key=b)
    return nn.Sequential([norm, Counting(c), nn.Lambda(jnp.tanh), nn.Linear(3, 2, key=b), nn.Identity()])


def index_and_state(key):
    index = nn.StateIndex((jax.random.normal(key, (3,)), jnp.array(1.5)))
    return nn.delete_init_state(index), nn.State(index)


def read_index(pair, x):
    index, state = pair
    a, b = state.get(index)
    return x * a + b, state.set(index, (a + 1, b))


def convolution(cls, dims, **options):
    return Example(lambda key: cls(in_channels=2, out_channels=4, key=key, **options), (x(2, *([5] * dims)),))


def pool(cls, dims, *args, **options):
    return Example(lambda key: cls(*args, **options), (x(2, *([4] * dims)),), weights=False)


def attention(**options):
    return Example(
        lambda key: nn.MultiheadAttention(2, 4, key=key, **options),
        (x(3, 4), x(3, 4) * 2, x(3, 4) + 1, jnp.tril(jnp.ones((3, 3), bool))),
    )


DROP = (x(3), jax.random.key(3))
STATE = ((x(3), x(4)), (x(4) / 2, x(4)))

EXAMPLES: dict[type, list[Example]] = {
    nn.Linear: [
        Example(lambda key: nn.Linear(3, 4, key=key), (x(3),)),
        Example(lambda key: nn.Linear(3, 4, use_bias=False, key=key), (x(3),)),
        Example(lambda key: nn.Linear("scalar", 4, key=key), (x(),)),
        Example(lambda key: nn.Linear(3, "scalar", key=key), (x(3),)),
    ],
    nn.MLP: [
        Example(lambda key: nn.MLP(3, 2, 4, 2, key=key), (x(3),)),
        Example(lambda key: nn.MLP(3, "scalar", 4, 2, jnp.tanh, jnp.abs, use_final_bias=False, key=key), (x(3),)),
        Example(lambda key: nn.MLP(3, 2, 4, 1, nn.PReLU(0.1), key=key), (x(3),)),
    ],
    nn.Conv: [
        convolution(nn.Conv, 2, num_spatial_dims=2, kernel_size=3, stride=2, padding=1, dilation=1, groups=2),
    ],
    nn.Conv1d: [convolution(nn.Conv1d, 1, kernel_size=3, padding="SAME", padding_mode="CIRCULAR")],
    nn.Conv2d: [
        convolution(nn.Conv2d, 2, kernel_size=2),
        convolution(nn.Conv2d, 2, kernel_size=(2, 3), padding=((0, 1), (1, 0)), use_bias=False),
    ],
    nn.Conv3d: [convolution(nn.Conv3d, 3, kernel_size=2)],
    nn.ConvTranspose: [convolution(nn.ConvTranspose, 2, num_spatial_dims=2, kernel_size=3, stride=2)],
    nn.ConvTranspose1d: [convolution(nn.ConvTranspose1d, 1, kernel_size=2)],
    nn.ConvTranspose2d: [convolution(nn.ConvTranspose2d, 2, kernel_size=3, stride=2, output_padding=1)],
    nn.ConvTranspose3d: [convolution(nn.ConvTranspose3d, 3, kernel_size=2)],
    nn.Pool: [pool(nn.Pool, 2, init=0, operation=jax.lax.add, num_spatial_dims=2, kernel_size=2)],
    nn.AvgPool1d: [pool(nn.AvgPool1d, 1, 2)],
    nn.AvgPool2d: [pool(nn.AvgPool2d, 2, (2, 3), (1, 2))],
    nn.AvgPool3d: [pool(nn.AvgPool3d, 3, 2, use_ceil=True)],
    nn.MaxPool1d: [pool(nn.MaxPool1d, 1, 2)],
    nn.MaxPool2d: [pool(nn.MaxPool2d, 2, 2, 2, ((1, 0), (0, 1)))],
    nn.MaxPool3d: [pool(nn.MaxPool3d, 3, 2)],
    nn.AdaptivePool: [pool(nn.AdaptivePool, 2, (2, 3), 2, jnp.mean)],
    nn.AdaptiveAvgPool1d: [pool(nn.AdaptiveAvgPool1d, 1, 3)],
    nn.AdaptiveAvgPool2d: [pool(nn.AdaptiveAvgPool2d, 2, 3)],
    nn.AdaptiveAvgPool3d: [pool(nn.AdaptiveAvgPool3d, 3, (1, 2, 3))],
    nn.AdaptiveMaxPool1d: [pool(nn.AdaptiveMaxPool1d, 1, 3)],
    nn.AdaptiveMaxPool2d: [pool(nn.AdaptiveMaxPool2d, 2, 3)],
    nn.AdaptiveMaxPool3d: [pool(nn.AdaptiveMaxPool3d, 3, (1, 2, 3))],
    nn.Dropout: [
        Example(lambda key: nn.Dropout(0.3), DROP, lambda m, x, key: m(x, key=key), weights=False),
        Example(lambda key: nn.Dropout(0.3, inference=True), DROP, lambda m, x, key: m(x, key=key), weights=False),
    ],
    nn.Embedding: [
        Example(lambda key: nn.Embedding(5, 3, key=key), (jnp.array(2),)),
        Example(lambda key: nn.Embedding(weight=jax.random.normal(key, (5, 3))), (jnp.array(4),)),
    ],
    nn.RotaryPositionalEmbedding: [
        Example(lambda key: nn.RotaryPositionalEmbedding(4), (x(3, 4),), weights=False),
        Example(lambda key: nn.RotaryPositionalEmbedding(4, 100.0, jnp.float16), (x(3, 4),), weights=False),
    ],
    nn.GRUCell: [
        Example(lambda key: nn.GRUCell(3, 4, key=key), (x(3), x(4))),
        Example(lambda key: nn.GRUCell(3, 4, use_bias=False, key=key), (x(3), x(4))),
    ],
    nn.LSTMCell: [Example(lambda key: nn.LSTMCell(3, 4, key=key), (x(3), (x(4), x(4) / 2)))],
    nn.LayerNorm: [
        Example(lambda key: nn.LayerNorm((2, 3)), (x(2, 3) ** 2,)),
        Example(lambda key: nn.LayerNorm(3, use_weight=False, use_bias=False), (x(3) ** 2,), weights=False),
    ],
    nn.GroupNorm: [Example(lambda key: nn.GroupNorm(2, 4), (x(4, 3) ** 2,))],
    nn.RMSNorm: [Example(lambda key: nn.RMSNorm(3), (x(3),))],
    nn.BatchNorm: [
        batch_norm(mode="ema"),
        batch_norm(mode="batch"),
        batch_norm(mode="ema", channelwise_affine=False, momentum=0.5, weights=False),
        batch_norm(mode="batch", inference=True),
    ],
    nn.SpectralNorm: [
        Example(
            lambda key: nn.make_with_state(nn.SpectralNorm)(nn.Linear(3, 4, key=key), "weight", key=key),
            (x(3),),
            with_state,
        ),
        Example(
            lambda key: nn.make_with_state(nn.SpectralNorm)(
                nn.Conv2d(2, 3, 2, key=key), "weight", 3, inference=True, key=key
            ),
            (x(2, 4, 4),),
            with_state,
        ),
    ],
    nn.WeightNorm: [
        Example(lambda key: nn.WeightNorm(nn.Linear(3, 4, key=key)), (x(3),)),
        Example(lambda key: nn.WeightNorm(nn.Conv2d(2, 3, 2, key=key), axis=None), (x(2, 4, 4),)),
    ],
    nn.MultiheadAttention: [attention(), attention(use_query_bias=True, use_output_bias=True, vo_size=3, qk_size=5)],
    nn.Sequential: [
        Example(
            lambda key: nn.Sequential([nn.Linear(3, 4, key=key), nn.Lambda(jax.nn.relu), nn.Linear(4, 2, key=key)]),
            (x(3),),
        ),
        Example(lambda key: nn.make_with_state(sequence_of_all_sorts)(key), (x(3),), with_state),
    ],
    nn.Lambda: [
        Example(lambda key: nn.Lambda(jnp.tanh), (x(3),), weights=False),
        Example(lambda key: nn.Lambda(lambda x: x * 2), (x(3),), weights=False),
    ],
    nn.Identity: [Example(lambda key: nn.Identity(3, any="thing"), (x(3),), weights=False)],
    nn.PReLU: [Example(lambda key: nn.PReLU(0.25), (x(3),))],
    nn.Shared: [Example(tied, (jnp.array(1),), run_tied)],
    nn.State: [Example(lambda key: nn.make_with_state(Counting)(key)[1], (), lambda s: jax.tree.map(jnp.sin, s))],
    nn.StateIndex: [Example(index_and_state, (x(3),), read_index)],
    nn.StatefulLayer: [
        Example(lambda key: nn.make_with_state(Counting)(key), (x(3),), with_state),
        Example(lambda key: (OnlyWeights(jax.random.normal(key, (3,))), None), (x(3),), with_state),
    ],
}

CASES = [
    pytest.param(example, id=f"{cls.__name__}-{i}")
    for cls, examples in EXAMPLES.items()
    for i, example in enumerate(examples)
]
WITH_WEIGHTS = [case for case in CASES if case.values[0].weights]
MODES = pytest.mark.parametrize("jit", [graftax.jit, graftax.filter_jit], ids=["jit", "filter_jit"])


def public(kind):
    names = [name for name in dir(nn) if not name.startswith("_")]
    return {name for name in names if isinstance(getattr(nn, name), type) is (kind is type)}


def test_every_class_has_an_example():
    assert public(type) == {cls.__name__ for cls in EXAMPLES if EXAMPLES[cls]}
    assert public(None) == FUNCTIONS


def build(example):
    return example.make(jax.random.key(0))


def twin(model):
    """Equal, and no object of the original: a state that is used up is the twin's."""
    return jax.tree.map(lambda leaf: leaf, model)


def reweighted(model):
    return jax.tree.map(lambda leaf: leaf * 1.5 + 0.1 if eqx.is_inexact_array(leaf) else leaf, model)


def one_trace(jitted, run):
    """`run` traces once. Examples share functions, and a function's table serves all its wrappers."""
    jitted.clear_cache()
    before = jitted.cache_info().traces
    run()
    assert jitted.cache_info().traces == before + 1


def agree(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        if eqx.is_array(b):
            assert eqx.is_array(a) and a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
        else:
            assert a is b or a == b


def statics_of_equinox(node):
    """The leaves that are no arrays, and the values of static fields, of a tree of modules."""
    if isinstance(node, eqx.Module):
        for field in dataclasses.fields(node):
            value = getattr(node, field.name)
            yield from [value] if field.metadata.get("static", False) else statics_of_equinox(value)
        return
    children = jax.tree.leaves(node, is_leaf=lambda child: child is not node)
    if len(children) == 1 and children[0] is node:
        if not eqx.is_array(node):
            yield node
        return
    for child in children:
        yield from statics_of_equinox(child)


def without_partials(module):
    """Partials compare by identity, so those that `unflatten` makes equal no others."""
    return eqx.filter(module, lambda leaf: not isinstance(leaf, functools.partial))


def statics(obj):
    _, graphdef = graftax.flatten(obj)
    values = [row.value for row in graphdef.rows() if row.op.name == "static"]
    return {repr((type(value), value)) for value in values if value is not None}


@pytest.mark.parametrize("example", CASES)
def test_the_leaves_are_equinoxs_array_leaves_in_its_order(example):
    model = build(example)
    leaves, _ = graftax.flatten(model)
    theirs = jax.tree.leaves(eqx.filter(model, eqx.is_array))
    assert [id(leaf) for leaf in leaves] == [id(leaf) for leaf in theirs]
    assert bool(leaves) or not example.weights


@pytest.mark.parametrize("example", CASES)
def test_all_else_is_static(example):
    model = build(example)
    assert statics(model) == statics([*statics_of_equinox(model)])


@pytest.mark.parametrize("example", CASES)
def test_unflatten_makes_an_equal_module(example):
    model = build(example)
    leaves, graphdef = graftax.flatten(model)
    made = graftax.unflatten(graphdef, leaves)
    assert jax.tree.structure(made) == jax.tree.structure(model)
    assert eqx.tree_equal(without_partials(made), without_partials(model))


@pytest.mark.parametrize("example", CASES)
def test_a_module_that_went_through_jax_is_the_same_structure(example):
    model = build(example)
    assert graftax.flatten(twin(model))[1] == graftax.flatten(model)[1]
    assert hash(graftax.flatten(twin(model))[1]) == hash(graftax.flatten(model)[1])


@MODES
@pytest.mark.parametrize("example", CASES)
@pytest.mark.quick(0)
def test_forward_is_equinoxs_and_other_weights_do_not_retrace(example, jit):
    model = build(example)
    ours, theirs = jit(example.call), eqx.filter_jit(example.call)

    def run():
        for variant in (model, reweighted(model), twin(model)):
            expected = example.call(twin(variant), *example.args)
            agree(theirs(twin(variant), *example.args), expected)
            agree(ours(twin(variant), *example.args), expected)

    one_trace(ours, run)


@MODES
@pytest.mark.parametrize("example", WITH_WEIGHTS)
def test_a_changed_weight_is_used(example, jit):
    model = build(example)
    at = next(i for i, leaf in enumerate(jax.tree.leaves(model)) if eqx.is_inexact_array(leaf))
    changed = eqx.tree_at(
        lambda tree: jax.tree.leaves(tree)[at],
        model,
        replace_fn=lambda w: w * 3 + 0.5,
    )
    ours = jit(example.call)

    def run():
        before, after = ours(twin(model), *example.args), ours(twin(changed), *example.args)
        agree(after, example.call(twin(changed), *example.args))
        same = [np.array_equal(a, b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)]
        assert not all(same)

    one_trace(ours, run)


@MODES
@pytest.mark.parametrize("example", CASES)
def test_a_module_goes_in_and_out(example, jit):
    model = build(example)
    f = jit(lambda m: m)
    for variant in (model, reweighted(model)):
        out = f(variant)
        assert eqx.tree_equal(out, variant)
        assert graftax.flatten(out)[1] == graftax.flatten(variant)[1]
    assert f.cache_info().traces == 1


@MODES
@pytest.mark.quick(0)
def test_inference_mode_is_another_structure(jit):
    def run(model, x, key):
        return model(x, key=key)

    model = nn.Sequential([nn.Linear(3, 8, key=jax.random.key(0)), nn.Dropout(0.5)])
    quiet = nn.inference_mode(model)
    f = jit(run)
    for m in (model, quiet, model, nn.inference_mode(quiet, False)):
        agree(f(m, x(3), jax.random.key(1)), run(m, x(3), jax.random.key(1)))
    assert f.cache_info().traces == 2


@MODES
@pytest.mark.parametrize("mode", ["ema", "batch"])
def test_batch_norm_over_many_batches_and_then_in_inference(mode, jit):
    model, state = nn.make_with_state(nn.BatchNorm)(3, "batch", mode=mode)
    ours, theirs = jit(lambda pair, batch: over_batch(pair, batch)), eqx.filter_jit(over_batch)
    a = b = state
    for step in range(4):
        batch = x(4, 3) * (step + 1)
        (out, a), (expected, b) = ours((model, a), batch), theirs((model, b), batch)
        agree((out, a), (expected, b))
    quiet = nn.inference_mode(model)
    agree(ours((quiet, a), x(4, 3)), theirs((quiet, b), x(4, 3)))
    assert ours.cache_info().traces == 2


@MODES
@pytest.mark.quick(0)
def test_rope_does_not_keep_a_tracer_between_functions(jit):
    rope = nn.RotaryPositionalEmbedding(6)
    first, second = jit(lambda m, x: m(x)), jit(lambda m, x: m(x) * 2)
    expected = rope(x(5, 6))
    agree(first(rope, x(5, 6)), expected)
    agree(second(rope, x(5, 6)), expected * 2)
    agree(rope(x(5, 6)), expected)
