# SPDX-License-Identifier: Apache-2.0
"""How arguments are spelled: positions, keywords, defaults, and the errors of a wrong call."""

import pytest

import graftax
from zoo import f32


def traces(jitted):
    return jitted.cache_info().traces


def test_positional_keyword_and_default_spellings_share_one_trace():
    @graftax.jit
    def f(x, y=2, *, z=3):
        return x * y + z

    calls = [f(f32(1)), f(x=f32(1)), f(f32(1), 2), f(f32(1), y=2), f(f32(1), z=3), f(z=3, y=2, x=f32(1))]
    assert [call.tolist() for call in calls] == [[5.0]] * 6
    assert traces(f) == 1
    assert f(f32(1), 4).tolist() == [7.0]
    assert f(y=4, x=f32(1)).tolist() == [7.0]
    assert traces(f) == 2


def test_var_positional_and_var_keyword():
    @graftax.jit
    def f(*args, **kwargs):
        assert list(kwargs) == ["b", "a"]
        return sum(args) + kwargs["a"] * kwargs["b"]

    assert f(f32(1), f32(2), b=f32(3), a=f32(4)).tolist() == [15.0]
    assert f(f32(1), b=f32(3), a=f32(4)).tolist() == [13.0]


def test_keyword_order_is_seen_by_the_function():
    f = graftax.jit(lambda **kwargs: list(kwargs))
    assert f(b=f32(1), a=f32(2)) == ["b", "a"]
    assert f(a=f32(1), b=f32(2)) == ["a", "b"]
    assert f(b=f32(1), a=f32(2)) == ["b", "a"]


def test_keywords_may_have_any_name():
    @graftax.jit
    def f(x, **kwargs):
        return x + sum(kwargs.values())

    names = ["self", "fun", "f", "args", "kwargs", "static", "mutation", "func", "cls", "key", "jitted"]
    for name in names:
        assert f(f32(1), **{name: f32(2)}).tolist() == [3.0]

    g = graftax.jit(lambda self, fun, args, kwargs, static: self + fun + args + kwargs + static)
    assert g(**dict.fromkeys(["static", "kwargs", "args", "fun", "self"], f32(1))).tolist() == [5.0]


def test_positional_only_parameters():
    @graftax.jit
    def f(x, y=2, /, **kwargs):
        return x * y + kwargs["x"]

    assert f(f32(3), x=f32(1)).tolist() == [7.0]
    assert f(f32(3), 3, x=f32(1)).tolist() == [10.0]


def one(x):
    return x


def two(x, y):
    return x


def only(x, /):
    return x


def keyword(*, x):
    return x


WRONG = [
    (one, (), {}),
    (one, (1, 2), {}),
    (one, (1,), {"x": 1}),
    (one, (1,), {"z": 1}),
    (two, (1,), {}),
    (only, (), {"x": 1}),
    (keyword, (1,), {}),
    (keyword, (), {}),
]


@pytest.mark.parametrize("case", WRONG, ids=range(len(WRONG)))
def test_a_wrong_call_raises_the_functions_own_type_error(case):
    f, args, kwargs = case
    jitted = graftax.jit(f)
    with pytest.raises(TypeError) as plain:
        f(*args, **kwargs)
    with pytest.raises(TypeError) as caught:
        jitted(*args, **kwargs)
    assert str(caught.value) == str(plain.value)


def test_replaced_defaults_are_used():
    def f(x, scale=1):
        return x * scale

    jitted = graftax.jit(f)
    assert jitted(f32(2)).tolist() == [2]
    f.__defaults__ = (5,)
    assert jitted(f32(2)).tolist() == f(f32(2)).tolist() == [10]
    f.__defaults__ = None
    with pytest.raises(TypeError, match="scale"):
        jitted(f32(2))
