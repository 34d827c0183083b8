# SPDX-License-Identifier: Apache-2.0
"""NumPy arrays in captures and defaults: traced, until the code asks for their values; then constants by content."""

from __future__ import annotations

import functools
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
    "mask": "x[:2][TABLE > 1]",
    "parameter": "jnp.tile(x, TABLE[1])",
    "key": "x * {1: 2.0, 2: 3.0, 3: 4.0}[TABLE[1]]",
    "text": "x * float(f'{TABLE[0]:d}')",
    "caught": "attempt(lambda: x * int(TABLE[0]))",
    "another error": "renamed(lambda: x[int(TABLE[0])])",
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
def renamed(f):
    try: return f()
    except Exception as error: raise RuntimeError("no value") from error
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


class Config:
    def __init__(self, table: Any) -> None:
        self.table = np.array(table)


def _sizes(table: Any, x: Any) -> Any:
    ones = jnp.ones(int(table[1]))
    return [x * i for i in table], ones if table[0] == 0 else -ones, x.reshape(table[2], -1), float(table[1]) * x


def _positional(table: Any) -> Any:
    def f(x: Any, table: Any = table) -> Any:
        return _sizes(table, x)

    return f


def _keyword(table: Any) -> Any:
    def f(x: Any, *, table: Any = table) -> Any:
        return _sizes(table, x)

    return f


def _attribute(table: Any) -> Any:
    def f(x: Any, config: Any = Config(table)) -> Any:
        return _sizes(config.table, x)

    return f


def _element(table: Any) -> Any:
    def f(x: Any, config: Any = {"tables": [table]}) -> Any:  # noqa: B006
        return _sizes(config["tables"][0], x)

    return f


def _partial(table: Any) -> Any:
    return functools.partial(lambda x, table: _sizes(table, x), table=table)


def _leaves(result: Any) -> Any:
    return jax.tree.map(lambda y: jnp.asarray(y).tolist(), result)


@pytest.mark.parametrize("make", [_positional, _keyword, _attribute, _element, _partial])
def test_code_may_ask_for_the_values_of_a_numpy_array_in_a_default(make: Any):
    plain = make(np.array([0, 3, 1]))
    jitted, x = graftax.jit(plain), jnp.arange(2.0)
    expected = _leaves(plain(x))
    assert [_leaves(jitted(x)) for _ in range(2)] == [expected] * 2
    assert jitted.cache_info().traces <= 2
    assert _leaves(jitted.lower(x).compile()(x)) == expected
    assert _leaves(jax.vmap(jitted)(x[None])) == _leaves(jax.vmap(plain)(x[None]))
    assert _leaves(jitted(jnp.arange(4.0))) == _leaves(plain(jnp.arange(4.0)))  # the program of other shapes


def test_defaults_that_are_replaced_or_changed_in_place_are_other_constants():
    table = np.array([0, 3, 1])
    plain = _positional(table)
    jitted, x = graftax.jit(plain), jnp.arange(2.0)
    jitted(x)
    table[:2] = 1, 2
    assert _leaves(jitted(x)) == _leaves(plain(x))
    plain.__defaults__ = (np.array([4, 1, 2]),)
    assert _leaves(jitted(x)) == _leaves(plain(x))


def test_what_is_given_for_a_default_is_traced():
    table = np.array([1, 2])

    def f(x: Any, table: Any = table, asks: bool = True) -> Any:
        return x[: table[0]] if asks else x * table.sum()

    jitted, x = graftax.jit(f), jnp.arange(4.0)
    assert jitted(x).tolist() == [0]
    for given in ([2, 2], [3, 2]):
        assert jitted(x, np.array(given), asks=False).tolist() == (x * sum(given)).tolist()
    assert jitted.cache_info().traces == 2
    with pytest.raises(IndexError, match=r"must (have|be) static"):
        jitted(x, np.array([2, 2]))
    assert jitted(x).tolist() == [0]


def test_equal_functions_share_programs_of_equal_defaults():
    x = jnp.arange(2.0)
    first, second = (graftax.jit(_positional(np.array([0, 3, 1]))) for _ in range(2))
    third = graftax.jit(_positional(np.array([1, 4, 1])))
    assert _leaves(first(x)) == _leaves(second(x)) == _leaves(_positional(np.array([0, 3, 1]))(x))
    assert _leaves(third(x)) == _leaves(_positional(np.array([1, 4, 1]))(x))
    for y in (jnp.arange(4.0), x):
        assert _leaves(second(y)) == _leaves(first(y)) == _leaves(_positional(np.array([0, 3, 1]))(y))


def test_a_program_in_which_a_default_was_given_is_left_where_another_shape_asks_for_it():
    table = np.array([1, 2])

    def f(x: Any, table: Any = table) -> Any:
        return x * table.sum() if x.ndim == 1 else x[: table[0]]

    jitted, row, matrix = graftax.jit(f), jnp.arange(4.0), jnp.ones((2, 2))
    for _ in range(2):
        assert jitted(row, np.array([2, 2])).tolist() == (row * 4).tolist()
        assert jitted(matrix).tolist() == [[1, 1]]
        assert jitted(row).tolist() == (row * 3).tolist()


def test_an_explanation_shows_what_was_changed_in_place():
    users = module("import numpy as np\nTABLE = np.array([1, 2])\ndef f(x): return x[int(TABLE[0])]")
    jitted, x = graftax.jit(users.f), jnp.arange(5.0)
    for users.TABLE[1] in (2, 4, 3):
        jitted(x)
    assert [str(cause) for variant in graftax.explain(jitted).variants[1:] for cause in variant.causes] == [
        "global TABLE was array([1, 2]), is array([1, 4])",
        "global TABLE was array([1, 4]), is array([1, 3])",
    ]


def test_static_arrays_of_small_floats_are_told_apart():
    types_of_eight_bits = jnp.float8_e4m3fn, jnp.float8_e4m3b11fnuz
    jitted = graftax.jit(lambda y, table: y * types_of_eight_bits.index(table.dtype), static_argnames="table")
    tables = [np.zeros(2, dtype) for dtype in types_of_eight_bits]
    assert [jitted(jnp.ones(()), table=table).item() for table in tables] == [0, 1]
    assert [str(cause) for cause in graftax.explain(jitted).variants[1].causes] == [
        "table was array([0, 0], dtype='float8_e4m3fn'), is array([0, 0], dtype='float8_e4m3b11fnuz')"
    ]
