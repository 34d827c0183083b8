# SPDX-License-Identifier: Apache-2.0
"""Arguments that are declared static: their class's own `__eq__` and `__hash__` decide, as in `jax.jit`."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest

import graftax


class Named:
    """Counts by its name alone."""

    def __init__(self, name, notes=()):
        self.name, self.notes = name, notes

    def __eq__(self, other):
        return isinstance(other, Named) and self.name == other.name

    def __hash__(self):
        return hash(self.name)


def by_jax(*values):
    """How often `jax.jit` traces a function for these values of a static argument in turn."""
    traces = []
    f = jax.jit(lambda value, x: traces.append(value) or x, static_argnums=0)
    for value in values:
        f(value, jnp.ones(()))
    return len(traces)


def by_graftax(*values):
    f = graftax.jit(lambda value, x: x, static_argnums=0)
    for value in values:
        f(value, jnp.ones(()))
    return f.cache_info().traces


def test_equal_objects_share_a_program_whatever_else_they_hold():
    values = Named("a", [1]), Named("a", [object()]), Named("b"), Named("a", {"w": jnp.ones(3)})
    assert by_graftax(*values) == by_jax(*values) == 2


def test_below_a_tuple_as_linen_hands_over_its_fingerprint():
    values = [(True, Named("a", object())), (True, Named("a", object())), (False, Named("a"))]
    assert by_graftax(*values) == by_jax(*values) == 2


def test_a_change_that_the_hash_shows_compiles_again():
    f = graftax.jit(lambda value, x: x * len(value.name), static_argnums=0)
    value = Named("a")
    assert f(value, 1.0) == 1
    value.name = "abc"
    assert f(value, 1.0) == 3 and f(Named("a"), 1.0) == 1 and f(value, 1.0) == 3


def test_the_function_is_given_the_object_itself():
    inside = []
    value = Named("a")
    graftax.jit(lambda value, x: inside.append(value) or x, static_argnums=0)(value, 1.0)
    assert inside[0] is value


def test_where_it_is_not_declared_static_all_of_it_counts():
    f = graftax.jit(lambda value, x: x)
    f(Named("a", [1]), 1.0), f(Named("a", [2]), 1.0), f(Named("a", "b"), 1.0)
    assert f.cache_info().traces > 1


def test_one_that_cannot_be_hashed_is_an_error_as_in_jax():
    with pytest.raises(TypeError, match="unhashable"):
        graftax.jit(lambda value, x: x, static_argnums=0)(Named([1]), 1.0)


@dataclass(frozen=True)
class Config:
    width: float


def test_what_a_dataclass_compares_by_itself_is_compared_by_type_as_well():
    assert by_graftax(Config(1), Config(1.0), Config(1)) == 2
