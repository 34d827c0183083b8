# SPDX-License-Identifier: Apache-2.0
# pyright: basic
"""An Equinox model: immutable modules, and a step that returns new ones."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import flarejax
import jax
import optax
from flax import nnx

from graftax._cli.demo.compare import BASELINE, Contender
from graftax._cli.demo.digits import CLASSES, PIXELS, score
from graftax._cli.demo.training import Jit, Step, default_jit, trained_by
from graftax._cli.demo.wrapper import wrapper_jit

TITLE = "Equinox, returned by the step"


class Classifier(eqx.Module):
    """A network with two fields that are no arrays; only `name` is declared static."""

    layers: list[eqx.nn.Linear]
    norms: list[eqx.nn.LayerNorm]
    head: eqx.nn.Linear
    activation: Callable[[jax.Array], jax.Array]
    name: str = eqx.field(static=True, default="digits")

    def __init__(self, key: jax.Array, width: int = 48, depth: int = 3) -> None:
        keys = jax.random.split(key, depth + 1)
        sizes = [PIXELS] + [width] * depth
        self.layers = [eqx.nn.Linear(n, width, key=k) for n, k in zip(sizes[:-1], keys[:-1], strict=True)]
        self.norms = [eqx.nn.LayerNorm(width) for _ in self.layers]
        self.head = eqx.nn.Linear(width, CLASSES, key=keys[-1])
        self.activation = jax.nn.gelu

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = self.activation(norm(layer(x)))
        return self.head(x)


optimizer = optax.adam(3e-3)


def loss_and_accuracy(model: Classifier, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    return score(jax.vmap(model)(x), y)


def step(model: Classifier, state: Any, x: jax.Array, y: jax.Array) -> Any:
    """One step of Adam: the new model and optimizer state, loss and accuracy."""
    graded = eqx.filter_value_and_grad(loss_and_accuracy, has_aux=True)
    (loss, accuracy), grads = graded(model, x, y)
    # Optax takes trees of arrays: the activation, a function, is none.
    updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state, loss, accuracy


def start() -> tuple[Classifier, Any]:
    """A fresh model and its optimizer state."""
    model = Classifier(jax.random.key(0))
    return model, optimizer.init(eqx.filter(model, eqx.is_array))


class Trainer:
    """Rebinds model and state at each step. `jit` is `graftax.jit` unless given."""

    def __init__(self, jit: Jit | None = None) -> None:
        jit = default_jit(jit)
        self.model, self.state = start()
        self._step = jit(step)
        self._test = jit(loss_and_accuracy)

    def step(self, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        self.model, self.state, loss, accuracy = self._step(self.model, self.state, x, y)
        return loss, accuracy

    def test(self, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self._test(self.model, x, y)


def by_hand() -> Step:
    """`jax.jit` over the arrays alone; the rest is closed over and put back inside."""
    model, state = start()
    arrays, static = eqx.partition(model, eqx.is_array)

    @jax.jit
    def compiled(arrays: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        model, state, loss, accuracy = step(eqx.combine(arrays, static), state, x, y)
        return eqx.filter(model, eqx.is_array), state, loss, accuracy

    def loss_of_example(x: jax.Array, y: jax.Array) -> jax.Array:
        nonlocal arrays, state
        arrays, state, loss, _ = compiled(arrays, state, x, y)
        return loss

    return loss_of_example


def contenders(jit: Jit | None = None) -> list[Contender]:
    """Every way to compile this step; `jit` takes graftax's place."""
    refused = "the activation is no array"
    return [
        Contender("jax.jit", trained_by(Trainer, jax.jit), refused),
        Contender(BASELINE, by_hand),
        Contender("equinox.filter_jit", trained_by(Trainer, eqx.filter_jit)),
        Contender("nnx.jit", trained_by(Trainer, nnx.jit), refused),
        Contender("flarejax.filter_jit", trained_by(Trainer, flarejax.filter_jit), "takes its own modules only"),
        Contender("wrapper", trained_by(Trainer, wrapper_jit)),
        Contender("graftax.jit", trained_by(Trainer, default_jit(jit))),
    ]
