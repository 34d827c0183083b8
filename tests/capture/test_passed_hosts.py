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


# ---- methods


class Log:
    def __init__(self) -> None:
        self.values: list[float] = []

    def add(self, v: Any) -> None:
        self.values.append(float(v))


LOSSES: list[Any] = []
LOG = Log()


def to_a_list(x: Any) -> Any:
    jax.debug.callback(LOSSES.append, x)
    return x + 1


def to_an_object(x: Any) -> Any:
    jax.debug.callback(LOG.add, x, ordered=True)
    return x + 1


def in_order(x: Any) -> Any:
    graftax.io_callback(LOG.add, None, x, ordered=True)
    return x + 1


def in_a_branch(x: Any) -> Any:
    jax.lax.cond(x >= 0, lambda: jax.debug.callback(LOG.add, x), lambda: None)
    return x + 1


def in_a_loop(x: Any) -> Any:
    def step(c: Any, _: Any) -> Any:
        jax.debug.callback(LOSSES.append, x, ordered=True)
        return c + 1, None

    return jax.lax.scan(step, x, None, length=1)[0]


def with_an_inner_jit(x: Any) -> Any:
    def inner(x: Any) -> Any:
        jax.debug.callback(LOG.add, x)
        return x + 1

    return graftax.jit(inner)(x)


def twice(x: Any) -> Any:
    jax.debug.callback(LOG.add, x)
    jax.debug.callback(LOSSES.append, x)
    return x + 1


@pytest.mark.quick(7)
@pytest.mark.parametrize("f", [to_a_list, to_an_object, in_order, in_a_branch, in_a_loop, with_an_inner_jit, twice])
def test_a_method_that_is_passed_compiles_once_and_changes_the_callers_object(f: Any, monkeypatch: Any):
    LOSSES.clear()
    LOG.values.clear()
    jitted = graftax.jit(f)
    for i in range(4):
        assert jitted(jnp.float32(i)) == i + 1
        jax.effects_barrier()
    noted = [float(v) for v in (LOSSES or LOG.values)]
    assert noted == [0, 1, 2, 3] and jitted.cache_info().traces == 1


def test_another_object_in_its_place_is_found(monkeypatch: Any):
    jitted = graftax.jit(to_a_list)
    jitted.clear_cache()
    for i in range(3):
        monkeypatch.setitem(globals(), "LOSSES", fresh := [])
        for _ in range(2):
            jitted(jnp.float32(i))
        jax.effects_barrier()
        assert fresh == [i, i] and jitted.cache_info().traces == i + 1


def test_another_method_of_its_class_is_found(monkeypatch: Any):
    jitted, log = graftax.jit(to_an_object), []
    jitted(jnp.float32(0))
    monkeypatch.setattr(Log, "add", lambda self, v: log.append(float(v)))
    for i in range(2):
        jitted(jnp.float32(i))
    jax.effects_barrier()
    assert log == [0, 1]


def collecting() -> Any:
    """Functions with variables of an enclosing call, and what replaces these."""
    log, losses = Log(), list[Any]()

    def step(x: Any) -> Any:
        jax.debug.callback(losses.append, x)
        jax.lax.cond(x >= 0, lambda: jax.debug.callback(log.add, x), lambda: None)
        return x + 1

    def reading(x: Any) -> Any:
        jax.debug.callback(losses.append, x)
        return x + len(losses)

    def replace() -> tuple[Any, Any]:
        nonlocal log, losses
        log, losses = Log(), []
        return log, losses

    return step, reading, replace


def test_variables_are_as_globals():
    step, _, replace = collecting()
    jitted = graftax.jit(step)
    for round_ in range(3):
        log, losses = replace()
        for i in range(3):
            assert jitted(jnp.float32(i)) == i + 1
            jax.effects_barrier()
        assert log.values == losses == [0, 1, 2] and jitted.cache_info().traces == round_ + 1


def test_an_object_that_the_function_reads_too_is_state():
    _, reading, replace = collecting()
    jitted = graftax.jit(reading)
    _, losses = replace()
    with pytest.warns(graftax.LostChangeWarning, match="its host function list.append"):
        for i in range(3):
            jitted(jnp.float32(i))
    jax.effects_barrier()
    assert losses == []  # as the warning says


def through_a_function(x: Any) -> Any:
    def callback(f: Any, x: Any) -> None:
        f(x)

    callback(LOG.add, 2.0)
    return x + len(LOG.values)


def test_what_is_named_as_a_callback_of_jax_and_is_none_runs_in_the_trace():
    LOG.values.clear()
    jitted = graftax.jit(through_a_function)
    assert [float(jitted(jnp.float32(0))) for _ in range(3)] == [1, 2, 3] and LOG.values == [2, 2, 2]


# ---- what the host function changes, and the jitted function reads too

total: Any = 0.0
kept: dict[str, Any] = {}


def add(v: Any) -> None:
    global total
    total = total + v
    kept["v"] = kept["v"] + v


def made_inside(x: Any) -> Any:
    def host(v: Any) -> None:
        global total
        total = total + v
        kept["v"] = kept["v"] + v

    y = x * total + kept["v"]
    jax.debug.callback(host, x)
    return y


def made_outside(x: Any) -> Any:
    y = x * total + kept["v"]
    jax.debug.callback(add, x)
    return y


def through_a_lambda(x: Any) -> Any:
    y = x * total + kept["v"]
    jax.debug.callback(lambda v: add(v), x)
    return y


def below_grad(x: Any) -> Any:
    def loss(x: Any) -> Any:
        y = x * total + kept["v"]
        jax.debug.callback(add, x)
        return y

    return jax.value_and_grad(loss)(x)[0]


@pytest.mark.parametrize("step", [made_inside, made_outside, through_a_lambda, below_grad])
def test_a_host_function_changes_what_the_next_call_reads(step: Any):
    def run(step: Any) -> list[Any]:
        global total
        total, kept["v"] = jnp.zeros(()), jnp.ones(())
        answers = list[Any]()
        for i in range(4):
            answers.append(step(jnp.float32(i)).tolist())
            jax.effects_barrier()
            answers += [total.tolist(), kept["v"].tolist()]
            total = total + 10  # and a change outside
        return answers

    with pytest.warns(graftax.LostChangeWarning, match=r"seems to change global \w+(, global \w+)?, which \w+ uses"):
        given = run(graftax.jit(step))
    assert given == run(step)
