# SPDX-License-Identifier: Apache-2.0
"""Keys on ordinary input: aux data, equal and almost equal tuples, sets, and objects that are keys."""

import collections
import contextlib
import dataclasses
import decimal
import gc
import pathlib
import weakref

import jax
import jax.numpy as jnp
import pytest

import graftax
from graftax import _core
from watchdog import isolated

x = jnp.arange(3.0)


class Pair:
    def __init__(self, w, a, b):
        self.w, self.a, self.b = w, a, b


def test_aux_data_that_flatten_makes_anew_is_compared_each_time():
    f = graftax.jit(lambda items: [(r.a, r.b) for r in items])
    for i in range(50):
        items = [Pair(x, 1, "k"), Pair(x, 1, "k")]
        assert f(items) == [(1, "k"), (1, "k")]
        items[i % 2].a = 2
        assert f(items) == [(r.a, r.b) for r in items]


@pytest.mark.quick(0)
@isolated()
def test_many_equal_and_almost_equal_tuples_are_told_apart():
    def value(i):
        return tuple([0] * 20 + [i])

    graph = [(i, value(i)) for i in range(20)] + [(0, value(0)), 77, value(0)]
    leaves, graphdef = graftax.flatten(graph)
    assert graftax.unflatten(graphdef, leaves) == graph
    assert graftax.jit(lambda g: g[-1])(graph) == value(0)


def test_two_sentinels_of_one_class_are_two():
    class Sentinel:
        pass

    a, b = Sentinel(), Sentinel()
    f = graftax.jit(lambda s, y: (y + 1 if s is a else y - 1, s))
    assert f(a, x)[0][0] == 1
    assert f(b, x)[0][0] == -1
    assert f(b, x)[1] is b


Key = collections.namedtuple("Key", "n")


@dataclasses.dataclass(frozen=True)
class FrozenKey:
    n: object
    note: object = dataclasses.field(default=None, compare=False)


@pytest.mark.parametrize("make", [Key, FrozenKey])
def test_keys_are_compared_by_what_they_are_made_of(make):
    f = graftax.jit(lambda d: repr(next(iter(d)).n))
    g = graftax.jit(lambda s: repr(next(iter(s)).n))
    for n in (1, True, 1.0, 0.0, -0.0):
        assert f({make(n): 1}) == repr(n)
        assert g({make(n)}) == repr(n)


def test_a_field_of_a_key_that_does_not_count_for_equality_counts():
    f = graftax.jit(lambda d: next(iter(d)).note)
    assert f({FrozenKey(1, "a"): x}) == "a"
    assert f({FrozenKey(1, "b"): x}) == "b"


def test_an_attribute_of_a_key_object_is_seen_to_change():
    class Thing:
        def __init__(self):
            self.k = 1

        def method(self):
            return self.k

    thing = Thing()
    f = graftax.jit(lambda d, s: (next(iter(d)).k, next(iter(s)).k))
    assert f({thing: x}, {thing}) == (1, 1)
    thing.k = 2
    assert f({thing: x}, {thing}) == (2, 2)


def test_elements_of_a_frozenset_are_told_apart_at_every_depth():
    f = graftax.jit(lambda s: sorted(map(repr, s)))
    for value in (frozenset({frozenset({1})}), frozenset({frozenset({True})}), frozenset({decimal.Decimal("1.0")})):
        assert f(value) == sorted(map(repr, value))
    other = frozenset({decimal.Decimal("1.00")})
    assert f(other) == sorted(map(repr, other))


def test_sets_with_two_nans_are_told_from_sets_with_one():
    f = graftax.jit(lambda s: sorted(map(repr, s)))
    nan, other = float("nan"), float("nan")
    assert f({nan, 1}) == ["1", "nan"]
    assert f({nan, other}) == ["nan", "nan"]


@pytest.mark.quick(0)
@isolated()
def test_a_set_with_a_nan_is_one_structure_wherever_the_nan_stands():
    f = graftax.jit(lambda s, y: (len(s), y + 1))
    sets, orders = [], set()
    while len(sets) < 30 or len(orders) < 2:  # nan hashes by its address
        sets.append({float("nan"), 1.0, 2.0, 3.0, 4.0})
        orders.add(tuple(map(repr, sets[-1])))
    for s in sets:
        assert f(s, x)[0] == 5
    assert f.cache_info().traces == 1
    assert len({graftax.flatten(s)[1] for s in sets}) == 1


def test_a_key_that_goes_away_while_it_is_compared():
    d, armed = {}, [False]

    class Evil:
        def __hash__(self):
            return 5

        def __eq__(self, other):
            if armed[0]:
                armed[0] = False
                d.clear()
            return True

        def method(self): ...

    def fill():
        d.clear()
        d[(Evil(), *map(str, range(1000, 1200)))] = 1.0

    f = graftax.jit(len)
    g = graftax.jit(lambda d: len(d))
    for h in (f, g):
        fill()
        h(d)
        fill()
        armed[0] = True
        with contextlib.suppress(graftax.GraftaxError):
            h(d)
        armed[0] = False


@isolated()
def test_a_type_that_outlives_its_weak_references_keeps_its_kind():
    saved = []

    def make():
        class C:
            def __del__(self):
                saved.append(self)

            def m(self): ...

        c = C()
        c.items = [2]
        c.graphdef = graftax.flatten([c.items, C()])[1]
        saved.clear()
        c.me = c

    make()
    gc.collect()
    graphdef = saved[0].graphdef
    kept = []
    for i in range(300):
        kept.append(type(f"T{i}", (list,), {"m": lambda s: 0}))
        graftax.flatten(kept[-1]())
    assert "C()" in repr(graphdef)
    graftax.unflatten(graphdef, [])


def test_a_repr_that_raises_is_no_reason_to_fail():
    class Shy:
        def __repr__(self):
            raise RuntimeError

    things = [type("Shy", (), {"__repr__": Shy.__repr__})() for _ in range(20)]
    f = graftax.jit(lambda s, y: y)
    for thing in things:
        assert f(thing, x).tolist() == x.tolist()


class Thing:
    def __init__(self, k=1):
        self.k = k

    def method(self): ...


def test_objects_that_are_keys_count_by_identity_everywhere():
    a, b = Thing(), Thing()
    table = {a: 1.0, b: 2.0}
    f = graftax.jit(lambda o, y: y + table[o])
    assert f(a, x).tolist() == (x + 1).tolist()
    assert f(b, x).tolist() == (x + 2).tolist()
    for order in ((a, b), (b, a)):
        g = graftax.jit(lambda s, t: t in s)
        for t in order:
            assert g({a}, t) is (t is a)


@jax.tree_util.register_pytree_node_class
class Named:
    """Registered with JAX, and compared by identity."""

    def __init__(self, name):
        self.name = name

    def tree_flatten(self):
        return (), self.name

    @classmethod
    def tree_unflatten(cls, name, _):
        return cls(name)


def test_a_registered_object_that_is_a_key_is_itself_and_no_other_one_like_it():
    one, other = Named("n"), Named("n")
    f = graftax.jit(lambda d, y: (d, y * 2))
    for key in (one, other, one, other):
        [found] = f({key: 1}, x)[0]
        assert found is key
    assert graftax.flatten({one: 1})[1] == graftax.flatten({one: 1})[1] != graftax.flatten({other: 1})[1]


def test_an_argument_that_becomes_a_key_is_the_callers_own_object():
    f = graftax.jit(lambda s, d, o, y: (s.add(o), d.__setitem__(o, y), {o: y})[2])
    for _ in range(2):
        s, d, a = set(), {}, Thing()
        out = f(s, d, a, x)
        assert s == {a} and list(d) == list(out) == [a]
        assert out[a].tolist() == x.tolist()
    assert f.cache_info().traces == 1


def test_an_object_that_is_a_key_becomes_a_part_of_other_keys():
    f = graftax.jit(lambda d, y: ({(k, 1): 2 for k in d}, {(k, "a") for k in d}, y))
    for thing in (Thing(), Thing()):
        for _ in range(2):
            keys, elements, _ = f({thing: 1}, x)
            assert keys == {(thing, 1): 2} and elements == {(thing, "a")}


def test_an_object_made_inside_that_becomes_a_key_is_a_clear_error():
    s = set()
    with pytest.raises(graftax.UnsupportedValueError, match="makes becomes a dict key"):
        graftax.jit(lambda s: s.add(Thing()))(s)
    assert s == set()
    for o in (Thing(), (1, Thing())):
        with pytest.raises(graftax.UnsupportedValueError, match="key"):
            graftax.jit(lambda o: {(o, 1): 2, (1, Thing()): 3})(o)


@pytest.mark.parametrize("make", [lambda a: {a: 1}, lambda a: {a}, lambda a: frozenset([a]), lambda a: {(a, 1): 2}])
def test_what_the_function_does_to_a_key_object_comes_back(make):
    def f(d, y):
        for key in d:
            thing = key[0] if isinstance(key, tuple) else key
            thing.k = thing.k + 1
        return y * thing.k

    a = Thing()
    jitted = graftax.jit(f)
    for k in (2, 3, 4):
        assert jitted(make(a), x).tolist() == (x * k).tolist()
        assert a.k == k


def test_a_failing_function_leaves_a_key_object_as_it_was():
    def f(d):
        for key in d:
            key.k = 9
        raise ValueError("no")

    a = Thing()
    with pytest.raises(ValueError, match="no"):
        graftax.jit(f)({a: x})
    assert a.k == 1


def test_a_changed_attribute_of_an_object_in_a_tuple_key_is_seen():
    a = Thing()
    d = {(a, 1): x}
    f = graftax.jit(lambda d: [k[0].k for k in d])
    assert f(d) == [1]
    a.k = 2
    assert f(d) == [2]


@isolated()
def test_a_damaged_state_never_crashes():
    _, graphdef = graftax.flatten((1, (2, 3)))
    state = list(graphdef._state())
    for flags in range(8):
        code = [list(i) for i in state[4]]
        for i in code:
            i[1] |= flags
        state[4] = tuple(map(tuple, code))
        try:
            assert graftax.unflatten(_core.GraphDef._from_state(tuple(state)), []) == (1, (2, 3))
        except ValueError:
            continue


def test_a_donated_array_in_a_registered_node_is_written_back():
    node = Pair(x + 1, 1, 2)
    f = graftax.jit(lambda r, y: y + r.w, donate_argnums=0)
    for _ in range(3):
        f(node, x)
        assert node.w.tolist() == (x + 1).tolist()


def test_a_weak_reference_as_a_key_is_its_referent_and_no_equal_object():
    @dataclasses.dataclass(frozen=True)
    class Value:
        a: int

    one, equal = Value(1), Value(1)
    first, other, called = weakref.ref(one), weakref.ref(equal), weakref.ref(one, lambda _: None)
    assert first is not called
    structures = [graftax.flatten({key: 1})[1] for key in (first, other, called)]
    assert structures[0] == structures[2] and structures[0] != structures[1]
    f = graftax.jit(lambda d, x: (x * 2, len(d)))
    for key in (first, other, called, first):
        assert f({key: 1}, x)[1] == 1
    assert f.cache_info().traces == 2


def test_values_of_other_classes_that_are_equal_and_hash_alike_are_other_structures():
    pure, own = pathlib.PurePosixPath("a"), pathlib.PosixPath("a")
    assert pure == own and hash(pure) == hash(own)
    for build in (lambda v: [v], lambda v: {v: 1}, lambda v: {(v, 1): 1}, lambda v: {v}):
        assert graftax.flatten(build(pure))[1] != graftax.flatten(build(own))[1]
