# SPDX-License-Identifier: Apache-2.0
"""Attributes that the user sets on a jitted function, which code of a trace reads."""

from typing import Any

import jax.numpy as jnp

import graftax


def test_a_function_reads_its_own_attribute_as_it_is_now():
    @graftax.jit
    def step(x: Any) -> Any:
        return x * attributes.rate

    attributes: Any = step
    for rate in (1.0, 2.0, 3.0, 3.0):
        attributes.rate = rate
        assert step(jnp.ones(2)).tolist() == [rate, rate]
    assert step.cache_info().traces == 3


def test_another_function_reads_it_as_it_is_now():
    inner: Any = graftax.jit(lambda x: x * 2)
    inner.mode = "train"
    outer = graftax.jit(lambda x: inner(x) if inner.mode == "train" else x)
    assert outer(jnp.ones(())) == 2
    inner.mode = "test"
    assert outer(jnp.ones(())) == 1
    inner.mode = "train"
    assert outer(jnp.ones(())) == 2
    assert outer.cache_info().traces == 2


def test_an_attribute_that_comes_later_is_seen():
    inner: Any = graftax.jit(lambda x: x * 2)
    outer = graftax.jit(lambda x: inner(x) * inner.scale if hasattr(inner, "scale") else inner(x))
    assert outer(jnp.ones(())) == 2
    inner.scale = 3
    assert outer(jnp.ones(())) == 6


def test_what_a_jitted_function_has_anyway_is_no_binding():
    inner = graftax.jit(lambda x: x * 2)
    outer = graftax.jit(lambda x: inner.__wrapped__(x) + inner(x))
    for _ in range(2):
        assert outer(jnp.ones(())) == 4
    assert outer.cache_info().traces == 1
