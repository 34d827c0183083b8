# SPDX-License-Identifier: Apache-2.0
"""A program that is traced under a debugger, or under coverage, is the same program."""

from __future__ import annotations

import sys
import types
from typing import Any

import jax.numpy as jnp

import graftax

ONE = jnp.ones(2)
WATCHED: list[str] = []
LINES = 0


def watch(frame: types.FrameType, event: str, _: Any) -> Any:
    """What a debugger does between two lines: code of its own, with state of its own."""
    global LINES
    LINES += 1
    WATCHED.append(f"{event} {frame.f_code.co_name} {ONE.shape}")
    return watch


def test_what_a_debugger_does_is_no_part_of_the_program() -> None:
    def doubled(x: Any) -> Any:
        return x * 2

    def step(model: Any) -> None:
        model["w"] = doubled(model["w"])

    compiled, model = graftax.jit(step), {"w": jnp.ones(2)}
    trace_function = sys.gettrace()
    sys.settrace(watch)
    try:
        for _ in range(3):
            compiled(model)
    finally:
        sys.settrace(trace_function)
    assert model["w"][0] == 8 and compiled.cache_info().traces == 1
    assert LINES == len(WATCHED) > 0 and any("doubled" in line for line in WATCHED)
    compiled(model)
    assert compiled.cache_info().traces == 1
