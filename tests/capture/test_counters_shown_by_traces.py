# SPDX-License-Identifier: Apache-2.0
"""Numbers that only a trace shows to change: it is repeated within the call, unless that would do things twice."""

import contextvars
import functools
import gc
import logging
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax

ONCE = 1 if sys.version_info >= (3, 12) else 2  # compilations, where the trace alone shows that a number changes


class Counted:
    def __init__(self):
        self.w, self.steps, self.rate = jnp.ones(3), 0, 1.0


def by_get_with_a_default(state):
    state["steps"] = state.get("steps", 0) + 1
    return state, state["w"] * state["steps"]


def by_setdefault(state):
    state.setdefault("steps", 0)
    state["steps"] += 1
    return state, state["w"] * state["steps"]


def by_a_name_that_is_given(state, name="steps"):
    setattr(state, name, getattr(state, name) + 1)
    return state, state.w * state.steps


def by_each_name(state):
    for name in ("steps",):
        setattr(state, name, getattr(state, name) + 1)
    return state, state.w * state.steps


def by_a_tree_map(state):
    return [state[0], jax.tree.map(lambda n: n + 1, state[1])], state[0] * state[1]["n"]


class Behind:
    def __init__(self):
        self.w, self._steps = jnp.ones(2), 0

    @property
    def steps(self):
        return self._steps

    @steps.setter
    def steps(self, steps):
        self._steps = steps


def behind_a_property(state):
    state.steps += 1
    return state, state.w * state.steps


def by_a_comprehension(state):
    return [state[0], [n + 1 for n in state[1]]], state[0] * state[1][0]


def beside_a_handler(state):
    try:
        state.w = state.w + {}["w"]
    except KeyError:
        state.steps += 1
    return state, state.w * state.steps


def beside_a_schedule(state):
    state.steps += 1
    state.rate = 0.1 * min(1.0, state.steps / 100)
    return state, state.w * np.float32(state.rate)


SHOWN_BY_THE_TRACE = [
    *((Counted, f) for f in (by_a_name_that_is_given, by_each_name, beside_a_handler)),
    (Behind, behind_a_property),
    (Counted, beside_a_schedule),
    (lambda: [jnp.ones(2), {"n": 0}], by_a_tree_map),
    (lambda: [jnp.ones(2), [0, 7]], by_a_comprehension),
]


@pytest.mark.parametrize("make, f", SHOWN_BY_THE_TRACE, ids=[f.__name__ for _, f in SHOWN_BY_THE_TRACE])
def test_a_number_that_the_first_trace_changes_compiles_once(make: Callable[[], Any], f: Callable[..., Any]):
    jitted, state, plain = graftax.jit(f), make(), make()
    for _ in range(4):
        (state, result), (plain, expected) = jitted(state), f(plain)
        np.testing.assert_allclose(result, expected, rtol=1e-6)
        assert graftax.equal(state, plain)
    info = jitted.cache_info()
    assert info.traces == info.misses == ONCE and info.hits == 4 - ONCE
    assert ONCE > 1 or "traced twice: the first trace changed state" in str(graftax.explain(jitted))


def test_a_trace_that_does_what_cannot_be_repeated_runs_once(capsys: pytest.CaptureFixture[str]):
    @graftax.jit(warn_impure=False)
    def step(state):
        print("stepping")
        return by_each_name(state)

    state = Counted()
    step(state)
    assert capsys.readouterr().out == "stepping\n"
    step(state), step(state)
    assert state.steps == 3 and step.cache_info().traces == 2


LOGGER = logging.getLogger("a counter")
VARIABLE = contextvars.ContextVar("variable", default=0)


def set_level():
    LOGGER.setLevel(LOGGER.level + 10)
    return LOGGER.level


def set_option():
    np.set_printoptions(precision=np.get_printoptions()["precision"] + 1)
    return np.get_printoptions()["precision"]


def set_variable():
    VARIABLE.set(VARIABLE.get() + 1)
    return VARIABLE.get()


def run_text():
    exec("LOGGER.setLevel(LOGGER.level + 10)", {"LOGGER": LOGGER})
    return LOGGER.level


def add_callback():
    gc.callbacks.append(print)
    gc.callbacks.remove(print)
    gc.callbacks.append(LOGGER.isEnabledFor)
    return len(gc.callbacks)


def through_an_instance(logger=LOGGER):
    return [logger][0].setLevel(LOGGER.level + 10) or LOGGER.level


@pytest.mark.parametrize(
    "effect",
    [set_level, set_option, set_variable, run_text, add_callback, through_an_instance],
    ids=lambda f: f.__name__,
)
def test_what_a_second_run_would_do_again_is_done_once(effect: Callable[[], Any]):
    def step(state):
        effect()
        return by_each_name(state)

    def run(wrap: Callable[[Any], Any]) -> Any:
        LOGGER.setLevel(0)
        callbacks, context = list(gc.callbacks), contextvars.copy_context()
        with np.printoptions(precision=3):
            context.run(wrap(step), Counted())
            found = LOGGER.level, np.get_printoptions()["precision"], len(gc.callbacks), context.get(VARIABLE)
        gc.callbacks[:] = callbacks
        return found

    assert run(functools.partial(graftax.jit, warn_impure=False)) == run(lambda f: f)


@pytest.mark.parametrize("f", [by_get_with_a_default, by_setdefault])
def test_a_counter_that_is_missing_in_the_first_call_compiles_twice(f: Callable[..., Any]):
    jitted, state, plain = graftax.jit(f), {"w": jnp.ones(2)}, {"w": jnp.ones(2)}
    for _ in range(4):
        (state, result), (plain, expected) = jitted(state), f(plain)
        assert result.tolist() == expected.tolist()
        assert graftax.equal(state, plain)
    assert jitted.cache_info().traces == 2
