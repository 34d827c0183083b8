# SPDX-License-Identifier: Apache-2.0
"""NumPy arrays that a function captures: traced, until its code asks for their values; then constants by content."""

from __future__ import annotations

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from users_modules import module

ASKING = {
    "index": "[x[i] for i in TABLE]",
    "slice": "x[TABLE[0] : TABLE[1]]",
    "shape": "jnp.zeros(tuple(TABLE)) + x[0]",
    "range": "sum(x[0] for _ in range(int(TABLE[1])))",
    "branch": "x if TABLE[0] > 1 else -x",
    "list": "x * sum(TABLE.tolist())",
    "NumPy": "x * float(np.sum(TABLE))",
    "caught": "attempt(lambda: x * int(TABLE[0]))",
    "helper": "helper(x)",
    "attribute": "[x[i] for i in BOX.table]",
}
SOURCE = """
import numpy as np
TABLE = np.array([1, 2])
BOX = types.SimpleNamespace(table=np.array([1, 2]))
def attempt(f):
    try: return f()
    except Exception: return -1.0
def helper(x): return x[int(TABLE[0])]
def f(x): return {}
"""


@pytest.mark.parametrize("ask", ASKING)
def test_code_may_ask_for_the_values_of_a_numpy_array_that_it_captures(ask: str):
    users = module(SOURCE.replace("{}", ASKING[ask]), types=types)
    jitted, x = graftax.jit(users.f), jnp.arange(1.0, 6.0)

    def right() -> None:
        assert (
            jax.tree.map(lambda y: jnp.asarray(y).tolist(), [jitted(x), jitted(x)])
            == [jax.tree.map(lambda y: jnp.asarray(y).tolist(), users.f(x))] * 2
        )

    right()
    users.TABLE[0] = users.BOX.table[0] = 2
    right()
    users.TABLE, users.BOX.table = np.array([0, 3]), np.array([4, 0])
    right()
    traces = jitted.cache_info().traces
    users.TABLE, users.BOX.table = np.array([0, 3]), np.array([4, 0])
    right()
    assert jitted.cache_info().traces == traces


def test_an_array_whose_values_nobody_asks_for_stays_an_input():
    weights = np.ones(3, np.float32)
    f = graftax.jit(lambda x: x * weights)
    for w in (1.0, 2.0, 3.0):
        weights[0] = w
        assert f(jnp.ones(3))[0] == w
    assert f.cache_info().traces == 1


def test_an_argument_that_has_no_value_is_an_error_whatever_is_captured():
    table = np.array([1, 2])
    f = graftax.jit(lambda x: x * table if x.sum() > 0 else x)
    for _ in range(2):
        with pytest.raises(jax.errors.TracerBoolConversionError):
            f(jnp.ones(2))


def test_a_constant_that_is_written_to_is_an_error_and_stays_as_it_was():
    table = np.array([1, 2])

    def f(x: Any) -> Any:
        y = x * int(table[0])
        table[0] += 1
        return y

    jitted = graftax.jit(f)
    with pytest.raises(ValueError, match="read-only"):
        jitted(jnp.ones(2))
    assert table.tolist() == [1, 2] and table.flags.writeable


class Layer:
    def __init__(self, n: int) -> None:
        self.n, self.w = np.array(n), jnp.ones(2)

    def scaled(self, x: Any) -> Any:
        return x * self.w if self.n > 1 else -x

    __call__ = scaled


@pytest.mark.parametrize("bind", [lambda layer: layer.scaled, lambda layer: layer], ids=["method", "callable"])
def test_what_a_function_is_bound_to_counts_as_captured(bind: Any):
    layer = Layer(2)
    jitted = graftax.jit(bind(layer))
    assert [jitted(jnp.ones(2)).tolist() for _ in range(2)] == [[1, 1]] * 2
    layer.n[...] = 1
    assert [jitted(jnp.ones(2)).tolist() for _ in range(2)] == [[-1, -1]] * 2
    layer.n, layer.w = np.array(3), jnp.full(2, 5.0)
    assert jitted(jnp.ones(2)).tolist() == [5, 5]
    assert jitted.cache_info().traces <= 4


def test_an_argument_is_not_captured():
    with pytest.raises(jax.errors.TracerBoolConversionError):
        graftax.jit(lambda layer, x: x if layer.n > 1 else -x)(Layer(2), jnp.ones(2))
