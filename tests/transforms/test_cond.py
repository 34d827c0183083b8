# SPDX-License-Identifier: Apache-2.0
"""cond and switch: what the chosen function does, to any objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from oracle import deep_copy, difference
from zoo import BUILDERS, NAMES, Box, Node, Point

BOTH = pytest.mark.parametrize("pred", [True, False])
JITS = pytest.mark.parametrize("jit", [lambda f: f, graftax.jit, jax.jit], ids=["plain", "graftax.jit", "jax.jit"])


@pytest.mark.parametrize("build", BUILDERS, ids=NAMES)
def test_any_graph_is_an_operand_and_a_result(build: Callable[[], Any]):
    graph, copy = (deep_copy([build()], leaf=jnp.asarray) for _ in range(2))
    result = graftax.cond(True, lambda g: g, lambda g: g, graph)
    assert result is graph
    assert difference(copy, graph) is None


@pytest.mark.parametrize("build", BUILDERS, ids=NAMES)
def test_the_values_are_those_of_the_chosen_one(build: Callable[[], Any]):
    pred = False
    leaves, graphdef = graftax.flatten([build()])
    ones = [jnp.asarray(x) for x in leaves]
    twos = [x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else (x + x).astype(x.dtype) for x in ones]
    first, second = graftax.unflatten(graphdef, ones), graftax.unflatten(graphdef, twos)
    result = graftax.cond(jnp.asarray(pred), lambda a, b: {"x": a}, lambda a, b: {"x": b}, first, second)
    assert difference({"x": first if pred else second}, result) is None
    assert difference(graftax.unflatten(graphdef, ones), first) is None
    assert difference(graftax.unflatten(graphdef, twos), second) is None


@BOTH
@JITS
def test_a_change_of_one_branch_is_made_only_where_it_runs(pred: bool, jit: Any):
    total = {"calls": jnp.asarray(0)}

    def double(box: Any) -> None:
        box.w = box.w * 2
        total["calls"] = total["calls"] + 1

    @jit
    def run(pred: Any, w: Any) -> Any:
        box = Box(w=w, untouched=w)
        assert graftax.cond(pred, double, lambda box: None, box) is None
        return box.w, box.untouched, total["calls"]

    w, untouched, calls = run(pred, jnp.ones(2))
    assert w.tolist() == ([2, 2] if pred else [1, 1])
    assert untouched.tolist() == [1, 1]
    assert calls == pred


@BOTH
def test_branches_change_one_shared_object(pred: bool):
    root = Node(jnp.zeros(2))
    child = Node(jnp.ones(2), parent=root)
    copy = deep_copy(root)

    def down(node: Any, x: Any) -> Any:
        node.children[0].value = node.value + x
        return node.children[0]

    def up(node: Any, x: Any) -> Any:
        node.value = node.children[0].value * x
        node.children[0].value = node.value
        return node.children[0].parent.children[0]

    (down if pred else up)(copy, 3.0)
    assert graftax.cond(jnp.asarray(pred), down, up, root, 3.0) is child
    assert difference(copy, root) is None


@BOTH
def test_one_tracer_in_two_places_of_one_branch(pred: bool):
    def put_twice(box: Any, x: Any) -> None:
        box.a = box.b = x

    def other(box: Any, x: Any) -> None:
        box.a, box.b = x * 2, x * 3

    box, copy = (Box(a=jnp.zeros(()), b=jnp.zeros(())) for _ in range(2))
    (put_twice if pred else other)(copy, jnp.ones(()))
    graftax.cond(pred, put_twice, other, box, jnp.ones(()))
    assert difference(copy, box) is None


@BOTH
def test_both_branches_may_change_the_structure_in_the_same_way(pred: bool):
    def append_row(box: Any) -> Any:
        box.rows.append({"v": jnp.ones(2)})
        box.last = box.rows[-1]
        del box.old
        return box.last

    def zeros(box: Any) -> Any:
        new = {"v": jnp.zeros(2)}
        box.last = new
        box.rows.append(new)
        del box.old
        return new

    box, copy = (Box(rows=[], old=jnp.ones(3), last=None) for _ in range(2))
    expected = (append_row if pred else zeros)(copy)
    result = graftax.cond(pred, append_row, zeros, box)
    assert difference((copy, expected), (box, result)) is None
    assert result is box.last is box.rows[0]


@BOTH
def test_a_new_object_beside_one_that_stays_is_a_new_one(pred: bool):
    state = {"x": jnp.ones(2), "name": "s"}
    result = graftax.cond(pred, lambda s: {**s, "x": s["x"] + 1}, lambda s: s, state)
    assert result is not state
    assert difference({"x": jnp.ones(2) + 1 if pred else jnp.ones(2), "name": "s"}, result) is None
    assert state["x"].tolist() == [1, 1]


@BOTH
def test_in_a_tuple_only_what_differs_is_new(pred: bool):
    a, b, c = ({"v": jnp.zeros(2) + i} for i in range(3))

    def first() -> Any:
        c["v"] = c["v"] + 1
        return a, c, 1.0

    def second() -> Any:
        return b, c, 2.5

    result = graftax.cond(pred, first, second)
    assert result[1] is c
    assert c["v"].tolist() == ([3, 3] if pred else [2, 2])
    assert result[0] is not a
    assert result[0] is not b
    assert result[0]["v"].tolist() == ([0, 0] if pred else [1, 1])
    assert result[2] == (1 if pred else 2.5)


@BOTH
def test_a_python_number_in_an_operand_that_one_branch_changes_is_traced(pred: bool):
    def count(box: Any) -> None:
        box.n += 1

    box = Box(n=1, w=jnp.ones(2))
    graftax.cond(pred, count, lambda box: None, box)
    assert box.n == (2 if pred else 1)


@pytest.mark.parametrize("jit", [lambda f: f, graftax.jit], ids=["plain", "graftax.jit"])
def test_numbers_beside_one_that_a_branch_changes_stay_numbers(jit: Callable[..., Any]):
    def count(box: Any) -> Any:
        box.n += 1
        return jnp.ones(box.size)

    def keep(box: Any) -> Any:
        return jnp.zeros(box.size)

    run = jit(lambda pred, box: graftax.cond(pred, count, keep, box))
    box = Box(n=1, size=3, rate=-0.5, table=np.arange(3.0))
    table = box.table
    for pred, n in ((True, 2), (False, 2), (True, 3)):
        assert run(jnp.asarray(pred), box).tolist() == [float(pred)] * 3
        assert box.n == n
        assert (type(box.size), box.size, type(box.rate), box.rate) == (int, 3, float, -0.5)
        assert box.table is table


@pytest.mark.parametrize("jit", [lambda f: f, graftax.jit], ids=["plain", "graftax.jit"])
def test_a_number_that_a_branch_computes_of_others_leaves_them_numbers(jit: Callable[..., Any]):
    def double(box: Any) -> None:
        box.n = box.m * 2

    run = jit(lambda pred, box: graftax.cond(pred, double, lambda box: None, box))
    box = Box(n=1, m=4, rate=-0.5)
    for n in (8, 8):
        run(jnp.asarray(True), box)
        assert box.n == n
        assert (type(box.m), box.m, type(box.rate), box.rate) == (int, 4, float, -0.5)


def test_a_number_that_all_branches_change_alike_stays_one():
    def halve(box: Any) -> None:
        box.n *= 0.5

    run = graftax.jit(lambda pred, box: graftax.cond(pred, halve, halve, box))
    box = Box(n=1.0)
    for n in (0.5, 0.25, 0.125):
        run(jnp.asarray(True), box)
        assert (type(box.n), box.n) == (float, n)


def test_a_python_number_that_no_branch_changes_stays_one():
    box = Box(n=2, w=jnp.ones(4))
    assert graftax.cond(True, lambda b: b.w[: b.n], lambda b: b.w[-b.n :], box).shape == (2,)
    assert type(box.n) is int


@pytest.mark.parametrize(
    "results", [(1, 2), (1.0, jnp.float32(2)), (True, False), (1, jnp.int32(2)), (np.float32(1), 2.0)]
)
@BOTH
def test_numbers_become_what_jax_makes_of_them(results: tuple[Any, Any], pred: bool):
    actual, expected = (cond(pred, lambda: results[0], lambda: results[1]) for cond in (graftax.cond, jax.lax.cond))
    assert difference(expected, actual) is None


@BOTH
def test_results_of_every_kind(pred: bool):
    def first(x: Any) -> Any:
        return Point(Box(x=x, name="n"), [x, "s", None])

    def second(x: Any) -> Any:
        return Point(Box(x=x * 2, name="n"), [x * 3, "s", None])

    x = jnp.ones(2)
    assert difference((first if pred else second)(x), graftax.cond(pred, first, second, x)) is None


@pytest.mark.parametrize("index", [0, 1, 2])
def test_the_order_of_keys_and_attributes_does_not_matter(index: int):
    """`jax.tree.map` sorts the keys of a dict."""

    def in_order(keys: str, number: float) -> Any:
        def branch(box: Any) -> Any:
            box.new = {key: jnp.asarray(number + ord(key)) for key in keys}
            return {key: [box.new[key] * 2] for key in reversed(keys)}

        return branch

    branches = [in_order("cab", 0), in_order("abc", 100), in_order("bca", 200)]
    box, copy = Box(w=jnp.ones(2)), Box(w=jnp.ones(2))
    expected, result = branches[index](copy), graftax.switch(index, branches, box)
    assert result == expected
    assert list(result) == list("bac")
    assert box.new == copy.new


def test_tree_map_beside_doing_nothing():
    params = {"w": jnp.ones(2), "b": jnp.zeros(2)}
    for pred in (True, False):
        result = graftax.cond(pred, lambda p: jax.tree.map(lambda x: x + 1, p), lambda p: p, params)
        assert {key: value.tolist() for key, value in result.items()} == {"w": [1 + pred] * 2, "b": [pred] * 2}


@pytest.mark.parametrize("index", [-5, 0, 1, 2, 7])
@pytest.mark.parametrize("wrap", [int, jnp.asarray])
def test_switch_clamps_as_jax_does(index: int, wrap: Any):
    log = {"n": jnp.asarray(0)}

    def branch_for(k: int) -> Any:
        def branch(x: Any) -> Any:
            if k:
                log["n"] = log["n"] + k
            return {"x": x * k}

        return branch

    result = graftax.switch(wrap(index), [branch_for(0), branch_for(1), branch_for(2)], jnp.ones(2))
    chosen = min(max(index, 0), 2)
    assert result["x"].tolist() == [chosen, chosen]
    assert log["n"] == chosen


def test_one_branch_is_that_branch():
    box = Box(w=jnp.ones(2))

    def double(box: Any) -> Any:
        box.w = box.w * 2
        return box

    assert graftax.switch(3, [double], box) is box
    assert box.w.tolist() == [2, 2]


@pytest.mark.quick(0)
def test_branches_are_vmapped_and_differentiated():
    def run(pred: Any, x: Any) -> Any:
        box = Box(x=x, name="n")

        def square(box: Any) -> None:
            box.x = box.x**2

        graftax.cond(pred, square, lambda box: None, box)
        return box.x

    preds, xs = jnp.array([True, False]), jnp.array([3.0, 4.0])
    assert jax.vmap(run)(preds, xs).tolist() == [9, 4]
    for grad in (graftax.grad, jax.grad):
        assert [float(grad(run, argnums=1)(p, x)) for p, x in zip(preds, xs, strict=True)] == [6, 1]
    assert jax.vmap(jax.grad(run, argnums=1))(preds, xs).tolist() == [6, 1]


def test_branches_in_a_loop_in_a_branch():
    def step(carry: Any, x: Any) -> Any:
        def add(c: Any) -> None:
            c.sum = c.sum + x

        def skip(c: Any) -> None:
            c.skipped = c.skipped + 1

        graftax.cond(x > 1, add, skip, carry)
        return carry, carry.sum

    def run(box: Any) -> None:
        graftax.scan(step, box, jnp.arange(4.0))

    box = Box(sum=jnp.zeros(()), skipped=jnp.asarray(0))
    graftax.cond(jnp.asarray(True), run, lambda box: None, box)
    assert (float(box.sum), int(box.skipped)) == (5, 2)
    graftax.jit(lambda box, p: graftax.cond(p, run, lambda box: None, box))(box, jnp.asarray(False))
    assert (float(box.sum), int(box.skipped)) == (5, 2)


def test_what_one_branch_captures_may_be_the_others_operand():
    shared = {"v": jnp.zeros(2)}

    def by_name() -> Any:
        shared["v"] = shared["v"] + 1
        return shared

    assert graftax.cond(True, by_name, lambda: shared) is shared
    assert shared["v"].tolist() == [1, 1]

    def add(state: Any) -> None:
        state["v"] = state["v"] + shared["v"]

    graftax.cond(False, lambda state: None, add, shared)
    assert shared["v"].tolist() == [2, 2]


def test_without_jit_only_the_chosen_one_runs():
    ran: list[str] = []
    with jax.disable_jit():
        graftax.cond(jnp.asarray(True), lambda: ran.append("yes"), lambda: ran.append("no"))
        graftax.switch(9, [lambda: ran.append("zero"), lambda: ran.append("last")])
        values = jax.vmap(lambda p: graftax.cond(p, lambda: 1.0, lambda: 2.0))(jnp.array([True, False]))
    assert ran == ["yes", "last"]
    assert values.tolist() == [1, 2]


@BOTH
@JITS
def test_a_branch_makes_numpy_arrays(jit: Any, pred: bool):
    def f(pred: Any, x: Any) -> Any:
        return graftax.cond(pred, lambda x: {"y": np.ones(2, np.float32)}, lambda x: {"y": x * 2}, x)["y"]

    assert jnp.array_equal(jit(f)(jnp.asarray(pred), jnp.arange(2.0)), [1.0, 1.0] if pred else [0.0, 2.0])
    chosen = jit(lambda i: graftax.switch(i, [lambda: np.zeros(2), lambda: np.ones(2)]))(jnp.asarray(int(pred)))
    assert chosen.sum() == 2 * int(pred)


def test_a_step_makes_a_numpy_array():
    def step(state: Any) -> Any:
        return {"n": state["n"] + 1, "x": np.full(2, 3, np.float32)}

    last = graftax.while_loop(lambda s: s["n"] < 4, step, {"n": jnp.zeros((), int), "x": jnp.zeros(2)})
    assert last["n"] == 4 and jnp.array_equal(last["x"], [3.0, 3.0])


@pytest.mark.parametrize("change", [lambda o: setattr(o, "w", o.w + 1), lambda o: setattr(o, "name", "new")])
def test_a_copy_that_stands_for_one_of_several_objects_may_not_be_changed(change):
    class Part:
        def __init__(self, w):
            self.w, self.name = w, "old"

    left, right = Part(jnp.ones(2)), Part(jnp.zeros(2))

    def f(p):
        chosen = graftax.cond(p, lambda: left, lambda: right)
        change(chosen)
        return chosen.w

    with pytest.raises(graftax.MutationError, match=r"result\.(w|name)"):
        graftax.jit(f)(jnp.asarray(True))
    assert (left.name, right.name, left.w.tolist(), right.w.tolist()) == ("old", "old", [1, 1], [0, 0])
