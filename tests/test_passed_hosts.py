# SPDX-License-Identifier: Apache-2.0
"""Host functions that a jitted function captures by their name: what they collect is no part of its structure."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import graftax


def passed_on(log: list[Any], again: list[Any]) -> dict[str, Any]:
    """Functions that pass a host function of their own on, by its name."""

    def host(v: Any) -> None:
        log.append(float(v))

    def other(v: Any) -> None:
        again.append(float(v))

    def plain(x: Any) -> Any:
        jax.debug.callback(host, x)
        return x + 1

    def partial(x: Any) -> Any:
        jax.debug.callback(functools.partial(host), x)
        return x + 1

    def in_branch(x: Any) -> Any:
        jax.lax.cond(x >= 0, lambda: jax.debug.callback(host, x), lambda: None)
        return x + 1

    def rebinds() -> None:
        nonlocal host
        host = other

    return {"plain": plain, "partial": partial, "in_branch": in_branch, "rebinds": rebinds}


@pytest.mark.parametrize("name", ["plain", "partial", "in_branch"])
def test_a_host_function_that_is_passed_by_its_name_does_not_compile_anew(name: str):
    log, again = list[Any](), list[Any]()
    made = passed_on(log, again)
    f = graftax.jit(made[name])
    for i in range(5):
        f(jnp.float32(i))
        jax.effects_barrier()
    assert log == [0, 1, 2, 3, 4] and f.cache_info().traces == 1
    made["rebinds"]()  # another function in that variable is another program
    for i in range(3):
        f(jnp.float32(i))
        jax.effects_barrier()
    assert log == [0, 1, 2, 3, 4] and again == [0, 1, 2]


def test_a_host_function_that_the_trace_calls_too_is_part_of_the_state():
    scale = [2.0]

    def host(v: Any) -> Any:
        return v * scale[0]

    def step(x: Any, both: bool) -> Any:
        out = jax.pure_callback(host, x, x)
        return (out, host(x)) if both else (out, out)

    f, x = graftax.jit(step), jnp.float32(1)
    for both in (False, True, False, True):
        for scale[0] in (2.0, 3.0):
            assert f(x, both) == (scale[0], scale[0])
