# SPDX-License-Identifier: Apache-2.0
"""A call returns once its computation is dispatched; nothing waits for a result."""

import jax
import jax.numpy as jnp
import pytest

import graftax
from graftax._jax import fast_dispatch
from zoo import Box


@jax.jit
def long_computation(x):
    return jax.lax.fori_loop(0, 1200, lambda _, y: jnp.sin(y @ x), x)


def changing(g):
    g["w"] = g["w"] + 1
    g["box"].w = g["w"] * 2
    return g, g["w"].shape


@pytest.fixture(scope="module", autouse=True)
def _tested_direct_calls():
    """The self-test before the first direct call of a process waits for its own results."""
    fast_dispatch.status()


def graph(w):
    return {"w": w, "box": Box(w=jnp.ones(()), n=1)}


MODES = {
    "jit": lambda: graftax.jit(changing),
    "discard": lambda: graftax.jit(changing, mutation="discard"),
    "filter_jit": lambda: graftax.filter_jit(lambda g: jax.tree.map(lambda w: w + 1, g["w"])),
}


@pytest.mark.quick(0)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings("ignore::UserWarning")  # the advice on lost changes
def test_a_call_returns_before_its_own_input_is_computed(mode):
    x = jnp.full((256, 256), 0.01)
    f = MODES[mode]()
    f(graph(x))
    long_computation.lower(x).compile()
    pending = long_computation(x)
    args = graph(pending)
    out = f(args)
    assert not pending.is_ready(), "the call waited for its input"
    jax.block_until_ready([out[0]["w"] if mode != "filter_jit" else out, pending])


@pytest.mark.quick(0)
def test_a_first_call_does_not_wait_either():
    x = jnp.full((256, 256), 0.01)
    long_computation.lower(x).compile()
    # The compilation of a second function takes a while: this one's input takes longer.
    pending = long_computation(long_computation(long_computation(x)))
    out = graftax.jit(lambda g: g["w"] + 1)(graph(pending))
    assert not pending.is_ready(), "the call waited for its input"
    jax.block_until_ready(out)


def test_nothing_blocks_on_an_array(monkeypatch):
    waited = []
    array_type = type(jnp.ones(()))
    original = array_type.block_until_ready
    monkeypatch.setattr(array_type, "block_until_ready", lambda self: waited.append(self) or original(self))
    monkeypatch.setattr(jax, "block_until_ready", lambda tree: waited.append(tree) or tree)
    f = graftax.jit(changing)
    for _ in range(3):
        f(graph(jnp.ones(())))
    assert waited == []
