# SPDX-License-Identifier: Apache-2.0
"""Programs with `donate="auto"` on disk: the next process donates the same, and nothing that somebody holds."""

import jax
import jax.numpy as jnp
import pytest

import graftax
from graftax._jax import fast_dispatch

pytestmark = [
    pytest.mark.usefixtures("cache_of_jax_is_off"),
    pytest.mark.quick(1),
    pytest.mark.skipif(
        not fast_dispatch.counts_buffer_users(), reason="donate='auto' needs direct calls and the users of a buffer"
    ),
]


@pytest.fixture
def cache(tmp_path):
    jitted().clear_cache()
    yield graftax.cache(tmp_path / "cache", min_seconds=0)
    graftax.cache(None)


def step(state, x):
    for name in list(state):
        state[name] = state[name] * 2 + x


def jitted():
    return graftax.jit(step, donate="auto")


def fresh(size=1 << 15):
    return {"a": jnp.full(size, 1.0) + 0, "b": jnp.full(size, 2.0) + 0}


def pointers(state):
    return {name: value.unsafe_buffer_pointer() for name, value in state.items()}


def run(f, state, calls=3):
    for _ in range(calls):
        before = pointers(state)
        f(state, 1.0)
        yield state["a"][0].item(), state["b"][0].item(), pointers(state) == before


def test_the_next_process_donates_without_a_trace(cache):
    expected = list(run(jitted(), fresh()))
    assert all(is_same for *_, is_same in expected)
    cache.flush()
    f = jitted()
    f.clear_cache()
    assert list(run(f, fresh())) == expected
    assert (f.cache_info().traces, f.cache_info().disk) == (0, 1)
    assert len(f.donation().donated) == 2


def test_what_is_held_is_not_donated_by_a_program_of_disk(cache):
    list(run(jitted(), fresh()))
    cache.flush()
    f, state = jitted(), fresh()
    f.clear_cache()
    f(state, 1.0)
    held = state["a"]
    f(state, 1.0)
    assert held[0] == 3 and state["a"][0] == 7 and f.cache_info().disk == 1
    assert f.cache_info().traces <= 1


def test_another_shape_has_a_program_of_its_own(cache):
    f = jitted()
    sizes = 1 << 15, 1 << 14
    expected = [list(run(f, fresh(size))) for size in sizes]
    cache.flush()
    f = jitted()
    f.clear_cache()
    assert [list(run(f, fresh(size))) for size in sizes] == expected
    assert (f.cache_info().traces, f.cache_info().disk) == (0, 2)


def test_a_counter_goes_on_with_donation(cache):
    def counting(state, x):
        state["step"] += 1
        state["a"] = state["a"] * 2 + x / state["step"]

    def calls(f, begin):
        state = {"step": begin, "a": jnp.full(1 << 15, 1.0) + 0}
        for _ in range(3):
            f(state, jnp.ones(()))
        return state["step"], state["a"][0].item()

    f = graftax.jit(counting, donate="auto")
    expected = calls(f, 0), calls(f, 7)
    cache.flush()
    f = graftax.jit(counting, donate="auto")
    f.clear_cache()
    assert (calls(f, 0), calls(f, 7)) == expected
    assert f.cache_info().traces == 0 and f.cache_info().disk > 0


def test_what_is_called_without_donation_is_kept_too(cache):
    x = jnp.ones(3)
    f = graftax.jit(lambda x: x * 2, donate="auto")
    f(x)
    cache.flush()
    f.clear_cache()
    assert f(x).tolist() == [2, 2, 2] and (f.cache_info().traces, f.cache_info().disk) == (0, 1)
    jax.block_until_ready(x)
