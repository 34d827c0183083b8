# SPDX-License-Identifier: Apache-2.0
"""State that stands where few look: behind functions that are handed around, in bases of libraries, in hidden slots."""

from __future__ import annotations

import json
import logging
import operator
import types
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import graftax
from zoo import f32

x = f32(1)


def counter() -> Any:
    state = {"n": 0}

    def count() -> int:
        state["n"] += 1
        return state["n"]

    return count


def activation(w: Any) -> Any:
    return lambda y: y * w


count = counter()
act = activation(jnp.ones(1) * 2)


def test_a_global_function_with_state_that_leaves_the_function_is_the_callers_own() -> None:
    def f(a: Any, x: Any) -> Any:
        a.callback = count
        return count

    a = types.SimpleNamespace()
    for n in (1, 3):
        returned = graftax.jit(f)(a, x)
        assert returned is count and a.callback is count
        assert (returned(), count()) == (n, n + 1)


def test_a_function_with_arrays_that_is_given_is_the_global_that_it_is_compared_with() -> None:
    f = graftax.jit(lambda given, x: given(x) + (100.0 if given is act else 0.0))
    assert f(act, x) == 102 and f(act, x) == 102 and f(activation(jnp.ones(1) * 3), x) == 3


def test_a_function_that_a_callback_is_given_is_no_input() -> None:
    def f(x: Any) -> Any:
        jax.debug.callback(recorder, x.sum())  # noqa: F821  # pyright: ignore
        return x

    log: list[float] = []

    def make() -> Any:
        return lambda loss: log.append(float(loss))

    run = graftax.jit(types.FunctionType(f.__code__, {**globals(), "recorder": make()}))
    for i in range(4):
        run(x * i)
    jax.effects_barrier()
    assert log == [0, 1, 2, 3] and run.cache_info().traces == 1


class Encoder(json.JSONEncoder):
    item_separator = ","


def test_an_attribute_by_which_a_class_sets_up_its_base_of_the_standard_library_counts() -> None:
    f = graftax.jit(lambda x: (Encoder().encode([1, 2]), x)[0])
    assert f(x) == "[1,2]"
    Encoder.item_separator = ";"
    assert f(x) == "[1;2]"


@pytest.mark.parametrize(
    "make",
    [lambda: types.ModuleType("m"), lambda: cache(len), logging.StreamHandler],
    ids=["module", "cache", "handler"],
)
def test_what_has_state_that_is_not_compared_cannot_be_made_inside_and_returned(make: Any) -> None:
    with pytest.raises(graftax.UnsupportedValueError, match="one object for all calls"):
        graftax.jit(lambda x: make())(x)
    made = make()
    assert graftax.jit(lambda x, made: made)(x, made) is made


def test_a_getter_that_holds_an_object_is_refused_and_one_of_names_is_not() -> None:
    call: Any = operator.methodcaller("get", "k")
    assert graftax.jit(lambda g, d, x: x * g(d))(call, {"k": 3.0}, x) == 3
    with pytest.raises(graftax.UnsupportedValueError, match="methodcaller holds an object"):
        graftax.jit(lambda g, x: x)(operator.methodcaller("get", {}), x)


def test_a_slot_without_its_descriptor_is_refused() -> None:
    class Hidden:
        __slots__ = ("value",)

    slot: Any = vars(Hidden)["value"]
    del Hidden.value
    hidden = Hidden()
    slot.__set__(hidden, x)
    with pytest.raises(graftax.UnsupportedValueError, match="no descriptor for its slot 'value'"):
        graftax.jit(lambda a: a.value)(hidden)
