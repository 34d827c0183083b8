# SPDX-License-Identifier: Apache-2.0
# pyright: basic
"""The data: scikit-learn's handwritten digits, 1797 images of 8 by 8 pixels, ten classes."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

PIXELS = 64
CLASSES = 10

Batch = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class Digits:
    """Pixels as float32 of mean 0 and variance 1, shape `(n, 64)`; labels as int32, shape `(n,)`."""

    train_x: np.ndarray
    train_y: np.ndarray
    test_x: jax.Array
    test_y: jax.Array

    def batches(self, size: int, seed: int) -> list[Batch]:
        """The training set in a shuffled order, cut into whole batches on the device."""
        order = np.random.default_rng(seed).permutation(len(self.train_x))
        starts = range(0, len(order) - size + 1, size)
        chosen = [order[start : start + size] for start in starts]
        return [(jnp.asarray(self.train_x[rows]), jnp.asarray(self.train_y[rows])) for rows in chosen]


def load() -> Digits:
    """Read the digits and split them; the test images take no part in the normalisation."""
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(pixels))
    pixels, labels = pixels[order].astype(np.float32), labels[order].astype(np.int32)
    cut = len(pixels) // 5
    train = pixels[cut:]
    pixels = (pixels - train.mean()) / train.std()
    return Digits(pixels[cut:], labels[cut:], jnp.asarray(pixels[:cut]), jnp.asarray(labels[:cut]))


def score(logits: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean cross-entropy and accuracy of `logits`, shape `(n, 10)`."""
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    return loss, (logits.argmax(-1) == y).mean()
