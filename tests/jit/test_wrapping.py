# SPDX-License-Identifier: Apache-2.0
"""A jitted function beside Python's own tools: signature, attributes, pickle, copy and deepcopy."""

import copy
import functools
import inspect
import pickle

import pytest

import graftax
from zoo import f32


@graftax.jit
def step(x, n: int = 2, *, unit: str = "m") -> tuple:
    """Steps."""
    return x * n, unit


step.note = "kept"
doubled = graftax.filter_jit(functools.partial(step.__wrapped__, n=2))


class Model:
    def __init__(self):
        self.w = f32(1)

    @graftax.jit
    def step(self, x, n=2):
        """Adds."""
        self.w = self.w + x * n
        return self.w

    @graftax.jit(mutation="discard", check=True)
    def look(self, x):
        return self.w + x

    def plain(self, x):
        return self.w * x

    @classmethod
    @graftax.jit
    def make(cls, x):
        return cls.__name__, x


def test_the_signature_is_the_functions_own():
    assert str(inspect.signature(step)) == "(x, n: int = 2, *, unit: str = 'm') -> tuple"
    assert str(inspect.signature(Model.step)) == "(self, x, n=2)"
    assert list(inspect.signature(graftax.jit(Model().plain)).parameters) == ["x"]
    assert inspect.signature(doubled).parameters["n"].default == 2


@pytest.mark.parametrize(
    "function", [step, Model.step, doubled, Model().step], ids=["function", "in a class", "partial", "bound"]
)
def test_the_signature_is_there_for_those_who_do_not_follow_what_is_wrapped(function):
    assert inspect.signature(function, follow_wrapped=False) == inspect.signature(function)


def test_the_signature_of_a_bound_method_is_without_self():
    assert list(inspect.signature(Model().step).parameters) == ["x", "n"]


def test_the_attributes_are_the_functions_own():
    assert (step.__name__, step.__qualname__, step.__module__) == ("step", "step", __name__)
    assert step.__doc__ == "Steps." and step.__annotations__ == {"n": int, "unit": str, "return": tuple}
    assert step.note == "kept" and inspect.unwrap(step) is step.__wrapped__
    assert Model().step.__doc__ == "Adds." and Model.step.__qualname__ == "Model.step"
    assert inspect.getsource(step).startswith("@graftax.jit\ndef step")
    assert callable(step) and not inspect.isclass(step)


def test_a_wrapper_around_it_works():
    @functools.wraps(step)
    def outer(*args, **kwargs):
        return step(*args, **kwargs)

    assert outer(f32(1))[0].tolist() == graftax.jit(outer)(f32(1))[0].tolist() == [2.0]
    assert functools.partial(step, n=5)(f32(1))[0].tolist() == [5.0]


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_named_function_is_pickled_by_name(protocol):
    assert pickle.loads(pickle.dumps(step, protocol)) is step
    assert pickle.loads(pickle.dumps(Model.step, protocol)) is Model.step


def test_another_jit_of_a_named_function_is_pickled_with_its_options():
    again = pickle.loads(pickle.dumps(graftax.jit(scaled, mutation="error", donate="all", cache_size=7)))
    assert again(f32(2)).tolist() == [4.0]
    assert again.cache_info().maxsize == 7
    with pytest.raises(graftax.MutationError):
        pickle.loads(pickle.dumps(graftax.jit(appends, mutation="error")))([f32(1)])


def scaled(x):
    return x * 2


def appends(x):
    x.append(x[0])


def test_a_local_function_cannot_be_pickled():
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        pickle.dumps(graftax.jit(lambda x: x))


@pytest.mark.parametrize("use", [copy.copy, copy.deepcopy])
def test_a_copy_of_a_jitted_function_is_itself(use):
    assert use(step) is step


def test_a_deep_copy_of_a_bound_method_has_its_own_object():
    model = Model()
    other = copy.deepcopy(model.step)
    other(f32(1))
    assert model.w.tolist() == [1.0] and other.__self__.w.tolist() == [3.0]
    bound = graftax.jit(model.plain)
    assert copy.deepcopy(bound)(f32(4)).tolist() == [4.0]
    assert copy.copy(model.step)(f32(1)).tolist() == [3.0] == model.w.tolist()


def test_a_bound_method_is_pickled_with_its_object():
    model = Model()
    model.w = f32(5)
    again = pickle.loads(pickle.dumps(model.step))
    assert again(f32(1)).tolist() == [7.0]
    assert model.w.tolist() == [5.0]
    looked = pickle.loads(pickle.dumps(model.look))
    assert looked(f32(1)).tolist() == [6.0] and type(looked) is type(model.look)


def test_an_object_that_holds_its_jitted_method_is_copied_with_it():
    model = Model()
    model.run = model.step
    other = copy.deepcopy(model)
    other.run(f32(1))
    assert other.w.tolist() == [3.0] and model.w.tolist() == [1.0]


def test_a_classmethod_is_called_on_class_and_instance():
    assert Model.make(f32(1))[0] == Model().make(f32(1))[0] == "Model"
