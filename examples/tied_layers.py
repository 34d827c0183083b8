# SPDX-License-Identifier: Apache-2.0
"""Plain Python classes with a shared layer and a back-reference, trained in place: `python examples/tied_layers.py`."""

import jax
import jax.numpy as jnp

import graftax


class Layer:
    def __init__(self, owner, key, activation):
        self.owner = owner  # a back-reference: the graph has a cycle
        self.activation = activation  # a string: static
        self.weight = 0.5 * jax.random.normal(key, (4, 4))

    def __call__(self, x):
        y = x @ self.weight
        return jnp.tanh(y) if self.activation == "tanh" else y


class Network:
    def __init__(self, key):
        first, last = jax.random.split(key)
        shared = Layer(self, first, "tanh")
        self.layers = [shared, shared, Layer(self, last, "linear")]  # one layer in two places

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Run:
    """The network and what is known of its training."""

    def __init__(self, network):
        self.network = network
        self.steps = jnp.asarray(0)  # a number that changes is an array: nothing compiles again
        self.best = jnp.asarray(jnp.inf, jnp.float32)  # with a dtype: JAX traces anew for a weak type


@graftax.jit
def train(run, x, y, rate=0.1):
    """One step of gradient descent. Only the loss is returned: `run` and its network change in place."""
    # Each weight is one leaf, however often its layer is used.
    weights, graphdef = graftax.flatten(run.network)

    def loss_of(weights):
        network = graftax.unflatten(graphdef, weights)
        return jnp.mean((network(x) - y) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(weights)
    run.network = graftax.unflatten(graphdef, [w - rate * g for w, g in zip(weights, grads, strict=True)])
    run.steps += 1
    run.best = jnp.minimum(run.best, loss)
    return loss


def main():
    x = jax.random.normal(jax.random.key(1), (64, 4))
    y = jnp.tanh(x[:, ::-1])
    run = Run(Network(jax.random.key(0)))
    before = train(run, x, y)
    for _ in range(200):
        loss = train(run, x, y)
    network = run.network
    assert network.layers[0] is network.layers[1], "still one layer in two places"
    assert network.layers[0].owner is network, "the back-reference leads to the network it belongs to"
    assert run.steps == 201 and run.best <= loss < before
    assert train.cache_info().traces <= 1
    print(f"loss {before:.3f} before, {loss:.3f} after {run.steps} steps, traced {train.cache_info().traces} time")


if __name__ == "__main__":
    main()
