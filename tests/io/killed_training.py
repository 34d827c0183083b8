# SPDX-License-Identifier: Apache-2.0
"""A training that may be killed at any moment: it goes on where the newest checkpoint is, and writes each loss."""

import sys
import time

import jax
import jax.numpy as jnp
import optax

import graftax

STEPS, EVERY = 40, 4


class Batches:
    """What a process has for itself: where it is in its data."""

    def __init__(self):
        self.position = 0

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]

    def __next__(self):
        self.position += 1
        return jax.random.normal(jax.random.key(self.position), (8, 200))


class State:
    def __init__(self):
        self.w = jax.random.normal(jax.random.key(0), (200, 100))
        self.small = jnp.zeros(100)
        self.key = jax.random.key(7)
        self.optimizer = graftax.optimizer(optax.adamw(1e-2), {"w": self.w, "small": self.small})
        self.params = {"w": self.w, "small": self.small}


@graftax.jit(donate="all")
def step(state, batch):
    state.key, key = jax.random.split(state.key)
    noise = jax.random.normal(key, (100,))

    def loss(params):
        return jnp.mean((jnp.tanh(batch @ params["w"] + params["small"]) - noise) ** 2)

    value, grads = graftax.value_and_grad(loss)(state.params)
    state.optimizer.update(state.params, grads)
    return value


def main(folder, log):
    state, batches, losses = State(), Batches(), []
    del state.w, state.small
    with graftax.Checkpoints(folder, every=EVERY, keep=2) as checkpoints, open(log, "a") as log_file:
        restored_step = checkpoints.restore((state, losses), host=batches)
        for number in range(0 if restored_step is None else restored_step + 1, STEPS):
            loss = float(step(state, next(batches)))
            losses.append(loss)
            print(number, loss.hex(), len(losses), file=log_file, flush=True)
            checkpoints.save(number, (state, losses), host=batches)
            time.sleep(0.005)


if __name__ == "__main__":
    main(*sys.argv[1:])
