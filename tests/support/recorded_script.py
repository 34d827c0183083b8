# SPDX-License-Identifier: Apache-2.0
"""A script whose recorded calls go wrong: `recorded_script.py FOLDER CASE`."""

from __future__ import annotations

import random
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import graftax

FOLDER, CASE = sys.argv[1], sys.argv[2]
SCALE = 1.0
SEEN: dict[str, Any] = {"count": 0, "sum": jnp.zeros(2), "names": ["first"]}
OPTIMIZER = optax.adam(1e-2)
warnings.simplefilter("ignore", graftax.ImpureCallWarning)
random.seed(3)
np.random.seed(4)


class Layer:
    def __init__(self, w: Any, parent: Any) -> None:
        self.w, self.parent, self.activation = w, parent, lambda x: jnp.log(x) * SCALE

    def __call__(self, x: Any) -> Any:
        return self.activation(x * self.w)


class Model:
    def __init__(self) -> None:
        w = jnp.ones(2)
        self.layers = [Layer(w, self), Layer(w, self)]
        self.steps = 0

    @graftax.record(dir=FOLDER)
    def loss(self, x: Any) -> Any:
        self.steps += 1
        return note(self.layers[0](x)).sum()


def note(x: Any) -> Any:
    """A helper that changes a global."""
    SEEN["count"] += 1
    SEEN["sum"] = SEEN["sum"] + x
    SEEN["names"].append("next")
    return x + SEEN["sum"]


def train(model: Model, state: Any, x: Any) -> Any:
    model.layers[0].w = model.layers[0].w - model.layers[0](x) * random.random()
    updates, state = OPTIMIZER.update(model.layers[1].w * np.random.rand(), state)
    model.layers[1].w = model.layers[1].w + updates
    return state, {"loss": note(model.layers[0].w).sum(), "shared": model.layers}


def make_counter() -> Any:
    total, calls = jnp.zeros(2), 0

    def count(x: Any) -> Any:
        nonlocal total, calls
        total, calls = total + jnp.sqrt(x), calls + 1
        return total * calls

    return count


def refuse(x: Any) -> Any:
    if SEEN["count"] > 1:
        raise ValueError(f"no more than {len(SEEN['names'])}")
    return note(x)


def drawn(x: Any) -> Any:
    def draw(y: Any) -> Any:
        return np.asarray(y * np.random.rand() / (4 - SEEN["count"]), np.float32)

    note(x)
    return jax.pure_callback(draw, jax.ShapeDtypeStruct((2,), "float32"), x)


def failing(x: Any) -> Any:
    def fail(y: Any) -> Any:
        if y[0] > 3:
            raise RuntimeError("the host says no")
        return y

    return jax.pure_callback(fail, jax.ShapeDtypeStruct((2,), "float32"), x) * 2


def doubled(w: Any, x: Any) -> Any:
    return w / x, w * x


RECORD = graftax.record(dir=FOLDER)
STEP = RECORD(graftax.jit(train, donate="state"))
COUNT = RECORD(make_counter())
REFUSE = RECORD(refuse)
DRAWN = RECORD(drawn)
FAILING = RECORD(failing)
DONATING = RECORD(graftax.jit(doubled, donate=0))
BY_VALUE = RECORD(graftax.filter_jit(lambda model, x: (model, model.layers[0](x))))


def main() -> None:
    global SCALE
    SCALE = 1.0 if CASE == "by_value" else 2.0  # of filter_jit, what is read is not known
    model, state, x = Model(), OPTIMIZER.init(jnp.ones(2)), np.ones(2, np.float32)
    w = jnp.ones(2)
    for i in range(5):
        x[:] = 4.0 - 1.5 * i  # negative at the end
        try:
            if CASE == "method":
                model.loss(x)
            elif CASE == "train":
                state, _ = STEP(model, state, x)
            elif CASE == "donating":
                w, _ = DONATING(w, jnp.asarray(x + 1 if i < 4 else x * 0))
            elif CASE == "by_value":
                model, _ = BY_VALUE(model, x)
            else:
                jax.block_until_ready({"counter": COUNT, "refuse": REFUSE, "drawn": DRAWN, "failing": FAILING}[CASE](x))
        except (ValueError, jax.errors.JaxRuntimeError):
            break


if __name__ == "__main__":
    main()
