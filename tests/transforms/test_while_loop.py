# SPDX-License-Identifier: Apache-2.0
"""while_loop and fori_loop: what the Python loop does, on any objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from oracle import deep_copy, difference
from zoo import BUILDERS, NAMES, Box, Node


def halve(state: Any) -> Any:
    state.x, state.steps = state.x / 2, state.steps + 1
    return state


def is_big(state: Any) -> Any:
    return state.x.sum() > 1


def state(x: Any = 64.0) -> Box:
    return Box(x=jnp.asarray([x, x]), steps=jnp.asarray(0), name="x")


def loop(test: Callable[[Any], Any], body: Callable[[Any], Any], value: Any) -> Any:
    while test(value):
        value = body(value)
    return value


@pytest.mark.parametrize("build", BUILDERS, ids=NAMES)
def test_any_graph_is_carried(build: Callable[[], Any]):
    graph, copy = (deep_copy(build(), leaf=jnp.asarray) for _ in range(2))

    def body(value: Any) -> Any:
        return {"graph": value["graph"], "n": value["n"] + 1}

    value = graftax.while_loop(lambda v: v["n"] < 3, body, {"graph": graph, "n": jnp.asarray(0)})
    assert difference((copy, copy), (graph, value["graph"])) is None
    assert value["n"] == 3


@pytest.mark.parametrize("max_steps", [None, 100])
@pytest.mark.parametrize("x", [64.0, 1.0, 0.0])
def test_it_does_what_the_loop_does(x: float, max_steps: int | None):
    first, copy = state(x), state(x)
    expected = loop(is_big, halve, copy)
    value = graftax.while_loop(is_big, halve, first, max_steps=max_steps)
    assert value is first
    assert difference((expected, copy), (value, first)) is None


def test_a_new_object_in_each_step():
    first = state()
    value = graftax.while_loop(is_big, lambda s: Box(x=s.x / 2, steps=s.steps + 1, name=s.name), first)
    assert difference(loop(is_big, halve, state()), value) is None
    assert difference(state(), first) is None


def test_a_python_counter_of_the_state_is_traced():
    first = Box(n=0, done=False, name="x")

    def body(s: Any) -> Any:
        s.n += 2
        s.done = s.n >= 7
        return s

    graftax.while_loop(lambda s: jnp.logical_not(s.done), body, first)
    assert first.n == 8
    assert bool(first.done)
    assert first.name == "x"


def test_both_functions_see_one_captured_state():
    log = {"left": jnp.asarray(5), "sum": jnp.asarray(0)}

    def body(value: Any) -> Any:
        log["left"] = log["left"] - 1
        log["sum"] = log["sum"] + log["left"]
        return value

    graftax.while_loop(lambda value: log["left"] > 0, body, None)
    assert log == {"left": 0, "sum": 10}


def test_a_loop_that_does_not_run_leaves_values_as_they_were():
    start = jnp.ones(3)

    def body(s: Any) -> Any:
        s.a, s.b = start, s.a
        return s

    first = Box(a=jnp.zeros(3), b=jnp.ones(3) * 2)
    assert graftax.while_loop(lambda s: s.a.sum() > 9, body, first) is first
    assert difference(Box(a=jnp.zeros(3), b=jnp.ones(3) * 2), first) is None


def test_a_condition_may_be_known_when_it_is_traced():
    assert difference(graftax.while_loop(lambda s: False, halve, state()), state()) is None
    assert graftax.while_loop(lambda s: True, halve, state(), max_steps=3).steps == 3


@pytest.mark.parametrize("jit", [graftax.jit, jax.jit])
def test_it_runs_under_jit(jit: Any):
    value = jit(lambda x: graftax.while_loop(is_big, halve, state(x)).x)(64.0)
    np.testing.assert_array_equal(value, loop(is_big, halve, state()).x)


def test_it_is_vmapped():
    xs = jnp.array([64.0, 1.0, 8.0])
    values = jax.vmap(lambda x: graftax.while_loop(is_big, halve, state(x)).x)(xs)
    np.testing.assert_array_equal(values, jnp.stack([loop(is_big, halve, state(x)).x for x in xs]))


def test_forward_mode_is_that_of_jax():
    def run(x: Any) -> Any:
        return graftax.while_loop(is_big, halve, state(x)).x.sum()

    assert jax.jvp(run, (64.0,), (1.0,)) == (1.0, 2 / 128)


# ---- max_steps


@pytest.mark.parametrize("max_steps", [0, 1, 2, 5, 6, 7, 8, 50])
def test_at_most_so_many_steps_are_made(max_steps: int):
    expected = loop(lambda s: is_big(s) and s.steps < max_steps, halve, state())
    assert difference(expected, graftax.while_loop(is_big, halve, state(), max_steps=max_steps)) is None


@pytest.mark.quick(0)
@pytest.mark.parametrize("max_steps", [1, 4, 7, 30])
def test_a_bounded_loop_is_differentiated_in_reverse(max_steps: int):
    def body(s: Any) -> Any:
        s.x, s.steps = jnp.sin(s.x) * s.x, s.steps + 1
        return s

    def run(x: Any, loop: Any) -> Any:
        return loop(lambda s: is_big(s) & (s.steps < max_steps), body, state(x)).x.sum()

    def bounded(test: Any, body: Any, value: Any) -> Any:
        return graftax.while_loop(is_big, body, value, max_steps=max_steps)

    expected = jax.jacfwd(lambda x: run(x, graftax.while_loop))(2.0)
    for grad in (graftax.grad, jax.grad):
        np.testing.assert_allclose(grad(lambda x: run(x, bounded))(2.0), expected, rtol=1e-5)


def test_a_bounded_loop_promotes_weak_types_as_the_other_does():
    def body(s: Any) -> Any:
        return {"n": s["n"] + 1, "x": s["x"] + jnp.float32(0.5)}

    first = {"n": 0, "x": 0}
    actual = [graftax.while_loop(lambda s: s["x"] < 3, body, dict(first), max_steps=m) for m in (None, 20)]
    assert actual[0] == actual[1] == {"n": 6, "x": 3.0}
    assert actual[0]["x"].dtype == actual[1]["x"].dtype == jnp.float32


def test_a_bounded_loop_keeps_little():
    def loss(x: Any, run: Any) -> Any:
        return run(lambda s: jnp.sin(s), x).sum()

    def bounded(body: Any, x: Any) -> Any:
        return graftax.while_loop(lambda s: s.sum() < 1e9, body, x, max_steps=900)

    def scanned(body: Any, x: Any) -> Any:
        return jax.lax.scan(lambda s, _: (body(s), None), x, length=900)[0]

    x = jnp.ones(1000)
    sizes = [
        sum(v.size for v in jax.tree.leaves(jax.vjp(lambda x, run=run: loss(x, run), x)[1]) if hasattr(v, "size"))
        for run in (bounded, scanned)
    ]
    assert sizes[0] * 10 < sizes[1]


# ---- fori_loop


def add(i: Any, value: Any) -> Any:
    value.value = value.value + i * value.children[0].value
    return value


def family() -> Node:
    root = Node(jnp.zeros(2))
    Node(jnp.arange(2.0), parent=root)
    return root


@pytest.mark.parametrize("bounds", [(0, 5), (2, 2), (-3, 3), (5, 2), (jnp.asarray(1), jnp.asarray(4))])
def test_fori_loop_does_what_the_loop_does(bounds: tuple[Any, Any]):
    root, copy = family(), family()
    for i in range(*map(int, bounds)):
        add(i, copy)
    assert graftax.fori_loop(*bounds, add, root) is root
    assert difference(copy, root) is None


def test_fori_loop_with_known_bounds_is_differentiated_in_reverse():
    def run(x: Any) -> Any:
        return graftax.fori_loop(0, 4, lambda i, v: {"x": jnp.sin(v["x"]) + i}, {"x": x})["x"]

    def expected(x: Any) -> Any:
        return jax.lax.fori_loop(0, 4, lambda i, v: jnp.sin(v) + i, x)

    assert graftax.grad(run)(0.3) == jax.grad(expected)(0.3)
    assert graftax.fori_loop(0, 4, lambda i, v: v + i, 0, unroll=2) == 6


def test_fori_loop_under_jit_with_traced_bounds():
    run = graftax.jit(lambda root, n: graftax.fori_loop(0, n, add, root))
    root, copy = family(), family()
    for i in range(4):
        add(i, copy)
    assert run(root, jnp.asarray(4)) is root
    assert difference(copy, root) is None


@pytest.mark.parametrize(
    "run", [lambda v: graftax.while_loop(is_big, halve, v), lambda v: graftax.fori_loop(0, 7, lambda i, v: halve(v), v)]
)
def test_without_jit_they_are_python_loops(run: Any):
    value = state()
    with jax.disable_jit():
        assert run(value) is value
    assert difference(loop(is_big, halve, state()), value) is None


def test_without_jit_a_vmapped_loop_is_traced():
    with jax.disable_jit():
        values = jax.vmap(lambda x: graftax.while_loop(is_big, halve, state(x)).steps)(jnp.array([64.0, 0.0]))
    assert values.tolist() == [7, 0]
