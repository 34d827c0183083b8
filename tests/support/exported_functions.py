# SPDX-License-Identifier: Apache-2.0
"""Functions and classes that another process finds by name when it loads what test_export.py has exported."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


class Layer:
    def __init__(self, w: jax.Array, name: str = "layer") -> None:
        self.w, self.name, self.log = w, name, [0]

    def scale(self, x: jax.Array) -> jax.Array:
        return self.w * x


def relu(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, 0)


def step(
    model: dict[str, Any], x: jax.Array, rate: float = 0.5, /, *more: jax.Array, act: Any = relu, **named: Any
) -> Any:
    layer = model["layers"][0]
    layer.w = layer.w - rate * act(x) + sum(more)
    layer.log.append(layer.w.sum())
    layer.log[0] += 1
    named["out"] = layer
    return {"layer": layer, "name": layer.name.upper(), "named": named, "again": [layer.log, layer.log], "act": act}


def model() -> dict[str, Any]:
    layer = Layer(jnp.ones(2))
    return {"layers": [layer], "best": layer}
