# SPDX-License-Identifier: Apache-2.0
"""NumPy's functions on Python numbers that change: scalars are computed on each call, and nothing compiles for them."""

from __future__ import annotations

import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from number_values import same, traces, x

WHOLE = (1, 2, 3, 5, 4, 7, 12)
FLOATS = (0.5, 1.5, 2.25, 3.5, 0.25)


def a_schedule(x: Any, n: Any) -> Any:
    rate = 0.125 * 0.5 * (1 + np.cos(np.pi * n / 100))
    return x * rate, rate


def functions(x: Any, n: Any) -> Any:
    results = np.sqrt(n), np.exp(-n), np.log(n), np.maximum(n, 3), np.minimum(n, 2.5), np.power(0.5, n), np.abs(-n)
    return *results, np.sign(n), np.mod(n, 3), np.floor(n / 2), np.hypot(n, 2), np.arctan2(n, 3), np.add(n, 0.5)


def other_functions(x: Any, n: Any) -> Any:
    points = np.interp(n, [0, 10], [0.0, 1.0]), np.interp(n, np.array([0.0, 5.0, 9.0]), (0.0, 1.0, 0.5))
    return *points, np.clip(n, 2, 4), np.round(n * 0.37, 1), np.nan_to_num(n)


def types(x: Any, n: Any) -> Any:
    return np.float32(n), np.float64(n), np.int32(n), np.float16(n) * 2, np.int64(n) + 1, x * np.float32(n)


def operators(x: Any, n: Any) -> Any:
    s = np.sqrt(n)
    first = s + 1, 1 - s, s * s, s / 3, s // 1, s % 2, s**2, 2**s, divmod(s, 2), -s, abs(s), round(s, 1), sum([s, s])
    return *first, math.floor(s), float(s), int(s), np.float32(3) * s, s * np.float32(3), np.float64(3) ** s


def whole_operators(x: Any, n: Any) -> Any:
    s = np.int32(n)
    first = s + 1, 1 - s, s * s, s / 3, s // 2, s % 2, s**2, divmod(s, 2), -s, s << 1, s & 3, ~s, 1 | s, s ^ 5
    return *first, float(s), int(s), np.uint8(2) * s


def with_arrays(x: Any, n: Any) -> Any:
    s = np.sqrt(n)
    first = x * s, s * x, x + s, s - x, x / s, x < s, s >= x, x.astype(jnp.bfloat16) * s, x.astype(int) * np.int32(n)
    return *first, jnp.where(x > 1, s, x), jnp.asarray(s), jnp.array([s, 1.0]), jnp.full((2,), s), x.at[0].set(s), x**s


def what_it_is(x: Any, n: Any) -> Any:
    s = np.sqrt(n)
    is_one = isinstance(s, np.floating), isinstance(s, float), isinstance(s, np.integer), type(s) is np.float64
    return *is_one, s.dtype, s.shape, s.ndim, s.item(), s.astype(np.float32), np.isscalar(s), np.shape(s)


def in_objects(x: Any, n: Any) -> Any:
    values = {"a": [np.sqrt(n), x], "b": (np.int32(n), n)}
    return values, jax.tree.map(lambda a: a * 2, values)


def in_jax(x: Any, n: Any) -> Any:
    s = np.sqrt(n)
    return (
        jax.grad(lambda v, s: (v * s).sum())(x, s),
        jax.vmap(lambda v, s: v * s, in_axes=(0, None))(x, s),
        jax.lax.scan(lambda c, v: (c * s, v), x[0], x),
        jax.random.normal(jax.random.fold_in(jax.random.key(0), np.int32(n)), (2,)),
    )


def in_graftax(x: Any, n: Any) -> Any:
    s = np.sqrt(n)
    return (
        graftax.grad(lambda v, s: (v * s["s"]).sum())(x, {"s": s}),
        graftax.vmap(lambda v, s: v * s, in_axes=(0, None))(x, s),
        graftax.scan(lambda c, v: ([c[0] * 2], v * c[0]), [s], x),
        graftax.jit(lambda v, s: (v * s, s))(x, s),
    )


def a_comparison(x: Any, n: Any) -> Any:
    return (x * 2 if np.greater(n, 3) and not np.isnan(n) else x), np.logical_and(n > 0, n < 100)


def a_value(x: Any, n: Any) -> Any:
    return f"{np.sqrt(n):.2f}", {np.float32(n): x}


def an_array(x: Any, n: Any) -> Any:
    return np.array([n, 1]) * 2, np.asarray(n), np.arange(3) * np.sqrt(n), np.linspace(0, n, 3), x


PROGRAMS = (
    *((program, 2) for program in (a_schedule, functions, other_functions, types, operators, what_it_is, in_objects)),
    *((program, 2) for program in (with_arrays, in_jax, in_graftax)),
    *((program, None) for program in (a_value, an_array)),
)


@pytest.mark.quick(1)  # each program once and more
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("values", [WHOLE, FLOATS])
@pytest.mark.parametrize(("program", "count"), PROGRAMS)
def test_scalars_of_numpy_are_those_of_plain_python(program: Any, count: int | None, values: Any, x64: bool):
    f = graftax.jit(program, warn_impure=False)
    f.clear_cache()
    with jax.enable_x64(x64), warnings.catch_warnings():
        warnings.simplefilter("ignore", graftax.RecompileWarning)
        for value in (*values, values[0]):
            assert same(f(x(), value), program(x(), value)), value
    assert traces(f) == (len(values) if count is None else count)


def numpy_itself() -> Any:
    return np


def test_a_helper_may_return_numpy_itself():
    f = graftax.jit(lambda x, n: x * numpy_itself().sqrt(n), warn_impure=False)
    for value in (4, 9):
        assert same(f(x(), value), x() * np.sqrt(value))


def test_whole_scalars_compile_once_and_comparisons_by_their_outcome():
    for program, count in ((whole_operators, 2), (a_comparison, 3)):
        f = graftax.jit(program)
        for value in WHOLE:
            assert same(f(x(), value), program(x(), value)), value
        assert traces(f) == count


def test_whole_numbers_in_math_compile_once():
    def program(x: Any, n: Any) -> Any:
        integers = math.gcd(n, 12), math.lcm(4, n), math.comb(20, n), math.perm(n, 1), math.factorial(n), math.isqrt(n)
        return integers, x * math.gcd(n, 6), math.ulp(n), math.nextafter(n, 0)

    f = graftax.jit(program)
    for value in WHOLE:
        assert same(f(x(), value), program(x(), value)), value
    assert traces(f) == 2


def test_a_scalar_is_written_to_the_callers_objects():
    class Trainer:
        def __init__(self) -> None:
            self.step, self.rate, self.best = 0, 0.0, math.inf

        def train(self, x: Any) -> Any:
            self.step += 1
            self.rate = np.float32(0.5) * self.step
            self.best = float(np.minimum(self.best, 10 / self.step))
            return x * self.rate

    plain, jitted, step = Trainer(), Trainer(), graftax.jit(Trainer.train)
    for _ in range(12):
        assert same(step(jitted, x()), plain.train(x()))
        assert same(vars(jitted), vars(plain))
    assert traces(step) <= 3


def test_what_numpy_says_of_a_value_it_says_on_each_call():
    f = graftax.jit(lambda x, n: x * np.log(n))
    f(x(), 1.0), f(x(), 2.0)
    with pytest.warns(RuntimeWarning, match="divide by zero"):
        assert same(f(x(), 0.0), x() * -np.inf)
    with np.errstate(divide="raise"), pytest.raises(FloatingPointError):
        f(x(), 0.0)
    assert same(f(x(), 3.0), x() * np.log(3.0))


def test_code_that_hushes_numpy_has_a_program_for_each_value():
    @graftax.jit
    def f(x: Any, n: Any) -> Any:
        with np.errstate(divide="ignore"):
            return x * np.log(n)

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for value in (1.0, 2.0, 0.0):
            assert same(f(x(), value), x() * (np.log(value) if value else -np.inf))


def test_a_number_too_large_for_numpy_has_a_program_of_its_own():
    f = graftax.jit(lambda x, n: (x, np.maximum(n, 3)))
    for value in (1, 2, 5, 1 << 40, (1 << 63) + 5, 7):
        try:
            expected = np.maximum(value, 3)
        except OverflowError:
            with pytest.raises(OverflowError):
                f(x(), value)
        else:
            assert same(f(x(), value), (x(), expected)), value


def test_code_that_passes_a_class_of_numpy_on_has_the_class_itself():
    @graftax.jit
    def f(x: Any, n: Any) -> Any:
        return x.astype(np.float16) * n, np.float32(n), np.finfo(np.float32).bits, np.float16(n), {np.int8: np.int8(1)}

    for value in (1, 2, 3):
        result = f(x(), value)
        expected = x().astype(np.float16) * value, np.float32(value), 32, np.float16(value), {np.int8: np.int8(1)}
        assert same(result[:4], expected[:4]) and list(result[4]) == [np.int8] and type(result[4][np.int8]) is np.int8


def test_a_scalar_too_large_for_jax_is_what_jax_makes_of_it():
    def program(x: Any, n: Any) -> Any:
        return x * np.maximum(n, 2), jnp.full_like(x, np.maximum(n, 2)), jnp.asarray(np.maximum(n, 2)), np.maximum(n, 2)

    f = graftax.jit(program)
    for value in (1, 2, 3, 1 << 31, 1 << 40, 5):
        assert same(f(x(), value), program(x(), value)), value
