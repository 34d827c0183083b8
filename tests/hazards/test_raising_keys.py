# SPDX-License-Identifier: Apache-2.0
"""What the `__hash__` or `__eq__` of a key raises comes out of every operation: never swallowed, never replaced."""

from __future__ import annotations

import gc
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import graftax
from graftax import _core
from raising_key import Key, Stop


@pytest.fixture(autouse=True)
def unarmed() -> Any:
    yield
    Key.left[0] = 0


def _first(o: Any) -> Any:
    return len(o)  # CPython's own iterator of an OrderedDict makes a KeyError of what a key raises


def _ordered() -> Any:
    return OrderedDict([(Key(1), jnp.float32(1)), ("b", 2), (Key(3), [jnp.ones(1)])])


def _plain() -> Any:
    return {Key(1): jnp.float32(1), "b": 2, Key(3): [jnp.ones(1)]}


def _default() -> Any:
    return defaultdict(list, _plain())


def _warm(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    jitted = graftax.jit(change)

    def call(o: Any) -> Any:
        before, Key.left[0] = Key.left[0], 0
        jitted(graftax.copy(o))
        jitted(graftax.copy(o))
        given = graftax.copy(o)
        Key.left[0] = before
        return jitted(given)

    return call


def _replaced(o: Any) -> Any:
    for key in list(o):
        if isinstance(key, str):
            o[key] = 5


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "flatten": graftax.flatten,
    "to_dict": graftax.to_dict,
    "copy": graftax.copy,
    "equal": lambda o: graftax.equal(o, o),
    "shared": graftax.shared,
    "find": lambda o: graftax.find(o, jax.Array),
    "leaves": graftax.tree.leaves,
    "structure": graftax.tree.structure,
    "first call": lambda o: graftax.jit(_first)(o),
    "hit": _warm(_first),
    "hit with a write": _warm(_replaced),
}


MAKERS = (_ordered, _plain, _default)
SORTING = ("leaves", "structure")  # of the keys of a plain dict, which cannot be sorted here


@pytest.mark.parametrize(
    ("name", "make"), [(n, m) for n in OPERATIONS for m in MAKERS if m is _ordered or n not in SORTING]
)
def test_what_a_key_raises_is_what_comes_out(name: str, make: Callable[[], Any]) -> None:
    obj, operation = make(), OPERATIONS[name]
    for k in range(1, 200):
        Key.left[0] = k
        try:
            operation(obj)
        except Stop:
            # Where the layout of an OrderedDict is not known, its content is put back key by key.
            assert Key.left[0] == 0 or (name, make) == ("hit with a write", _ordered)
            continue
        assert Key.left[0] > 0, "the exception was swallowed"
        return
    raise AssertionError("it never comes to an end")


def test_a_replay_raises_what_a_key_raises() -> None:
    obj = _ordered()
    _, graphdef = graftax.flatten(obj)
    for k in range(1, 5):
        Key.left[0] = k
        try:
            assert _core.walk(graphdef, (obj,)) is not None
        except Stop:
            assert Key.left[0] == 0
    assert _core.walk(graphdef, (obj,)) is not None


@pytest.mark.quick(0)
def test_sets_in_two_orders_raise_what_an_element_raises_when_they_are_compared() -> None:
    one, two = ({Key(v) for v in values} for values in ((0, 8, 16), (16, 8, 0)))
    assert [k.value for k in one] != [k.value for k in two]
    jitted = graftax.jit(_first)

    def call() -> Any:
        before, Key.left[0] = Key.left[0], 0
        jitted.clear_cache()
        for _ in range(3):
            jitted(one)
        Key.left[0] = before
        return jitted(two)

    compared: list[Callable[[], Any]] = [
        lambda: graftax.flatten(one)[1] == graftax.flatten(two)[1],
        lambda: graftax.equal(one, two),
        call,
    ]
    for compare in compared:
        Key.left[0] = 0
        expected = compare()
        for k in range(1, 200):
            Key.left[0] = k
            try:
                assert compare() == expected
            except Stop:
                assert Key.left[0] == 0
                continue
            assert Key.left[0] > 0, "the exception was swallowed"
            break
        else:
            raise AssertionError("it never comes to an end")


def test_a_new_key_that_raises_leaves_a_dict_as_it_was_or_comes_too_late() -> None:
    new = Key(9)

    def change(o: Any, x: Any) -> None:
        o["b"], o[new], o["c"] = 5, x * 2, x
        del o["a"]

    jitted = graftax.jit(change)
    for _ in range(3):
        jitted({"a": jnp.ones(1), "b": 2}, jnp.ones(1))
    for k in range(1, 50):
        o = {"a": jnp.ones(1), "b": 2}
        Key.left[0] = k
        try:
            jitted(o, jnp.ones(1))
        except Stop:
            Key.left[0] = 0
            assert list(o) == ["a", "b"] and o["b"] == 2
            continue
        Key.left[0] = 0
        assert list(o) == ["b", new, "c"] and o["b"] == 5
        return
    raise AssertionError("it never comes to an end")


def test_a_class_that_is_registered_while_it_is_opened_is_finished_as_it_was_begun() -> None:
    class Table(OrderedDict[Any, Any]):
        pass

    class Registers:
        armed = False

        def __hash__(self) -> int:
            if Registers.armed:
                Registers.armed = False
                graftax.register_static(Table)
                gc.collect()
            return 7

        def __eq__(self, other: object) -> bool:
            return self is other

    table = Table([(Registers(), jnp.float32(1)), ("b", 2)])
    graftax.flatten([table])
    Registers.armed = True
    leaves, _ = graftax.flatten([table])
    assert len(leaves) == 1
    assert graftax.flatten([table])[0] == []  # from then on it is static
