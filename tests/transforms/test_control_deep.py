# SPDX-License-Identifier: Apache-2.0
"""Loops and branches over deep and wide graphs, and the paths that are spelled for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import graftax
from graftax._graph.structure import Op, Structure
from sizes import sized

DEPTH = sized(20_000, 4_000)


def chain() -> dict[str, Any]:
    node = {"v": jnp.zeros(())}
    for _ in range(DEPTH):
        node = {"next": node}
    return node


def bottom(node: dict[str, Any]) -> dict[str, Any]:
    while "next" in node:
        node = node["next"]
    return node


def increment(node: dict[str, Any]) -> dict[str, Any]:
    last = bottom(node)
    last["v"] = last["v"] + 1
    return node


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("run", "steps"),
    [
        (lambda c: graftax.scan(lambda c, _: (increment(c), None), c, length=3)[0], 3),
        (lambda c: graftax.fori_loop(0, 3, lambda _, c: increment(c), c), 3),
        (lambda c: graftax.while_loop(lambda c: bottom(c)["v"] < 3, increment, c), 3),
        (lambda c: graftax.while_loop(lambda c: bottom(c)["v"] < 3, increment, c, max_steps=5), 3),
        (lambda c: graftax.cond(True, increment, lambda c: c, c), 1),
    ],
)
def test_a_chain_of_20000_objects_is_state(run: Callable[[Any], Any], steps: int):
    node = chain()
    assert run(node) is node
    assert bottom(node)["v"] == steps


@pytest.mark.quick(0)
def test_references_are_spelled_without_a_walk_for_each():
    nodes = [[jnp.zeros(())] for _ in range(DEPTH)]
    graphdef = graftax.flatten([nodes, nodes[::-1]])[1]
    structure = Structure(graphdef)
    references = [row for row in structure.rows if row.op is Op.ref]
    assert len(references) == DEPTH
    for row in references:
        (_, path), (_, first) = structure.root_path(row), structure.root_path(structure.target(row))
        assert (path[0].idx, first[0].idx, first[1].idx) == (1, 0, DEPTH - 1 - path[1].idx)
    for i in (0, 1, 2, DEPTH, DEPTH + 2):
        assert graphdef._node_place(i) == structure.root_path(structure.tracked[i])
    with pytest.raises(IndexError):
        graphdef._node_place(DEPTH + 3)
