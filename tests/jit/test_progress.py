# SPDX-License-Identifier: Apache-2.0
"""`jit(..., progress=)`: what a call does that compiles."""

from __future__ import annotations

import io
import pickle
import re
import sys

import jax.numpy as jnp
import pytest

import graftax

PARTS = ["recorded", "traced", "lowered", "compiled"]


def test_each_part_of_a_first_call_is_told_once_and_nothing_after_it():
    reports = []

    @graftax.jit(progress=lambda part, seconds: reports.append((part, seconds)))
    def step(state, x):
        state["w"] = state["w"] + jnp.ones((3, 7))[0, 0] * x
        return state

    state = {"w": jnp.ones(3)}
    step(state, jnp.ones(3))
    assert [part for part, _ in reports] == PARTS
    assert all(seconds > 0 for _, seconds in reports)
    step(state, jnp.ones(3))
    assert len(reports) == 4
    step({"w": jnp.ones(3), "new": 1}, jnp.ones(3))
    assert [part for part, _ in reports[4:]] == ["recorded", "traced", "lowered", "reused"]
    step({"w": jnp.ones(3), "new": jnp.ones(1)}, jnp.ones(3))
    assert [part for part, _ in reports[8:]] == PARTS


def test_functions_in_each_other_are_told_apart():
    reports = []

    @graftax.jit(progress=lambda part, seconds: reports.append(f"inner {part}"))
    def inner(x):
        return x * 2

    @graftax.jit(progress=lambda part, seconds: reports.append(f"outer {part}"))
    def outer(x):
        return inner(x) + 1

    outer(jnp.ones(5))
    assert [text for text in reports if text.startswith("outer")] == [f"outer {part}" for part in PARTS]


def test_a_call_that_fails_leaves_nothing_behind():
    reports = []

    @graftax.jit(progress=lambda part, seconds: reports.append(part))
    def step(x, fails):
        if fails:
            raise ValueError("no")
        return x + 3

    with pytest.raises(ValueError, match="no"):
        step(jnp.ones(2), True)
    assert reports == ["recorded", "failed"]
    step(jnp.ones(2), False)
    assert reports == ["recorded", "failed", *PARTS]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_it_is_printed_to_the_standard_error(monkeypatch, capsys):
    graftax.jit(lambda x: x * 5, progress=True)(jnp.ones(3))
    lines = capsys.readouterr().err.splitlines()
    assert [re.sub(r"[\d.]+", "0", line) for line in lines] == [
        "<lambda>: recorded in 0 s",
        "<lambda>: traced in 0 s",
        "<lambda>: lowered in 0 s",
        "<lambda>: compiled in 0 s; 0 s in all",
    ]
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    graftax.jit(lambda x: x * 6, progress=True)(jnp.ones(3))
    assert "<lambda>: compiling …" in terminal.getvalue()
    assert terminal.getvalue().endswith("s in all\n")


def module_level(x):
    return x + 1


def test_it_goes_with_the_other_options():
    reports = []
    step = graftax.jit(lambda x: x * 7, check=True, progress=lambda part, seconds: reports.append(part))
    assert step(jnp.ones(2)).tolist() == [7.0, 7.0]
    assert reports == PARTS
    quiet = graftax.jit(module_level, progress=True)
    assert pickle.loads(pickle.dumps(quiet))(jnp.ones(2)).tolist() == [2.0, 2.0]
