# SPDX-License-Identifier: Apache-2.0
"""`jit(f, repeated=...)` with modules of Equinox and Flax NNX: as without the option."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import graftax

WIDTH = 4
X = jnp.linspace(-1.0, 1.0, 3 * WIDTH).reshape(3, WIDTH)


class Attending(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(2, WIDTH, key=first)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 8, 1, activation=jax.nn.relu, key=second)
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.dropout = eqx.nn.Dropout(0.5)

    def __call__(self, x, key):
        y = jax.vmap(self.norm)(x)
        return x + self.dropout(jax.vmap(self.mlp)(self.attention(y, y, y)), key=key)


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jnp.tanh(self.norm(self.linear(x))))


def loss_of_attending(blocks, keys):
    x = X
    for block, key in zip(blocks, keys, strict=True):
        x = block(x, key)
    return (x**2).mean()


def loss_of_normed(blocks, keys):
    x = X
    for block in blocks:
        x = block(x)
    return (x**2).mean()


def attending():
    return [Attending(key) for key in jax.random.split(jax.random.key(0), 3)]


def normed():
    rngs = nnx.Rngs(0)
    return [Normed(rngs) for _ in range(3)]


def arrays(value):
    leaves, structure = graftax.flatten(value)
    typed = [jnp.issubdtype(getattr(x, "dtype", None), jax.dtypes.prng_key) for x in leaves]
    return [np.asarray(jax.random.key_data(x) if t else x) for x, t in zip(leaves, typed, strict=True)], structure


@pytest.mark.quick(0)
@pytest.mark.parametrize(
    ("loss", "make", "repeated", "name"),
    [
        (loss_of_attending, attending, Attending, "Attending"),
        (loss_of_attending, attending, True, "Attending"),
        (loss_of_normed, normed, Normed, "Normed"),
        (loss_of_normed, normed, True, "Normed"),
    ],
)
@pytest.mark.parametrize("differentiated", [False, True])
def test_blocks_of_a_library(loss, make, repeated, name, differentiated):
    keys = list(jax.random.split(jax.random.key(5), 3))

    def step(blocks, keys):
        return graftax.value_and_grad(loss)(blocks, keys) if differentiated else loss(blocks, keys)

    def run(**options):
        f, blocks = graftax.jit(lambda blocks, keys: step(blocks, keys), **options), make()
        results = [f(blocks, keys), f(blocks, keys)]
        return arrays((results, blocks)), f

    (leaves, structure), f = run(repeated=repeated)
    (expected, expected_structure), _ = run()
    assert structure == expected_structure
    for ours, plain in zip(leaves, expected, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-5)
    assert f"{name}: traced once for 3 calls" in graftax.explain(f).variants[0].repeated
