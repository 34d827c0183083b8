# SPDX-License-Identifier: Apache-2.0
"""Random programs over blocks: with `repeated=` they do what the plain function does, call after call."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from graftax._jit import repeated_parts

WIDTH = 3
STATE = {"scale": jnp.ones(()), "mode": "plain", "log": []}


class Block:
    """Its methods change its own arrays, numbers and containers, those of the object it is given, and globals."""

    def __init__(self, w):
        self.w, self.mean, self.calls, self.kind, self.history = w, jnp.zeros(WIDTH), 0, "tanh", []

    def __call__(self, x):
        self.calls += 1
        y = getattr(jnp, self.kind)(x @ self.w)
        self.mean = 0.5 * self.mean + jax.lax.stop_gradient(y)
        return x + y

    def beside(self, x, other):
        other.mean = other.mean + self.mean
        self.calls, other.calls = other.calls, self.calls
        return x * other.w.sum()

    def remember(self, x):
        self.history.append(x.sum())
        return x - self.history[0]

    def scaled(self, x):
        return x * STATE["scale"] if STATE["mode"] == "plain" else x + STATE["scale"]

    def log(self, x):
        note(x)
        return x

    def give(self, x):
        return {"block": self, "again": [self, x]}


def note(x):
    STATE["log"].append(x.sum())


METHODS = ["call", "call", "call", "call", "beside", "remember", "scaled", "give", "kind", "tie", "swap"]
OF_GLOBALS = ["scale", "mode", "scaled", "log"]  # a function under a derivative may not change what it names


def program(draw, count, length, names):
    """A list of steps: the name of a step, and which blocks it is about."""
    return [(draw.choice(names), draw.randrange(count), draw.randrange(count)) for _ in range(length)]


def run(steps, blocks, x):
    for name, i, j in steps:
        block, other = blocks[i], blocks[j]
        if name == "call":
            x = block(x)
        elif name == "beside":
            x = block.beside(x, other)
        elif name == "give":
            given = block.give(x)
            assert given["block"] is given["again"][0] is block
            x = given["again"][1]
        elif name == "kind":
            block.kind = "sin" if block.kind == "tanh" else "tanh"
        elif name == "tie":
            block.w = other.w
        elif name == "scale":
            STATE["scale"] = STATE["scale"] + 0.5
        elif name == "mode":
            STATE["mode"] = "other" if STATE["mode"] == "plain" else "plain"
        elif name == "swap":
            blocks[i], blocks[j] = other, block
        else:
            x = getattr(block, name)(x)
        x = jnp.tanh(x)
    return x.sum()


def outcomes(f, count):
    STATE.update(scale=jnp.ones(()), mode="plain", log=[])
    blocks = [Block(0.3 * jax.random.normal(key, (WIDTH, WIDTH))) for key in jax.random.split(jax.random.key(1), count)]
    blocks[-1].w = blocks[0].w
    results = [f(blocks, jnp.arange(3.0) / 3), f(blocks, jnp.arange(3.0) / 5)]
    return graftax.flatten((results, blocks, STATE))


@pytest.mark.quick(0)
@pytest.mark.parametrize(
    "repeated", ["auto", True, (Block, Block.beside, Block.remember, Block.scaled, Block.give, Block.log)]
)
@pytest.mark.parametrize("differentiated", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_random_programs(seed, differentiated, repeated, monkeypatch):
    monkeypatch.setattr(repeated_parts, "_FEWEST_EQUATIONS", 0)
    monkeypatch.setattr(repeated_parts, "_FEWEST_CALLS", 2)
    draw = random.Random(seed)
    count = draw.randint(2, 4)
    steps = program(draw, count, 14, METHODS if differentiated else METHODS + OF_GLOBALS)

    def step(blocks, x):
        if not differentiated:
            return run(steps, blocks, x)
        return graftax.value_and_grad(lambda x: run(steps, blocks, x))(x)

    leaves, structure = outcomes(graftax.jit(lambda blocks, x: step(blocks, x), repeated=repeated), count)
    expected, expected_structure = outcomes(graftax.jit(lambda blocks, x: step(blocks, x)), count)
    assert structure == expected_structure
    for ours, plain in zip(leaves, expected, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-5)
