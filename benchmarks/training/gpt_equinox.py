# SPDX-License-Identifier: Apache-2.0
"""`examples/gpt.py` as it is written with Equinox: the tie is one table, given to both by `eqx.nn.Shared`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

TEXT = "the quick brown fox jumps over the lazy dog. " * 40
LETTERS = sorted(set(TEXT))
TOKENS = jnp.asarray([LETTERS.index(letter) for letter in TEXT])
CONTEXT = 16


class Embedding(eqx.Module):
    """One table, which reads tokens and, transposed, writes them."""

    table: jax.Array

    def __init__(self, key, size):
        self.table = 0.1 * jax.random.normal(key, (len(LETTERS), size))


class Norm(eqx.Module):
    scale: jax.Array

    def __init__(self, size):
        self.scale = jnp.ones(size)

    def __call__(self, x):
        return self.scale * x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


class Block(eqx.Module):
    heads: int = eqx.field(static=True)
    norms: list[Norm]
    qkv: jax.Array
    out: jax.Array
    up: jax.Array
    down: jax.Array

    def __init__(self, key, size, heads):
        keys = jax.random.split(key, 4)
        self.heads = heads
        self.norms = [Norm(size), Norm(size)]
        self.qkv = jax.random.normal(keys[0], (size, 3 * size)) / size**0.5
        self.out = 0.1 * jax.random.normal(keys[1], (size, size))
        self.up = jax.random.normal(keys[2], (size, 4 * size)) / size**0.5
        self.down = 0.1 * jax.random.normal(keys[3], (4 * size, size))

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x)) @ self.out
        return x + jax.nn.gelu(self.norms[1](x) @ self.up) @ self.down

    def attention(self, x):
        length, size = x.shape
        q, k, v = jnp.split((x @ self.qkv).reshape(length, self.heads, -1), 3, axis=-1)
        scores = jnp.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), v).reshape(length, size)


class Gpt(eqx.Module):
    tied: eqx.nn.Shared
    position: jax.Array
    blocks: Block
    norm: Norm

    def __init__(self, key, size=32, depth=4):
        keys = jax.random.split(key, depth + 2)
        reader, writer = Embedding(keys[0], size), Embedding(keys[0], size)
        self.tied = eqx.nn.Shared((reader, writer), lambda pair: pair[1].table, lambda pair: pair[0].table)
        self.position = 0.1 * jax.random.normal(keys[1], (CONTEXT, size))
        self.blocks = eqx.filter_vmap(lambda key: Block(key, size, heads=4))(keys[2:])
        self.norm = Norm(size)

    def __call__(self, tokens):
        reader, writer = self.tied()
        x = reader.table[tokens] + self.position
        arrays, static = eqx.partition(self.blocks, eqx.is_array)
        x, _ = jax.lax.scan(lambda x, block: (eqx.combine(block, static)(x), None), x, arrays)
        return self.norm(x) @ writer.table.T


def loss_of(model, batch):
    logits = jax.vmap(model)(batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def decay(params):
    def is_kept(path, _):
        names = jax.tree_util.keystr(path)
        return not ("norm" in names or "position" in names)

    return jax.tree_util.tree_map_with_path(is_kept, params)


TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3, mask=decay))


@eqx.filter_jit
def train(model, state, batch):
    loss, grads = eqx.filter_value_and_grad(loss_of)(model, batch)
    updates, state = TX.update(grads, state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state, loss


def main():
    model = Gpt(jax.random.key(0))
    state = TX.init(eqx.filter(model, eqx.is_array))
    losses = []
    for key in jax.random.split(jax.random.key(1), 150):
        starts = jax.random.randint(key, (16, 1), 0, len(TOKENS) - CONTEXT - 1)
        model, state, loss = train(model, state, TOKENS[starts + jnp.arange(CONTEXT + 1)])
        losses.append(float(loss))
    reader, writer = model.tied()
    assert (reader.table == writer.table).all(), "still tied"
    assert losses[-1] < 0.3 < 2 < losses[0]
    return losses


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.2f} before, {losses[-1]:.2f} after")
