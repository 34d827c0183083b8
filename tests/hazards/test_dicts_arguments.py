# SPDX-License-Identifier: Apache-2.0
"""Order and kind of containers, spellings of calls."""

import math
from collections import Counter, OrderedDict, defaultdict, deque

import jax.numpy as jnp
import pytest

import graftax
import oracle
import zoo
from zoo import Box, Color, f32, scalar


def test_dict_order_is_seen_kept_and_part_of_the_key():
    f = graftax.jit(lambda d: (list(d), {"z": d["a"], "b": d["b"], "a": 1}))
    for order in ("ab", "ba", "ab", "ba"):
        keys, out = f({key: f32(ord(key)) for key in order})
        assert keys == list(order)
        assert list(out) == ["z", "b", "a"]
        assert out["z"].tolist() == [97.0] and out["b"].tolist() == [98.0]
    assert f.cache_info().traces == 2


@pytest.mark.parametrize("kind", [dict, OrderedDict, zoo.Table, lambda **items: Box(**items)])
def test_values_follow_their_keys_when_the_order_changes(kind):
    @graftax.jit
    def f(x):
        items = vars(x) if isinstance(x, Box) else x
        return items["a"] - items["b"]

    for _ in range(2):
        assert f(kind(a=f32(3), b=f32(1))).tolist() == [2.0]
        assert f(kind(b=f32(1), a=f32(3))).tolist() == [2.0]


def test_keyword_argument_order():
    f = graftax.jit(lambda *, first=None, **rest: list(rest))
    for order in ("xyz", "zyx", "yxz", "xyz"):
        assert f(**dict.fromkeys(order, f32(1))) == list(order)


class Unorderable:
    def __lt__(self, other):
        raise AssertionError("keys are never sorted")

    __gt__ = __le__ = __ge__ = __lt__


UNORDERABLE = [Unorderable(), Unorderable()]


@pytest.mark.parametrize(
    "keys",
    [
        (1, "a", None, 2.5),
        ((1, "x"), (1, 2), b"b"),
        (Color.RED, Color.BLUE, "RED"),
        (math.nan, 1),
        UNORDERABLE,
        (int, str),
    ],
    ids=["mixed", "tuples", "enums", "nan", "unorderable", "classes"],
)
def test_keys_that_cannot_be_sorted(keys):
    f = graftax.jit(lambda d: {key: value + 1 for key, value in d.items()})
    for value in (1.0, 2.0):
        out = f({key: f32(value + i) for i, key in enumerate(keys)})
        assert all(got is key for got, key in zip(out, keys, strict=True))
        assert [x.tolist() for x in out.values()] == [[value + 1 + i] for i in range(len(keys))]
    assert f.cache_info().traces == 1


def test_true_one_and_one_point_zero_as_keys():
    f = graftax.jit(lambda d: [type(key).__name__ for key in d])
    assert [f({key: f32(1)}) for key in (1, True, 1.0, 1, True, 1.0)] == [["int"], ["bool"], ["float"]] * 2


def test_a_dict_key_with_arrays_below_is_a_clear_error():
    class Key:
        def __init__(self):
            self.w = f32(1)

        def use(self):
            return self.w

    with pytest.raises(graftax.GraftaxError, match="config"):
        graftax.jit(lambda x: 1)({"config": {Key(): 1}})


@pytest.mark.parametrize(
    "build",
    [
        lambda: OrderedDict(b=f32(1), a=f32(2)),
        lambda: defaultdict(list, a=[f32(1)]),
        lambda: Counter({"a": 2, "b": 1}),
        lambda: deque([f32(1), f32(2)], maxlen=2),
        zoo.tagged,
        zoo.list_subclass,
        zoo.dict_subclass,
        zoo.deque_subclass,
        zoo.ordered_subclass,
    ],
)
def test_special_containers_keep_type_factory_maxlen_and_attributes(build):
    @graftax.jit
    def f(x):
        return x, oracle.deep_copy(x), type(x).__name__, oracle.extras(x) == oracle.extras(build())

    for _ in range(2):
        x = build()
        same, copy, name, extras = f(x)
        assert same is x if oracle.is_mutable(x) else True
        assert oracle.difference(x, copy) is None
        assert (name, extras) == (type(x).__name__, True)


def test_the_kind_of_a_container_is_part_of_the_key():
    f = graftax.jit(lambda x: type(x).__name__)
    makers = [list, tuple, deque, zoo.Stack, zoo.Triple]
    assert [f(make([f32(1)])) for make in makers * 2] == ["list", "tuple", "deque", "Stack", "Triple"] * 2
    assert f.cache_info().traces == 5


def test_a_factory_is_part_of_the_key():
    f = graftax.jit(lambda d: d["missed"])
    assert [f(defaultdict(factory, a=f32(1))) for factory in (int, list, int)] == [0, [], 0]


def test_maxlen_is_part_of_the_key():
    f = graftax.jit(lambda d: d.append(d[0] * 2))
    for maxlen in (None, 2, 3, None):
        d = deque([f32(1), f32(2)], maxlen)
        f(d)
        assert len(d) == (2 if maxlen == 2 else 3)
        assert d[-1].tolist() == [2.0]


def test_none_and_array_and_empty_containers():
    f = graftax.jit(lambda x: 0 if x is None else x + 1 if hasattr(x, "shape") else (type(x).__name__, len(x)))
    for _ in range(2):
        assert f(None) == 0
        assert f(f32(1)).tolist() == [2.0]
        for empty in ([], (), {}, set(), deque(), OrderedDict(), ""):
            assert f(empty) == (type(empty).__name__, 0)
    assert f.cache_info().traces == 9


def test_an_optional_field_that_comes_and_goes():
    f = graftax.jit(lambda box: box.w if box.b is None else box.w + box.b)
    for _ in range(2):
        assert f(Box(w=f32(1), b=None)).tolist() == [1.0]
        assert f(Box(w=f32(1), b=f32(2))).tolist() == [3.0]
    assert f.cache_info().traces == 2


def test_python_scalars_and_none_come_out_as_they_are():
    f = graftax.jit(lambda x: (1, 1.0, True, None, "s", 1j, x))
    for _ in range(2):
        out = f(scalar())
        assert [type(x) for x in out[:6]] == [int, float, bool, type(None), str, complex]


def test_a_mutable_default_argument_is_seen_as_it_is_now():
    def f(x, scale=[2.0]):  # noqa: B006
        return x * scale[0]

    jitted = graftax.jit(f)
    assert jitted(f32(1)).tolist() == [2.0]
    f.__defaults__[0][0] = 3.0
    assert jitted(f32(1)).tolist() == [3.0]


def test_wrong_arity_after_right_calls():
    f = graftax.jit(lambda x, y: x)
    f(f32(1), f32(2))
    for _ in range(2):
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'y'"):
            f(f32(1))
    assert f(f32(1), f32(2)).tolist() == [1.0]


@pytest.mark.quick(0)
def test_many_arguments():
    f = graftax.jit(lambda *args, **kwargs: sum(args) + sum(kwargs.values()))
    kwargs = {f"k{i}": jnp.ones(()) for i in range(200)}
    for _ in range(2):
        assert float(f(*[jnp.ones(())] * 300, **kwargs)) == 500.0
