# SPDX-License-Identifier: Apache-2.0
"""Packed state as the state of loops and branches: the functions are given the object inside, as in a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import graftax

JITS = pytest.mark.parametrize("jit", [lambda f: f, graftax.jit])


def net() -> dict[str, Any]:
    return {"w": jnp.ones(3), "b": jnp.zeros(2), "name": "net", "n": 0}


def train(net: dict[str, Any]) -> Any:
    net["w"], net["n"] = net["w"] + 1, net["n"] + 1
    net["b"] = net["b"] + net["w"].sum()
    return net["b"][0]


def new(net: dict[str, Any]) -> dict[str, Any]:
    return {**net, "w": net["w"] + 1}


def chained(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run(net: Any) -> Any:
        step(net)
        return net

    return run


LOOPS: dict[str, Callable[[Callable[[Any], Any], Any], Any]] = {
    "scan": lambda step, s: graftax.scan(lambda c, _: (step(c), None), s, length=3)[0],
    "fori": lambda step, s: graftax.fori_loop(0, 3, lambda _, c: step(c), s),
    "while": lambda step, s: graftax.while_loop(lambda c: c["w"].sum() < 10, step, s),
    "bounded": lambda step, s: graftax.while_loop(lambda c: c["w"].sum() < 10, step, s, max_steps=9),
}


@JITS
@pytest.mark.parametrize("loop", list(LOOPS))
def test_packed_state_that_is_carried_is_the_object_inside(loop: str, jit: Any):
    handle, plain = graftax.pack(net()), net()
    actual = jit(lambda h: LOOPS[loop](chained(train), h))(handle)
    expected = LOOPS[loop](chained(train), plain)
    assert actual["b"].tolist() == expected["b"].tolist() and actual["n"] == 3
    state = handle.unpack()
    assert state["w"].tolist() == [4, 4, 4] and state["n"] == 3 and state["name"] == "net"


@pytest.mark.parametrize("loop", list(LOOPS))
def test_packed_state_stays_where_each_step_makes_a_new_object(loop: str):
    handle = graftax.pack(net())
    assert LOOPS[loop](new, handle)["w"].tolist() == [4, 4, 4]
    assert handle.unpack()["w"].tolist() == [1, 1, 1]


@JITS
def test_packed_state_that_is_captured_is_state(jit: Any):
    handle = graftax.pack({"w": jnp.ones(3), "b": jnp.zeros(2)})

    def step(carry: Any, _: Any) -> Any:
        state = handle.unpack()
        state["w"] = state["w"] * 2
        handle.update(state)
        return carry + state["w"].sum(), None

    assert jit(lambda: graftax.scan(step, jnp.zeros(()), length=3)[0])() == 42
    assert handle.unpack()["w"].tolist() == [8, 8, 8]


def test_packed_state_that_is_changed_in_two_ways_is_an_error():
    handle = graftax.pack({"w": jnp.ones(3)})

    def step(carry: Any, _: Any) -> Any:
        carry["w"] = carry["w"] + 1
        handle.update({"w": carry["w"] * 2})
        return carry, None

    with pytest.raises(graftax.StructureError, match="both as its argument and through the handle itself"):
        graftax.scan(step, handle, length=2)


@pytest.mark.parametrize("pred", [True, False])
def test_branches_are_given_the_object_inside(pred: bool):
    handle = graftax.pack({"w": jnp.ones(3)})

    def double(net: Any) -> Any:
        net["w"] = net["w"] * 2
        return net["w"].sum()

    assert graftax.cond(pred, double, lambda net: net["w"].sum(), handle) == (6 if pred else 3)
    assert handle.unpack()["w"].tolist() == ([2, 2, 2] if pred else [1, 1, 1])
