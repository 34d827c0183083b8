# SPDX-License-Identifier: Apache-2.0
"""equal and diff: what counts, what does not, and where two graphs differ."""

from __future__ import annotations

import datetime
import functools
from collections import OrderedDict, defaultdict, deque
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
import oracle
import zoo
from zoo import Affine, Box, Point, Registered, f32

pytestmark = pytest.mark.quick(8)  # a case takes milliseconds


class Text(str):
    """A string with attributes."""


class Group(set):  # type: ignore[type-arg]
    """A set with attributes."""


def with_note(x: Any, note: Any = 1) -> Any:
    x.note = note
    return x


def returning(value: Any) -> Any:
    return lambda: value


def texts(one: Any, other: Any, **options: Any) -> list[str]:
    return [str(d) for d in graftax.diff(one, other, **options)]


@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_a_graph_equals_itself_built_again(build: Any):
    for sharing in (True, False):
        assert graftax.diff(build(), build(), sharing=sharing) == []
        assert graftax.equal(build(), build(), sharing=sharing)


@pytest.mark.parametrize("other", zoo.BUILDERS[::3], ids=zoo.NAMES[::3])
@pytest.mark.parametrize("one", zoo.BUILDERS, ids=zoo.NAMES)
def test_different_graphs_are_not_equal_whichever_comes_first(one: Any, other: Any):
    same = one is other
    assert graftax.equal(one(), other()) == graftax.equal(other(), one()) == same
    assert (graftax.diff(one(), other()) == []) == same


NAN = float("nan")
UNEQUAL: list[tuple[str, Any, Any]] = [
    ("int_bool", 1, True),
    ("int_float", 1, 1.0),
    ("sign_of_zero", 0.0, -0.0),
    ("none_false", None, False),
    ("text_bytes", "a", b"a"),
    ("shape", f32(1, 2), jnp.ones((1, 2))),
    ("dtype", jnp.ones(2), jnp.ones(2, jnp.bfloat16)),
    ("numpy_jax", np.ones(2, np.float32), jnp.ones(2)),
    ("numpy_scalar", np.float32(1), np.ones((), np.float32)),
    ("array_number", jnp.asarray(1.0), 1.0),
    ("values", f32(1, 2), f32(1, 3)),
    ("bfloat16", jnp.asarray(1, jnp.bfloat16), jnp.asarray(2, jnp.bfloat16)),
    ("int4", jnp.ones(2, jnp.int4), jnp.zeros(2, jnp.int4)),
    ("keys", jax.random.key(0), jax.random.key(1)),
    ("key_kinds", jax.random.key(0), jax.random.key(0, impl="rbg")),
    ("key_data", jax.random.key(0), jax.random.key_data(jax.random.key(0))),
    ("dates", np.array(["2020-01-01"], "M8[D]"), np.array(["NaT"], "M8[D]")),
    ("texts", np.array(["a"]), np.array(["b"])),
    ("huge", np.float32([3e38]), np.float32([-3e38])),
    ("list_tuple", [1], (1,)),
    ("keys_of_dicts", {"a": 1}, {"b": 1}),
    ("types_of_keys", {1: "x"}, {True: "x"}),
    ("order_of_ordered_dicts", OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
    ("dict_ordered_dict", {"a": 1}, OrderedDict(a=1)),
    ("maxlen", deque([1]), deque([1], 3)),
    ("factory", defaultdict(list), defaultdict(set)),
    ("sets", {1}, {True}),
    ("frozensets", frozenset({1}), frozenset({2})),
    ("bytearrays", bytearray(b"a"), bytearray(b"b")),
    ("classes", Box(a=1), zoo.Data(1)),
    ("attributes", Box(a=1), Box(a=1, b=2)),
    ("static_fields", Affine(1, 2, name="a"), Affine(1, 2, name="b")),
    ("aux_data", Registered(1, 2, "a"), Registered(1, 2, "b")),
    ("namedtuples", Point(1, 2), (1, 2)),
    ("content_beside_attributes", with_note(Text("a")), with_note(Text("b"))),
    ("elements_beside_attributes", with_note(Group({1})), with_note(Group({2}))),
    ("functions", len, max),
    ("closures", returning(1), returning(2)),
    ("keys_of_tuples", {(1, 2): 0}, {(True, 2): 0}),
    ("code", lambda: 1, lambda: 2),
    ("partials", functools.partial(max, 1), functools.partial(max, 2)),
    ("methods", zoo.Counter(1, 2).step, zoo.Counter(2, 2).step),
    ("generators", (i for i in "a"), (i for i in "a")),
    ("sentinels", object(), object()),
    ("dates_of_python", datetime.date(2020, 1, 1), datetime.date(2020, 1, 2)),
]
EQUAL: list[tuple[str, Any, Any]] = [
    ("nan", NAN, float("nan")),
    ("nan_in_arrays", f32(NAN, 1), f32(NAN, 1)),
    ("nan_in_bfloat16", jnp.asarray(NAN, jnp.bfloat16), jnp.asarray(NAN, jnp.bfloat16)),
    ("complex_nan", jnp.asarray(complex(NAN, 1)), jnp.asarray(complex(NAN, 1))),
    ("not_a_time", np.array(["NaT"], "M8[D]"), np.array(["NaT"], "M8[D]")),
    ("sign_of_zero_in_arrays", f32(0.0), f32(-0.0)),
    ("infinity", f32(float("inf")), f32(float("inf"))),
    ("weak_types", jnp.asarray(1.0), jnp.float32(1)),
    ("empty", jnp.ones((0, 2)), jnp.zeros((0, 2))),
    ("order_of_dicts", {"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ("order_of_attributes", Box(a=1, b=2), Box(b=2, a=1)),
    ("order_of_sets", {1, 2, 9}, {9, 2, 1}),
    ("texts", np.array(["a"]), np.array(["a"])),
    ("records", np.zeros(2, [("a", int)]), np.zeros(2, [("a", int)])),
    ("one_function", len, len),
    ("keys", jax.random.key(3), jax.random.key(3)),
    ("equal_tuples_twice", [(), ((), 1), ((), 1)], [(), ((), 1), tuple([(), 1])]),
]


@pytest.mark.quick(100)
@pytest.mark.parametrize(("one", "other"), [pair[1:] for pair in UNEQUAL], ids=[pair[0] for pair in UNEQUAL])
def test_what_differs(one: Any, other: Any):
    for a, b in ((one, other), (other, one)):
        for sharing in (True, False):
            assert not graftax.equal(a, b, sharing=sharing) and len(graftax.diff(a, b, sharing=sharing)) == 1
        differences = graftax.diff([a, 5], [b, 5])
        assert (
            len(differences) == 1
            and str(differences[0].path).startswith("[0]")
            and differences[0].one
            and differences[0].other
        )
        assert graftax.equal([a], [a])


@pytest.mark.quick(100)
@pytest.mark.parametrize(("one", "other"), [pair[1:] for pair in EQUAL], ids=[pair[0] for pair in EQUAL])
def test_what_does_not_differ(one: Any, other: Any):
    assert graftax.diff(one, other) == graftax.diff(other, one) == []
    assert graftax.equal({"x": one}, {"x": other})


def test_rounding():
    one, other = {"w": f32(1, 2), "b": 1.0}, {"w": f32(1.001, 2), "b": 1.0}
    assert not graftax.equal(one, other)
    assert graftax.equal(one, other, rtol=1e-2) and graftax.equal(one, other, atol=1e-2)
    assert not graftax.equal(one, other, rtol=1e-5, atol=1e-5)
    half = [jnp.asarray([x], jnp.bfloat16) for x in (1.0, 1.01)]
    assert not graftax.equal(*half) and graftax.equal(*half, rtol=0.1)
    assert not graftax.equal(jnp.asarray([100]), jnp.asarray([101]), rtol=1), "whole numbers are not rounded"


def test_sharing():
    x, y = [1], [1]
    assert texts([x, x], [x, y]) == ["obj[1]: list of obj[0] once more and list of its own"]
    assert texts([x, y], [x, x]) == ["obj[1]: list of its own and list of obj[0] once more"]
    assert graftax.equal([x, x], [x, y], sharing=False)
    assert not graftax.equal([x, y, x], [x, y, y])
    w = f32(1)
    assert graftax.equal([w, w], [w, f32(1)]), "arrays are values"


def test_cycles_of_different_shape():
    def ring(size: int) -> Any:
        first: list[Any] = [1]
        last = first
        for _ in range(size - 1):
            last.append([1])
            last = last[-1]
        last.append(first)
        return first

    assert graftax.equal(ring(3), ring(3)) and not graftax.equal(ring(2), ring(3))
    assert texts(ring(2), ring(3)) == ["obj[1][1]: list of obj once more and list of its own"]
    assert graftax.equal(ring(2), ring(3), sharing=False), "what is reached is the same without end"
    assert not graftax.equal(zoo.parent_and_child(), zoo.doubly_linked())


def test_every_difference_is_found_and_nothing_below_one():
    one = {"a": 1, "b": [1, 2, {"c": 3}], "d": f32(1, 2), "e": (1, 2)}
    other = {"a": 2, "b": [1, 5, [3]], "d": f32(1, 3), "e": (1, 2, 3)}
    assert texts(one, other) == [
        "obj[a]: int 1 and int 2",
        "obj[b][1]: int 2 and int 5",
        "obj[b][2]: dict with the keys 'c' and list of length 1",
        "obj[d]: float32[2] 2.0 and 3.0 (1 of 2 elements differ, the first at [1])",
        "obj[e]: tuple without and tuple with [2]",
    ]
    assert len(graftax.diff(one, other, limit=2)) == 2 and graftax.diff(one, one, limit=2) == []


def test_what_both_have_is_compared_where_one_has_more():
    one, other = {"a": 1, "b": [1, 2]}, {"a": 2, "b": [1, 3, 4], "c": 5}
    assert texts(one, other) == [
        "obj: dict without and dict with [c]",
        "obj[a]: int 1 and int 2",
        "obj[b]: list without and list with [2]",
        "obj[b][1]: int 2 and int 3",
    ]
    assert texts(Box(a=1, x=2), Box(b=1, x=3)) == ["obj: Box with .a and Box with .b", "obj.x: int 2 and int 3"]
    assert texts([1], (2,)) == ["obj: list of length 1 and tuple of length 1"], "nothing below what has another type"


def test_keys_that_only_one_has_are_named():
    assert texts({"a": 1, "b": 2}, {"a": 1, "c": 3}) == ["obj: dict with [b] and dict with [c]"]
    assert texts(Box(a=1), Box()) == ["obj: Box with .a and Box without"]
    assert texts(OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)) == ["obj: the order [a], [b] and the order [b], [a]"]


@pytest.mark.parametrize("name", ["layers", "final"])
def test_it_is_tree_equal_of_equinox_for_modules(name: str):
    make = functools.partial(eqx.nn.MLP, 2, 2, 4, 2)
    one, same, other = (make(key=jax.random.key(seed)) for seed in (0, 0, 1))
    assert graftax.equal(one, same) and eqx.tree_equal(one, same)
    assert not graftax.equal(one, other) and not eqx.tree_equal(one, other)
    assert len(graftax.diff(one, other)) == 6 and name
    assert graftax.equal(one, eqx.tree_at(lambda m: m.layers[0].weight, one, one.layers[0].weight + 0))


def test_an_array_that_is_gone_is_an_error_that_names_the_place():
    one, other = {"w": f32(1)}, {"w": f32(1)}
    other["w"].delete()
    with pytest.raises(RuntimeError, match="deleted") as info:
        graftax.equal(one, other)
    assert any("obj[w]" in note for note in info.value.__notes__)


def test_tracers_are_an_error_that_names_the_place():
    with pytest.raises(jax.errors.TracerArrayConversionError) as info:
        jax.jit(lambda x: graftax.equal({"w": x}, {"w": f32(1)}))(f32(1))
    assert any("obj[w]" in note for note in info.value.__notes__)


def test_objects_with_a_broken_eq_are_not_asked():
    class Broken:
        def __init__(self) -> None:
            self.w = f32(1)

        def __eq__(self, other: object) -> bool:
            raise AssertionError("never asked")

        __hash__ = None  # type: ignore[assignment]

    assert graftax.equal([Broken()], [Broken()])


def test_neither_graph_is_changed():
    one, other = zoo.parent_and_child(), zoo.parent_and_child()
    twin = graftax.copy(one)
    other.children[0].value = f32(9)
    assert not graftax.equal(one, other) and graftax.equal(one, twin)
    assert oracle.is_mutable(one)
