# SPDX-License-Identifier: Apache-2.0
"""Python numbers that change between calls: compiled once more, computed on the host, equal to plain Python."""

from __future__ import annotations

import copy
import enum
import json
import math
import pickle
import sys
from math import exp
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from number_values import FLOATS, INTEGERS, same, traces, x

MANY = None  # the code asks for the value: one trace a value, as with static numbers


# ---- what code does with a number: (program, traces for INTEGERS, traces for FLOATS); None: one a value


def arithmetic(x: Any, n: Any) -> Any:
    return n + 1, 2 - n, n * n, n / 3, n // 3, n % 3, -n, abs(-n), +n, n**2, 2**n, divmod(n, 4), divmod(9, n)


class Level(enum.IntEnum):
    LOW, HIGH = 2, 5


def with_members(x: Any, n: Any) -> Any:
    return Level.HIGH * n, n + Level.LOW, Level.LOW - n, n == Level.HIGH + 100, x * (Level.LOW * n)


def bits(x: Any, n: Any) -> Any:
    return n << 2, n >> 1, n & 6, n | 1, n ^ 5, ~n, 3 & n


def rounded(x: Any, n: Any) -> Any:
    return round(n / 3), round(n / 3, 2), math.floor(n / 2), math.ceil(n / 2), math.trunc(n / 2)


def with_arrays(x: Any, n: Any) -> Any:
    return x * n, n * x, x + n, n - x, x / n, x % n, x < n, n >= x, x == n


def in_functions(x: Any, n: Any) -> Any:
    arrays = jnp.asarray(n), jnp.array([n, 1.0]), jnp.full((2,), n), jnp.full_like(x, n), jnp.float32(n)
    return *arrays, jnp.where(x > 1, n, x), jnp.maximum(x, n), jnp.clip(x, 0, n), jnp.stack([x[0], n]), x.at[0].set(n)


def schedule(x: Any, n: Any) -> Any:
    return x * (0.1 * 0.99**n), x * (0.5 * (1 + math.cos(math.pi * n / 10))), x * (1 - float(n) / 10), x * exp(-n)


def compared(x: Any, n: Any) -> Any:
    return (x * 2 if n > 4 else x), n in (1, 2.25), min(n, 4), max(n, 2), sorted([n, 2, 4])


def as_truth(x: Any, n: Any) -> Any:
    return (x if n else -x), not n, bool(n), n and 1


def in_a_loop(x: Any, n: Any) -> Any:
    for i in range(3):
        x = x * (n + i)
    return x


def through_jax(x: Any, n: Any) -> Any:
    scanned = jax.lax.scan(lambda c, v: (c + v * n, c), 0.0, x)
    chosen = jax.lax.cond(x[0] < 1, lambda a: a * n, lambda a: a, x)
    return (
        jax.grad(lambda v: (v * n).sum())(x),
        jax.vmap(lambda v: v * n)(x),
        jax.jit(lambda a, b: a * b)(x, n),
        scanned,
        chosen,
    )


def through_graftax(x: Any, n: Any) -> Any:
    def loss(model: Any) -> Any:
        model["n"] += 1
        return (model["w"] * model["n"]).sum()

    model = {"w": x, "n": n}
    gradients = graftax.grad(loss)(model)
    scanned = graftax.scan(lambda c, v: (c + v * n, c), jnp.zeros(()), x)
    return gradients["w"], model["n"], scanned, graftax.vmap(lambda v: v * n)(x), graftax.jit(lambda a: a * n)(x)


def in_a_carry(x: Any, n: Any) -> Any:
    return graftax.scan(lambda c, v: ((c[0] + v, c[1]), v), (jnp.zeros(()), n), x)


def keys(x: Any, n: Any) -> Any:
    return jax.random.normal(jax.random.fold_in(jax.random.key(0), n), (2,))


def its_type(x: Any, n: Any) -> Any:
    return type(n) is int, type(n).__name__, isinstance(n, int), isinstance(n, float), isinstance(n, bool), x


def copied(x: Any, n: Any) -> Any:
    return copy.copy(n) + 1, copy.deepcopy([n])[0] * 2, x


def exponent(x: Any, n: Any) -> Any:
    return x**n


def a_shape(x: Any, n: Any) -> Any:
    return jnp.zeros(int(n)), [x * i for i in range(int(n))]


def an_index(x: Any, n: Any) -> Any:
    return [10, 20, 30, 40, 50, 60, 70, 80, 90][int(n)], x


def text(x: Any, n: Any) -> Any:
    return f"{n}", f"{n:.1f}", str(n), "%s" % n, x  # noqa: UP031


def a_key(x: Any, n: Any) -> Any:
    return {float(n): x, -1.0: n + 1}, {n, -1.0} == {n, -1}


def in_numpy(x: Any, n: Any) -> Any:
    return np.float32(2) * n, np.arange(3) * n, np.array([n, 1.0]), np.sqrt(n), x


def with_complex(x: Any, n: Any) -> Any:
    return n * 1j, complex(n), (-1.5) ** (n + 0.5), x


def in_json(x: Any, n: Any) -> Any:
    return json.dumps({"n": n}), pickle.loads(pickle.dumps(n)), x


# Traces of seven integers, and of seven floats. One is enough where another number, computed of it, is returned.
# MANY: one for each; and one more where the first was traced for a number that changes.
PROGRAMS = [
    (arithmetic, 1, 1),
    (with_members, 2, 2),
    (bits, 1, None),
    (rounded, 2, 2),
    (with_arrays, 2, 2),
    (in_functions, 2, 2),
    (schedule, 2, 2),
    (compared, 4, MANY),
    (as_truth, 2, 2),
    (in_a_loop, 2, 2),
    (through_jax, 2, 2),
    (through_graftax, 2, 2),
    (in_a_carry, 2, 2),
    (keys, 2, 2),
    (its_type, 2, 2),
    (copied, 2, 2),
    (exponent, MANY, 2),
    (a_shape, MANY, MANY),
    (an_index, MANY, MANY),
    (text, MANY, MANY),
    (a_key, 8, MANY),
    (in_numpy, MANY, MANY),
    (with_complex, 8, MANY),
    (in_json, MANY, MANY),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("program", "count", "values"), [
    *((program, count, INTEGERS) for program, count, _ in PROGRAMS),
    *((program, count, FLOATS) for program, _, count in PROGRAMS),
])  # fmt: skip
def test_a_number_that_changes_gives_what_plain_python_gives(program: Any, count: int | None, values: Any):
    f = graftax.jit(program, warn_impure=False)
    f.clear_cache()  # a table belongs to the function
    for value in (*values, values[0], values[-1]):
        try:
            expected = program(x(), value)
        except TypeError as error:
            with pytest.raises(type(error)):
                f(x(), value)
            return
        assert same(f(x(), value), expected), value
    assert traces(f) == (len(values) if count is None else count)


# ---- programs


class Trainer:
    def __init__(self) -> None:
        self.w, self.step, self.base, self.best = jnp.ones(3), 0, 0.125, math.inf

    def train(self, x: Any) -> Any:
        rate = self.base * 0.5**self.step
        if self.step % 10 == 0:
            self.w = self.w * 2
        self.w = self.w - rate * x
        self.step += 1
        self.best = min(self.best, 100.0 / self.step)
        return self.step, rate


def test_a_trainer_that_counts_compiles_once_for_each_answer():
    f = graftax.jit(Trainer.train)
    plain, jitted = Trainer(), Trainer()
    for _ in range(45):
        assert same(f(jitted, x()), plain.train(x()))
        assert same([jitted.w, jitted.step, jitted.best], [plain.w, plain.step, plain.best])
    assert type(jitted.step) is int and type(jitted.best) is float
    assert traces(f) == (2 if sys.version_info >= (3, 12) else 3)


def test_two_numbers_that_change_at_different_times():
    f = graftax.jit(lambda x, state: (x * state["a"] + state["b"], state["a"] * state["b"]))
    for a, b in ((1, 2.0), (3, 2.0), (4, 2.0), (4, 5.0), (6, 7.0), (1, 2.0), (3, 2.0)):
        assert same(f(x(), {"a": a, "b": b}), (x() * a + b, a * b))
    assert traces(f) == 3  # static, one symbol, two symbols


def test_closures_globals_and_attributes_count_too():
    class Counter:
        n = 0

    counter = Counter()
    counter.n = 1
    rate = 0.5

    def step(x: Any) -> Any:
        nonlocal rate
        rate = rate / 2
        counter.n += 1
        return x * rate

    f = graftax.jit(step)
    for i in range(6):
        assert f(x()).tolist() == (x() * 0.5 ** (i + 2)).tolist()
        assert (counter.n, rate) == (i + 2, 0.5 ** (i + 2))
    assert traces(f) == 1


def test_an_object_that_is_given_back_keeps_its_number():
    f = graftax.jit(lambda box, x: (box, box["n"], [box["n"], box["n"] + 1], x))
    for n in (10**6, 10**6 + 1, 10**6 + 2):
        box = {"n": n}
        out = f(box, x())
        assert out[0] is box and out[1] is n and out[2][0] is n and out[2][1] == n + 1
    assert traces(f) == 1


def test_one_family_of_structures_does_not_know_the_numbers_of_another():
    f = graftax.jit(lambda x, a: [x * v for v in a])
    for values in ([1], [2], [1, 2], [3], [4, 5], [6, 7]):
        assert same(f(x(), values), [x() * v for v in values])
    assert traces(f) == 4


def test_int_and_float_and_bool_in_one_place_are_three_structures():
    f = graftax.jit(lambda x, n: (x * n, n))
    for n in (1, True, 1.0, 2, 2.0, False, 3, 3.5):
        assert same(f(x(), n), (x() * n, n)), n
    assert traces(f) == 6  # a static one of int and float, both bools, a symbol of int and of float


@pytest.mark.parametrize("value", [-0.0, 0.0, math.nan, math.inf, -math.inf, 1e300, 5e-324])
def test_special_floats(value: float):
    f = graftax.jit(lambda x, n: (x * n, n, n + 1, n == 0, math.copysign(1, n), x + 1 if n > 0 else x))
    for n in (1.0, 2.0, value, 3.0, value):
        expected = x() * n, n, n + 1, n == 0, math.copysign(1, n), x() + 1 if n > 0 else x()
        assert same(f(x(), n), expected), n


def test_a_value_that_was_asked_for_tells_zeros_apart():
    f = graftax.jit(lambda n, x: (str(n), x))
    for n in (1.0, 0.0, -0.0, math.nan, 0.0, -0.0):
        assert f(n, x())[0] == str(n)


def test_integers_that_jax_cannot_take_work_as_long_as_they_meet_no_array():
    f = graftax.jit(lambda x, n: (n + 1, x))
    for n in (1, 2**40, 2**70, -(2**80), 3):
        assert f(x(), n)[0] == n + 1
    assert traces(f) == 1
    g = graftax.jit(lambda x, n: x * n)
    assert [g(x(), n)[1] for n in (1, 2, 3)] == [1, 2, 3]
    with pytest.raises(OverflowError):
        g(x(), 2**40)
    assert g(x(), 5)[1] == 5


def test_settings_of_jax_are_those_of_the_call():
    f = graftax.jit(lambda x, n: x * n)
    for n in (1, 2):
        f(x(), n)
    with jax.enable_x64(True):
        for n in (3, 2**40):
            assert int(f(jnp.arange(3), n)[1]) == n
    assert f(x(), 4)[1] == 4


@pytest.mark.parametrize("n", [300, -1, 70000])
def test_an_integer_that_does_not_fit_a_dtype_is_the_error_that_it_is_in_jax(n: int):
    f = graftax.jit(lambda n: jnp.asarray(n, jnp.uint8))
    for value in (1, 2, 3):
        assert f(value) == value
    with pytest.raises(OverflowError):
        jnp.asarray(n, jnp.uint8)
    with pytest.raises(OverflowError):
        f(n)
    assert f(4) == 4


@pytest.mark.quick(0)
def test_more_inputs_than_were_expected():
    def f(x: Any, n: Any) -> Any:
        return [x * (n + i) for i in range(50)], [x * (n / (i + 1)) for i in range(50)]

    jitted = graftax.jit(f)
    for n in (1, 2, 3, 4):
        assert same(jitted(x(), n), f(x(), n))
    assert traces(jitted) <= 3


def test_other_shapes_of_one_entry():
    f = graftax.jit(lambda x, n: (x * n if x.shape[0] > 2 else x / (n + 1), n * x.shape[0]))
    for n, size in ((1, 3), (2, 3), (3, 3), (4, 2), (5, 2), (6, 3), (7, 2), (8, 4)):
        value = jnp.arange(1.0, size + 1)
        assert same(f(value, n), (value * n if size > 2 else value / (n + 1), n * size))
    assert traces(f) == 4  # static, and one for each of three shapes
