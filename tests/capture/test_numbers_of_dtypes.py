# SPDX-License-Identifier: Apache-2.0
"""A changing number that becomes an array of some dtype has the bits that plain Python gives it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from number_values import same, traces

# Most of them are other ones in 32 bits.
WHOLE_PARTS = (1.5, 2.5, 0.9999999999, 16777217.9, -0.9999999999, 2147483646.9, 1900000001.0)
WIDE = (1.5, 2.5, 0.1, 1.00048828125 * (1 + 1e-12), 2.0**-25 * (1 + 1e-12), 1e-60, 70000.0)
INTEGERS = (1, 2, 3, 300, -1, 70000, 2**31 - 1)

TO_INTEGERS: dict[str, Any] = {
    "full": lambda n: jnp.full((2,), n, int),
    "full_like": lambda n: jnp.full_like(jnp.arange(2), n),
    "a list": lambda n: jnp.array([n, 1], jnp.int32),
    "lax": lambda n: jax.lax.convert_element_type(n, jnp.int32),
    "a NumPy scalar": lambda n: jnp.full((2,), np.floor(n), int),
    "in an update": lambda n: jnp.arange(3).at[1].set(jnp.full((), n, int)),
}


def agree(f: Any, jitted: Any, value: Any) -> bool:
    """Both give the same bits, or the same kind of error."""
    try:
        expected = f(value)
    except (OverflowError, ValueError) as error:
        with pytest.raises(type(error)):
            jitted(value)
        return True
    return same(jitted(value), expected)


@pytest.mark.quick(12)
@pytest.mark.parametrize("program", TO_INTEGERS.values(), ids=TO_INTEGERS.keys())
def test_a_float_becomes_an_integer_with_all_of_its_bits(program: Any):
    f = graftax.jit(program)
    assert all(agree(program, f, value) for value in WHOLE_PARTS[:5])
    assert traces(f) <= 3
    assert all(agree(program, f, value) for value in WHOLE_PARTS[5:])


@pytest.mark.quick(3)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float8_e5m2, jnp.float32, bool])
def test_a_float_is_rounded_once(dtype: Any):
    def program(n: Any) -> Any:
        return jnp.full((2,), n, dtype), jnp.asarray(n, dtype), jnp.array([n], dtype)

    f = graftax.jit(program)
    assert all(agree(program, f, value) for value in WIDE)
    assert traces(f) <= 3 or dtype == jnp.float8_e5m2


@pytest.mark.quick(12)
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int16, jnp.uint32])
@pytest.mark.parametrize(
    "program",
    [
        lambda n, dtype: jnp.array([n], dtype),
        lambda n, dtype: jnp.asarray((n, 1), dtype),
        lambda n, dtype: jnp.array([[n], [jnp.ones((), dtype)]], dtype),
        lambda n, dtype: jnp.full((2,), n, dtype),
    ],
)
def test_an_integer_that_a_dtype_cannot_hold_is_what_it_is_in_plain_python(program: Any, dtype: Any):
    def of_dtype(n: Any) -> Any:
        return program(n, dtype)

    f = graftax.jit(of_dtype)
    assert all(agree(of_dtype, f, value) for value in INTEGERS)


def test_a_number_has_64_bits_where_the_code_turns_them_on():
    def program(n: Any) -> Any:
        with jax.enable_x64(True):
            return jnp.asarray(n) * 3

    f = graftax.jit(program)
    for value in (0.1, 0.2, 0.3, 0.7):
        assert float(f(value)) == value * 3


@pytest.mark.quick(2)
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int16])
def test_a_numpy_integer_in_a_list_has_to_fit(dtype: Any):
    def program(n: Any) -> Any:
        return jnp.array([np.int64(n), 1], dtype)

    f = graftax.jit(program)
    assert all(agree(program, f, value) for value in INTEGERS)


def test_a_float_is_no_length():
    def program(n: Any) -> Any:
        return jnp.zeros(7) if n == 500 else jnp.zeros(n)

    f = graftax.jit(program)
    for value in (2.0, 500.0, 7.0, 3.0):
        try:
            expected: Any = program(value)
        except TypeError:
            with pytest.raises(TypeError):
                f(value)
        else:
            assert same(f(value), expected)
