# SPDX-License-Identifier: Apache-2.0
"""A key whose hash has changed since it was put in: Python does not find it, but among rebuilt keys it would."""

from __future__ import annotations

import sys
from typing import Any

import jax.numpy as jnp
import pytest

import graftax

X = jnp.ones(2)


class Key:
    def __init__(self, value: int) -> None:
        self.value = value

    def __hash__(self) -> int:
        return hash(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self.value == other.value


def holders(key: Key) -> dict[str, Any]:
    return {"dict": {key: 2.0, Key(2): X}, "set": {key, Key(2)}, "frozenset": frozenset([key])}


WITHIN = {"itself": lambda key: key}
if sys.version_info < (3, 14):  # from then on a tuple keeps its hash, so plain Python finds it, too
    WITHIN["in a tuple"] = lambda key: (key, "name")


@pytest.mark.quick(6)
@pytest.mark.parametrize("kind", holders(Key(1)))
@pytest.mark.parametrize("within", WITHIN.values(), ids=WITHIN)
def test_a_key_that_was_changed_is_refused(within: Any, kind: str):
    key = Key(1)
    f = graftax.jit(lambda held, x: x * (within(Key(1)) in held) + (within(Key(77)) in held))
    held = holders(within(key))[kind]
    assert f(held, X).tolist() == [1.0, 1.0]
    key.value = 77
    with pytest.raises(graftax.errors.UnsupportedValueError, match=r"held.*another hash than when it was put there"):
        f(held, X)
    key.value = 1
    assert f(held, X).tolist() == [1.0, 1.0]


def test_keys_that_equal_nothing_are_found_as_themselves():
    nan = float("nan")
    f = graftax.jit(lambda held, x: x * (nan in held["set"]) + len(held["dict"]))
    assert f({"set": {nan}, "dict": {nan: 1}}, X).tolist() == [2.0, 2.0]
