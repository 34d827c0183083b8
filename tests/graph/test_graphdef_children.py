# SPDX-License-Identifier: Apache-2.0
"""`GraphDef.children`: one structure a child, each complete by itself."""

import jax.numpy as jnp

import graftax


def structure(obj):
    return graftax.flatten(obj)[1]


def test_children_are_the_structures_of_the_parts():
    parts = [{"a": jnp.ones(2)}, "text", (1, jnp.ones(3))]
    assert structure(parts).children() == [structure(p) for p in parts]


def test_a_leaf_has_no_children():
    assert structure(jnp.ones(2)).children() == []


def test_a_reference_out_of_a_child_is_spelled_out():
    shared = [jnp.ones(1)]
    assert structure({"x": shared, "y": shared}).children() == [structure(shared)] * 2


def test_a_cycle_is_unrolled_to_itself():
    loop = [jnp.ones(1)]
    loop.append(loop)
    assert structure(loop).children()[1] == structure(loop)
