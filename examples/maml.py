# SPDX-License-Identifier: Apache-2.0
"""MAML with a plain class: learns where to begin, through steps on a copy of the model: `python examples/maml.py`."""

import jax
import jax.numpy as jnp
import optax

import graftax


class Linear:
    def __init__(self, key, inputs, outputs):
        self.w, self.b = jax.random.normal(key, (inputs, outputs)) / inputs**0.5, jnp.zeros(outputs)

    def __call__(self, x):
        return x @ self.w + self.b


class Model:
    def __init__(self, key, size=32):
        keys = jax.random.split(key, 3)
        self.layers = [Linear(keys[0], 1, size), Linear(keys[1], size, size), Linear(keys[2], size, 1)]
        self.activation = jnp.tanh

    def __call__(self, x):
        *layers, last = self.layers
        for layer in layers:
            x = self.activation(layer(x))
        return last(x)


def loss_of(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def adapted(model, x, y, steps=1, rate=0.05):
    """A copy of the model, a few steps on."""
    model = graftax.copy(model)
    inner = graftax.optimizer(optax.sgd(rate), model)
    for _ in range(steps):
        inner.update(model, graftax.grad(loss_of)(model, x, y))
    return model


def task(key):
    """A sine of some amplitude and phase: points to adapt to, and points to be judged by."""
    keys = jax.random.split(key, 3)
    amplitude, phase = jax.random.uniform(keys[0], (2,), minval=0.5, maxval=2.0)
    x = jax.random.uniform(keys[1], (2, 20, 1), minval=-3, maxval=3)
    return x, amplitude * jnp.sin(x + phase)


def meta_loss(model, keys):
    def after(key):
        (seen, judged), (y_seen, y_judged) = task(key)
        return loss_of(adapted(model, seen, y_seen), judged, y_judged)

    return graftax.vmap(after)(keys).mean()


@graftax.jit
def train(model, opt, keys):
    loss, grads = graftax.value_and_grad(meta_loss)(model, keys)
    opt.update(model, grads)
    return loss


def main():
    model = Model(jax.random.key(0))
    opt = graftax.optimizer(optax.adam(3e-3), model)
    judge = graftax.jit(meta_loss)
    unseen = jax.random.split(jax.random.key(2), 100)
    before = judge(model, unseen)
    for key in jax.random.split(jax.random.key(1), 400):
        train(model, opt, jax.random.split(key, 16))
    after = judge(model, unseen)
    assert after < 0.6 * before and train.cache_info().traces <= 1
    print(f"loss after one step on a new task: {before:.2f} before, {after:.2f} after meta-training")


if __name__ == "__main__":
    main()
