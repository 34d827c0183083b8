# SPDX-License-Identifier: Apache-2.0
# pyright: basic
"""Plain Python classes: a layer used in two places, blocks that know their network, training in place."""

from typing import Any

import equinox as eqx
import flarejax
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from graftax._cli.demo.compare import BASELINE, Contender
from graftax._cli.demo.digits import CLASSES, PIXELS, score
from graftax._cli.demo.training import Jit, Step, default_jit, keeping_state, trained_by
from graftax._cli.demo.wrapper import wrapper_jit

TITLE = "plain Python classes, changed in place"


class Dense:
    """A linear layer."""

    def __init__(self, key: jax.Array, inputs: int, outputs: int) -> None:
        self.weight = jax.random.normal(key, (inputs, outputs)) / inputs**0.5
        self.bias = jnp.zeros(outputs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.weight + self.bias


class Block:
    """A residual block; `parent` leads back to the network, and `dense` may serve other blocks too."""

    def __init__(self, parent: "Network", dense: Dense) -> None:
        self.parent = parent
        self.dense = dense

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.parent.activation(self.dense(x))


class Network:
    """First and last block share one layer."""

    def __init__(self, key: jax.Array, width: int = 48) -> None:
        keys = jax.random.split(key, 4)
        shared = Dense(keys[0], width, width)
        self.name = "digits"
        self.activation = jax.nn.relu
        self.embed = Dense(keys[1], PIXELS, width)
        self.blocks = [Block(self, shared), Block(self, Dense(keys[2], width, width)), Block(self, shared)]
        self.head = Dense(keys[3], width, CLASSES)
        self.steps = jnp.zeros((), jnp.int32)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def layers(self) -> list[Dense]:
        """Each layer once, however many blocks use it."""
        return list(dict.fromkeys([self.embed, *(block.dense for block in self.blocks), self.head]))

    def params(self) -> list[tuple[jax.Array, jax.Array]]:
        return [(layer.weight, layer.bias) for layer in self.layers()]

    def set_params(self, params: list[tuple[jax.Array, jax.Array]]) -> None:
        for layer, (weight, bias) in zip(self.layers(), params, strict=True):
            layer.weight, layer.bias = weight, bias


class Optimizer:
    """An Optax transformation and its state."""

    def __init__(self, network: Network) -> None:
        self.transform = optax.adam(3e-3)
        self.state = self.transform.init(network.params())  # pyright: ignore[reportArgumentType]

    def update(self, network: Network, grads: Any) -> None:
        params: Any = network.params()
        updates, self.state = self.transform.update(grads, self.state, params)
        network.set_params(optax.apply_updates(params, updates))  # pyright: ignore[reportArgumentType]


def loss_and_accuracy(network: Network, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    return score(network(x), y)


def step(network: Network, optimizer: Optimizer, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One step: network and optimizer change, nothing but loss and accuracy is returned."""

    def from_params(params: Any) -> tuple[jax.Array, jax.Array]:
        network.set_params(params)
        return loss_and_accuracy(network, x, y)

    params = network.params()
    (loss, accuracy), grads = jax.value_and_grad(from_params, has_aux=True)(params)
    # `from_params` has left the tracers of the gradient there.
    network.set_params(params)
    optimizer.update(network, grads)
    network.steps = network.steps + 1
    return loss, accuracy


def start() -> tuple[Network, Optimizer]:
    """A fresh network and its optimizer."""
    network = Network(jax.random.key(0))
    return network, Optimizer(network)


class Trainer:
    """Calls the step and keeps nothing: the objects have changed. `jit` is `graftax.jit` unless given."""

    def __init__(self, jit: Jit | None = None) -> None:
        jit = default_jit(jit)
        self.network, self.optimizer = start()
        self._step = jit(step)
        self._test = jit(loss_and_accuracy)

    def step(self, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self._step(self.network, self.optimizer, x, y)

    def test(self, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self._test(self.network, x, y)


def by_hand() -> Step:
    """`jax.jit` over lists of arrays; the objects are a template that the trace fills in."""
    network, optimizer = start()
    params, state = network.params(), optimizer.state

    @jax.jit
    def compiled(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        network.set_params(params)
        optimizer.state = state
        loss, _ = step(network, optimizer, x, y)
        return network.params(), optimizer.state, loss

    return keeping_state(compiled, params, state)


def as_flarejax() -> Step:
    """The same objects as FlareJax modules, which keep references; they come back as new objects.

    FlareJax rebuilds no namedtuple, so the optimizer state travels as a list.
    """
    network, optimizer = start()
    # In place, since blocks and network refer to each other.
    for obj in (network, *network.blocks, *network.layers()):
        module: Any = type(type(obj).__name__, (type(obj), flarejax.Module), {})
        obj.__class__ = module
    state, treedef = jax.tree.flatten(optimizer.state)

    @flarejax.filter_jit
    def compiled(network: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        optimizer.state = jax.tree.unflatten(treedef, state)
        loss, _ = step(network, optimizer, x, y)
        return network, jax.tree.leaves(optimizer.state), loss

    return keeping_state(compiled, network, state)


def contenders(jit: Jit | None = None) -> list[Contender]:
    """Every way to compile this step; `jit` takes graftax's place."""
    baked = "model becomes a constant"
    return [
        Contender("jax.jit", trained_by(Trainer, jax.jit), "no pytree"),
        Contender(BASELINE, by_hand),
        Contender("equinox.filter_jit", trained_by(Trainer, eqx.filter_jit), baked),
        Contender("nnx.jit", trained_by(Trainer, nnx.jit), "no pytree"),
        Contender("flarejax.filter_jit", as_flarejax),
        Contender("wrapper", trained_by(Trainer, wrapper_jit), baked),
        Contender("graftax.jit", trained_by(Trainer, default_jit(jit))),
    ]
