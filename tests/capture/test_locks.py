# SPDX-License-Identifier: Apache-2.0
"""A trace that begins anew gives back what it has taken: else the next one waits for ever."""

from __future__ import annotations

import faulthandler

import jax.numpy as jnp
import pytest

import graftax
from programs import module

KINDS = {
    "Lock": "threading.Lock()",
    "RLock": "threading.RLock()",
    "Condition": "threading.Condition()",
    "Condition of a Lock": "threading.Condition(threading.Lock())",
    "Semaphore": "threading.Semaphore(1)",
    "BoundedSemaphore": "threading.BoundedSemaphore(2)",
}
PLACES = {
    "a global": ("one = {kind}", "one"),
    "a helper's": ("class H: one = {kind}\ndef get(): return H.one", "get()"),
    "an attribute": ("class S:\n    def __init__(self): self.one = {kind}\nheld = S()", "held.one"),
    "a list": ("held = [{kind}]", "held[0]"),
    "a closure": ("def make():\n    one = {kind}\n    return lambda: one\nget = make()", "get()"),
}


@pytest.mark.quick(10)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_what_a_trace_has_taken_is_free_when_it_begins_anew(kind: str, place: str):
    made, one = PLACES[place]
    m = module(f"""import threading
{made.format(kind=KINDS[kind])}
K, L = {{'k': 2.0}}, {{'l': 3.0}}
def first(x): return x * K['k']
def second(n, x): return x * L['l'] * float(n)
def state():
    lock = {one}
    free = lock.acquire(blocking=False)
    if free: lock.release()
    return free, getattr(lock, '_value', 0)
def f(n, x):
    {one}.acquire()
    y = first(x)
    {one}.acquire(blocking=False)
    y = second(n, y)
    {one}.release()
    if n > 0: pass
    if '{kind}' in ('RLock', 'Condition', 'BoundedSemaphore'): {one}.release()
    return y
""")
    faulthandler.dump_traceback_later(60, exit=True)
    try:
        before, f = m.state(), graftax.jit(m.f)
        for n in (1, 2, 3):
            assert f(n, jnp.ones(1)).tolist() == [6.0 * n]
            assert m.state() == before
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.mark.filterwarnings("ignore:f .* leaves a:graftax.ImpureCallWarning")
def test_what_a_trace_has_released_is_taken_again_when_it_begins_anew():
    m = module("""import threading
lock, sem, K = threading.Lock(), threading.Semaphore(0), {'k': 2.0}
def helper(x): return x * K['k']
def f(x):
    lock.release(); sem.release()
    return helper(x)
""")
    m.lock.acquire()
    assert graftax.jit(m.f)(jnp.ones(1)).tolist() == [2.0]
    assert not m.lock.locked() and m.sem._value == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_that_keeps_a_lock_says_so_once(kind: str):
    m = module(f"""import threading
lock = {KINDS[kind]}
def keeps(x):
    lock.acquire()
    return x * 2
def gives_back(x):
    with lock: return x * 2
""")
    assert graftax.jit(m.gives_back)(jnp.ones(1)) == 2
    keeps = graftax.jit(m.keeps)
    with pytest.warns(graftax.ImpureCallWarning, match=r"keeps .* leaves a \w+ in another state than before"):
        keeps(jnp.ones(1))
    assert keeps(jnp.ones(1)) == 2
    m.lock.release()
