# SPDX-License-Identifier: Apache-2.0
"""A Flax NNX model with BatchNorm and Dropout, changed in place: `python examples/nnx_training.py`."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import graftax


class Classifier(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(8, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.last = nnx.Linear(32, 2, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(nnx.relu(self.norm(self.first(x)))))


class Training:
    """A plain object that holds what a step changes, and a log of what it saw."""

    def __init__(self, seed):
        self.model = Classifier(nnx.Rngs(seed))
        self.optimizer = nnx.Optimizer(self.model, optax.adam(1e-2), wrt=nnx.Param)
        self.seen = jnp.asarray(0)


def loss_of(model, x, labels):
    return optax.softmax_cross_entropy_with_integer_labels(model(x), labels).mean()


@graftax.jit
def step(training, x, labels):
    """One step: statistics of BatchNorm, the key of Dropout, parameters, moments and the count change in place."""
    loss, grads = graftax.value_and_grad(loss_of)(training.model, x, labels)
    training.optimizer.update(training.model, nnx.state(grads, nnx.Param))
    training.seen += len(x)
    return loss


@graftax.jit
def accuracy(model, x, labels):
    return (model(x).argmax(-1) == labels).mean()


def data(seed=0):
    """Two classes: inside and outside of a shell."""
    x = jax.random.normal(jax.random.key(seed), (512, 8))
    return x, ((x**2).sum(-1) > 7).astype(jnp.int32)


def train(steps, seed=0):
    training, (x, labels) = Training(seed), data(seed)
    losses = [float(step(training, x, labels)) for _ in range(steps)]
    return training, losses


def main():
    training, losses = train(150)
    assert training.seen == 150 * 512 and step.cache_info().traces <= 1
    assert float(abs(training.model.norm.mean[...]).sum()) > 0  # the statistics moved
    training.model.eval()  # a static attribute: another program
    right = float(accuracy(training.model, *data()))
    assert losses[-1] < losses[0] and right > 0.8
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}, {right:.0%} right")


if __name__ == "__main__":
    main()
