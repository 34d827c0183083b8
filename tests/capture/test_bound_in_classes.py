# SPDX-License-Identifier: Apache-2.0
"""Classes that hold bound methods, partials and bound jitted functions: their objects are read and changed."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import graftax


class Counter:
    def __init__(self) -> None:
        self.w, self.calls = jnp.ones(2), 0

    def step(self, x: Any) -> Any:
        self.w, self.calls = self.w + x, self.calls + 1
        return self.w

    jitted = graftax.jit(step)


BINDINGS: dict[str, Callable[[Counter], Any]] = {
    "method": lambda counter: counter.step,
    "jitted method": lambda counter: counter.jitted,
    "jit of a method": lambda counter: graftax.jit(counter.step),
    "jit of a partial": lambda counter: graftax.jit(functools.partial(Counter.step, counter)),
}
ASKED: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    "class": lambda cls: lambda x: cls.step(x),
    "instance": lambda cls: lambda x: cls().step(x),
    "getattr": lambda cls: lambda x: getattr(cls, "step")(x),  # noqa: B009
    "subclass": lambda cls: lambda x: type("Sub", (cls,), {})().step(x),
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("bound", BINDINGS)
def test_its_object_is_read_and_changed(bound: str, asked: str):
    counter, other = Counter(), Counter()
    holder: Any = type("Holder", (), {"step": BINDINGS[bound](counter)})
    call = graftax.jit(ASKED[asked](holder))
    for i in range(3):
        assert call(jnp.ones(2)).tolist() == [i + 2, i + 2]
    assert counter.w.tolist() == [4, 4]
    assert counter.calls == 3
    holder.step = BINDINGS[bound](other)
    assert call(jnp.ones(2)).tolist() == [2, 2]
    assert (counter.calls, other.calls) == (3, 1)


def test_a_jitted_method_that_is_bound_stays_so_in_another_class():
    counter = Counter()
    holder: Any = type("Holder", (), {"step": counter.jitted})()
    assert holder.step(jnp.ones(2)).tolist() == [2, 2]
    assert counter.w.tolist() == [2, 2]
