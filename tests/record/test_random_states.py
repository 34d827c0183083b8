# SPDX-License-Identifier: Apache-2.0
"""Recorded calls whose traces or callbacks draw from `random` and `np.random`: a replay draws the same numbers."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from graftax._record.replay import RecordedCalls

SETTINGS = {"order": 0}


def jittered(x: Any) -> Any:
    return x * random.random() + np.random.rand()


def jittered_before_a_read(x: Any) -> Any:
    jitter = random.random()
    return x * jitter + read_late()


def read_late() -> Any:
    return SETTINGS["order"]


def jittered_on_the_host(x: Any) -> Any:
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    noise = jax.pure_callback(lambda: np.float32(np.random.rand()) + np.zeros(shape.shape, shape.dtype), shape)
    return x * random.random() + noise


def too_far(x: Any) -> Any:
    raise ValueError(f"drawn: {random.random()}")


def log_of_drawn(x: Any) -> Any:
    return jnp.log(random.random() - x)


FAILS = {"now": False}


def fails_on_the_host(x: Any) -> Any:
    def host(x: Any) -> Any:
        if FAILS["now"]:
            raise ValueError(f"given {x[0]}")
        return x

    return jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x * random.random())


def saved(function: Any, folder: Path, sizes: list[int]) -> RecordedCalls:
    recorder = graftax.record(graftax.jit(function, warn_impure=False), last=len(sizes), dir=folder)
    for size in sizes:
        recorder(jnp.ones(size))
    recorder.save(folder / "call.record")
    return RecordedCalls(folder / "call.record")


@pytest.mark.parametrize("function", [jittered, jittered_before_a_read, jittered_on_the_host])
def test_each_shape_has_the_numbers_that_its_own_trace_has_drawn(function: Any, tmp_path: Path):
    recorded = saved(function, tmp_path, [2, 2, 3, 2, 3])
    state = random.getstate()
    for number in range(len(recorded)):
        assert recorded.run(number).differences == []
    assert random.getstate() == state  # that of this process


def jittered_unless_forbidden(x: Any) -> Any:
    if os.path.exists("forbidden"):
        raise ValueError("forbidden")
    return x * random.random() + GAIN


GAIN = jnp.ones(())


def test_a_hit_whose_function_raises_when_it_is_traced_again_is_told_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    recorded = saved(jittered_unless_forbidden, tmp_path, [2, 2])
    monkeypatch.chdir(tmp_path)
    Path("forbidden").touch()
    jax.clear_caches()  # otherwise JAX has the trace of the recorded call
    gain = jnp.full((), 2.0)
    monkeypatch.setitem(globals(), "GAIN", gain)
    state = random.getstate()
    outcome = recorded.run(1)
    assert outcome.raised == "ValueError: forbidden"
    assert outcome.differences
    assert random.getstate() == state and gain is GAIN


@pytest.mark.filterwarnings("ignore::graftax.RecordedCallWarning")
def test_the_cause_has_the_number_that_was_drawn(tmp_path: Path):
    recorded = saved(log_of_drawn, tmp_path, [2, 3, 2])
    first, second, again = (recorded.where(i).cause for i in range(3))
    assert first is not None and second is not None and again is not None
    assert first.operands == again.operands != second.operands


def test_a_callback_that_raises_is_given_what_the_newest_trace_has_drawn(tmp_path: Path):
    function = graftax.jit(fails_on_the_host, warn_impure=False)
    recorder = graftax.record(function, nonfinite=False, dir=tmp_path)
    for size in (2, 3):
        jax.block_until_ready(recorder(jnp.ones(size)))
    FAILS["now"] = True
    try:
        with (
            pytest.warns(graftax.RecordedCallWarning),
            pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="given"),
        ):
            jax.block_until_ready(recorder(jnp.ones(3)))
            recorder.flush()
        outcome = RecordedCalls(recorder.files[0]).run(2)
    finally:
        FAILS["now"] = False
    assert outcome.differences == [] and "given" in outcome.raised


def test_a_trace_that_raises_draws_the_same_numbers(tmp_path: Path):
    recorder = graftax.record(graftax.jit(too_far, warn_impure=False), dir=tmp_path)
    with pytest.warns(graftax.RecordedCallWarning), pytest.raises(ValueError, match="drawn"):
        recorder(jnp.ones(2))
    outcome = RecordedCalls(recorder.files[0]).run(0)
    assert outcome.differences == [] and outcome.raised.startswith("ValueError: drawn")
