# SPDX-License-Identifier: Apache-2.0
"""Functions and objects that are jitted: in one another, as methods, copied, with attributes, freed."""

import copy
import gc
import types
import weakref

import jax.numpy as jnp
import pytest

import graftax
from graftax import _core
from watchdog import isolated

x = jnp.arange(3.0)


def test_what_a_jitted_function_captures_comes_back_from_a_call_in_another():
    state = []

    @graftax.jit
    def inner(y):
        state.append(y * 2)
        return y

    outer = graftax.jit(lambda y: inner(y) + 1)
    for n in (1, 2):
        assert outer(x).tolist() == [1, 2, 3]
        assert [y.tolist() for y in state] == [[0, 2, 4]] * n
    inner(x)
    assert len(state) == 3


def test_jit_of_a_jitted_function_is_one_jit():
    log = []

    def f(y):
        log.append(1)
        return y + 1

    twice = graftax.jit(graftax.jit(f))
    for n in (1, 2, 3):
        assert twice(x).tolist() == (x + 1).tolist()
        assert len(log) == n


def test_a_jitted_callable_object_is_no_method():
    class Scale:
        k = 2

        def __call__(self, y):
            return y * self.k

    class Layer:
        act = graftax.jit(Scale())
        sin = graftax.jit(jnp.sin)

    assert Layer().act(x).tolist() == (x * 2).tolist()
    assert Layer().sin(x).tolist() == jnp.sin(x).tolist()


def test_attributes_of_a_jitted_object_do_not_cover_the_wrapper():
    class Model:
        def __init__(self):
            self._plan = self._options = self.lower = 1

        def __call__(self, y):
            return y + self._plan

    f = graftax.jit(Model())
    assert f(x).tolist() == (x + 1).tolist()
    f.lower(x)


def test_a_deep_copy_of_an_object_binds_its_own_jitted_method():
    class Model:
        def __init__(self):
            self.n = x
            self.step = graftax.jit(self.plain)

        def plain(self):
            self.n = self.n + 1

    a = Model()
    b = copy.deepcopy(a)
    b.step()
    assert a.n.tolist() == x.tolist()
    assert b.n.tolist() == (x + 1).tolist()


@isolated()
def test_internal_entry_points_refuse_what_they_cannot_take():
    for wrong in (type(iter([])), types.GeneratorType, "x"):
        with pytest.raises(TypeError):
            _core.kind_info(wrong)
    with pytest.raises(TypeError):
        _core.Caller()(1)
    with pytest.raises(TypeError):
        graftax.Jitted.__new__(graftax.Jitted)(1)


def test_a_jitted_function_that_calls_itself_is_freed():
    def make():
        @graftax.jit
        def f(y, n):
            return y if n == 0 else f(y, n - 1)

        f(x, 1)
        return weakref.ref(f)

    ref = make()
    gc.collect()
    assert ref() is None


def test_an_attribute_set_on_the_jitted_function_itself_is_a_clear_error():
    @graftax.jit
    def step(y):
        step.calls = getattr(step, "calls", 0) + 1
        return y

    with pytest.raises(graftax.MutationError, match="attributes of the jitted function"):
        step(x)
    assert not hasattr(step, "calls")
