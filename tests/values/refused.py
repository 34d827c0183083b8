# SPDX-License-Identifier: Apache-2.0
"""What graftax refuses: a compiled program could not do with it what the function does."""

from __future__ import annotations

import io
import itertools
import random
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np


class WithDel:
    def __init__(self) -> None:
        self.w = jnp.ones(2)

    def __del__(self) -> None:
        pass


def generator() -> Any:
    yield 1


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
    ("`slice` with an array", lambda: slice(jnp.asarray(1))),
]
