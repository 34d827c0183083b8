# SPDX-License-Identifier: Apache-2.0
"""What graftax refuses: a compiled program could not do with it what the function does."""

from __future__ import annotations

import contextvars
import ctypes
import decimal
import fractions
import functools
import hashlib
import io
import itertools
import mmap
import multiprocessing
import queue
import random
import re
import sqlite3
import time
import weakref
import xml.etree.ElementTree as ElementTree
import zlib
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


def closed_connection() -> sqlite3.Connection:
    db = sqlite3.connect(":memory:")
    db.close()
    return db


def frame() -> Any:
    """Without pandas, a class of its name."""
    try:
        import pandas
    except ImportError:
        return type("NDFrame", (), {"__module__": "pandas.core.generic"})()
    return pandas.DataFrame({"a": [1.0]})


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
    ("`ctypes` data, `multiprocessing.Value`: pass its value", lambda: ctypes.c_int(2)),
    ("`mmap.mmap`: pass its bytes", lambda: mmap.mmap(-1, 8)),
    ("`contextvars.Context`: pass the values that are set in it", contextvars.Context),
    ("`decimal.Context`: pass its settings", decimal.Context),
    ("`queue.Queue`, `queue.SimpleQueue`: pass a list or a `deque`", queue.SimpleQueue),
    ("`multiprocessing` connection or queue: read it first", lambda: multiprocessing.Pipe()[0]),
    ("element of `xml.etree.ElementTree`: pass its text or attributes", lambda: ElementTree.Element("a")),
    ("`hashlib` object: pass its digest", hashlib.sha256),
    ("`zlib` and other (de)compressors: pass the bytes", zlib.compressobj),
    ("`sqlite3` connection: pass the rows", closed_connection),
    ("scanner of a `re.Pattern`: pass the pattern", lambda: re.compile("a").scanner("a")),
    ("bound method of a refused object", lambda: queue.SimpleQueue().put),
    ("frame or series of pandas or polars: pass its columns as arrays", frame),
    ("other object implemented in C: pass what the function needs from it", lambda: functools.cmp_to_key(max)(1)),
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
