# SPDX-License-Identifier: Apache-2.0
"""A small transformer (Equinox), trained on text that ships with Python: `python examples/transformer.py`.

The embedding is one array in two places: it turns characters into vectors, and vectors into the logits of the next
character. `eqx.nn.Shared` keeps it one parameter with one gradient. The blocks stand in a list and are compiled as one,
so that `--blocks 24` does not take long to compile.
"""

import argparse
import pydoc_data.topics

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import graftax

CONTEXT, WIDTH, HEADS, BLOCKS = 64, 64, 4, 2


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    norms: list[eqx.nn.LayerNorm]

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=first)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, activation=jax.nn.gelu, key=second)
        self.norms = [eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)]

    def __call__(self, x):
        mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y, mask)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class Transformer(eqx.Module):
    tied: eqx.nn.Shared  # (embedding, its transpose as the last layer)
    positions: jax.Array
    blocks: list[Block]
    alphabet: str = eqx.field(static=True)

    def __init__(self, alphabet, key, blocks=BLOCKS):
        first, second, third, *keys = jax.random.split(key, 3 + blocks)
        embedding = eqx.nn.Embedding(weight=0.1 * jax.random.normal(first, (len(alphabet), WIDTH)))
        last = eqx.nn.Linear(WIDTH, len(alphabet), key=second)
        self.tied = eqx.nn.Shared((embedding, last), lambda pair: pair[1].weight, lambda pair: pair[0].weight)
        self.positions = 0.1 * jax.random.normal(third, (CONTEXT, WIDTH))
        self.blocks = [Block(k) for k in keys]
        self.alphabet = alphabet

    def __call__(self, tokens):
        embedding, last = self.tied()
        x = jax.vmap(embedding)(tokens) + self.positions[: len(tokens)]
        x, _ = graftax.scan(lambda x, block: (block(x), None), x, self.blocks)
        return jax.vmap(last)(x)


def loss_of(model, batch):
    """Mean cross entropy of the next character; batch: int32 (sequences, CONTEXT + 1)."""
    logits = jax.vmap(model)(batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


optimizer = optax.adam(3e-3)


@graftax.jit
def step(model, opt_state, batch):
    """One step of training. The model holds strings and functions, and goes in as it is."""
    loss, grads = graftax.value_and_grad(loss_of)(model, batch)
    updates, opt_state = optimizer.update(grads, opt_state)
    return eqx.apply_updates(model, updates), opt_state, loss


def text():
    """The help texts of Python's own `help()`, half a million characters."""
    return "".join(pydoc_data.topics.topics.values())


def train(steps, blocks=BLOCKS, seed=0):
    """Returns (model, losses)."""
    corpus = text()
    alphabet = "".join(sorted(set(corpus)))
    tokens = jnp.asarray([alphabet.index(c) for c in corpus[:200_000]], jnp.int32)
    key, model_key = jax.random.split(jax.random.key(seed))
    model = Transformer(alphabet, model_key, blocks)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    losses = []
    for _ in range(steps):
        key, use = jax.random.split(key)
        starts = jax.random.randint(use, (16,), 0, len(tokens) - CONTEXT - 1)
        batch = tokens[starts[:, None] + jnp.arange(CONTEXT + 1)]
        model, opt_state, loss = step(model, opt_state, batch)
        losses.append(float(loss))
    return model, losses


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--blocks", type=int, default=BLOCKS)
    given = options.parse_args()
    steps = given.steps
    model, losses = train(steps, given.blocks)
    embedding, last = model.tied()
    assert (embedding.weight == last.weight).all()
    assert losses[-1] < 3.3 < losses[0]  # a guess at random among a hundred characters costs 4.6
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} after {steps} steps, compiled {step.cache_info().traces} time(s)")


if __name__ == "__main__":
    main()
