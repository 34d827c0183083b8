# SPDX-License-Identifier: Apache-2.0
"""Bound methods and partials as values: opened like any node, so that what they hold is seen."""

import functools

import jax.numpy as jnp
import pytest

import graftax
from graftax import _core


class Scale:
    def __init__(self, k, w=None):
        self.k, self.w = k, w

    def times(self, x):
        return x * self.k if self.w is None else x * self.k * self.w

    def count(self):
        self.k += 1


x = jnp.arange(3.0)


def test_a_bound_method_fetched_anew_is_a_hit():
    scale = Scale(2)
    f = graftax.jit(lambda m, x: m(x))
    for _ in range(3):
        assert f(scale.times, x).tolist() == (x * 2).tolist()
    assert f.cache_info().traces == 1


@pytest.mark.parametrize("w", [None, x])
def test_the_instance_of_a_bound_method_is_seen_to_change(w):
    scale = Scale(2, w)
    method = scale.times
    f = graftax.jit(lambda m, x: m(x))
    f(method, x)
    scale.k = 5
    assert f(method, x).tolist() == scale.times(x).tolist()


def test_a_bound_method_changes_its_instance():
    scale = Scale(2, x)
    f = graftax.jit(lambda m: m())
    for n in (3, 4, 5):
        f(scale.count)
        assert scale.k == n


def test_arrays_in_a_partial_are_traced_and_equal_partials_are_one_key():
    def g(a, x, b):
        return a * x + b

    f = graftax.jit(lambda p, x: p(x))
    for i in range(3):
        assert f(functools.partial(g, x * i, b=x), x).tolist() == (x * i * x + x).tolist()
    assert f.cache_info().traces == 1


def test_a_static_in_a_partial_is_part_of_the_key():
    f = graftax.jit(lambda p, x: p(x))
    for k in (1, True, 1.0, 2):
        assert f(functools.partial(lambda k, x: (repr(k), x), k), x)[0] == repr(k)


def test_keywords_of_a_partial_come_back_changed():
    p = functools.partial(dict, w=x)

    def f(p):
        p.keywords["w"] = p.keywords["w"] + 1
        p.keywords["note"] = "new"

    jitted = graftax.jit(f)
    jitted(p)
    assert p()["w"].tolist() == (x + 1).tolist()
    assert p()["note"] == "new"


@pytest.mark.parametrize("wrap", [graftax.jit, graftax.filter_jit])
def test_a_partial_made_inside_comes_out_with_arrays(wrap):
    p = wrap(lambda x: functools.partial(jnp.add, x, x))(x)
    assert p().tolist() == (x + x).tolist()


def test_flatten_and_the_flat_form_open_them():
    shared = [x]
    graph = {"m": Scale(2, shared).times, "p": functools.partial(max, shared, key=len), "s": shared}
    leaves, graphdef = graftax.flatten(graph)
    assert len(leaves) == 1
    for restored in (graftax.unflatten(graphdef, leaves), graftax.from_dict(graftax.to_dict(graph))):
        assert restored["m"].__self__.w is restored["p"].args[0] is restored["s"]
        assert restored["m"].__func__ is Scale.times
        assert restored["p"].keywords == {"key": len}
        assert graftax.flatten(restored)[1] == graphdef


def test_an_error_names_the_part():
    with pytest.raises(graftax.UnsupportedValueError, match=r"p\.args\[0\]"):
        graftax.jit(lambda p: p())(functools.partial(max, iter([1])))


def test_what_was_never_set_up_or_is_set_up_wrongly_says_so():
    jitted = graftax.jit(lambda x: x)
    with pytest.raises(TypeError, match="never set up"):
        type(jitted).__new__(type(jitted))(1)
    with pytest.raises(TypeError, match="expected a Table and a Binding"):
        jitted._configure(len, (), 1, jitted._binding)
    with pytest.raises(TypeError, match="expected a Table and a Binding"):
        jitted._configure(len, (), jitted._table, 2)
    with pytest.raises(TypeError, match="4 arguments"):
        jitted._configure(len)
    assert jitted(3) == 3


PARTS = {
    "names": ("a",), "defaults": (1,), "missing": object(), "given": None, "positional": 1, "positional_only": 0,
    "var_positional": False, "var_keyword": False, "cells": (), "globals": {}, "global_names": (), "origins": (),
}  # fmt: skip
INCONSISTENT = [
    {"names": ()},
    {"positional": 2},
    {"positional_only": 2},
    {"globals": None, "global_names": ("x",)},
    {"origins": (1,)},
    {"origins": ((1, 2),)},
]


@pytest.mark.parametrize("parts", INCONSISTENT, ids=str)
def test_parts_of_a_signature_that_do_not_fit_are_refused(parts):
    _core.Binding(**PARTS)
    with pytest.raises(ValueError, match="inconsistent binding"):
        _core.Binding(**{**PARTS, **parts})
