# SPDX-License-Identifier: Apache-2.0
"""No symbol is left anywhere when a trace has ended: what holds a number holds a number."""

from __future__ import annotations

import collections
import dataclasses
import fractions
import functools
import gc
import logging
import operator
import types
import uuid
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from graftax._capture.numbers.symbols import FloatSymbol, IntSymbol, ScalarSymbol
from number_values import traces, x

Pair = collections.namedtuple("Pair", "a b")


NO_HOLDERS = (type, types.ModuleType, types.CodeType, types.FrameType, types.TracebackType, jax.Array)
SYMBOLS = {IntSymbol, FloatSymbol, ScalarSymbol}


class Slots:
    __slots__ = ("a", "b")


@graftax.register_static
@dataclasses.dataclass(frozen=True)
class Registered:
    n: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["a"], meta_fields=["n"])
@dataclasses.dataclass
class WithMeta:
    a: Any
    n: Any


class Hidden:
    """An object that graftax does not look into."""

    z = 0

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.table: dict[Any, Any] = {}
        self.known: set[Any] = set()
        self.latest: collections.deque[Any] = collections.deque(maxlen=2)
        self.records: list[Any] = []

    def keep(self, n: Any) -> int:
        self.values.append(n)
        self.table[n] = n
        self.table["last", n] = (n, (n, slice(n)))
        self.known.add(n)
        self.latest.append(n)
        self.function = lambda: n
        type(self).z = n
        slotted = Slots()
        slotted.a, slotted.b = n, [n]
        self.slotted = slotted
        return 0


HIDDEN = graftax.Static(Hidden())


@pytest.fixture(autouse=True)
def _not_frozen() -> None:
    """The collector does not know what was there when the tests began: `gc.freeze()`."""
    vars(HIDDEN.value).update(vars(Hidden()))


class Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        HIDDEN.value.records.append(record)


LOGGER = logging.Logger("numbers")
LOGGER.addHandler(Handler())


def in_slots(n: Any) -> Any:
    out = Slots()
    out.a, out.b = n, (n, [n])
    return [out.a, out.b]


def weakly(n: Any) -> Any:
    found: Any = weakref.WeakValueDictionary()
    found[n] = HIDDEN.value
    return list(found.data)


KEPT: dict[str, Any] = {
    "slots of the library's": lambda n: uuid.UUID(int=n),
    "a fraction": lambda n: fractions.Fraction(n, 3),
    "slices": lambda n: [slice(n, n + 2), (slice(n), n)],
    "a shape": lambda n: jax.ShapeDtypeStruct((n, 2), "float32"),
    "a spec": lambda n: jax.sharding.PartitionSpec("a", n),
    "static fields": lambda n: (Registered(n), Registered((n, (n,)))),
    "meta fields": lambda n: WithMeta(jnp.ones(1), (n, [n])).n,
    "a structure": lambda n: jax.tree.structure(WithMeta(0, n)),
    "a key path": lambda n: (jax.tree_util.SequenceKey(n), jax.tree_util.DictKey(n)),
    "a getter": lambda n: operator.itemgetter(n),
    "a named tuple": lambda n: Pair(n, slice(n)),
    "a frozen set": lambda n: frozenset([n, (n,)]),
    "weak values": weakly,
    "slots": in_slots,
    "hidden state": lambda n: HIDDEN.value.keep(n),
    "a logger": lambda n: LOGGER.info("is %s", n),
}


def types_in(value: Any) -> set[type]:
    """All types that the collector finds from a value, without those of code."""
    types_held, stack, met = set[type](), [value], set[int]()
    while stack:
        item = stack.pop()
        if id(item) not in met and not isinstance(item, NO_HOLDERS):
            met.add(id(item))
            types_held.add(type(item))
            stack += gc.get_referents(item) if not isinstance(item, types.FunctionType) else item.__closure__ or ()
    return types_held


@pytest.mark.quick(5)
@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT.keys())
def test_what_keeps_a_number_holds_a_number(keep: Any):
    f = graftax.jit(lambda x, n: (keep(n), x * n), warn_impure=False)
    for n in (1, 2, 3, 2):
        result, product = f(x(), n)
        assert product[1] == n
        assert not types_in([result, *vars(HIDDEN.value).values()]) & SYMBOLS
        assert repr(result) == repr(keep(n))
    hidden = HIDDEN.value
    assert set(hidden.values) <= {1, 2, 3} and all(
        type(n) is int for n in [*hidden.values, *hidden.table.values()][:9:2]
    )


def test_a_number_beside_one_that_is_kept_stays_symbolic():
    f = graftax.jit(lambda x, n, m: (slice(n), x * m))
    for n in (1, 2):
        assert f(x(), n, 0)[0] == slice(n)
    for m in range(6):
        assert f(x(), 2, m)[1][1] == m
    assert traces(f) <= 6


def test_a_host_function_that_keeps_numbers_keeps_plain_ones():
    kept: list[Any] = []

    def step(x: Any, n: Any) -> Any:
        jax.debug.callback(lambda v: kept.append((n, float(v))), x[1])
        return x * n

    f = graftax.jit(step)
    for n in (1, 2, 3, 5):
        f(x(), n)
        jax.effects_barrier()
    assert [(type(n), n) for n, _ in kept] == [(int, 1), (int, 2), (int, 3), (int, 5)]


ASKED: dict[str, Any] = {
    "equal": lambda n: (graftax.equal({"n": n}, {"n": 2}), graftax.equal([n, (n,)], [2, (2,)]), graftax.equal(n, 2.0)),
    "diff": lambda n: [str(d) for d in graftax.diff({"n": n, "m": (n,)}, {"n": 2, "m": (2.0,)})],
    "structures": lambda n: graftax.flatten({"n": n})[1] == graftax.flatten({"n": 2})[1],
    "their hashes": lambda n: hash(graftax.flatten((n,))[1]) == hash(graftax.flatten((2,))[1]),
    "show": lambda n: graftax.show({"n": n, "m": [n]}).text(),
    "show.diff": lambda n: graftax.show.diff({"n": n}, {"n": 2}).text(),
}


@pytest.mark.quick(12)
@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED.keys())
def test_graphs_with_changing_numbers_are_compared_and_shown_as_plain_ones(ask: Any):
    f = graftax.jit(lambda x, n: (ask(n), x * n))
    for n in (1, 2, 3, 2):
        assert f(x(), n)[0] == ask(n)


def test_complex_numbers_keep_the_signs_of_zeros():
    def parts(v: Any, n: Any) -> Any:
        return complex(v, v), complex(n, v), complex(v), np.complex64(v), hasattr(v, "__complex__")

    f = graftax.jit(parts)
    for v, n in ((1.0, 1), (2.0, 2), (-0.0, 3), (0.0, 4), (-0.0, 5)):
        assert repr(f(v, n)) == repr(parts(v, n))
