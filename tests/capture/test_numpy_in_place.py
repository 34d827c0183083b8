# SPDX-License-Identifier: Apache-2.0
"""Code that changes NumPy arrays in place: as plain Python leaves them, or an error or a warning that says why not."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import graftax


def ones() -> np.ndarray:
    return np.ones(3, np.float32)


def returned_old(a: Any) -> Any:
    old = a
    a += 1
    return old


def used_old(a: Any) -> Any:
    old = a
    a -= 1
    return old * 2


def used_old_by_jax(a: Any) -> Any:
    old = a
    a *= 2
    return jnp.sum(old)


def used_view(a: Any) -> Any:
    view = a[1:]
    a /= 2
    return view + 1


def used_transposed(a: Any) -> Any:
    view = a.reshape(1, 3).T
    a **= 2
    return jnp.sin(view)


def changed_view(a: Any) -> Any:
    view = a[1:]
    view += 1
    return a


def changed_rows(a: Any) -> Any:
    for row in a.reshape(3, 1):
        row += 1
    return a


def changed_what_numpy_computed(a: Any) -> Any:
    b = a * 2
    c = b
    b += 1
    return c


def changed_by_what_numpy_computed(a: Any) -> Any:
    old = a
    a -= a.mean() * 2
    return old


def kept_in_a_list(a: Any) -> Any:
    holder = [a]
    a += 1
    return holder


SILENT_BEFORE: list[Callable[[Any], Any]] = [
    *(returned_old, used_old, used_old_by_jax, used_view, used_transposed, changed_view, changed_rows),
    *(changed_what_numpy_computed, changed_by_what_numpy_computed, kept_in_a_list),
]


@pytest.mark.parametrize("f", SILENT_BEFORE, ids=lambda f: f.__name__)
def test_another_name_of_an_array_that_is_changed_in_place_is_refused(f: Callable[[Any], Any]):
    a = ones()
    with pytest.raises(graftax.MutationError, match=r"test_numpy_in_place.py:\d+ changes a .*in place.* Write `a = a"):
        graftax.jit(f)(a)
    assert a.tolist() == [1, 1, 1]


def test_another_place_that_holds_the_array_is_named():
    def in_a_loop(arrays: list[Any]) -> None:
        for a in arrays:
            a += 1

    with pytest.raises(graftax.MutationError, match=r"arrays\[0\] holds that array, too"):
        graftax.jit(in_a_loop)([ones()])

    def two_attributes(o: Any) -> None:
        o.a += 1

    a = ones()
    for other in (a, a[:2], a[::-1]):
        with pytest.raises(graftax.MutationError, match=r"NumPy array o.a in place, and o.b shares its memory"):
            graftax.jit(two_attributes)(types.SimpleNamespace(a=a, b=other))


table = ones()


def test_a_captured_array_counts_as_well():
    captured = types.SimpleNamespace(a=ones())

    def of_an_object(x: Any) -> Any:
        old = captured.a
        captured.a += 1
        return x + old

    def of_a_module(x: Any) -> Any:
        global table
        old = table
        table += 1
        return x + old

    for f in (of_an_object, of_a_module):
        with pytest.raises(graftax.MutationError, match="another name of it, or a view"):
            graftax.jit(f)(jnp.ones(3))
    assert captured.a.tolist() == table.tolist() == [1, 1, 1]


@pytest.mark.parametrize("method", ["sort", "fill", "partition", "put", "resize"])
def test_methods_that_change_an_array_are_refused(method: str):
    def f(a: Any) -> None:
        getattr(a, method)(0)

    with pytest.raises(graftax.MutationError, match=rf"{method}\(\) in .* Write a = jnp"):
        graftax.jit(f)(ones())


def test_where_nothing_else_is_known_to_hold_the_array_it_is_a_warning_with_the_line():
    def f(o: Any) -> Any:
        o.a += 1
        return o.a * 2

    o = types.SimpleNamespace(a=ones())
    jitted = graftax.jit(f)
    with pytest.warns(graftax.LostChangeWarning, match=r"`a \+= x` in .*:\d+ changes the NumPy array o.a") as told:
        assert jitted(o).tolist() == [4, 4, 4] and o.a.tolist() == [2, 2, 2]
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jitted(o).tolist() == [6, 6, 6] and o.a.tolist() == [3, 3, 3]


def test_what_makes_a_new_array_in_plain_python_is_as_there():
    def with_an_array_of_jax(a: Any, x: Any) -> Any:
        old = a
        a += x
        return a, old

    def of_a_scalar(a: Any, s: Any) -> Any:
        old, mean = s, a.mean()
        kept = mean
        s += 1
        mean += 1
        return s, old, mean, kept

    def of_what_jax_computed(a: Any) -> Any:
        b = jnp.sin(a)
        c = b
        b += 1
        return b, c

    def copied(a: Any) -> Any:
        b, c = a.copy(), a.astype(np.float32)
        b += 1
        c += 2
        return a, b, c

    def assigned(a: Any) -> Any:
        old = a
        a = a + 1
        return a, old

    cases: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (with_an_array_of_jax, (ones(), jnp.ones(3))),
        (of_a_scalar, (ones(), np.float32(2))),
        (of_what_jax_computed, (ones(),)),
        (assigned, (ones(),)),
        (copied, (ones(),)),
    ]
    for f, args in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for one, other in zip(graftax.jit(f)(*args), f(*args), strict=True):
                assert np.allclose(one, other)


def test_a_program_that_was_traced_with_an_array_of_jax_is_not_that_of_a_numpy_array():
    def add(o: Any) -> Any:
        old = o.a
        o.a += 1
        return old

    def ordered(o: Any) -> Any:
        o.a.sort()
        return o.a

    for f in (add, ordered):
        jitted = graftax.jit(f)
        for _ in range(2):
            assert jitted(types.SimpleNamespace(a=jnp.ones(3))).tolist() == [1, 1, 1]
            with pytest.raises(graftax.MutationError):
                jitted(types.SimpleNamespace(a=ones()))

    def unchanged(o: Any) -> Any:
        return o.a + 1

    plain = graftax.jit(unchanged)
    for a in (jnp.ones(3), ones(), jnp.ones(3)):
        plain(types.SimpleNamespace(a=a))
    assert plain.cache_info().traces == 1


def test_numpys_own_errors_of_shapes_and_dtypes_are_raised():
    def add(a: Any, b: Any) -> Any:
        a += b
        return a

    for a, b, said in [
        (np.ones(3, np.int32), np.ones(3, np.float32), "Cannot cast ufunc 'add' output"),
        (ones(), np.ones((2, 3), np.float32), "non-broadcastable output operand"),
    ]:
        for run in (add, graftax.jit(add)):
            with pytest.raises((TypeError, ValueError), match=said):
                run(a, b)
    with pytest.warns(graftax.LostChangeWarning):
        assert graftax.jit(add)(np.ones(3, np.float16), ones()).dtype == np.float16
