# SPDX-License-Identifier: Apache-2.0
"""How often loops and branches trace what they call: not once more for each level around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import graftax

Step = Callable[[Any], Any]


class Traces:
    count = 0  # of a class: no part of any state


def scanned(inner: Step) -> Step:
    return lambda v: graftax.scan(lambda c, _: (inner(c), None), v, length=2)[0]


def fori(inner: Step) -> Step:
    return lambda v: graftax.fori_loop(0, 2, lambda _, c: inner(c), v)


def whiled(inner: Step, max_steps: int | None = None) -> Step:
    def loop(v: Any) -> Any:
        def step(s: Any) -> Any:
            return {"i": s["i"] + 1, "v": inner(s["v"])}

        return graftax.while_loop(lambda s: s["i"] < 2, step, {"i": 0, "v": v}, max_steps=max_steps)["v"]

    return loop


def bounded(inner: Step) -> Step:
    return whiled(inner, 3)


def branched(inner: Step) -> Step:
    return lambda v: graftax.cond(v > -1, inner, lambda v: v, v)


def mapped(inner: Step) -> Step:
    return lambda v: graftax.map(lambda x: inner(x), jnp.stack([v, v]))[0]


def differentiated(inner: Step) -> Step:
    def level(v: Any) -> Any:
        def step(c: Any, _: Any) -> Any:
            return c + graftax.value_and_grad(inner)(c)[0] * 0, None

        return graftax.scan(step, v, length=2)[0]

    return level


def nested(level: Callable[[Step], Step], depth: int, state: dict[str, Any]) -> Step:
    def innermost(v: Any) -> Any:
        state["n"] = state["n"] + 1
        Traces.count += 1
        return v

    step: Step = innermost
    for _ in range(depth):
        step = level(step)
    return step


@pytest.mark.quick(0)
@pytest.mark.parametrize("level", [scanned, fori, whiled, bounded, branched, mapped, differentiated])
@pytest.mark.parametrize("jit", [lambda f: f, graftax.jit])
def test_a_change_of_captured_state_costs_one_trace_a_level(level: Any, jit: Any):
    traces: list[int] = []
    for depth in (1, 2, 3, 4):
        state = {"n": jnp.zeros(())}
        Traces.count = 0
        jit(nested(level, depth, state))(jnp.ones(()))
        assert state["n"] == (1 if level is branched else 2**depth)
        traces.append(Traces.count)
    traces_per_level = 2 if level in (whiled, bounded) else 1  # the counter there turns out to be a number that changes
    assert traces == [1 + traces_per_level * depth for depth in (1, 2, 3, 4)]


def test_what_is_known_is_that_of_the_same_loop():
    """Loops of one code in one step differ in what they carry: each begins with its own."""

    def step(carry: Any, x: Any) -> Any:
        def inner(c: Any, _: Any) -> Any:
            return ({**c, "n": c["n"] + c["by"]}, jnp.zeros(c["by"] + 1))

        c, _ = graftax.scan(inner, {"n": 0, "by": 1}, length=2)  # n is traced
        d, y = graftax.scan(inner, {"n": 5, "by": 0}, length=3)  # n is not
        total["n"] = total["n"] + c["n"] + d["n"]
        return carry + d["n"], y.sum() + jnp.ones(d["n"]).sum()

    total = {"n": jnp.asarray(0)}
    carry, y = graftax.scan(step, jnp.asarray(0), length=2)
    assert (int(carry), y.tolist(), int(total["n"])) == (10, [5, 5], 14)


def test_a_loop_that_is_not_traced_again_leaves_what_the_next_one_knows():
    """A jitted function inside of a step is compiled once, also where the step is traced twice."""

    def count(c: Any, _: Any) -> Any:
        return {**c, "n": c["n"] + c["by"]}, None

    def loop(step_size: int, c: Any) -> Any:
        return graftax.scan(count, {"n": 4, "by": step_size, "c": c}, length=2)[0]

    jitted = graftax.jit(lambda c: loop(1, c)["n"])

    def step(carry: Any, _: Any) -> Any:
        total["n"] = total["n"] + jitted(carry)
        return carry, jnp.ones(loop(0, carry)["n"])

    total = {"n": jnp.asarray(0)}
    assert graftax.scan(step, jnp.asarray(0), length=2)[1].shape == (2, 4)
    assert int(total["n"]) == 12


def test_a_step_that_does_otherwise_in_its_second_trace_is_traced_with_nothing_known():
    class Turn:
        trace = 0

    def inner(c: Any, _: Any) -> Any:
        n = c["n"] + (Turn.trace == 1)
        return {"n": n}, jnp.ones(2 if Turn.trace == 1 else n)

    def step(carry: Any, _: Any) -> Any:
        Turn.trace += 1
        total["n"] = total["n"] + 1
        return carry, graftax.scan(inner, {"n": 2}, length=2)[1]

    total = {"n": jnp.asarray(0)}
    assert graftax.scan(step, jnp.asarray(0), length=3)[1].shape == (3, 2, 2)
    assert Turn.trace == 2
