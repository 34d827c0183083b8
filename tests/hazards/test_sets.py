# SPDX-License-Identifier: Apache-2.0
"""Sets iterate in a traced function as they do outside: at the first call, on a hit, and after a change."""

import marshal
import pickle

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def added(*elements):
    s = set()
    for element in elements:
        s.add(element)
    return s


def loaded(*elements):
    """As a constant of a module that was imported, whose table is that of a set that was loaded at once."""
    return set(marshal.loads(marshal.dumps(frozenset(elements))))


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
    literals = (lambda: {8, 0, 16}, lambda: {16, 8, 0}, lambda: emptied({0, 8, 16}), lambda: {8, 0, 16})
    for make in (*literals, lambda: loaded(8, 0, 16), lambda: added(16, 8, 0), lambda: loaded(8, 0, 16).copy()):
        plain, ours = make(), make()
        assert jitted(ours, x)[0] == f(plain, x)[0]
        assert (ours, list(ours)) == (plain, list(plain))


ELEMENTS = [0, 8, 16, 24, 64, 1, -2, "a", "b", (1, 2), None, True, 1.5, frozenset({8, 0, 16})]


@st.composite
def histories(draw):
    """How a set came to be: equal elements, in one order, may stand in other places of a table of another size."""
    elements = draw(st.sampled_from([(), (0, 8, 16), (16, 0, "a"), (1, 64, "b", (1, 2), frozenset({1, 9}))]))
    more = draw(st.sampled_from([0, 0, 1, 2, 4, 40]))
    last = draw(
        st.sampled_from([set, set.copy, lambda s: s, lambda s: s | set(), lambda s: (s.add(s.pop()) if s else 0, s)[1]])
    )

    def build():
        s = loaded(*elements) if more % 2 else added(*elements)
        s.update(range(1000, 1000 + more))
        for i in range(1000, 1000 + more):
            s.discard(i)
        return last(s)

    return build


STEPS = {
    "add": lambda s, t, other: s.add(other[0]),
    "discard": lambda s, t, other: s.discard(other[0]),
    "in and out": lambda s, t, other: [(s.add(e), s.discard(e)) for e in other],
    "update": lambda s, t, other: s.update(other),
    "|=": lambda s, t, other: s.__ior__(t),
    "-=": lambda s, t, other: s.__isub__(set(other)),
    "&=": lambda s, t, other: s.__iand__(t | set(other)),
    "^=": lambda s, t, other: s.__ixor__(t),
    "clear": lambda s, t, other: s.clear(),
    "pop": lambda s, t, other: s.pop() if s else None,
    "iterate": lambda s, t, other: list(s),
    "|": lambda s, t, other: s | t,
    "&": lambda s, t, other: t & s,
    "-": lambda s, t, other: s - t,
    "copy": lambda s, t, other: s.copy(),
    "frozenset": lambda s, t, other: (frozenset(s), frozenset(t) | s),
}


def run_steps(s, t, steps, x):
    seen = []
    for name, other in steps:
        out = STEPS[name](s, t, other)
        seen.append((out, list(out)) if isinstance(out, (set, frozenset)) and out is not s else out is s or out)
    return seen, list(s), list(t), x + 1


def orders(result):
    """What a result and the sets in it iterate as, now and after more changes."""
    if isinstance(result, (set, frozenset)):
        s, out = result if isinstance(result, set) else set(result), []
        for element in (40, "zz", 7, 48, 56, 15, *range(200, 212)):
            s.add(element)
            out.append(list(s))
        return [list(result), *out, [s.pop() for _ in range(len(s))]]
    return [orders(r) for r in result] if isinstance(result, (list, tuple)) else result


mutable = graftax.jit(run_steps)
dropped = graftax.jit(run_steps, mutation="discard")


@pytest.mark.quick(0)
@given(
    st.lists(st.tuples(histories(), histories()), min_size=1, max_size=3),
    st.lists(
        st.tuples(st.sampled_from(list(STEPS)), st.permutations(ELEMENTS).map(lambda p: tuple(p[:3]))), max_size=4
    ),
    st.booleans(),
    st.booleans(),
)
def test_sets_of_any_history_do_what_they_do_outside(pairs, steps, frozen, propagates):
    steps = tuple(steps)
    for build, build_other in pairs:
        (plain, other), (ours, our_other) = ((build(), (frozenset if frozen else set)(build_other())) for _ in range(2))
        for _ in range(2):
            before = ours.copy()
            expected, result = (
                run_steps(plain, other, steps, x)[:3],
                (mutable if propagates else dropped)(ours, our_other, steps, x)[:3],
            )
            assert repr(orders(expected)) == repr(orders(result))
            if not propagates:
                assert ours == before
                break
            assert (list(ours), list(our_other)) == (list(plain), list(other))
        else:
            assert repr(orders(plain)) == repr(orders(ours))


def test_a_set_that_only_others_change_is_traced_a_few_times():
    read = graftax.jit(lambda s, x: (list(s), x))
    s = {1, 2}
    for i in range(200):
        assert read(s, x)[0] == list(s)
        s.add(1000 + 7 * i)
        s.discard(1000 + 7 * i)
    assert read.cache_info().traces <= 8


def test_what_a_function_puts_in_and_takes_out_again_is_no_change():
    def step(s, x):
        s.add(24)
        s.discard(24)
        return list(s), x

    def later(s):
        return [(s.add(i), list(s)) for i in (56, 40, 7, 15)]

    for mode in ("propagate", "error"):
        jitted, ours, plain = graftax.jit(step, mutation=mode), {0, 8, 16}, {0, 8, 16}
        for _ in range(6):
            assert jitted(ours, x)[0] == step(plain, x)[0]
        assert later(ours) == later(plain)
    ours = {0, 8, 16}
    graftax.jit(step, mutation="discard")(ours, x)
    assert later(ours) == later({0, 8, 16})


def test_a_frozenset_that_is_a_key_iterates_as_outside():
    one, other = frozenset(added(16, 8, 0)), frozenset(added(8, 0, 16))
    assert list(one) != list(other)
    f = graftax.jit(lambda d, s, x: ([list(k) for k in d], [list(k[0]) for k in s], x))
    for _ in range(2):
        for key in (one, other):
            assert f({key: 1}, {(key, "a")}, x)[:2] == ([list(key)], [list(key)])


def test_a_compiled_function_refuses_a_set_of_another_order():
    one, other = added(16, 8, 0), added(8, 0, 16)
    compiled = graftax.jit(lambda s, x: (list(s), x)).lower(one, x).compile()
    assert compiled(added(16, 8, 0), x)[0] == list(one) != list(other)
    with pytest.raises(graftax.StructureError, match="different order"):
        compiled(other, x)


def test_a_set_keeps_its_table_through_unflatten_and_pickle():
    s = emptied({37, 2, 18})
    graphdef = graftax.flatten(s)[1]
    for known in (graphdef, pickle.loads(pickle.dumps(graphdef))):
        made, own = graftax.unflatten(known, []), emptied({37, 2, 18})
        for element in (50, 3, 90):
            made.add(element), own.add(element)
            assert list(made) == list(own)


def test_a_set_that_a_loop_fills_and_empties_iterates_as_the_callers_own():
    def step(s, n, x):
        s.add(n * 8)
        s.discard((n - 3) * 8)
        return x

    jitted, read, plain, ours = graftax.jit(step), graftax.jit(lambda s, x: (list(s), x)), set(), set()
    for n in range(7):
        jitted(ours, n, x), step(plain, n, x)
        assert (ours, list(ours)) == (plain, list(plain))
        assert read(ours, x)[0] == list(ours)


def test_equal_graphdefs_do_not_depend_on_the_order_of_sets():
    one, other = graftax.flatten({8, 0, 16})[1], graftax.flatten({16, 8, 0})[1]
    assert one == other and hash(one) == hash(other)
