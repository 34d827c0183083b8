# SPDX-License-Identifier: Apache-2.0
"""What can be jitted: methods, classmethods, callable objects, partials; and what the wrapper looks like."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from zoo import f32


def traces(jitted):
    return jitted.cache_info().traces


def one(x):
    return x


class Model:
    scale = 2

    def __init__(self, w):
        self.w = w
        self.calls = 0

    @graftax.jit
    def step(self, x):
        self.calls += 1
        self.w = self.w + x
        return self.w

    def double(self, x):
        return self.w * x * 2

    @graftax.jit
    @staticmethod
    def inner_static(x):
        return x + 1

    @staticmethod
    @graftax.jit
    def outer_static(x):
        return x + 2

    @classmethod
    @graftax.jit
    def outer_class(cls, x):
        return x * cls.scale

    def __call__(self, x):
        return self.w * x


class Wider(Model):
    scale = 3


def test_a_method():
    model = Model(f32(1))
    assert model.step(f32(2)).tolist() == [3.0]
    assert model.step(x=f32(2)).tolist() == [5.0]
    assert Model.step(model, f32(1)).tolist() == [6.0]
    assert model.w.tolist() == [6.0]
    assert model.calls == 3


def test_methods_of_two_instances_share_a_trace():
    jitted = Model.__dict__["step"]
    jitted.clear_cache()
    Model(f32(1)).step(f32(1))
    Model(f32(2)).step(f32(1))
    assert traces(jitted) == 1


def test_static_methods_in_both_orders():
    model = Model(f32(1))
    assert model.outer_static(f32(1)).tolist() == Model.outer_static(f32(1)).tolist() == [3.0]
    assert model.inner_static(f32(1)).tolist() == Model.inner_static(f32(1)).tolist() == [2.0]


def test_a_classmethod_sees_its_class():
    assert Model.outer_class(f32(1)).tolist() == [2.0]
    assert Wider.outer_class(f32(1)).tolist() == [3.0]
    assert Wider(f32(1)).outer_class(f32(1)).tolist() == [3.0]


def test_jit_of_a_classmethod_works_or_is_a_clear_error_at_decoration():
    try:

        class Odd:
            @graftax.jit
            @classmethod
            def f(cls, x):
                return x * 2
    except (graftax.GraftaxError, TypeError):
        return
    assert Odd.f(f32(1)).tolist() == [2.0]


def test_a_bound_method_sees_and_changes_its_object():
    model = Model(f32(3))
    double = graftax.jit(model.double)
    assert double(f32(1)).tolist() == [6.0]
    model.w = f32(5)
    assert double(f32(1)).tolist() == [10.0]
    assert traces(double) == 1

    step = graftax.jit(Model.step.__wrapped__.__get__(model))
    step(f32(1))
    assert model.w.tolist() == [6.0] and model.calls == 1


def test_a_callable_object_sees_its_state():
    model = Model(f32(3))
    call = graftax.jit(model)
    assert call(f32(2)).tolist() == [6.0]
    model.w = f32(4)
    assert call(f32(2)).tolist() == [8.0]
    assert traces(call) == 1


@pytest.mark.parametrize("transform", [graftax.jit, graftax.filter_jit], ids=["jit", "filter_jit"])
def test_a_bound_method_equals_itself_as_in_python(transform):
    class Model:
        def __init__(self):
            self.w = jnp.ones(2)

        @transform
        def step(self):
            return self.w + 1

        @transform
        def other(self):
            return self.w

    model, another = Model(), Model()
    assert model.step == model.step and hash(model.step) == hash(model.step)
    assert model.step != model.other and model.step != another.step and model.step != Model.step
    listeners = [model.step, another.step]
    listeners.remove(another.step)
    assert listeners == [model.step] and len({model.step, model.step, another.step}) == 2
    np.testing.assert_array_equal(graftax.jit(lambda step: step())(model.step), [2, 2])


def test_a_partial():
    f = graftax.jit(functools.partial(lambda w, x, n: w * x + n, f32(2), n=1))
    assert f(f32(3)).tolist() == [7.0]
    assert f(f32(4)).tolist() == [9.0]
    assert traces(f) == 1


def test_a_builtin():
    assert graftax.jit(max)([1, 3, 2]) == 3


def test_jit_of_jit():
    f = graftax.jit(graftax.jit(lambda x, log: log.append(x)))
    log = []
    f(f32(1), log)
    f(f32(2), log)
    assert [x.tolist() for x in log] == [[1.0], [2.0]]


def test_options_before_the_function():
    @graftax.jit(mutation="discard", cache_size=3)
    def f(x):
        return x + 1

    assert f(f32(1)).tolist() == [2.0]
    assert f.cache_info().maxsize == 3

    @functools.partial(graftax.jit, mutation="discard")
    def g(x):
        return x + 1

    assert g(f32(1)).tolist() == [2.0]


def test_the_wrapper_looks_like_the_function():
    def f(x: int, /, y=2, *, z) -> str:
        """Words."""

    jitted = graftax.jit(f)
    assert jitted.__wrapped__ is f
    assert (jitted.__name__, jitted.__doc__, jitted.__module__) == ("f", "Words.", __name__)
    assert jitted.__qualname__ == f.__qualname__
    assert inspect.signature(jitted) == inspect.signature(f)


def test_what_is_not_callable_is_refused_at_decoration():
    with pytest.raises(TypeError):
        graftax.jit(3)


def test_unknown_options_are_refused_at_decoration():
    with pytest.raises((TypeError, ValueError), match="sometimes"):
        graftax.jit(one, mutation="sometimes")
    with pytest.raises(TypeError, match="no_such_option"):
        graftax.jit(one, no_such_option=1)


@pytest.mark.parametrize("size", [0, -1])
def test_a_cache_size_without_room_is_refused(size):
    with pytest.raises(ValueError, match="cache_size"):
        graftax.jit(one, cache_size=size)


def test_the_text_of_a_bound_method_names_the_object_that_it_is_of():
    class Model:
        def __repr__(self):
            raise AssertionError("it may read arrays from a device")

        @graftax.jit
        def step(self):
            return 1

    model = Model()
    assert repr(Model.step).startswith("<graftax.jit of <function")
    assert repr(model.step).startswith("<bound graftax.jit of <function") and f"{id(model):#x}" in repr(model.step)
    assert repr(model.step) != repr(Model().step)


class Scale:
    by = 2

    def __call__(self, x):
        return x * self.by


class Shift:
    def __call__(self, x, by=2):
        return x + by


def test_a_class_that_gets_another_call(monkeypatch):
    scale = Scale()
    jitted = graftax.jit(scale)
    twice = graftax.jit(jitted)
    assert jitted(3) == twice(3) == 6
    monkeypatch.setattr(Scale, "__call__", lambda self, x, plus=0: x * 10 + plus)
    assert jitted(3) == twice(3) == graftax.jit(scale)(3) == 30
    assert jitted(3, plus=1) == 31
    monkeypatch.delattr(Scale, "__call__")
    with pytest.raises(TypeError, match="expects a callable, got Scale"):
        jitted(3)
    monkeypatch.undo()
    assert jitted(3) == 6


def test_an_object_that_gets_another_class():
    obj: object = Scale()
    jitted = graftax.jit(obj)
    assert [jitted(3), jitted(3)] == [6, 6]
    obj.__class__ = Shift
    assert [jitted(3), jitted(3), jitted(3, by=4)] == [5, 5, 7]


def test_a_call_that_takes_no_self():
    class Static:
        __call__ = staticmethod(lambda x: x + 1)

    class OfClass:
        by = 3

        @classmethod
        def __call__(cls, x):
            return x + cls.by

    for obj in (Static(), OfClass()):
        assert graftax.jit(obj)(jnp.ones(())) == obj(jnp.ones(()))


def test_every_way_to_call_follows_the_class(monkeypatch):
    scale, x = Scale(), jnp.ones(())
    jitted, checked = graftax.jit(scale), graftax.jit(scale, check=True)
    inner = graftax.jit(lambda x: jitted(x) + 1)
    assert [jitted(x), checked(x), inner(x)] == [2, 2, 3]
    monkeypatch.setattr(Scale, "__call__", lambda self, x: jnp.stack([x, x * 10]))
    assert jitted.eval_shape(x).shape == (2,) and jitted.lower(x).compile()(x)[1] == 10
    assert checked(x)[1] == 10 and inner(x)[1] == 11
    with jax.disable_jit():
        assert jitted(x)[1] == 10
