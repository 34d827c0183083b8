# SPDX-License-Identifier: Apache-2.0
"""What graftax refuses: a compiled program could not do with it what the function does."""

from __future__ import annotations

import fractions
import io
import itertools
import random
import time
import weakref
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np


class WithDel:
    def __init__(self) -> None:
        self.w = jnp.ones(2)

    def __del__(self) -> None:
        pass


class WithAttributes:
    pass


class Ratio(fractions.Fraction):
    pass


def generator() -> Any:
    yield 1


def with_array(v: Any) -> Any:
    v.w = jnp.ones(2)
    return v


THING = with_array(WithAttributes())

KINDS: list[tuple[str, Callable[[], Any]]] = [
    ("iterator", lambda: iter([1])),
    ("generator", generator),
    ("`map`, `zip`, `enumerate`", lambda: map(abs, [1])),
    ("`itertools` object", itertools.count),
    ("open file", io.StringIO),
    ("`random.Random`", random.Random),
    ("`numpy.random.Generator`", np.random.default_rng),
    ("`numpy.random.RandomState`", np.random.RandomState),
    ("`memoryview` that can be written to", lambda: memoryview(bytearray(b"a"))),
    ("NumPy array of objects", lambda: np.array([None])),
    ("structured NumPy array", lambda: np.zeros(2, [("a", "i4")])),
    ("masked NumPy array", lambda: np.ma.masked_array([1, 2], [True, False])),
    ("`numpy.matrix`", lambda: np.ones((2, 2)).view(np.matrix)),
    ("NumPy array of another byte order", lambda: np.ones(2, ">f4" if np.little_endian else "<f4")),
    ("`numpy.longdouble` array", lambda: np.ones(2, np.longdouble)),
    ("object with `__del__` and an array", WithDel),
    ("`dict` key with an array below", lambda: {with_array(WithAttributes()): 1}),
    ("element of a `set` with an array below", lambda: {with_array(WithAttributes())}),
    ("`WeakKeyDictionary` whose keys have arrays below", lambda: weakref.WeakKeyDictionary({THING: 1})),
    ("`WeakSet` whose elements have arrays below", lambda: weakref.WeakSet([THING])),
    ("`time.struct_time` and the like with an array", lambda: time.struct_time([jnp.asarray(1)] * 9)),
    (
        "subclass of `Fraction`, `Decimal` or `datetime.date` with an array as attribute",
        lambda: with_array(Ratio(1, 2)),
    ),
    ("`slice` with an array", lambda: slice(jnp.asarray(1))),
]
