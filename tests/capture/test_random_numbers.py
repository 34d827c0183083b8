# SPDX-License-Identifier: Apache-2.0
"""Random programs with numbers over random values: equal to plain Python, and traced a bounded number of times."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graftax

INTEGERS = st.integers(-20, 20) | st.sampled_from([0, 1, 100, 2**31 - 1, 2**40, -(2**63)])
FLOATS = st.floats(-10, 10) | st.sampled_from([0.0, -0.0, 0.5, 1e-3, 1e30, math.inf])
# Of each of the three tests: more than 1,000 sequences of values in the whole suite.
WANTED = settings.default.max_examples  # type: ignore[union-attr]
EXAMPLES = settings(max_examples=400 if WANTED == 200 else WANTED)
NAMES = ("s['n']", "s['m']", "s['r']")


@st.composite
def numbers(draw: Any, depth: int = 3) -> str:
    """An expression of Python numbers."""
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        return draw(st.sampled_from((*NAMES, "2", "3", "0.5", "-1", "s['k'][0]")))
    one, other = draw(numbers(depth - 1)), draw(numbers(depth - 1))
    form = draw(
        st.sampled_from(
            [
                *(f"({{a}} {op} {{b}})" for op in ("+", "-", "*", "/", "//", "%")),
                "min({a}, {b})",
                "max({a}, {b})",
                "abs({a})",
                "-{a}",
                "round({a})",
                "float({a})",
                "math.tanh({a})",
                "divmod({a}, {b})[1]",
                "({a} if {a} > {b} else {b})",
                "sum([{a}, {b}])",
                "(2.0 ** min(max({a}, -8), 8))",
                "np.tanh({a})",
                "np.float32({a})",
                "np.maximum({a}, {b})",
                "np.clip({a}, -2, 5.5)",
            ]
        )
    )
    return form.format(a=one, b=other)


STATEMENTS = st.sampled_from(
    [
        "x = x * {a}",
        "x = x + {a} * x",
        "x = jnp.where(x > {a}, x, {b})",
        "x = x.at[0].set({a})",
        "if {a} > {b}: x = -x",
        "if {a} in (0, 1, 2): x = x + 1",
        "s['n'] = {a}",
        "s['m'] += 1",
        "s['r'] *= 0.5",
        "s['k'][0] = {a}",
        "s['w'] = s['w'] - {a} * x",
        "out.append({a})",
        "out.append([x * {a}, {b}])",
        "s['name'] = str({a})[:4]",
        "x = x[: 1 + int(abs({a})) % 3].sum() + x",
        "try: out.append(1 / {a})\nexcept ZeroDivisionError: out.append(None)",
        "x = jax.lax.fori_loop(0, 2, lambda i, c: c * {a}, x)",
        "x = graftax.grad(lambda v: (v * {a}).sum())(x)",
    ]
)


@st.composite
def programs(draw: Any) -> str:
    lines = []
    for _ in range(draw(st.integers(1, 5))):
        text = draw(STATEMENTS).format(a=draw(numbers()), b=draw(numbers(1)))
        lines += [f"    {line}" for line in text.split("\n")]
    return "\n".join(["def f(s, x):", "    out = []", *lines, "    return out, x, s['n']"])


VALUES = st.lists(st.tuples(INTEGERS, INTEGERS, FLOATS), min_size=4, max_size=8)


def run(f: Any, state: Any, x: Any) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return f(state, x)
    except (ArithmeticError, ValueError, TypeError) as error:
        return type(error)


def same(one: Any, other: Any) -> bool:
    leaves, structure = jax.tree.flatten(one)
    others, other_structure = jax.tree.flatten(other)
    return structure == other_structure and all(map(same_leaf, leaves, others))


def same_leaf(one: Any, other: Any) -> bool:
    if not isinstance(one, jax.Array):
        return type(one) is type(other) and repr(one) == repr(other)
    # XLA fuses a whole program, and computes products and sums of it together.
    close = np.allclose(one, other, rtol=1e-4, atol=1e-4, equal_nan=True)
    return isinstance(other, jax.Array) and one.dtype == other.dtype and one.shape == other.shape and close


@EXAMPLES
@given(programs(), VALUES)
def test_random_programs_with_numbers(text: str, values: Any):
    scope: dict[str, Any] = {"jnp": jnp, "jax": jax, "math": math, "np": np, "graftax": graftax, "__name__": __name__}
    exec(text, scope)
    plain = scope["f"]
    jitted = graftax.jit(plain, warn_impure=False)
    state = {"n": 1, "m": 2, "r": 0.5, "k": [3], "w": jnp.ones(3), "name": ""}
    x = jnp.arange(1.0, 4.0)
    for n, m, r in values:
        state.update(n=n, m=m, r=r)
        expected, found = copy.deepcopy(state), copy.deepcopy(state)
        wanted, given_ = run(plain, expected, x), run(jitted, found, x)
        if isinstance(wanted, type):
            assert given_ == wanted, (n, m, r)
        else:
            assert same(wanted, given_), (n, m, r, wanted, given_)
            assert same(expected, found), (n, m, r, expected, found)
    assert jitted.cache_info().traces <= 4 * len(values)


ARITHMETIC = st.sampled_from(
    [
        "x = x * ({a}) + {b}",
        "x = x.at[1].add({a})",
        "s['m'] = {a}",
        "out.append(({a}, x * ({b})))",
        "x = jnp.stack([x[0], {a}, {b}])",
        "x = graftax.scan(lambda c, v: (c * 0.5 + ({a}), v), x[0], x)[1]",
        "x = jax.vmap(lambda v: v + ({a}))(x)",
    ]
)
SMALL = st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9), st.floats(-2, 2, width=16)), min_size=5, max_size=9)


@st.composite
def terms(draw: Any, names: tuple[str, ...], depth: int = 3) -> str:
    """An expression that computes, and never asks for a value."""
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        return draw(st.sampled_from((*names, "2", "0.5")))
    one, other = draw(terms(names, depth - 1)), draw(terms(names, depth - 1))
    form = draw(st.sampled_from(["({a} + {b})", "({a} - {b})", "{a} * {b}", "abs({a})", "-({a})", "({a}) / 4"]))
    return form.format(a=one, b=other)


@st.composite
def sums(draw: Any, names: tuple[str, ...]) -> str:
    lines = []
    for _ in range(draw(st.integers(1, 4))):
        lines.append("    " + draw(ARITHMETIC).format(a=draw(terms(names)), b=draw(terms(names, 1))))
    return "\n".join(["def f(s, x):", "    out = []", *lines, "    return out, x, s['n']"])


@pytest.mark.quick(0)
@EXAMPLES
@given(sums(NAMES), SMALL)
def test_arithmetic_alone_is_traced_once_more_for_each_number(text: str, values: Any):
    scope: dict[str, Any] = {"jnp": jnp, "jax": jax, "graftax": graftax, "__name__": __name__}
    exec(text, scope)
    jitted = graftax.jit(scope["f"], warn_impure=False)
    x = jnp.arange(1.0, 4.0)
    for n, m, r in values:
        expected, found = ({"n": n, "m": m, "r": r} for _ in range(2))
        wanted, given_ = run(scope["f"], expected, x), run(jitted, found, x)
        assert same(wanted, given_), (n, m, r, wanted, given_)
        assert same(expected, found), (n, m, r, expected, found)
    assert jitted.cache_info().traces <= 1 + 3


HOLDERS = """
RATE = 1
class Config:
    factor = 2
class Options:
    def __init__(self):
        self.scale = 3
options = Options()
def scaled(v, by=0.5, *, plus=1):
    return v * by + plus
def deep(v):
    return scaled(v) * Config.factor + RATE - options.scale
def made(k):
    def inner(v):
        return v + k
    return inner
shift = made(2)
"""
HELD = (
    "RATE",
    "Config.factor",
    "options.scale",
    "scaled(2)",
    "deep(1)",
    "scaled(RATE, plus=2)",
    "shift(3)",
    "deep(s['n'])",
)


def hold(scope: dict[str, Any], n: int, m: int, r: float) -> None:
    """Puts a call's numbers where helpers find them."""
    scope["RATE"], scope["Config"].factor, scope["options"].scale = m, n + m, n
    scope["scaled"].__defaults__, scope["scaled"].__kwdefaults__ = (r,), {"plus": m}
    scope["shift"].__closure__[0].cell_contents = n


@pytest.mark.quick(0)
@EXAMPLES
@given(sums(HELD), SMALL)
def test_numbers_that_helpers_hold(text: str, values: Any):
    scope: dict[str, Any] = {"jnp": jnp, "jax": jax, "graftax": graftax, "__name__": __name__}
    exec(HOLDERS + text, scope)
    jitted = graftax.jit(scope["f"], warn_impure=False)
    x = jnp.arange(1.0, 4.0)
    for n, m, r in values:
        hold(scope, n, m, r)
        expected, found = {"n": n}, {"n": n}
        wanted, given_ = run(scope["f"], expected, x), run(jitted, found, x)
        assert same(wanted, given_), (n, m, r, wanted, given_)
        assert same(expected, found), (n, m, r, expected, found)
    assert jitted.cache_info().traces <= 3 * len(values)
