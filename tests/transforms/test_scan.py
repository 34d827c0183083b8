# SPDX-License-Identifier: Apache-2.0
"""scan: what the Python loop does, on any carry and anything captured; what jax.lax.scan does, on the flat problem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from graftax import StructureError
from oracle import deep_copy, difference
from zoo import BUILDERS, NAMES, Box, Node, Point

XS = jnp.arange(12.0).reshape(4, 3)


def loop(f: Callable[..., Any], carry: Any, xs: Any = None, length: int | None = None) -> tuple[Any, list[Any]]:
    """The loop in plain Python; what is stacked is left as a list."""
    count = len(jax.tree.leaves(xs)[0]) if length is None else length
    ys: list[Any] = []
    for i in range(count):
        carry, y = f(carry, jax.tree.map(lambda x, i=i: x[i], xs))
        ys.append(jax.tree.map(jnp.asarray, y))
    return carry, ys


def assert_is_loop(f: Callable[..., Any], init: Any, xs: Any = None, length: int | None = None, run: Any = None) -> Any:
    """scan gives the result of the loop, and does to the first carry what the loop does to it."""
    copy = deep_copy(init)
    expected, ys = loop(f, copy, xs, length)
    carry, stacked = (run or graftax.scan)(f, init, xs, length)
    assert difference((expected, copy), (carry, init)) is None
    for column, leaf in zip(zip(*map(jax.tree.leaves, ys), strict=True), jax.tree.leaves(stacked), strict=True):
        np.testing.assert_allclose(jnp.stack(column), leaf, rtol=1e-6)
    return carry


# ---- laws


@pytest.mark.parametrize("build", BUILDERS, ids=NAMES)
def test_any_graph_is_carried_unchanged(build: Callable[[], Any]):
    graph, copy = (deep_copy(build(), leaf=jnp.asarray) for _ in range(2))

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        return {"graph": carry["graph"], "count": carry["count"] + x}, None

    carry, _ = graftax.scan(step, {"graph": graph, "count": jnp.asarray(0)}, jnp.arange(4))
    assert difference((copy, copy), (graph, carry["graph"])) is None
    assert carry["count"] == 6


@pytest.mark.parametrize("build", BUILDERS, ids=NAMES)
def test_a_new_graph_in_each_step_is_what_a_scan_of_its_leaves_gives(build: Callable[[], Any]):
    leaves, graphdef = graftax.flatten([build()])  # a number that stands by itself would become an array
    leaves = [jnp.asarray(x) for x in leaves]

    def doubled(x: Any) -> Any:
        return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) or x.dtype == bool else x + x

    def step(carry: Any, _: None) -> tuple[Any, Any]:
        values, structure = graftax.flatten(carry)
        return graftax.unflatten(structure, [doubled(x) for x in values]), None

    def flat(carry: Any, _: None) -> tuple[Any, Any]:
        return [doubled(x) for x in carry], None

    carry, _ = graftax.scan(step, graftax.unflatten(graphdef, leaves), length=3)
    expected, _ = jax.lax.scan(flat, leaves, length=3)
    assert difference(graftax.unflatten(graphdef, expected), carry) is None


@pytest.mark.parametrize("build", BUILDERS, ids=NAMES)
def test_any_graph_is_returned_from_a_step(build: Callable[[], Any]):
    graph = [build()]
    _, ys = graftax.scan(lambda carry, x: (carry, graph), None, jnp.arange(3))
    leaves, graphdef = graftax.flatten(graph)
    assert difference(graftax.unflatten(graphdef, [jnp.stack([jnp.asarray(x)] * 3) for x in leaves]), ys) is None


@pytest.mark.parametrize("build", BUILDERS, ids=NAMES)
def test_any_graph_of_arrays_is_gone_over(build: Callable[[], Any]):
    leaves, graphdef = graftax.flatten([build()])
    xs = graftax.unflatten(graphdef, [jnp.stack([jnp.asarray(x)] * 2) for x in leaves])
    if not leaves:
        with pytest.raises(ValueError, match="pass length="):
            graftax.scan(lambda carry, x: (carry, x), None, xs)
    _, ys = graftax.scan(lambda carry, x: (carry, x), None, xs, length=2)
    assert difference(xs, ys) is None


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("unroll", [1, 2, True])
def test_reverse_and_unroll_are_those_of_jax(reverse: bool, unroll: int):
    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        carry = carry * 0.5 + x
        return carry, carry * 2

    expected = jax.lax.scan(step, jnp.zeros(3), XS, reverse=reverse, unroll=unroll)
    actual = graftax.scan(step, jnp.zeros(3), XS, reverse=reverse, unroll=unroll)
    assert difference(expected, actual) is None


@pytest.mark.parametrize("init", [0, 1.5, True, 1j, (0, 1.0), jnp.float32(1), np.float32(2), np.arange(3)])
def test_numbers_become_what_jax_makes_of_them(init: Any):
    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        return jax.tree.map(lambda c: c * jnp.asarray(2, jnp.result_type(c)), carry), (carry, 1, 2.0)

    expected, actual = jax.lax.scan(step, init, XS), graftax.scan(step, init, XS)
    assert difference(expected, actual) is None
    assert [x.weak_type for x in jax.tree.leaves(expected)] == [x.weak_type for x in jax.tree.leaves(actual)]


def test_a_weak_type_is_promoted_by_the_first_step():
    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        return {"sum": carry["sum"] + x}, None

    carry, _ = graftax.scan(step, {"sum": jnp.asarray(0)}, jnp.ones(3))
    expected, _ = jax.lax.scan(step, {"sum": jnp.asarray(0)}, jnp.ones(3))
    assert difference(expected, carry) is None
    assert carry["sum"].dtype == jnp.float32


def test_no_step_changes_nothing():
    box = Box(w=jnp.ones(2), n=1)

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        carry.w = carry.w + x
        return carry, carry.w

    carry, ys = graftax.scan(step, box, jnp.zeros((0, 2)))
    assert carry is box
    np.testing.assert_array_equal(box.w, jnp.ones(2))
    assert ys.shape == (0, 2)


# ---- the carry


def moved(carry: Any, x: Any) -> tuple[Any, Any]:
    carry.value = carry.value * 2 + x
    carry.children[0].value = carry.children[0].value + carry.value
    return carry, carry.children[0].parent.value


def test_a_carry_with_back_references_is_changed_in_place():
    root = Node(jnp.zeros(3))
    child = Node(jnp.ones(3), parent=root)
    assert assert_is_loop(moved, root, XS) is root
    assert root.children[0] is child
    assert child.parent is root


def test_an_object_that_a_step_replaces_is_a_new_one_and_the_first_stays_as_it_was():
    first = Box(w=jnp.zeros(3), name="x")

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        return Box(w=carry.w + x, name=carry.name), None

    carry = assert_is_loop(step, first, XS)
    assert carry is not first
    np.testing.assert_array_equal(first.w, jnp.zeros(3))


def test_objects_of_the_carry_may_move_on():
    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        before, current, model = carry
        model["steps"] = model["steps"] + 1
        return (current, {"v": before["v"] + current["v"] + x}, model), current

    init = ({"v": jnp.ones(3)}, {"v": jnp.ones(3)}, {"steps": jnp.asarray(0)})
    carry = assert_is_loop(step, init, XS)
    assert carry[2] is init[2]


def test_two_objects_that_change_places_are_where_the_loop_puts_them():
    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        return (carry[1], carry[0]), carry[0]["v"]

    for length in (2, 3):
        init = ({"v": jnp.zeros(())}, {"v": jnp.ones(())})
        expected, _ = loop(step, init, length=length)
        carry, ys = graftax.scan(step, init, length=length)
        assert [c["v"] for c in carry] == [e["v"] for e in expected]
        assert ys.tolist() == [0, 1, 0][:length]


def test_a_number_under_a_key_that_messages_cut_short_is_traced_when_it_changes():
    key = "k" * 200

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        carry[key] += 1
        return carry, x

    carry, _ = graftax.scan(step, {key: 0}, jnp.arange(3))
    assert carry[key] == 3


def test_a_number_of_the_carry_that_changes_is_traced_and_one_that_stays_is_not():
    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        carry["n"] += 1
        return carry, x[: carry["size"]] * carry["n"]

    carry, ys = graftax.scan(step, {"n": 0, "size": 2}, XS)
    assert carry["n"] == 4
    assert type(carry["size"]) is int
    np.testing.assert_array_equal(ys, XS[:, :2] * jnp.arange(1, 5)[:, None])


def test_one_tracer_in_two_places_ends_in_both():
    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        carry.a = carry.b = carry.b + x
        return carry, None

    assert_is_loop(step, Box(a=jnp.zeros(3), b=jnp.ones(3)), XS)


def test_a_captured_array_may_enter_the_carry():
    start = jnp.arange(3.0)

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        return {"a": start, "b": carry["a"] + x}, None

    assert_is_loop(step, {"a": jnp.zeros(3), "b": jnp.zeros(3)}, XS)


def test_the_order_of_keys_and_attributes_does_not_matter():
    """`jax.tree.map` sorts the keys of a dict."""

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        carry["box"].params = jax.tree.map(lambda p: p * 2 + x, carry["box"].params)
        return jax.tree.map(lambda x: x, carry, is_leaf=lambda x: isinstance(x, Box)), None

    def make() -> Any:
        return {"z": jnp.ones(3), "box": Box(params={"w": {"v": jnp.zeros(3), "a": jnp.ones(3)}, "b": jnp.zeros(3)})}

    assert_is_loop(step, make(), XS)
    assert_is_loop(step, make(), XS, run=graftax.jit(graftax.scan))


def test_typed_keys_are_carried():
    def step(carry: Any, _: None) -> tuple[Any, Any]:
        carry["key"], key = jax.random.split(carry["key"])
        return carry, jax.random.uniform(key)

    state = {"key": jax.random.key(0)}
    _, ys = graftax.scan(step, state, length=3)
    _, expected = jax.lax.scan(
        lambda k, _: ((s := jax.random.split(k))[0], jax.random.uniform(s[1])), jax.random.key(0), length=3
    )
    np.testing.assert_array_equal(ys, expected)


def test_slices_are_new_objects_like_xs():
    xs = Box(pair=Point(XS, "name"), rows=[XS])
    xs.me = xs

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        assert type(x) is Box
        assert x.me is x
        assert x.pair.y == "name"
        x.rows.append("changed")
        return carry + x.pair.x + x.rows[0], None

    def flat(carry: Any, x: Any) -> tuple[Any, Any]:
        return carry + x + x, None

    assert difference(graftax.scan(step, jnp.zeros(3), xs), jax.lax.scan(flat, jnp.zeros(3), XS)) is None
    assert xs.me is xs and xs.rows[1:] == ["changed"]


class Layers:
    def __init__(self, count: int) -> None:
        self.w, self.calls, self.mode = jnp.arange(1.0, count + 1), jnp.zeros(count, int), "train"


def one_after_the_other(run: Callable[..., Any], reverse: bool = False) -> Layers:
    layers = Layers(3)

    def step(carry: Any, layer: Any) -> tuple[Any, Any]:
        carry = carry * layer.w
        layer.calls, layer.seen, layer.mode = layer.calls + 1, carry, "used"
        return carry, None

    assert run(lambda layers: graftax.scan(step, jnp.asarray(2.0), layers, reverse=reverse)[0])(layers) == 12
    return layers


@pytest.mark.quick(1)
@pytest.mark.parametrize("run", [lambda f: f, graftax.jit, jax.disable_jit()], ids=["eager", "jit", "plain"])
def test_what_a_step_changes_in_its_slice_comes_back_row_by_row(run: Any):
    layers = one_after_the_other(run)
    assert layers.calls.tolist() == [1, 1, 1] and layers.seen.tolist() == [2, 4, 12] and layers.mode == "used"
    assert one_after_the_other(run, reverse=True).seen.tolist() == [12, 12, 6]


@pytest.mark.parametrize("batch_size", [None, 2])
def test_map_brings_back_what_it_changes_row_by_row(batch_size: int | None):
    layers = Layers(3)

    def double(layer: Any) -> Any:
        layer.calls, layer.w = layer.calls + 1, layer.w * 2
        return layer

    result = graftax.map(double, layers, batch_size=batch_size)
    assert layers.w.tolist() == [2, 4, 6] and layers.calls.tolist() == [1, 1, 1]
    assert result is not layers and difference(result, layers) is None


def test_no_step_changes_no_slice():
    layers = Layers(0)
    one_step = lambda c, layer: (c, setattr(layer, "w", "changed"))
    graftax.scan(one_step, 0.0, layers)
    assert layers.w.shape == (0,)


def test_a_slice_and_the_captured_whole_are_not_both_changed():
    layers = Layers(3)

    def step(carry: Any, layer: Any) -> tuple[Any, Any]:
        layers.w = layers.w + 1
        layer.calls = layer.calls + 1
        return carry, None

    with pytest.raises(StructureError, match=r"xs through what it captures.*in one way"):
        graftax.scan(step, 0.0, layers)
    assert layers.w.tolist() == [1, 2, 3]


# ---- what is captured


def test_a_captured_counter_counts_steps():
    steps = jnp.asarray(0)
    log = {"sum": jnp.zeros(3)}

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        nonlocal steps
        steps = steps + 1
        log["sum"] = log["sum"] + x
        return carry, steps

    _, ys = graftax.scan(step, None, XS)
    assert steps == 4
    np.testing.assert_array_equal(ys, [1, 2, 3, 4])
    np.testing.assert_array_equal(log["sum"], XS.sum(0))


def test_the_instance_of_a_bound_method_is_state():
    class Cell:
        def __init__(self) -> None:
            self.h, self.name = jnp.zeros(3), "cell"

        def step(self, carry: Any, x: Any) -> tuple[Any, Any]:
            self.h = jnp.tanh(self.h + x)
            return carry, self.h

    cell = Cell()
    _, ys = graftax.scan(cell.step, None, XS)
    np.testing.assert_array_equal(cell.h, ys[-1])
    assert cell.name == "cell"


def test_what_the_carry_and_the_closure_share_stays_shared():
    model = Box(w=jnp.zeros(3))

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        carry["model"].w = carry["model"].w + x
        return carry, model.w

    carry, ys = graftax.scan(step, {"model": model}, XS)
    assert carry["model"] is model
    np.testing.assert_array_equal(ys, jnp.cumsum(XS, 0))
    np.testing.assert_array_equal(model.w, XS.sum(0))


def test_a_captured_array_that_no_step_changes_is_no_part_of_the_carry():
    weights = jnp.eye(3)

    def run(weights: Any, xs: Any) -> Any:
        return graftax.scan(lambda carry, x: (jnp.tanh(weights @ carry + x), None), jnp.zeros(3), xs)[0]

    def expected(weights: Any, xs: Any) -> Any:
        return jax.lax.scan(lambda carry, x: (jnp.tanh(weights @ carry + x), None), jnp.zeros(3), xs)[0]

    actual, wanted = (jax.make_jaxpr(f)(weights, XS).eqns[-1].params for f in (run, expected))
    assert actual["jaxpr"].in_avals == wanted["jaxpr"].in_avals
    assert actual["jaxpr"].out_avals == wanted["jaxpr"].out_avals


# ---- inside and outside of other transforms


def step_of_box(carry: Any, x: Any) -> tuple[Any, Any]:
    carry.w = jnp.sin(carry.w) + x
    return carry, {"w": carry.w, "name": carry.name}


def flat_step(w: Any, x: Any) -> tuple[Any, Any]:
    w = jnp.sin(w) + x
    return w, w


@pytest.mark.parametrize("jit", [lambda f: f, graftax.jit, jax.jit], ids=["plain", "graftax.jit", "jax.jit"])
def test_it_runs_under_jit(jit: Any):
    @jit
    def run(w: Any, xs: Any) -> Any:
        box = Box(w=w, name="x")
        carry, ys = graftax.scan(step_of_box, box, xs)
        assert carry is box
        return carry.w, ys["w"]

    expected = jax.lax.scan(flat_step, jnp.ones(3), XS)
    for actual, wanted in zip(run(jnp.ones(3), XS), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-6)


def test_a_jitted_function_passes_the_callers_object_through():
    box = Box(w=jnp.ones(3), name="x")
    run = graftax.jit(lambda box, xs: graftax.scan(step_of_box, box, xs)[0])
    for _ in range(2):
        expected, _ = jax.lax.scan(flat_step, box.w, XS)
        assert run(box, XS) is box
        np.testing.assert_allclose(box.w, expected, rtol=1e-6)


@pytest.mark.quick(1)
@pytest.mark.parametrize("grad", [graftax.grad, jax.grad])
def test_it_is_differentiated(grad: Any):
    def loss(w: Any, xs: Any) -> Any:
        carry, ys = graftax.scan(step_of_box, Box(w=w, name="x"), xs)
        return (carry.w * ys["w"].sum(0)).sum()

    def expected(w: Any, xs: Any) -> Any:
        w, ys = jax.lax.scan(flat_step, w, xs)
        return (w * ys.sum(0)).sum()

    np.testing.assert_allclose(grad(loss)(jnp.ones(3), XS), jax.grad(expected)(jnp.ones(3), XS), rtol=1e-5)


def test_it_is_vmapped():
    def run(w: Any) -> Any:
        return graftax.scan(step_of_box, Box(w=w, name="x"), XS)[0].w

    w = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_allclose(jax.vmap(run)(w), jax.vmap(lambda w: jax.lax.scan(flat_step, w, XS)[0])(w), rtol=1e-6)


def test_a_step_may_differentiate_and_vmap_and_jit():
    @graftax.jit
    def jitted(box: Any) -> Any:
        return (box.w**2).sum()

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        gradient = graftax.grad(jitted)(carry)
        carry.w = carry.w - 0.1 * gradient.w + jax.vmap(lambda v: v * 2)(x)
        return carry, None

    carry, _ = graftax.scan(step, Box(w=jnp.ones(3)), XS)
    expected, _ = jax.lax.scan(lambda w, x: (w - 0.2 * w + 2 * x, None), jnp.ones(3), XS)
    np.testing.assert_allclose(carry.w, expected, rtol=1e-6)


def test_loops_nest():
    total = jnp.zeros(())

    def inner(carry: Any, x: Any) -> tuple[Any, Any]:
        nonlocal total
        total = total + x
        carry.w = carry.w * 0.5 + x
        return carry, carry.w.sum()

    def outer(carry: Any, row: Any) -> tuple[Any, Any]:
        carry, sums = graftax.scan(inner, carry, row)
        return carry, sums

    box = Box(w=jnp.zeros(2))
    _, ys = graftax.scan(outer, box, XS)

    def flat(w: Any, row: Any) -> tuple[Any, Any]:
        return jax.lax.scan(lambda w, x: ((w := w * 0.5 + x), w.sum()), w, row)

    w, expected = jax.lax.scan(flat, jnp.zeros(2), XS)
    np.testing.assert_allclose(ys, expected, rtol=1e-6)
    np.testing.assert_allclose(box.w, w, rtol=1e-6)
    assert total == XS.sum()


def test_without_jit_it_is_the_python_loop_on_the_callers_own_objects():
    is_box: list[bool] = []
    box = Box(w=jnp.zeros(3), name="x", n=0)

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        is_box.append(carry is box)
        carry.w, carry.n = carry.w + x, carry.n + 1
        return carry, {"w": carry.w, "n": carry.n, "name": "y"}

    with jax.disable_jit():
        carry, ys = graftax.scan(step, box, XS, reverse=True)
    assert is_box == [True] * 4
    assert carry is box
    np.testing.assert_array_equal(ys["w"], jax.lax.scan(lambda w, x: (w + x, w + x), jnp.zeros(3), XS, reverse=True)[1])
    assert ys["n"].tolist() == [4, 3, 2, 1]
    assert ys["name"] == "y"


# ---- map and associative_scan


@pytest.mark.parametrize("batch_size", [None, 1, 3, 4])
def test_map_is_that_of_jax(batch_size: int | None):
    weights = {"w": jnp.arange(3.0), "name": "x"}
    actual = graftax.map(lambda x: Box(y=x["a"] * weights["w"], n=2), {"a": XS}, batch_size=batch_size)
    assert difference(Box(y=XS * jnp.arange(3.0), n=2), actual) is None


def test_map_threads_what_the_function_changes_through_its_steps():
    log = Box(sum=jnp.zeros(3), n=jnp.asarray(0))

    def add(x: Any) -> Any:
        log.sum, log.n = log.sum + x, log.n + 1
        return log.sum

    np.testing.assert_array_equal(graftax.map(add, XS), jnp.cumsum(XS, 0))
    assert log.n == 4


@pytest.mark.quick(1)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_associative_scan_is_that_of_jax(reverse: bool, axis: int):
    def compose(left: Any, right: Any) -> Any:
        return Box(a=left.a * right.a, b=right.a * left.b + right.b, kind=left.kind)

    def flat(left: Any, right: Any) -> Any:
        return (left[0] * right[0], right[0] * left[1] + right[1])

    # Whole numbers: what XLA fuses on one side alone rounds as the other does.
    elems = Box(a=XS, b=XS + 1, kind="affine")
    actual = graftax.associative_scan(compose, elems, reverse=reverse, axis=axis)
    a, b = jax.lax.associative_scan(flat, (XS, XS + 1), reverse=reverse, axis=axis)
    assert difference(Box(a=a, b=b, kind="affine"), actual) is None
