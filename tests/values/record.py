# SPDX-License-Identifier: Apache-2.0
"""The record of one kind of value, and what "exactly" means between two values."""

from __future__ import annotations

import decimal
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# A law by its title in the page, and the test that checks it.
LAWS = {
    "traced": "test_an_array_in_it_is_an_input",
    "key": "test_it_counts_by_its_exact_value",
    "in place": "test_a_change_in_place_is_seen",
    "write-back": "test_what_the_function_did_to_it_comes_back",
    "round trip": "test_it_survives_flatten_and_unflatten",
}
NAN = float("nan")
# What one static place may hold: values that `==` confuses, at the top and at depth. Eight: a ninth earns a warning.
STATICS = (1, 1.0, True, 0.0, -0.0, NAN, (1, NAN), (True, NAN))
NO_ARRAYS = "no arrays"
IMMUTABLE = "immutable"
NODE, VALUE, ITSELF = "node", "value", "itself"


def f32(*values: float) -> jax.Array:
    return jnp.asarray(np.array(values, np.float32))


@dataclass(frozen=True)
class Kind:
    """One kind of Python value.

    A value is made from a sample `w` (an array, unless the kind has samples of its own) and a static `n`. Two calls of
    `make` give equal values that share nothing mutable.
    """

    name: str
    make: Callable[[Any, Any], Any]
    read: Callable[[Any], tuple[Any, ...]]  # everything that the value holds
    change: Callable[[Any, Any, Any], None] | None = None  # in place, to the content of make(w, n)
    statics: tuple[Any, ...] = STATICS
    samples: tuple[Any, ...] = field(default_factory=lambda: (f32(1, 2), f32(3, 4), f32(5, 6)))
    identity: str = NODE  # node: keeps its identity; value: has none; itself: is never copied
    without: Mapping[str, str] = field(default_factory=dict)  # law: why it says nothing of this kind
    inside: bool = True  # `change` also works on what the function gets
    is_leaf: bool = False  # what changes in place is a leaf, which unflatten uses as it is
    abstract: bool = False  # only eval_shape and lower take it
    note: str = ""
    group: str = ""

    def __str__(self) -> str:
        return self.name


def constant(name: str, *values: Any, **more: Any) -> Kind:
    """A kind of immutable value without arrays: `values` are different ones."""
    without = {"traced": NO_ARRAYS, "in place": IMMUTABLE}
    more = {"identity": VALUE, "without": without, **more}
    return Kind(name, lambda w, n: n, lambda v: (v,), statics=values, **more)


def fresh(n: Any) -> Any:
    """An equal value that is another object, where Python makes one."""
    if type(n) is float:
        return struct.unpack("d", struct.pack("d", n))[0]
    if type(n) is tuple:
        return tuple(map(fresh, n))
    if type(n) is str:
        return "".join(list(n))
    return n


def is_array(x: Any) -> bool:
    return isinstance(x, jax.Array) or (isinstance(x, np.ndarray | np.generic) and x.dtype.kind not in "USMmO")


def exact(a: Any, b: Any) -> bool:
    """Same type and same content at every depth: 1 is not True, 0.0 is not -0.0, nan is nan."""
    if a is b:
        return True
    if isinstance(a, jax.Array) and isinstance(b, jax.Array):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            return exact(jax.random.key_data(a), jax.random.key_data(b))
        return a.weak_type == b.weak_type and np.asarray(a).tobytes() == np.asarray(b).tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if type(a) is float:
        return struct.pack("d", a) == struct.pack("d", b)
    if type(a) is complex:
        return exact((a.real, a.imag), (b.real, b.imag))
    if type(a) in (tuple, list):
        return len(a) == len(b) and all(map(exact, a, b))
    if type(a) in (set, frozenset):
        return len(a) == len(b) and all(any(exact(i, j) for j in b) for i in a)
    if type(a) is dict:
        return exact(list(a.items()), list(b.items()))
    if isinstance(a, decimal.Decimal):
        return a.as_tuple() == b.as_tuple()
    return bool(a == b) and repr(a) == repr(b)


def shown(part: Any) -> Any:
    """A part as a function of graftax gives it back: an array goes through a computation, the rest is as it is."""
    return jnp.stack([part, part]) if is_array(part) else part


def reader(kind: Kind) -> Callable[[Any], tuple[Any, ...]]:
    """A function to compile, which computes with everything that a value holds."""
    read = kind.read

    def f(v: Any) -> tuple[Any, ...]:
        return tuple(map(shown, read(v)))

    return f
