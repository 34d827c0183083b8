# SPDX-License-Identifier: Apache-2.0
"""Sets iterate in a traced function as they do outside: at the first call, on a hit, and after a change."""

import jax.numpy as jnp
import pytest

import graftax
from zoo import Box

x = jnp.ones(2)


def emptied(keep, size=40):
    """A set whose table is larger than its content asks for: it iterates in another order than a copy."""
    s = set(range(size))
    for i in range(size):
        if i not in keep:
            s.discard(i)
    return s


ORDERS = [emptied({37, 2, 18}), {64, 0}, {0, 64}, {8, 0, 16}, {16, 8, 0}, {16, 0, 8}, {"b", "a"}, set(), emptied({1})]


@pytest.mark.parametrize("kind", [set, frozenset])
@pytest.mark.parametrize(
    "inside", [lambda s: s, lambda s: {"s": [s]}, lambda s: Box(s=s)], ids=["set", "dict", "object"]
)
def test_a_set_iterates_as_outside(kind, inside):
    def order(graph, x):
        s = graph if isinstance(graph, kind) else graph["s"][0] if isinstance(graph, dict) else graph.s
        return list(s), [x * i for i, _ in enumerate(s)]

    f = graftax.jit(order)
    for _ in range(2):
        for elements in ORDERS:
            s = elements if kind is set else frozenset(list(elements))
            graph = inside(s)
            assert f(graph, x)[0] == order(graph, x)[0] == list(s)


def test_sets_of_one_order_are_one_entry():
    f = graftax.jit(lambda s, x: (list(s), x))
    for _ in range(20):
        f({8, 0, 16}, x), f({16, 8, 0}, x)
    assert f.cache_info().traces == len({tuple({8, 0, 16}), tuple({16, 8, 0})})


CHANGES = {
    "add": lambda s: s.add(5),
    "discard": lambda s: s.discard(0),
    "out and in": lambda s: (s.discard(16), s.add(48)),
    "in and out": lambda s: (s.add(48), s.discard(16)),
    "clear and fill": lambda s: (s.clear(), s.update([24, 8, 16, 0])),
    "pop": lambda s: s.pop(),
    "update": lambda s: s.update(range(100, 140)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_set_that_was_changed_holds_what_it_holds_after_the_function(change):
    def f(s, x):
        change(s)
        return list(s), x + 1

    jitted = graftax.jit(f)
    for make in (lambda: {8, 0, 16}, lambda: emptied({0, 8, 16}), lambda: {16, 8, 0}, lambda: {8, 0, 16}):
        plain, given = make(), make()
        assert jitted(given, x)[0] == f(plain, x)[0]
        assert given == plain


def test_a_set_that_a_loop_fills_and_empties_iterates_as_the_callers_own():
    def step(s, n, x):
        s.add(n * 8)
        s.discard((n - 3) * 8)
        return x

    jitted, read, plain, given = graftax.jit(step), graftax.jit(lambda s, x: (list(s), x)), set(), set()
    for n in range(7):
        jitted(given, n, x), step(plain, n, x)
        assert given == plain
        assert read(given, x)[0] == list(given)


def test_equal_graphdefs_do_not_depend_on_the_order_of_sets():
    one, other = graftax.flatten({8, 0, 16})[1], graftax.flatten({16, 8, 0})[1]
    assert one == other and hash(one) == hash(other)
