# SPDX-License-Identifier: Apache-2.0
"""JAX's settings are kept between calls: what a call sees of them is what JAX says in its thread, at that moment."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from graftax import _core
from graftax._jax import fast_dispatch


def asked() -> tuple[Any, bool, tuple[Any, ...]]:
    """What the core would say if it kept nothing."""
    _core.use_told_settings(False)
    try:
        return _core.settings_now()
    finally:
        _core.use_told_settings(True)


def key() -> Any:
    return jax.random.key(0)


def impl(f: Callable[[], Any]) -> str:
    return str(jax.random.key_impl(f()))


# What is in force where a thread has nothing else: JAX only tells what is in force in this one.
NAMES = "jax_debug_nans", "jax_debug_infs", "jax_default_prng_impl", "jax_optimization_level"
IN_ALL = {name: getattr(jax.config, name) for name in NAMES}


@contextlib.contextmanager
def for_all(name: str, value: Any) -> Iterator[None]:
    before, IN_ALL[name] = IN_ALL[name], value
    jax.config.update(name, value)
    try:
        yield
    finally:
        IN_ALL[name] = before
        jax.config.update(name, before)


CONTEXTS: dict[str, Callable[[], Any]] = {
    "nans here": lambda: jax.debug_nans(True),
    "no nans here": lambda: jax.debug_nans(False),
    "nans": lambda: for_all("jax_debug_nans", True),
    "rbg here": lambda: jax.default_prng_impl("rbg"),
    "rbg": lambda: for_all("jax_default_prng_impl", "rbg"),
    "level": lambda: for_all("jax_optimization_level", "O1"),
}


pytestmark = pytest.mark.skipif(fast_dispatch.status() != "on", reason="settings are asked for on each call")


def test_a_change_of_a_setting_is_told():
    for context in (lambda: jax.debug_nans(True), lambda: for_all("jax_debug_infs", True)):
        before = _core.settings_changed()
        with context():
            assert _core.settings_changed() == before + 2
        assert _core.settings_changed() == before + 4


@pytest.mark.parametrize("seed", range(6))
def test_settings_that_change_in_two_threads_are_followed(seed: int):
    """Contexts are entered and left in two threads in any order: what is kept is what JAX says in each."""
    draw = random.Random(seed)
    jitted = graftax.jit(key)

    def enter(name: str) -> Any:
        context = CONTEXTS[name]()
        context.__enter__()
        return context

    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        threads = (first, second)
        entered: list[list[Any]] = [[], []]
        everywhere: list[Any] = []  # left by the thread that entered it, the last first
        for _ in range(25):
            at = draw.randrange(2)
            name = draw.choice(list(CONTEXTS))
            mine = everywhere if name in ("nans", "rbg", "level") else entered[at]
            thread = first if mine is everywhere else threads[at]
            if mine and draw.random() < 0.5:
                thread.submit(mine.pop().__exit__, None, None, None).result()
            else:
                mine.append(thread.submit(enter, name).result())
            for pool in threads:
                assert pool.submit(_core.settings_now).result() == pool.submit(asked).result()
                assert pool.submit(impl, jitted).result() == pool.submit(impl, key).result()
        for context in reversed(everywhere):
            first.submit(context.__exit__, None, None, None).result()
        for pool, contexts in zip(threads, entered, strict=True):
            for context in reversed(contexts):
                pool.submit(context.__exit__, None, None, None).result()
    assert impl(jitted) == "threefry2x32"
    assert _core.settings_now()[1]


@pytest.mark.parametrize("other", ["int32", "uint32", "weak", "committed"])
def test_a_setting_and_a_leaf_that_change_at_once_are_both_seen(other: str):
    jitted, expected = graftax.jit(lambda t: {n: x * 2 for n, x in t.items()}), jax.jit(lambda x: x * 2)
    one = {n: jnp.ones(3) + i for i, n in enumerate("abcdef")}
    make = {
        "weak": jax.jit(lambda x: jnp.broadcast_to(1.5, (3,)) + x[0].astype(int)),
        "committed": lambda x: jax.device_put(x, jax.devices()[0]),
    }.get(other, lambda x: x.astype(other))
    two = {n: make(x) for n, x in one.items()}
    for t in (one, one, one, two, one, two):
        with for_all("jax_optimization_level", "O1") if t is two else contextlib.nullcontext():
            for n, x in jitted(t).items():
                right = expected(t[n])
                assert x.aval == right.aval and x.committed == right.committed and np.array_equal(x, right)
