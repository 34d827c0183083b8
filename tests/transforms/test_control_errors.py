# SPDX-License-Identifier: Apache-2.0
"""Loops and branches say what they cannot do: where, why, and what to write instead; and they leave objects alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from zoo import Box

XS = jnp.ones((3, 2))
ZERO = jnp.zeros(2)
LOG: dict[str, Any] = {"sum": jnp.zeros(2)}
NUMBER = 0


def appending() -> Any:
    logs: list[Any] = []

    def step(carry: Any, x: Any) -> Any:
        logs.append(carry)
        return carry + x, None

    return graftax.scan(step, ZERO, XS)


def counting() -> Any:
    count = 0

    def step(carry: Any, x: Any) -> Any:
        nonlocal count
        count += 1
        return carry + x, None

    return graftax.scan(step, ZERO, XS)


def exchanging() -> Any:
    a, b = {"v": ZERO}, {"v": ZERO}

    def step(carry: Any, x: Any) -> Any:
        nonlocal a, b
        a, b = b, a
        return carry, None

    return graftax.scan(step, ZERO, XS)


def changing_and_replacing() -> Any:
    def step(carry: Any, x: Any) -> Any:
        carry["a"]["v"] = carry["a"]["v"] + 1
        return {"a": {"v": carry["a"]["v"]}}, None

    return graftax.scan(step, {"a": {"v": ZERO}}, XS)


def changing_and_moving() -> Any:
    def step(carry: Any, x: Any) -> Any:
        carry[0]["v"] = carry[0]["v"] + 1
        return (carry[1], carry[0]), None

    return graftax.scan(step, ({"v": ZERO}, {"v": ZERO}), XS)


def exchanging_inside() -> Any:
    def step(carry: Any, x: Any) -> Any:
        carry["a"], carry["b"] = carry["b"], carry["a"]
        return carry, None

    return graftax.scan(step, {"a": [ZERO], "b": [ZERO]}, XS)


def sharing_in_the_end() -> Any:
    def step(carry: Any, x: Any) -> Any:
        return {"a": carry["a"], "b": carry["a"]}, None

    return graftax.scan(step, {"a": [ZERO], "b": [ZERO]}, XS)


def changing_test() -> Any:
    def test(state: Any) -> Any:
        state["n"] = state["n"] + 1
        return state["n"].sum() < 3

    return graftax.while_loop(test, lambda s: s, {"n": ZERO})


def assigning_a_global() -> Any:
    def step(carry: Any, x: Any) -> Any:
        global NUMBER
        NUMBER = 1
        return carry, None

    return graftax.scan(step, ZERO, XS)


def changing_in_batches() -> Any:
    def add(x: Any) -> Any:
        LOG["sum"] = LOG["sum"] + x
        return x

    return graftax.map(add, XS, batch_size=2)


def changing_associative() -> Any:
    def add(a: Any, b: Any) -> Any:
        LOG["sum"] = LOG["sum"] + 1
        return a + b

    return graftax.associative_scan(add, XS)


@graftax.jit
def jitted_step(carry: Any, x: Any) -> Any:
    LOG["sum"] = LOG["sum"] + x
    return carry, None


def hidden_cache() -> Any:
    @jax.tree_util.register_pytree_node_class
    class Cached:
        def __init__(self, a: Any) -> None:
            self.a, self.cache = a, None

        def tree_flatten(self) -> Any:
            return (self.a,), None

        @classmethod
        def tree_unflatten(cls, aux: None, children: Any) -> Any:
            return cls(*children)

    def step(carry: Any, x: Any) -> Any:
        carry.cache = x
        return carry, None

    return graftax.scan(step, Cached(ZERO), XS)


def moved_in_one() -> Any:
    def swap(s: Any) -> None:
        s["list"], s["other"] = s["other"], s["list"]

    return graftax.cond(False, lambda s: None, swap, {"list": [ZERO], "other": [ZERO + 1]})


def changed_and_replaced_in_both() -> Any:
    def replace(s: Any) -> None:
        s["c"]["v"] = ZERO + 1
        s["c"] = {"v": ZERO}

    return graftax.cond(True, replace, replace, {"c": {"v": ZERO}})


def number_used_for_a_shape() -> Any:
    return graftax.cond(
        True,
        lambda d: {"n": d["n"] + 1, "z": jnp.zeros(d["n"])},
        lambda d: {"n": d["n"], "z": jnp.zeros(d["n"])},
        {"n": 2},
    )


def number_used_for_a_key() -> Any:
    def step(i: Any, d: dict[str, Any]) -> Any:
        d["n"] += 1
        d[f"item {d['n']}"] = ZERO
        return d

    return graftax.fori_loop(0, 2, step, {"n": 0})


CASES: list[tuple[Callable[[], Any], type[Exception], list[str]]] = [
    (
        appending,
        graftax.StructureError,
        ["scan of step", "closure logs[0]: expected nothing, given an array", "second"],
    ),
    (counting, graftax.StructureError, ["closure count: expected 0, given 1", "jnp.asarray"]),
    (exchanging, graftax.StructureError, ["the object at closure b in the place of closure a", "copy.copy"]),
    (changing_and_replacing, graftax.StructureError, ["changes the object at carry['a'] in place", "second step"]),
    (changing_and_moving, graftax.StructureError, ["changes the object at carry[0] in place"]),
    (exchanging_inside, graftax.StructureError, ["the object at carry['b'] in the place of carry['a']", "copy.copy"]),
    (sharing_in_the_end, graftax.StructureError, ["carry['a'] and carry['b']: expected two objects, given one object"]),
    (changing_test, graftax.MutationError, ["cond_fun must not change anything, and changed s"]),
    (assigning_a_global, graftax.MutationError, ["assigns the global NUMBER"]),
    (changing_in_batches, graftax.MutationError, ["with batch_size, f must not", "changed global LOG"]),
    (changing_associative, graftax.MutationError, ["fn must not change anything", "changed global LOG"]),
    (hidden_cache, graftax.StructureError, ["['cache']", "flatten leaves out"]),
    (
        lambda: graftax.scan(lambda c, x: (c.astype(int), None), ZERO, XS),
        graftax.StructureError,
        ["c is float32[2] before a step and int32[2] after it", "x.astype"],
    ),
    (
        lambda: graftax.scan(lambda c, x: ({"a": c["a"][None]}, None), {"a": ZERO}, XS),
        graftax.StructureError,
        ["c['a'] is float32[2] before a step and float32[1, 2] after it"],
    ),
    (
        lambda: graftax.scan(lambda c, x: ({"b": c["a"]}, None), {"a": ZERO}, XS),
        graftax.StructureError,
        ["c['a']: expected an array, given nothing", "c['b']: expected nothing, given an array"],
    ),
    (lambda: graftax.scan(lambda c, x: c, ZERO, XS), TypeError, ["a pair (carry, y), and returned float32[2]"]),
    (lambda: graftax.scan(lambda c, x: (c, x, x), ZERO, XS), TypeError, ["returned tuple of 3"]),
    (
        lambda: graftax.scan(lambda c, x: (c, None), ZERO, {"a": XS, "b": jnp.ones(4)}),
        ValueError,
        ["xs['b'] has 4 rows and xs['a'] means 3"],
    ),
    (lambda: graftax.scan(lambda c, x: (c, None), ZERO, XS, 4), ValueError, ["3 rows and length=4 means 4"]),
    (lambda: graftax.scan(lambda c, x: (c, None), ZERO, [jnp.ones(())]), ValueError, ["xs[0] is a scalar"]),
    (lambda: graftax.scan(lambda c, x: (c, None), ZERO), ValueError, ["pass length="]),
    *(
        (
            lambda n=n: graftax.scan(lambda c, x: (c, None), ZERO, length=n),  # type: ignore[misc]
            ValueError,
            [f"length={n!r}", "whole number of steps"],
        )
        for n in (-1, 2.5, "3")
    ),
    (
        lambda: graftax.scan(lambda c, x: (c.update(a=x), None), {"a": ZERO}, XS),
        graftax.StructureError,
        ["returns None, which would be the next step's c", "changed in place"],
    ),
    (
        lambda: graftax.while_loop(lambda s: s["a"].sum() < 3, lambda s: s.update(a=s["a"] + 1), {"a": ZERO}),
        graftax.StructureError,
        ["while_loop of", "next step's s"],
    ),
    (
        lambda: graftax.associative_scan(lambda a, b: a, {"p": XS, "q": XS[:2]}),
        ValueError,
        ["elems['q'] has 2 elements along axis 0 and elems['p'] has 3"],
    ),
    (
        lambda: graftax.associative_scan(lambda a, b: a, {"p": XS, "q": ZERO}, axis=1),
        ValueError,
        ["elems['q'] has the shape (2,), and no axis 1"],
    ),
    (lambda: graftax.scan(3, ZERO, XS), TypeError, ["scan expects a callable, and was given 3"]),  # type: ignore[arg-type]
    (lambda: graftax.scan(lambda c: (c, None), ZERO, XS), TypeError, ["positional argument"]),
    (
        lambda: graftax.scan(lambda c, x: (c, None), ZERO, XS, progress=3),  # type: ignore[arg-type]
        TypeError,
        ["progress= takes True, a title or a function", "not int"],
    ),
    (
        lambda: graftax.while_loop(lambda s: s["a"] > 0, lambda s: s, {"a": ZERO}),
        TypeError,
        ["cond_fun has to return a scalar boolean array, and returned bool[2]", ".any()"],
    ),
    (lambda: graftax.while_loop(lambda s: None, lambda s: s, ZERO), TypeError, ["returned NoneType"]),
    *(
        (
            lambda m=m: graftax.while_loop(lambda s: s < 3, lambda s: s + 1, 0, max_steps=m),  # type: ignore[misc]
            TypeError,
            ["while_loop of", f"max_steps={m!r}", "whole number"],
        )
        for m in (2.5, -1, "3")
    ),
    (
        lambda: graftax.fori_loop(0, 3, lambda i, v: {**v, "b": i}, {"a": ZERO}),
        graftax.StructureError,
        ["fori_loop of", "v['b']: expected nothing, given an array"],
    ),
    (
        lambda: graftax.associative_scan(lambda a, b: [a["q"]], {"q": XS}),
        graftax.StructureError,
        ["elems: expected dict, given list"],
    ),
    (
        lambda: graftax.cond(True, lambda s: {"a": s}, lambda s: {"b": s}, ZERO),
        graftax.StructureError,
        ["true_fun and false_fun return different structures", "result['a']: expected an array, given nothing"],
    ),
    (
        lambda: graftax.cond(True, lambda s: ("x", 1), lambda s: ("y", 1), ZERO),
        graftax.StructureError,
        ["result[0]: expected 'x', given 'y'"],
    ),
    (
        lambda: graftax.cond(True, lambda s: {"a": s}, lambda s: {"a": s.sum()}, ZERO),
        graftax.StructureError,
        ["result['a'] is float32[2] after true_fun and float32[] after false_fun"],
    ),
    (
        lambda: graftax.cond(True, lambda: 1.0, lambda: 2),
        graftax.StructureError,
        ["result is float32[] after true_fun and int32[] after false_fun", "x.astype"],
    ),
    (
        lambda: graftax.cond(True, lambda s: s.append(ZERO), lambda s: None, [ZERO]),
        graftax.StructureError,
        ["leave different structures behind", "s[1]: expected an array, given nothing", "in both branches"],
    ),
    (
        lambda: graftax.switch(0, [lambda b: None, lambda b: setattr(b, "w", b.w.sum())], Box(w=ZERO)),
        graftax.StructureError,
        ["b.w is float32[2] after branches[0] and float32[] after branches[1]"],
    ),
    (
        moved_in_one,
        graftax.StructureError,
        ["s['list'] stays the object that it is in one of true_fun and false_fun"],
    ),
    (changed_and_replaced_in_both, graftax.StructureError, ["changes the object at s['c'] in place, and then removes"]),
    (number_used_for_a_shape, graftax.StructureError, ["result['n']: expected 3, given 2"]),
    (lambda: graftax.switch(1, [], ZERO), ValueError, ["at least one function"]),
    (lambda: graftax.cond(ZERO, lambda s: s, lambda s: s, [ZERO]), TypeError, ["Pred must be a scalar"]),
]


@pytest.mark.quick(10)
@pytest.mark.parametrize(("run", "kind", "words"), CASES, ids=[f"{i}" for i in range(len(CASES))])
def test_the_error_names_the_place_the_reason_and_the_way_out(run: Any, kind: type[Exception], words: list[str]):
    for call in (run, graftax.jit(lambda: run()), jax.jit(run)):
        with pytest.raises(kind) as caught:
            call()
        assert not [word for word in words if word not in str(caught.value)], str(caught.value)
    assert not isinstance(LOG["sum"], jax.core.Tracer)


@pytest.mark.quick(10)
@pytest.mark.parametrize(
    ("run", "argument"),
    [
        (
            lambda: graftax.scan(lambda c, x: (c if c["a"].sum() > 0 else {}, None), {"b": ZERO, "a": ZERO}, XS),
            "c['a']",
        ),
        (lambda: graftax.scan(lambda c, x: (c if x[1].sum() > 0 else {}, None), {"a": ZERO}, (XS, XS)), "xs[1]"),
        (lambda: graftax.map(lambda x: x if x["q"].sum() > 0 else 0, {"p": XS, "q": XS}), "xs['q']"),
        (lambda: graftax.while_loop(lambda s: bool(s["b"] > 0), lambda s: s, {"a": ZERO, "b": ZERO[0]}), "s['b']"),
        (lambda: graftax.fori_loop(0, 2, lambda i, v: v if v["b"] > 0 else {}, {"a": ZERO, "b": ZERO[0]}), "v['b']"),
        (lambda: graftax.cond(True, lambda s: s if s[1] > 0 else 0, lambda s: s, [ZERO, ZERO[0]]), "s[1]"),
    ],
)
def test_messages_of_jax_name_key_paths(run: Any, argument: str):
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        run()
    assert f"the value of the argument {argument}." in str(caught.value)


def test_a_number_that_is_traced_because_it_changes_is_named_beside_jaxs_error():
    with pytest.raises(TypeError) as caught:
        graftax.scan(lambda c, x: ({"n": c["n"] + 1}, jnp.zeros(c["n"])), {"n": 0}, XS)
    assert any("the Python numbers at c['n'] are traced here" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("wrap", [lambda f: f, graftax.jit])
def test_an_exception_in_a_step_leaves_the_callers_objects_as_they_were(wrap: Any):
    box = Box(w=ZERO, n=1)

    def step(carry: Any, x: Any) -> Any:
        carry.w, carry.n, LOG["new"] = carry.w + x, 2, x
        raise KeyError("mine")

    def branch(box: Any) -> None:
        box.w = box.w + 1
        raise KeyError("mine")

    for run in (
        lambda box: graftax.scan(step, box, XS),
        lambda box: graftax.cond(True, lambda b: None, branch, box),
        lambda box: graftax.while_loop(lambda b: True, branch, box),
    ):
        with pytest.raises(KeyError, match="mine"):
            wrap(run)(box)
        assert (box.w.tolist(), box.n, list(LOG)) == ([0, 0], 1, ["sum"])


def test_a_whole_number_of_steps_may_be_written_as_any_number():
    for n in (3, 3.0, np.int64(3), jnp.asarray(3), True):
        assert graftax.scan(lambda c, x: (c + 1, None), jnp.asarray(0), length=n)[0] == int(n)


def test_no_tracer_outlives_its_trace():
    state = {"a": ZERO}

    def step(carry: Any, x: Any) -> Any:
        state["a"] = state["a"] + x
        graftax.cond(x.sum() > 0, lambda: state.update(a=state["a"] * 2), lambda: None)
        return carry + state["a"], x

    with jax.checking_leaks():
        looped = graftax.scan(step, ZERO, XS)[0]
    assert looped.tolist() == [22, 22] and state["a"].tolist() == [14, 14]


def test_no_tracer_outlives_its_trace_under_jit():
    """Of loops that go through at once: JAX's checker takes a trace that an exception ends for a leak."""

    def run(state: Any) -> Any:
        mapped = graftax.map(lambda x: x * 2, XS)
        waited = graftax.while_loop(lambda s: s["x"].sum() < 9, lambda s: {"x": s["x"] + 1}, {"x": ZERO}, max_steps=9)
        chosen = graftax.switch(1, [lambda s: s["a"], lambda s: -s["a"]], state)
        return graftax.scan(lambda c, x: (c + x, x), state["a"], mapped)[0], waited["x"], chosen

    with jax.checking_leaks():
        looped, waited, chosen = graftax.jit(run)({"a": ZERO + 1})
    assert (looped.tolist(), waited.tolist(), chosen.tolist()) == ([7, 7], [5, 5], [-1, -1])


def test_a_jitted_step_that_changes_what_it_captures_runs_step_by_step_and_only_outside_of_jit():
    before = LOG["sum"]
    run = lambda: graftax.scan(jitted_step, ZERO, XS)
    for count in (1, 2):
        run()
        assert (LOG["sum"] == before + count * XS.sum(0)).all()
    for call in (graftax.jit(run), jax.jit(run)):
        with pytest.raises(graftax.MutationError):
            call()
    assert (LOG["sum"] == before + 2 * XS.sum(0)).all()


def test_a_text_of_a_number_of_a_loop_is_right_or_refused():
    assert list(number_used_for_a_key()) == ["n", "item 1", "item 2"]  # step by step
    for call in (graftax.jit(lambda: number_used_for_a_key()), jax.jit(number_used_for_a_key)):
        with pytest.raises(graftax.LeakedTracerError, match="a key of a dict is 'item JitTracer"):
            call()
