# SPDX-License-Identifier: Apache-2.0
# pyright: basic
"""A Flax NNX model: mutable modules with parameters, batch statistics and a random stream."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import flarejax
import jax
import optax
from flax import nnx

from graftax._cli.demo.compare import BASELINE, Contender
from graftax._cli.demo.digits import CLASSES, PIXELS, score
from graftax._cli.demo.training import Jit, Step, default_jit, keeping_state, trained_by
from graftax._cli.demo.wrapper import wrapper_jit

TITLE = "Flax NNX, changed in place"


class Classifier(nnx.Module):
    """Linear, batch norm and dropout: every call in training changes the model."""

    def __init__(self, rngs: nnx.Rngs, width: int = 48) -> None:
        self.first = nnx.Linear(PIXELS, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.05, rngs=rngs)
        self.head = nnx.Linear(width, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.dropout(nnx.relu(self.norm(self.first(x)))))


def loss_and_accuracy(model: Classifier, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    return score(model(x), y)


def step(model: Classifier, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One step in place: parameters, batch statistics, random stream and optimizer all change."""
    graded = nnx.value_and_grad(loss_and_accuracy, has_aux=True)
    (loss, accuracy), grads = graded(model, x, y)
    optimizer.update(model, grads)
    return loss, accuracy


def start() -> tuple[Classifier, nnx.Optimizer]:
    """A fresh model and its optimizer."""
    model = Classifier(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)


class Trainer:
    """Calls the step and keeps nothing: the modules have changed. `jit` is `graftax.jit` unless given."""

    def __init__(self, jit: Jit | None = None) -> None:
        jit = default_jit(jit)
        self.model, self.optimizer = start()
        self._step = jit(step)
        self._test = jit(loss_and_accuracy)

    def step(self, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self._step(self.model, self.optimizer, x, y)

    def test(self, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Without dropout, and with the statistics of the training in place of those of the batch.
        self.model.eval()
        result = self._test(self.model, x, y)
        self.model.train()
        return result


def returning_step(model: Any, optimizer: Any, x: jax.Array, y: jax.Array) -> Any:
    """The same step for a `jit` that loses mutations: what changed is returned."""
    loss, _ = step(model, optimizer, x, y)
    return model, optimizer, loss


def by_value(jit: Jit) -> Callable[[], Step]:
    """Modules in and modules out, as pytrees."""
    return lambda: keeping_state(jit(returning_step), *start())


def by_hand() -> Step:
    """Flax's own advice for small models: split outside, merge inside, `jax.jit` over the state."""
    graphdef, state = nnx.split(start())

    @jax.jit
    def compiled(state: Any, x: jax.Array, y: jax.Array) -> Any:
        model, optimizer = nnx.merge(graphdef, state)
        loss, _ = step(model, optimizer, x, y)
        return nnx.state((model, optimizer)), loss

    return keeping_state(compiled, state)


def contenders(jit: Jit | None = None) -> list[Contender]:
    """Every way to compile this step; `jit` takes graftax's place."""
    return [
        Contender("jax.jit", by_value(jax.jit)),
        Contender(BASELINE, by_hand),
        Contender("equinox.filter_jit", by_value(eqx.filter_jit)),
        Contender("nnx.jit", trained_by(Trainer, nnx.jit)),
        Contender("flarejax.filter_jit", by_value(flarejax.filter_jit), "takes its own modules only"),
        Contender("wrapper", by_value(wrapper_jit)),
        Contender("graftax.jit", trained_by(Trainer, default_jit(jit))),
    ]
