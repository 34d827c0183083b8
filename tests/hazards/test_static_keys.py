# SPDX-License-Identifier: Apache-2.0
"""Statics as part of the key: type and value at every depth; state, never the user's ``__eq__``."""

import dataclasses
import itertools
import math
import zlib

import flax.nnx  # noqa: F401  (says how such a mapping is compared)
import jax
import numpy as np
import pytest
from flax.typing import HashableMapping

import graftax
import zoo
from zoo import Box, Data, Frozen, Level, Slotted, f32, scalar

PLACES = {
    "bare": lambda v: v,
    "tuple": lambda v: (v, "x"),
    "nested_tuple": lambda v: ((("x", (v,)),),),
    "list": lambda v: [v],
    "dict_value": lambda v: {"k": v},
    "dict_key": lambda v: {v: "x"},
    "tuple_key": lambda v: {(v, 1): "x"},
    "dataclass": Data,
    "frozen_dataclass": Frozen,
    "object": lambda v: Box(v=v),
    "slotted": lambda v: Slotted(a=v),
    "frozenset": lambda v: frozenset([v]),
    "set": lambda v: {v},
    "registered_aux": lambda v: zoo.Registered(f32(1), f32(2), v),
    "registered_static": lambda v: zoo.RegisteredData(f32(1), f32(2), v),
    "equinox_static": lambda v: zoo.Affine(f32(1), None, v),
}
places = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)


def seen(value, found):
    """The innermost static of one place, as text that tells types and signs apart."""

    def inner(x):
        match x:
            case tuple() | list():
                return next((inner(i) for i in x if i != "x" or isinstance(i, tuple)), None)
            case frozenset() | set():
                return inner(next(iter(x)))
            case dict():
                (key, item), *_ = x.items()
                return inner(item) if key == "k" else inner(key)
            case zoo.Registered() | zoo.Affine():
                return x.name
            case zoo.RegisteredData():
                return x.size
            case Data() | Frozen() | Slotted():
                return x.a
            case Box():
                return x.v
        return x

    got = inner(value)
    return f"{type(got).__name__} {got!r}" == found


@places
@pytest.mark.parametrize(
    "values",
    [
        (1, True, 1.0, Level.ONE),
        (0.0, -0.0),
        (0, False, 0.0),
        (complex(0.0, 0.0), complex(0.0, -0.0), complex(-0.0, 0.0)),
    ],
    ids=["ones", "signed_zeros", "zeros", "complex_zeros"],
)
def test_equal_values_of_other_types_or_signs_are_other_keys(place, values):
    f = graftax.jit(lambda x, text: seen(x, text))
    for value in (*values, *values):
        assert f(place(value), f"{type(value).__name__} {value!r}")
    assert f.cache_info().traces == len(values)
    g = graftax.jit(lambda x, w: w)
    for value in (*values, *values):
        g(place(value), f32(1))
    assert g.cache_info().traces == len(values)


def test_a_numpy_integer_is_traced_and_a_python_one_is_not():
    f = graftax.jit(lambda x: type(x) is int)
    assert [f(x) for x in (1, np.int64(1), np.int32(1), 1)] == [True, False, False, True]


@places
def test_nan_is_one_key(place):
    f = graftax.jit(lambda x, w: w + 1)
    for _ in range(50):
        f(place(float("nan")), f32(1))
    assert f.cache_info().traces == 1


def test_nan_is_one_key_in_ten_thousand_calls():
    f = graftax.jit(lambda x, w: w)
    w = scalar()
    for i in range(10_000):
        f(math.inf - math.inf if i % 2 else float("nan"), w)
    assert f.cache_info().traces == 1


@pytest.mark.parametrize("wrap", [lambda v: v, slice, lambda v: {(v, 1): 2}], ids=["bare", "slice", "tuple_key"])
def test_complex_numbers_that_agree_in_one_part_are_other_keys(wrap):
    f = graftax.jit(lambda v, w: repr(v))
    for value in 2 * (complex(1, 2), complex(1, 3), complex(2, 2), complex(math.nan, 2), complex(2, math.nan)):
        assert f(wrap(value), f32(1)) == repr(wrap(value))
    assert f.cache_info().traces == 5


@pytest.mark.parametrize("wrap", [lambda v: v, slice, lambda v: {v}, lambda v: {(v, 1): 2}])
@pytest.mark.parametrize("of", [float, complex, lambda v: complex(1, v)], ids=["float", "real", "imaginary"])
def test_nan_is_one_key_whatever_its_bits(of, wrap):
    nan = of(math.nan)
    other = of(math.copysign(math.nan, -1))
    f = graftax.jit(lambda v, w: w + 1)
    for value in (nan, other, nan):
        f(wrap(value), f32(1))
    assert f.cache_info().traces == 1
    assert graftax.flatten(wrap(nan))[1] == graftax.flatten(wrap(other))[1]


structure = jax.tree.structure
OF_OTHER_SIZES = {
    "treedefs": [
        structure(t) for t in ((None,), (None, None), [None], {"a": None}, {"a": None, "b": None}, {"b": None})
    ],
    "slices": [slice(1, (1, 2)), slice(1, (1, 2, 3)), slice((1,), (1,)), slice(1, (1, (2,))), slice(1, (1, (2, 3)))],
    "ranges": [range(3), range(4), range(0, 4, 2)],
    "mappings": [
        HashableMapping(m)
        for m in (
            *({"a": 1}, {"a": 2}, {"b": 1}, {"b": 1, "a": 1}, {"b": 2, "a": 1}, {"a": (1,)}, {"a": (1, 2)}),
            *({"a": (1, None)}, {"a": {}}, {"a": {"b": 1}}, {"a": {"b": 1, "c": 1}}, {"a": None}, {"c": None}),
        )
    ],
    "arrays of text": [np.array(list("abcd")), np.array(list("abcd")).reshape(2, 2), np.array(list("abcde"))],
}


@pytest.mark.parametrize("values", OF_OTHER_SIZES.values(), ids=OF_OTHER_SIZES)
@pytest.mark.quick(2)
@pytest.mark.filterwarnings("ignore::graftax.RecompileWarning")
def test_values_of_other_sizes_are_other_keys_in_any_order(values):
    def program(x, v):
        return x * (zlib.crc32(repr(v).encode()) % 10_000)

    f = graftax.jit(program)
    for i in [*range(len(values)), *range(len(values))[::-1], *range(len(values))]:
        assert float(f(scalar(), values[i])) == program(1, values[i])
    assert f.cache_info().traces == len(values)


def set_int(x):
    x.n += 1


def set_float(x):
    x.scale = x.scale * 2


def set_text(x):
    x.name += "!"


def change_nested_list(x):
    x.sizes[1].append(7)


def change_nested_object(x):
    x.inner.n = x.inner.n + 1


def change_slot(x):
    x.slotted.a = "other"


def add_attribute(x):
    x.extra = 5


def delete_attribute(x):
    del x.name


def change_set(x):
    x.tags.add("new")


def change_bytes(x):
    x.raw.append(3)


def reorder(x):
    x.table["a"] = x.table.pop("a")


def config():
    return Box(
        n=1,
        scale=0.5,
        name="net",
        sizes=[1, [2]],
        inner=Box(n=3),
        slotted=Slotted(a="x"),
        tags={"t"},
        raw=bytearray(b"ab"),
        table={"a": 1, "b": 2},
    )


def state(x):
    """Everything in a config, as plain data."""
    found = {name: value for name, value in vars(x).items() if name not in ("inner", "slotted", "w")}
    tables = {name: list(value.items()) for name, value in found.items() if isinstance(value, dict)}
    return repr((sorted(found), found["sizes"], x.n, x.scale, found.get("name"))) + repr(
        (x.inner.n, x.slotted.a, sorted(x.tags), bytes(x.raw), tables)
    )


CHANGES = [
    set_int,
    set_float,
    set_text,
    change_nested_list,
    change_nested_object,
    change_slot,
    add_attribute,
] + [*(delete_attribute, change_set, change_bytes, reorder)]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("with_array", [False, True])
def test_a_changed_attribute_of_an_unregistered_object_is_used(change, with_array):
    f = graftax.jit(lambda x: state(x))
    x = config()
    if with_array:
        x.w = f32(1)
    assert f(x) == state(x)
    before = state(x)
    change(x)
    assert state(x) != before
    assert f(x) == state(x)
    info = f.cache_info()  # an equal lambda of another case may have traced it
    assert info.traces + info.shared == 2


def test_a_numpy_buffer_changed_in_place_is_used():
    f = graftax.jit(lambda x: x.w * 2)
    x = Box(w=np.ones(2, np.float32))
    assert f(x).tolist() == [2.0, 2.0]
    x.w[0] = 5
    assert f(x).tolist() == [10.0, 2.0]
    assert f.cache_info().traces == 1


def test_a_replaced_array_attribute_is_used_without_a_trace():
    f = graftax.jit(lambda x: x.w * x.inner["w"])
    x = Box(w=f32(1), inner={"w": f32(2)})
    for value in (1.0, 3.0, 5.0):
        x.w = f32(value)
        x.inner["w"] = f32(value)
        assert f(x).tolist() == [value * value]
    assert f.cache_info().traces == 1


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x,), lambda x: [x, f32(1)], Frozen], ids=range(4))
def test_a_static_mutated_in_place_and_back_is_three_right_answers_of_two_traces(wrap):
    f = graftax.jit(lambda x, inner, w: w * inner.n * len(inner.sizes))
    x = Box(n=1, sizes=[1])
    answers = []
    for n, sizes in ((1, [1]), (2, [1, 2]), (1, [1])):
        x.n = n
        x.sizes[:] = sizes
        answers.append(float(f(wrap(x), x, scalar(3.0))))
    assert answers == [3.0, 12.0, 3.0]
    assert f.cache_info().traces == 2


@pytest.mark.parametrize("kind", ["set", "bytearray", "list", "dict"])
def test_a_mutable_static_argument_is_compared_with_a_snapshot(kind):
    f = graftax.jit(lambda x, w: w * len(x))
    x = {"set": set(), "bytearray": bytearray(), "list": [], "dict": {}}[kind]
    add = {
        "set": lambda: x.add(1),
        "bytearray": lambda: x.append(1),
        "list": lambda: x.append(1),
        "dict": lambda: x.update(a=1),
    }[kind]
    assert float(f(x, scalar())) == 0.0
    add()
    assert float(f(x, scalar())) == 1.0
    x.clear()
    assert float(f(x, scalar())) == 0.0
    assert f.cache_info().traces == 2


@dataclasses.dataclass(eq=False)
class Loud:
    """Whose ``__eq__`` and ``__hash__`` must not be asked."""

    n: int

    def __eq__(self, other):
        raise AssertionError("__eq__ was called")

    def __hash__(self):
        raise AssertionError("__hash__ was called")


def test_objects_are_compared_by_their_state_and_not_by_their_eq():
    f = graftax.jit(lambda x, w: w * x.n)
    for n, _ in itertools.product((1, 2), range(3)):
        assert float(f(Loud(n), scalar(2.0))) == 2.0 * n
    assert f.cache_info().traces == 2


def test_fresh_but_equal_objects_are_one_key():
    f = graftax.jit(lambda x, w: w * x.n)
    for _ in range(5):
        f(config(), f32(1))
    assert f.cache_info().traces == 1
