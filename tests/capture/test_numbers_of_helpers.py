# SPDX-License-Identifier: Apache-2.0
"""Numbers that helpers read (globals, attributes of classes and modules, variables) compile twice at most."""

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import graftax

x = jnp.ones(2)
RATE = 0.5
COUNT = 0
config = types.ModuleType("config_of_a_test")
config.rate = 0.5


class Model:
    rate = 0.5

    def scaled(self, y):
        return y * self.rate


model = Model()


def tick():
    global COUNT
    COUNT += 1
    return COUNT


def by_global(y):
    return y * RATE


def by_module(y):
    return y * config.rate if config.rate < 5 else -y


def set_global(value):
    global RATE
    RATE = value


WAYS = {
    "global": (lambda y: by_global(y), set_global),
    "module": (lambda y: by_module(y), lambda value: setattr(config, "rate", value)),
    "class": (lambda y: model.scaled(y), lambda value: setattr(Model, "rate", value)),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_helper_reads_is_symbolic_once_it_changes(way):
    plain, assign = WAYS[way]
    f = graftax.jit(plain)
    for value in (0.5, 0.25, 2.0, 1.5, 0.125):
        assign(value)
        assert f(x).tolist() == plain(x).tolist()
    assert f.cache_info().traces == 2
    assign(3)
    assert f(x).tolist() == plain(x).tolist()  # another type of number
    assign(0.5)
    assert f(x).tolist() == plain(x).tolist()


def test_what_it_decides_is_a_guard():
    f = graftax.jit(lambda y: by_module(y))
    for config.rate in (1.0, 2.0, 7.0, 3.0, 8.0):
        assert f(x).tolist() == by_module(x).tolist()
    assert f.cache_info().traces == 3


ONCE = 1 if sys.version_info >= (3, 12) else 2  # compilations, where the trace alone shows that a number changes


def test_a_counter_of_a_helper():
    before = COUNT
    f = graftax.jit(lambda y: y * tick())
    for i in range(1, 8):
        assert f(x).tolist() == [before + i] * 2
    assert before + 7 == COUNT and f.cache_info().traces == 2


def closures():
    n = 0

    def tick():
        nonlocal n
        n += 1
        return n

    return tick, lambda y: y * n


def test_variables_of_helpers():
    inc, scaled = closures()
    f = graftax.jit(lambda y: scaled(y))
    for _ in range(6):
        n = inc()
        assert f(x).tolist() == [n, n]
    assert f.cache_info().traces <= 3
    g = graftax.jit(lambda y: y * inc())
    for i in range(n + 1, n + 6):
        assert g(x).tolist() == [i, i]
    assert g.cache_info().traces == ONCE and inc() == n + 6


def make_schedule(rate, start=2):
    def schedule(step):
        return rate * step if step < start else rate

    return schedule


def make_nested(rate):
    inner = make_schedule(rate)
    return lambda step: 2 * inner(step)


def by_its_name(y):
    return y * schedule(3) + schedule(1)


def by_a_helper(y):
    return -by_its_name(y)


def by_a_module(y):
    return y * config.schedule(3)


def in_a_result(y):
    return y * schedule(1), schedule


def in_a_loop(y):
    return jax.lax.scan(lambda carry, _: (carry * schedule(3), None), y, None, length=2)[0]


schedule = config.schedule = make_schedule(0.5)


@pytest.mark.parametrize("make", [make_schedule, make_nested])
@pytest.mark.parametrize("plain", [by_its_name, by_a_helper, by_a_module, in_a_result, in_a_loop])
def test_numbers_of_a_function_that_is_made_again_are_symbolic(plain: Any, make: Any):
    global schedule
    own = types.FunctionType(plain.__code__, globals(), f"{plain.__name__}_{make.__name__}")  # shares no program
    own.__qualname__ = own.__name__
    f = graftax.jit(own)
    for rate in (0.5, 0.25, 2.0, 1.5):
        schedule = config.schedule = make(rate)
        result, expected = f(x), plain(x)
        if plain is in_a_result:
            assert result[1](3) == expected[1](3)
            result, expected = result[0], expected[0]
        assert result.tolist() == expected.tolist()
    assert f.cache_info().traces == 2


warmup, decay = make_schedule(0.5), make_schedule(0.25)


def test_one_of_two_functions_of_the_same_code_is_made_again():
    global warmup
    f = graftax.jit(lambda y: y * warmup(3) + decay(3))
    for y in (x, jnp.ones(3), x):  # another shape changes nothing of what the names stand for
        assert f(y).tolist() == (y * warmup(3) + decay(3)).tolist()
    assert f.cache_info().traces == 2
    for rate in (2.0, 1.5, 0.75):
        warmup = make_schedule(rate)
        assert f(x).tolist() == (x * warmup(3) + decay(3)).tolist()
    assert f.cache_info().traces == 3


def test_a_function_that_is_made_of_other_code_or_with_another_text_is_another_program():
    global schedule

    def make(rate, kind):
        return lambda step: rate if kind == "constant" else rate * step

    f = graftax.jit(lambda y: y * schedule(3))
    schedules = [
        make(0.5, "constant"),
        make(0.25, "constant"),
        make(2.0, "linear"),
        make(4.0, "linear"),
        lambda step: step,
    ]
    for schedule in schedules:
        assert f(x).tolist() == [schedule(3)] * 2
    assert f.cache_info().traces == 4
    schedule = make_schedule(0.5)


def test_with_static_numbers_each_value_is_known_again():
    f = graftax.jit(lambda y: by_global(y), numbers="static")
    for value in (0.5, 0.25, 0.5, 0.25):
        set_global(value)
        assert f(x).tolist() == by_global(x).tolist()
    assert f.cache_info().traces <= 3


# ---- functions that are arguments


def with_a_variable(n: Any) -> Any:
    return lambda x: x * n + n


def with_a_default(n: Any) -> Any:
    return lambda x, n=n: x * n + n


def with_a_default_by_name(n: Any) -> Any:
    return lambda x, *, n=n: x * n + n


def with_an_attribute(n: Any) -> Any:
    def g(x: Any) -> Any:
        return x + 1

    g.n = n
    return g


def with_a_function_in_it(n: Any) -> Any:
    inner = with_a_variable(n)
    return lambda x: inner(x) - n


def with_its_own_counter(n: Any) -> Any:
    def g(x: Any) -> Any:
        nonlocal n
        n += 1
        return x * n

    return g


@pytest.mark.quick(2)
@pytest.mark.parametrize("make", [
    with_a_variable, with_a_default, with_a_default_by_name, with_an_attribute, with_a_function_in_it,
    with_its_own_counter,
])  # fmt: skip
def test_numbers_of_a_function_that_is_an_argument(make: Any):
    def f(held: Any, x: Any) -> Any:
        g = held["g"]
        return g(x), g(x), getattr(g, "n", 0) * x

    jitted, x = graftax.jit(f), jnp.arange(3.0)
    for n in (2, 5, 3, 7):
        for wanted, found in zip(f({"g": make(n)}, x), jitted({"g": make(n)}, x), strict=True):
            assert wanted.tolist() == found.tolist()
    assert jitted.cache_info().traces == (ONCE if make is with_its_own_counter else 2)


def test_a_shape_from_a_functions_variable_is_a_program_for_each():
    def make(n: int) -> Any:
        return lambda x: x[:n]

    jitted = graftax.jit(lambda g, x: g(x), warn_impure=False)
    assert [jitted(make(n), jnp.arange(5.0)).shape for n in (1, 2, 3, 1)] == [(1,), (2,), (3,), (1,)]
    assert jitted.cache_info().traces == 3


def counted(function: Callable[..., Any]) -> Any:
    @functools.wraps(function)
    def wrapper(*arguments: Any) -> Any:
        wrapper.calls += 1
        return function(*arguments)

    wrapper.calls = 0
    return wrapper


def test_a_decorator_that_counts_the_calls_of_a_helper_compiles_once():
    scale = counted(lambda x: x * 2)
    step = graftax.jit(lambda x: scale(x) + scale.calls)
    assert [step(jnp.ones(())).item() for _ in range(5)] == [3, 4, 5, 6, 7]
    assert scale.calls == 5
    scale.calls = 20
    assert step(jnp.ones(())).item() == 23
    assert step.cache_info().traces == 1


def test_a_number_in_an_attribute_of_a_helper_that_changes_between_calls_compiles_twice():
    def scale(x, by=2):
        return x * by * scale.rate

    step = graftax.jit(lambda x: scale(x))
    results = list[float]()
    for scale.rate in (1.0, 0.5, 0.25, 0.125):
        results.append(step(jnp.ones(())).item())
    assert results == [2, 1, 0.5, 0.25] and step.cache_info().traces == 2
    scale.__defaults__ = (4,)
    assert step(jnp.ones(())).item() == 0.5
