# SPDX-License-Identifier: Apache-2.0
"""Programs of `filter_jit` on disk: what they have as constants has to be as it was, and effects are not lost."""

from __future__ import annotations

import functools
import sys
import threading
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import graftax

pytestmark = [pytest.mark.usefixtures("cache_of_jax_is_off"), pytest.mark.quick(1)]

CALLS: list[int] = []
WEIGHTS = {"scale": 2.0, "w": jnp.arange(3.0)}


@pytest.fixture
def cache(tmp_path):
    yield graftax.cache(tmp_path / "cache", min_seconds=0)
    graftax.cache(None)


def in_next_process(cache, f):
    """As if in another process."""
    cache.flush()
    f.clear_cache()


def on_disk(f):
    return [variant.on_disk for variant in graftax.explain(f).variants]


class Mode:
    """Its objects are told apart by identity."""


UNSET = Mode()


class Scaling:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, x):
        return x * self.scale


def times(k):
    return lambda x: x * k


def doubled(x):
    return x * 2


CAPTURED = {
    "a number": (2.0, 3.0),
    "an array": (jnp.full(3, 2.0), jnp.full(3, 3.0)),
    "a list": ([2.0], [3.0]),
    "an object": (Scaling(2.0), Scaling(3.0)),
    "a function with variables": (times(2.0), times(3.0)),
    "another function": (doubled, lambda x: x * 3),
    "a partial": (functools.partial(jnp.multiply, 2.0), functools.partial(jnp.multiply, 3.0)),
}


def scaled(captured):
    @graftax.filter_jit
    def f(x):
        if callable(captured):
            return captured(x)
        return x * (captured[0] if type(captured) is list else captured)

    return f


@pytest.mark.parametrize("name", CAPTURED)
def test_what_a_function_captures_is_compared_by_content(cache, name):
    one, other = CAPTURED[name]
    x, f = jnp.ones(3), scaled(one)
    assert f(x).tolist() == [2, 2, 2] and f.cache_info().traces == 1
    cache.flush()
    f = scaled(one)
    assert f(x).tolist() == [2, 2, 2] and (f.cache_info().traces, f.cache_info().disk) == (0, 1)
    f = scaled(other)
    assert f(x).tolist() == [3, 3, 3] and (f.cache_info().traces, f.cache_info().disk) == (1, 0)


def test_a_constant_that_has_changed_in_place_is_another_one(cache, monkeypatch):
    f = graftax.filter_jit(lambda x: x * WEIGHTS["scale"] + WEIGHTS["w"])
    assert f(jnp.ones(3)).tolist() == [2, 3, 4]
    in_next_process(cache, f)
    monkeypatch.setitem(WEIGHTS, "scale", 3.0)
    assert f(jnp.ones(3)).tolist() == [3, 4, 5] and f.cache_info().disk == 0
    monkeypatch.undo()
    assert f(jnp.ones(3)).tolist() == [3, 4, 5]  # as in JAX: it was fixed by the trace
    in_next_process(cache, f)
    assert f(jnp.ones(3)).tolist() == [2, 3, 4] and f.cache_info().disk == 1


def test_another_shape_is_looked_for_with_the_constants_of_now(cache, monkeypatch):
    f = graftax.filter_jit(lambda x: x * WEIGHTS["scale"])
    f(jnp.ones(2)), f(jnp.ones(3))
    in_next_process(cache, f)
    assert f(jnp.ones(2)).tolist() == [2, 2] and f.cache_info().traces == 0
    monkeypatch.setitem(WEIGHTS, "scale", 3.0)
    assert f(jnp.ones(3)).tolist() == [3, 3, 3]
    assert (f.cache_info().traces, f.cache_info().disk) == (1, 1)


def counting_traces(x):
    CALLS.append(1)
    return x + 1


def setting_an_attribute(x):
    Scaling.last = "x"
    return x + 1


def setting_a_global(x):
    global LAST
    LAST = "x"
    return x + 1


@pytest.mark.parametrize("function", [counting_traces, setting_an_attribute, setting_a_global])
def test_what_a_trace_changes_is_changed_in_each_process(cache, function, monkeypatch):
    monkeypatch.setattr(Scaling, "last", "", raising=False)
    monkeypatch.setitem(globals(), "LAST", "")
    CALLS.clear()
    f = graftax.filter_jit(function)
    f(jnp.ones(3))
    assert on_disk(f)[0].endswith("was changed while the function was traced, which each process has to do again")
    in_next_process(cache, f)
    f(jnp.ones(3))
    assert f.cache_info().traces == 2 or len(CALLS) == 2 or f.cache_info().disk == 0


@functools.cache
def table():
    return [2.0]


def test_a_function_with_a_cache_is_named(cache):
    f = graftax.filter_jit(lambda x: x * table()[0])
    f(jnp.ones(3))
    assert "its code calls table, which has a cache" in on_disk(f)[0]


def test_a_constant_without_content_is_named(cache):
    weights = {"lock": threading.Lock()}
    f = graftax.filter_jit(lambda x: x + 1 if weights else x)
    f(jnp.ones(3))
    assert "not written: something that <lambda> captures is a constant of its program" in on_disk(f)[0]


def test_an_argument_that_may_be_a_constant_is_not_written(cache):
    f = graftax.filter_jit(lambda x, mode: x * 2 if mode is UNSET else x * 3)
    assert f(jnp.ones(3), UNSET).tolist() == [2, 2, 2]
    assert "an argument is an object of class Mode, which is compared by identity" in on_disk(f)[0]
    in_next_process(cache, f)
    assert f(jnp.ones(3), Mode()).tolist() == [3, 3, 3]


class Layer(eqx.Module):
    w: jax.Array
    scale: float

    @graftax.filter_jit
    def __call__(self, x):
        return self.w * x * self.scale


def loss(layer, x):
    return layer(x).sum()


def test_methods_and_transformed_functions_are_found(cache):
    layer, f = Layer(jnp.ones(3), 2.0), graftax.filter_jit(eqx.filter_value_and_grad(loss))
    expected = layer(jnp.ones(3)).tolist(), f(layer, jnp.ones(3))[0].tolist()
    in_next_process(cache, f)
    Layer.__call__.clear_cache()
    assert (layer(jnp.ones(3)).tolist(), f(layer, jnp.ones(3))[0].tolist()) == expected
    assert (f.cache_info().traces, f.cache_info().disk) == (0, 1)
    assert (Layer.__call__.cache_info().traces, Layer.__call__.cache_info().disk) == (0, 1)


class OnDemand:
    """A module gives it out under its `__getattr__`, as jaxtyping does with `PyTree`."""

    def __init__(self, factor):
        self.factor = factor

    def times(self, x):
        return x * self.factor


OnDemand.__module__ = "names_on_demand"


@pytest.mark.parametrize("jit", [graftax.jit, graftax.filter_jit])
def test_a_class_that_its_module_gives_out_on_demand_is_found(cache, monkeypatch, jit):
    module = types.ModuleType("names_on_demand")
    module.__getattr__ = {"OnDemand": OnDemand}.__getitem__
    monkeypatch.setitem(sys.modules, module.__name__, module)
    f = jit(lambda x: OnDemand(2.0).times(x))
    assert f(jnp.ones(3)).tolist() == [2, 2, 2]
    in_next_process(cache, f)
    assert f(jnp.ones(3)).tolist() == [2, 2, 2] and (f.cache_info().traces, f.cache_info().disk) == (0, 1)
