# SPDX-License-Identifier: Apache-2.0
"""What is trained in the tests of the optimizer, and with which transformations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

import graftax
from zoo import Box, f32

MATRICES = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
GROUPS = lambda params: jax.tree.map(lambda x: "slow" if x.size > 1 else "fast", params)

TRANSFORMATIONS: dict[str, Callable[[], Any]] = {
    "sgd, momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.adamw(1e-2),
    "clipped, scheduled": lambda: optax.chain(
        optax.clip_by_global_norm(0.5), optax.adam(optax.linear_schedule(1e-1, 1e-3, 4))
    ),
    "masked decay": lambda: optax.chain(optax.add_decayed_weights(1e-1, mask=MATRICES), optax.sgd(0.1)),
    "two transforms": lambda: optax.multi_transform({"slow": optax.sgd(1e-2), "fast": optax.adam(0.1)}, GROUPS),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(1e-1, 1e-3, 9)),
    "every second step": lambda: optax.MultiSteps(optax.adam(1e-1), 2),
    "guarded": lambda: optax.apply_if_finite(optax.rmsprop(1e-2), 3),
    "lion": lambda: optax.lion(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2),
    "schedule free": lambda: optax.contrib.schedule_free_adamw(1e-2, warmup_steps=2),
    "prodigy": lambda: optax.contrib.prodigy(1e-1),
    "polyak": lambda: optax.polyak_sgd(1.0),
    "line search": lambda: optax.lbfgs(linesearch=None),
}


def floating(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size > 0


def loss(model: Any) -> jax.Array:
    terms = [((leaf.astype(jnp.float32) - 0.3) ** 2).sum() for leaf in graftax.flatten(model)[0] if floating(leaf)]
    return sum(terms[1:], start=terms[0])


def assert_same(leaves: list[Any], expected: list[Any]) -> None:
    for a, b in zip(leaves, expected, strict=True):
        assert a.dtype == b.dtype
        if floating(a):
            np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-5, atol=1e-6)


def layers() -> Any:
    layer = Box(w=f32(1, 2), name="tied")
    return Box(first=layer, second=layer, b=f32(1), none=None)
