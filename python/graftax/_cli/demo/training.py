# SPDX-License-Identifier: Apache-2.0
# pyright: basic
"""The loop that trains any of the three models, one epoch at a time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from graftax._cli.demo.digits import Digits

BATCH = 64
Step = Callable[[jax.Array, jax.Array], jax.Array]
Jit = Callable[[Callable[..., Any]], Callable[..., Any]]


class Trainer(Protocol):
    """A model with its optimizer; a step changes both."""

    def step(self, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Train on one batch; returns loss and accuracy."""
        ...

    def test(self, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Loss and accuracy without training."""
        ...


@dataclass(frozen=True)
class Epoch:
    """The means over one epoch's batches, and the accuracy on the test images after it."""

    number: int
    loss: float
    accuracy: float
    test_accuracy: float


def run(trainer: Trainer, epochs: int, digits: Digits) -> Iterator[Epoch]:
    """Train for `epochs` passes over the digits."""
    for number in range(1, epochs + 1):
        # Read back once an epoch: a step only launches its computation.
        history = [trainer.step(x, y) for x, y in digits.batches(BATCH, seed=number)]
        loss, accuracy = np.mean(jax.device_get(history), axis=0)
        _, test_accuracy = trainer.test(digits.test_x, digits.test_y)
        yield Epoch(number, float(loss), float(accuracy), float(test_accuracy))


def trained_by(new_trainer: Callable[[Jit], Trainer], jit: Jit) -> Callable[[], Step]:
    """What starts a trainer, for a comparison: its step, which gives the loss."""

    def begin() -> Step:
        trainer = new_trainer(jit)
        return lambda x, y: trainer.step(x, y)[0]

    return begin


def keeping_state(step: Callable[..., Any], *state: Any) -> Step:
    """A step that keeps its state: `step(*state, x, y)` returns the new state, and behind it the loss."""
    kept: Sequence[Any] = state

    def loss_of_batch(x: jax.Array, y: jax.Array) -> jax.Array:
        nonlocal kept
        *kept, loss = step(*kept, x, y)
        return loss

    return loss_of_batch


def default_jit(jit: Jit | None) -> Jit:
    """`jit`, or `graftax.jit` where none is given."""
    if jit is not None:
        return jit
    import graftax

    return graftax.jit
