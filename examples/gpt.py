# SPDX-License-Identifier: Apache-2.0
"""A small GPT of plain classes, with tied embeddings, trained with Optax: `python examples/gpt.py`."""

import jax
import jax.numpy as jnp
import optax

import graftax

TEXT = "the quick brown fox jumps over the lazy dog. " * 40
LETTERS = sorted(set(TEXT))
TOKENS = jnp.asarray([LETTERS.index(letter) for letter in TEXT])
CONTEXT = 16


class Embedding:
    """One table, which reads tokens and, transposed, writes them."""

    def __init__(self, key, size):
        self.table = 0.1 * jax.random.normal(key, (len(LETTERS), size))


class Norm:
    def __init__(self, size):
        self.scale = jnp.ones(size)

    def __call__(self, x):
        return self.scale * x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


class Block:
    def __init__(self, key, size, heads):
        keys = jax.random.split(key, 4)
        self.heads = heads  # a Python number: static
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


class Gpt:
    def __init__(self, key, size=32, depth=4):
        keys = jax.random.split(key, depth + 2)
        self.reader = self.writer = Embedding(keys[0], size)  # tied
        self.position = 0.1 * jax.random.normal(keys[1], (CONTEXT, size))
        blocks = [Block(key, size, heads=4) for key in keys[2:]]
        self.blocks = graftax.stack(blocks)  # one block, whose arrays have rows
        self.norm = Norm(size)

    def __call__(self, tokens):
        x = self.reader.table[tokens] + self.position
        x, _ = graftax.scan(lambda x, block: (block(x), None), x, self.blocks)  # traced once for all blocks
        return self.norm(x) @ self.writer.table.T


def loss_of(model, batch):
    logits = jax.vmap(model)(batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


@graftax.jit
def train(model, opt, batch):
    loss, grads = graftax.value_and_grad(loss_of)(model, batch)
    opt.update(model, grads)
    return loss


def main():
    model = Gpt(jax.random.key(0))
    decay = graftax.labels({Norm: False, "position": False, "**": True})
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3, mask=decay))
    opt = graftax.optimizer(tx, model)
    losses = []
    for key in jax.random.split(jax.random.key(1), 150):
        starts = jax.random.randint(key, (16, 1), 0, len(TOKENS) - CONTEXT - 1)
        losses.append(float(train(model, opt, TOKENS[starts + jnp.arange(CONTEXT + 1)])))
    assert model.reader is model.writer, "still tied"
    assert sum("table" in name for name in opt.parameters(model)) == 1, "one state for both"
    assert losses[-1] < 0.3 < 2 < losses[0] and train.cache_info().traces <= 1
    return losses


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.2f} before, {losses[-1]:.2f} after")
