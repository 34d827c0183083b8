# SPDX-License-Identifier: Apache-2.0
"""Random graphs and random functions: a branch or a loop is what Python does, or an error that changes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import graftax
from oracle import difference

Function = Callable[[Any, Any], Any]


def graph(seed: int) -> dict[str, Any]:
    """Dicts with two arrays each, which refer to each other at random."""
    rng = random.Random(seed)
    nodes: list[dict[str, Any]] = [
        {"v": jnp.float32(rng.randint(0, 5)), "w": jnp.float32(rng.randint(0, 5)), "c": None, "d": None}
        for _ in range(rng.randint(2, 4))
    ]
    for node in nodes:
        for key in "cd":
            if rng.random() < 0.6:
                node[key] = rng.choice(nodes)
    return {"n": nodes[0], "m": rng.choice(nodes), "v": jnp.float32(1.0)}


def reached(root: Any) -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = []
    todo = [root]
    while todo:
        node = todo.pop()
        if not any(node is other for other in nodes):
            nodes.append(node)
            todo += [node[key] for key in reversed(node) if isinstance(node[key], dict)]
    return nodes


def function(shape: random.Random, values: random.Random, structural: list[str], returns: list[str]) -> Function:
    """Some operations on what is reached; `shape` chooses those that change structure, and what is returned."""
    steps = [(shape.choice(structural), [shape.random() for _ in range(3)]) for _ in range(shape.randint(0, 2))]
    for _ in range(values.randint(0, 3)):
        step = values.choice(["set", "copy", "exchange", "same"]), [values.random() for _ in range(3)]
        steps.insert(values.randint(0, len(steps)), step)
    result_name = shape.choice(returns)

    def run(root: Any, x: Any) -> Any:
        for name, (one, other, which) in steps:
            nodes = reached(root)
            a, b = nodes[int(one * len(nodes))], nodes[int(other * len(nodes))]
            keys = [key for key in a if isinstance(a[key], dict)]
            key = keys[int(which * len(keys))] if keys else None
            if name == "set":
                a["v"] = b["v"] * 0.5 + x
            elif name == "copy":
                a["v"] = b["v"]
            elif name == "exchange":
                a["v"], b["v"] = b["v"], a["v"]
            elif name == "same":
                a["v"] = b["v"] = b["v"] + 1
            elif name == "renew" and key:
                a[key] = dict(a[key])
            elif name == "link" and key:
                a[key] = b
        results = {
            "root": root,
            "node": root["n"],
            "pair": (root["m"], root["n"]),
            "new": {"r": root["n"], "v": root["v"] + x},
            "copy": dict(root),
        }
        return results[result_name]

    return run


def assert_is(expected: tuple[Any, Any], actual: tuple[Any, Any], with_sharing: bool) -> None:
    """(the state, the result) agree, each by itself; with `with_sharing`, also in what they share."""
    for expected_part, actual_part in zip(expected, actual, strict=True):
        assert difference(expected_part, actual_part) is None
    assert not with_sharing or difference(expected, actual) is None


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("pred", [True, False])
def test_a_branch_is_what_the_chosen_function_does(seed: int, pred: bool):
    returns = ["root", "node", "pair", "new", "copy"]
    one, other = (
        function(random.Random(seed), random.Random(seed * 2 + i), ["renew", "link"], returns) for i in (1, 2)
    )
    mine, copy, before = graph(seed), graph(seed), graph(seed)
    expected = (one if pred else other)(copy, 2.0)
    try:
        result = graftax.cond(pred, one, other, mine, 2.0)
    except graftax.StructureError:
        assert difference(before, mine) is None
    else:
        assert_is((copy, expected), (mine, result), with_sharing=True)


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("pred", [True, False])
def test_a_branch_that_changes_arrays_only_is_never_refused(seed: int, pred: bool):
    kinds = [["set"], ["copy"], ["same"]]
    one, other = (
        function(random.Random(seed + i), random.Random(seed * 2 + i), kinds[(seed + i) % 3], ["root"]) for i in (1, 2)
    )
    mine, copy = graph(seed), graph(seed)
    expected = (one if pred else other)(copy, 2.0)
    result = graftax.cond(pred, one, other, mine, 2.0)
    assert result is mine
    assert_is((copy, expected), (mine, result), with_sharing=True)


@pytest.mark.parametrize("seed", range(40))
def test_a_loop_is_the_python_loop(seed: int):
    structural = ["renew", "link"] if seed % 2 else ["set"]
    step = function(random.Random(seed), random.Random(seed), structural, ["root", "root", "copy"])
    mine, copy, before = graph(seed), graph(seed), graph(seed)
    xs = jnp.arange(1.0 + seed % 4)
    expected = copy
    for x in xs:
        expected = step(expected, x)
    try:
        result, _ = graftax.scan(lambda carry, x: (step(carry, x), None), mine, xs)
    except graftax.StructureError:
        assert difference(before, mine) is None
    else:
        assert_is((copy, expected), (mine, result), with_sharing=True)
