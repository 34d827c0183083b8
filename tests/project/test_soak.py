# SPDX-License-Identifier: Apache-2.0
"""A short one of the lives of soak.py."""

import jax
import jax.numpy as jnp
import pytest

import graftax
import soak
from sizes import sized
from watchdog import isolated


@pytest.mark.quick(0)
@isolated()
def test_a_process_that_lives_long_does_not_grow():
    calls = sized(40_000, 8_000)
    found = soak.soak(calls)
    middle, last = found[soak.PARTS // 2 - 1], found[-1]
    # A short life is still warming up in its second half.
    assert last.objects - middle.objects < sized(soak.MOST_OBJECTS, 600)
    assert last.blocks - middle.blocks < 1_000


@pytest.mark.quick(0)
def test_a_function_that_is_compiled_again_and_again_remembers_a_few_of_its_programs():
    f = graftax.jit(lambda x: x * 2)
    for _ in range(20):
        f(jnp.ones(3))
        jax.clear_caches()
    assert f.cache_info().traces == 20
    assert len(graftax.explain(f).variants) < 12
