# SPDX-License-Identifier: Apache-2.0
"""Python's garbage collector sees what each object of the core holds. What it has cleared is empty, and safe to use."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import pickle
import types
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
import pytest

import graftax
from graftax import _core
from watchdog import isolated

pytestmark = pytest.mark.quick(100)  # a case takes milliseconds


class Last:
    """Not known to the collector: its `__del__` runs where it is let go of, in the middle of a clear."""

    __slots__ = ()
    address: ClassVar[list[int]] = []  # of what is cleared
    used: ClassVar[list[str]] = []

    def __del__(self) -> None:
        addresses, Last.address = Last.address, []
        for address in addresses:
            if ctypes.c_int32.from_address(address).value > 0:  # it counts references: not freed
                use(ctypes.cast(address, ctypes.py_object).value)


class Pair:
    """A registered class."""

    def __init__(self, first: Any, second: Any = None) -> None:
        self.first, self.second = first, second


graftax.register(Pair, flatten=lambda p: ((p.first,), p.second), unflatten=lambda aux, parts: Pair(*parts, aux))


def use(obj: Any) -> None:
    """All that it can do without an argument, or with itself."""
    Last.used.append(type(obj).__name__)
    for name in dir(type(obj)):
        if name in ("__del__", "__init__", "__reduce__", "__class__", "__new__"):
            continue
        for args in ((), (obj,), ([],)):
            with contextlib.suppress(Exception):
                found = getattr(obj, name)
                found(*args)
    for act in (repr, hash, list, pickle.dumps, copy.copy, lambda x: x == x, lambda x: x()):
        with contextlib.suppress(Exception):
            act(obj)


def of_flatten(last: Any) -> Any:
    return graftax.flatten([jnp.ones(1), Pair, {last: ("a", 1.5)}, Pair(1, "x"), lambda: last, {1, "y"}])[1]


def entry(last: Any) -> Any:
    return _core.Entry(of_flatten(last), last, lambda: last, [], 0, False)


def table(last: Any) -> Any:
    out = _core.Table()
    out._promote(entry(last))
    return out


def opened(last: Any) -> Any:
    out = _core.Opened()
    _core.Recording((Pair([last], 1),), ("x",), [0], opened=out)
    return out


def reads(last: Any) -> Any:
    def reader(x: Any = last) -> Any:
        return x, last

    assert reader.__closure__
    return _core.Reads([({"a name": last}, "a name")], [reader], list(reader.__closure__))


def jitted(last: Any) -> Any:
    def limited(x: Any, model: Any, n: Any = last) -> Any:
        model.w = model.w + 1
        return x + 1, {"made": [n, last]}

    out = graftax.jit(limited)
    for _ in range(3):
        out(jnp.ones(2), types.SimpleNamespace(w=jnp.ones(2), name="a name"))
    return out


def outcome(last: Any) -> Any:
    key = {last: 1}
    f = graftax.jit(lambda x: [x + 1, (lambda: key)])
    f(jnp.ones(2))
    [entry] = f._table.entries.values()
    return entry.outcomes[0]


MADE: dict[str, Callable[[Any], Any]] = {
    "GraphDef": of_flatten,
    "Row": lambda last: next(r for r in of_flatten(last).rows() if r.parent >= 0 and r.key_entry),
    "Recording": lambda last: _core.Recording(([last, jnp.ones(1)],), ("x",), [0]),
    "Opened": opened,
    "Outcome": outcome,
    "Entry": entry,
    "Table": table,
    "Binding": lambda last: jitted(last)._binding,
    "Jitted": jitted,
    "Reads": reads,
    "GraphEditor": lambda last: _core.GraphEditor([jnp.ones(1), last]),
    "PyTreeDef": lambda last: graftax.tree.structure({"a": [1, Pair(1, last)]}),
    "Function": lambda last: _core.with_attributes(_core.flatten, {"last": last}),
}


@pytest.mark.parametrize("name", MADE)
def test_the_collector_finds_it_as_the_holder_of_what_it_holds(name: str) -> None:
    obj = MADE[name](Last())
    held = [x for x in gc.get_referents(obj) if gc.is_tracked(x)]
    assert type(obj) in held and len(held) > 1
    for x in held:
        assert any(holder is obj for holder in gc.get_referrers(x)), x


@pytest.mark.quick(0)
@pytest.mark.parametrize("name", MADE)
@isolated()
def test_what_was_cleared_is_safe_to_use(name: str) -> None:
    gc.collect()
    gc.disable()
    obj = MADE[name](Last())
    use(obj)
    keeper: list[Any] = [obj]  # found as garbage, and cleared after what it keeps
    keeper.append(keeper)
    Last.used.clear()
    Last.address = [id(obj)]
    del obj, keeper
    gc.collect()
    assert Last.used or name in ("Outcome", "Table"), "it was not used"


@pytest.mark.parametrize("name", sorted({*MADE} - {"Function", "Jitted", "Row"}))
def test_one_that_was_never_made_is_refused(name: str) -> None:
    cls = getattr(_core, name)
    obj = cls.__new__(cls)
    gc.collect()
    for attribute in dir(cls):
        if isinstance(vars(cls).get(attribute), property):
            with pytest.warns(RuntimeWarning), pytest.raises(TypeError):
                getattr(obj, attribute)
