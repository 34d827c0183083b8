# SPDX-License-Identifier: Apache-2.0
"""`flatten` keeps structures that come again: it answers what a first walk would, and nothing lives longer for it."""

import gc
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import graftax
from graftax import _core
from strategies import Recipe, graphs


class Model:
    def __init__(self, **values: object) -> None:
        self.__dict__.update(values)


def module_function() -> None: ...


def walked(obj: object) -> tuple[list[object], _core.GraphDef]:
    """What a walk gives that knows nothing."""
    return _core.record((obj,))


def checked(obj: object) -> _core.GraphDef:
    leaves, graphdef = graftax.flatten(obj)
    expected, fresh = walked(obj)
    assert graphdef == fresh and hash(graphdef) == hash(fresh)
    assert repr(graphdef) == repr(fresh)
    assert len(leaves) == len(expected) and all(a is b for a, b in zip(leaves, expected, strict=True))
    return graphdef


X = jnp.ones(3)


def test_a_structure_that_comes_again_is_one_object():
    model = Model(w=X, rate=3, act=jax.nn.relu, name="a", own=module_function, kind=int)
    graftax.flatten(model)
    second = checked(model)
    assert checked(model) is second
    assert checked(Model(w=X + 1, rate=3, act=jax.nn.relu, name="a", own=module_function, kind=int)) is second


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1}, {"a": True}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": 0.0}, {"a": -0.0}),
        ({"a": X, "b": X}, {"b": X, "a": X}),
        ([X, X], (X, X)),
        ([[X], [X]], [a := [X], a]),
        ({"a": X}, {"a": np.ones(3)}),
        ([X, None], [X, X]),
        ({1: X}, {True: X}),
        ({"k": {1, 2}}, {"k": {1, 3}}),
        (Model(a=X), Model(b=X)),
        (Model(a=module_function), Model(a=checked)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_differs_is_told_apart(one: object, other: object):
    for _ in range(3):
        first, second = checked(one), checked(other)
    expected = walked(one)[1] == walked(other)[1]
    assert (first == second) == expected


def test_several_structures_in_turn_are_all_kept():
    models = [Model(w=X, rate=rate) for rate in (1, 2, 3)]
    for _ in range(3):
        kept = [checked(model) for model in models]
    assert all(checked(model) is one for model, one in zip(models, kept, strict=True))


def test_a_change_of_one_object_is_seen():
    model = Model(items=[X, X], rate=1)
    for _ in range(3):
        checked(model)
    model.rate = 2
    assert "2" in repr(checked(model))
    model.items.append(model)
    assert checked(model) != checked(Model(items=[X, X], rate=2))
    del model.items
    checked(model)


def test_nothing_of_the_caller_lives_longer():
    class Local:
        pass

    def local() -> None: ...

    obj = Local()
    obj.w, obj.f, obj.own = jnp.ones(3), local, Model()
    gone = [weakref.ref(x) for x in (obj, obj.w, local, obj.own)]
    for _ in range(4):
        graftax.flatten(obj)
    del obj, local
    assert [ref() for ref in gone] == [None] * 4
    kind = weakref.ref(Local)
    plain = Local()
    for _ in range(4):
        graftax.flatten(plain)
    del plain, Local
    gc.collect()
    assert kind() is None


def test_what_modules_hold_is_kept_over_a_full_collection(monkeypatch):
    model = Model(w=X, of=Model)
    for _ in range(3):
        first = checked(model)
    gc.collect()
    assert checked(model) is first
    held = weakref.ref(first)
    monkeypatch.delattr(sys.modules[__name__], "Model")  # as a module that is loaded anew does
    del first
    gc.collect()
    assert held() is None


def test_long_texts_are_not_kept():
    model = Model(text="x" * 100_000, w=X)
    for _ in range(4):
        checked(model)
    assert checked(model) is not checked(model)


def test_a_registered_class_is_asked_once():
    calls = []

    class Registered:
        def __init__(self, x: object) -> None:
            self.x = x

    graftax.register(
        Registered, flatten=lambda r: calls.append(1) or ((r.x,), None), unflatten=lambda _, c: Registered(*c)
    )
    obj = {"a": Registered(X)}
    for _ in range(4):
        graftax.flatten(obj)
    assert len(calls) == 4


def test_a_class_that_is_registered_later_is_opened_as_it_says():
    class Later:
        def __init__(self, x: object) -> None:
            self.x, self.y = x, X

    obj = [Later(X)]
    for _ in range(4):
        assert len(graftax.flatten(obj)[0]) == 2 or graftax.flatten(obj)[0][0] is X
    graftax.register(Later, flatten=lambda r: ((r.x,), None), unflatten=lambda _, c: Later(*c))
    assert len(graftax.flatten([Later(X)])[0]) == 1


@given(graphs())
def test_any_graph_is_the_same_thrice(recipe: Recipe):
    obj = recipe.build()
    first = graftax.flatten(obj)[1]
    for _ in range(3):
        assert checked(obj) == first
