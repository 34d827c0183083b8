# SPDX-License-Identifier: Apache-2.0
"""A class that is registered with an abstract one counts at the next call, as in plain Python."""

from __future__ import annotations

import abc
import collections.abc
from typing import Any

import jax.numpy as jnp
import pytest

import graftax
from graftax._capture import abstract_classes

X = jnp.ones(1)


class Shape(abc.ABC):  # noqa: B024
    """With a subclass of its own, with which others are registered."""


class Flat(Shape):
    pass


class Unrelated(abc.ABC):  # noqa: B024
    pass


SHAPES = (int, Shape)


def by_tuple(o: Any) -> bool:
    return isinstance(o, SHAPES)


def by_match(o: Any) -> bool:
    match o:
        case Shape():
            return True
        case _:
            return False


ASKS = {
    "isinstance": lambda o: isinstance(o, Shape),
    "issubclass": lambda o: issubclass(type(o), Shape),
    "a tuple in a helper": by_tuple,
    "match": by_match,
}


@pytest.mark.quick(4)
@pytest.mark.parametrize("asks", ASKS.values(), ids=ASKS)
@pytest.mark.parametrize("base", [Shape, Flat])
def test_a_class_that_is_registered_between_calls_counts(asks: Any, base: Any):
    class New:
        pass

    f = graftax.jit(lambda o, x: x * 2 if asks(o) else x * 3)
    o = New()
    assert f(o, X) == 3
    base.register(New)
    assert f(o, X) == 2
    assert f(o, X) == 2
    assert f.cache_info().traces == 2


def test_one_of_the_standard_library_counts_too():
    class New:
        pass

    f = graftax.jit(lambda o, x: x * 2 if isinstance(o, collections.abc.Sequence) else x * 3)
    o = New()
    assert f(o, X) == 3
    collections.abc.Sequence.register(New)
    assert f(o, X) == 2
    assert "what is registered with Sequence was" in str(graftax.explain(f))


def test_what_the_function_itself_registers_counts_at_the_next_call():
    class New:
        pass

    @graftax.jit
    def f(o: Any, x: Any) -> Any:
        y = x * 2 if isinstance(o, Shape) else x * 3
        Shape.register(New)
        return y

    o = New()
    assert [float(f(o, X)[0]) for _ in range(3)] == [3, 2, 2]


def test_another_class_that_is_registered_elsewhere_compiles_nothing():
    class New:
        pass

    f = graftax.jit(lambda o, x: x * 2 if isinstance(o, Shape) else x * 3)
    o = New()
    assert f(o, X) == 3
    Unrelated.register(New)
    assert f(o, X) == 3
    assert f.cache_info().traces == 1


def test_where_the_registry_cannot_be_read_each_registration_counts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(abstract_classes, "_get_dump", None)

    class New:
        pass

    f = graftax.jit(lambda o, x: x * 2 if isinstance(o, Shape) else x * 3)
    o = New()
    assert f(o, X) == 3
    Shape.register(New)
    assert f(o, X) == 2
