# SPDX-License-Identifier: Apache-2.0
"""Streams of random keys: by name, with counts that come back from wherever they are drawn."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import graftax


def numbers(key):
    return np.asarray(jax.random.key_data(key)).tolist()


def test_a_name_draws_by_its_own_count_and_no_other_name_changes_it():
    one, other = graftax.Streams(0, "params", "dropout"), graftax.Streams(0, "noise", "dropout", "data")
    one("params")
    drawn = [numbers(one("dropout")) for _ in range(3)]
    assert drawn == [numbers(other("dropout")) for _ in range(3)]
    assert len({str(x) for x in drawn}) == 3 and numbers(one("params")) not in drawn
    assert repr(one) == "Streams(params: 2, dropout: 3)"


def test_the_numbers_are_those_of_nnx():
    ours, theirs = graftax.Streams(params=0, dropout=jax.random.key(7)), nnx.Rngs(params=0, dropout=jax.random.key(7))
    for name in ("params", "dropout", "params"):
        assert numbers(ours(name)) == numbers(theirs[name]())
    forked, expected = ours.fork(), theirs.fork()
    assert numbers(forked("dropout")) == numbers(expected.dropout())
    rows, expected = ours.split(3), theirs.split(3)
    assert numbers(rows.keys["params"]) == numbers(expected.params.key[...])
    assert rows.counts["params"].shape == expected.params.count[...].shape == (3,)
    assert numbers(ours("params")) == numbers(theirs.params())


def drawing(streams, x):
    return x + jax.random.normal(streams("noise"))


def in_scan(streams, x):
    return graftax.scan(lambda x, _: (drawing(streams, x), None), x, length=3)[0]


def in_loop(streams, x):
    return graftax.fori_loop(0, 3, lambda _, x: drawing(streams, x), x)


def in_branch(streams, x):
    return graftax.cond(x > -100, lambda: drawing(streams, drawing(streams, drawing(streams, x))), lambda: x)


def in_gradient(streams, x):
    value, _ = graftax.value_and_grad(lambda x: drawing(streams, drawing(streams, x)))(x)
    return drawing(streams, value)


def in_checkpoint(streams, x):
    return graftax.checkpoint(lambda x: drawing(streams, drawing(streams, drawing(streams, x))))(x)


@pytest.mark.parametrize("inside", [in_scan, in_loop, in_branch, in_gradient, in_checkpoint])
@pytest.mark.parametrize("compile", [lambda f: f, graftax.jit], ids=["plain", "jit"])
def test_counts_come_back_from_transforms(inside, compile):
    plain, streams = graftax.Streams(0, "noise"), graftax.Streams(0, "noise")
    x = jnp.zeros(())
    for _ in range(3):
        x = drawing(plain, x)
    np.testing.assert_allclose(compile(inside)(streams, jnp.zeros(())), x, rtol=1e-6)
    assert int(streams.counts["noise"]) == 3 and numbers(streams("noise")) == numbers(plain("noise"))


@pytest.mark.quick(0)
def test_each_row_of_a_vmap_draws_its_own():
    streams = graftax.Streams(0, "params", "noise")
    rows = streams.split(4)
    assert repr(rows) == "Streams(params: 4 rows, noise: 4 rows)"
    drawn = graftax.jit(graftax.vmap(drawing, in_axes=(0, None)))(rows, jnp.zeros(()))
    assert len(set(drawn.tolist())) == 4 and rows.counts["noise"].tolist() == [1] * 4
    assert int(streams.counts["noise"]) == 1
    again = graftax.unstack(rows)
    assert [numbers(one("noise")) for one in again] == [numbers(one("noise")) for one in graftax.unstack(rows)]
    grid = streams.split((2, 3), "noise")
    drawn = graftax.vmap(graftax.vmap(drawing, in_axes=(0, None)), in_axes=(0, None))(grid, jnp.zeros(()))
    assert len(set(np.ravel(drawn).tolist())) == 6 and list(grid.keys) == ["noise"]


def test_a_change_in_a_vmap_of_shared_streams_is_refused_or_the_same_for_all_rows():
    streams = graftax.Streams(0, "noise")
    same = graftax.vmap(drawing, in_axes=(None, 0))(streams, jnp.zeros(3))
    assert len(set(same.tolist())) == 1 and int(streams.counts["noise"]) == 1


def test_layers_share_one_and_nothing_compiles_again():
    class Dropout:
        def __init__(self, streams):
            self.streams = streams

        def __call__(self, x):
            return x * jax.random.bernoulli(self.streams("dropout"), 0.5, x.shape)

    streams = graftax.Streams(0, "dropout")
    layers = [Dropout(streams), Dropout(streams)]
    run = graftax.jit(lambda layers, x: [layer(x) for layer in layers])
    seen = {str(numbers_) for _ in range(4) for numbers_ in run(layers, jnp.ones(64))}
    assert len(seen) == 8 and run.cache_info().traces == 1 and int(streams.counts["dropout"]) == 8
    assert layers[0].streams is layers[1].streams is streams


def test_they_are_copied_saved_and_loaded(tmp_path):
    streams = graftax.Streams(3, "noise", "data")
    streams("noise")
    copied = graftax.copy(streams)
    graftax.save(tmp_path / "streams.safetensors", streams)
    loaded = graftax.load(tmp_path / "streams.safetensors", graftax.Streams(0, "noise", "data"))
    assert numbers(streams("noise")) == numbers(copied("noise")) == numbers(loaded("noise"))
    assert numbers(streams("data")) == numbers(loaded("data"))


@pytest.mark.quick(0)
def test_old_keys_and_equinox():
    streams = graftax.Streams(params=jax.random.PRNGKey(0))
    layer = eqx.nn.Linear(2, 2, key=streams("params"))
    rows = graftax.vmap(lambda s: eqx.nn.Linear(2, 2, key=s("params")))(streams.split(3))
    assert layer.weight.shape == (2, 2) and rows.weight.shape == (3, 2, 2) and len(np.unique(rows.weight)) == 12


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: graftax.Streams(), TypeError, "takes names"),
        (lambda: graftax.Streams(0), TypeError, "takes names"),
        (lambda: graftax.Streams(None, "a", "b"), TypeError, "a, b have no seed"),
        (lambda: graftax.Streams("params", "dropout"), TypeError, "the first argument is str"),
        (lambda: graftax.Streams(params=jnp.ones(2)), TypeError, "params is of dtype float32"),
        (lambda: graftax.Streams(0, "params")("parms"), KeyError, "no stream 'parms'. It has params"),
    ],
)
def test_errors_say_what_to_write(make, error, text):
    with pytest.raises(error) as raised:
        make()
    assert text in str(raised.value)
