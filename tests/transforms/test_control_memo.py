# SPDX-License-Identifier: Apache-2.0
"""What a helper keeps of a step outside of `jit`, as a memo does: it is a value, and later calls find it."""

import jax.numpy as jnp
import pytest

import graftax

memo: dict = {}
log: list = []
x = jnp.arange(3.0)


def table(n):
    if n not in memo:
        memo[n] = jnp.arange(float(n))
    return memo[n]


def noted(v):
    log.append(v)
    return v


class Counter:
    def __init__(self):
        self.n = jnp.zeros(())


def with_state(counter):
    def body(c, y):
        counter.n = counter.n + table(3).sum()
        return c * 0.5 + y, counter.n

    graftax.scan(body, 0.0, x)
    return counter.n


LOOPS = {
    "scan": (lambda: graftax.scan(lambda c, y: (c + table(3).sum(), y), 0.0, x)[0], 9),
    "fori_loop": (lambda: graftax.fori_loop(0, 3, lambda i, c: c + table(3).sum(), 0.0), 9),
    "while_loop": (lambda: graftax.while_loop(lambda c: c < 5, lambda c: c + table(3).sum(), 0.0), 6),
    "cond": (lambda: graftax.cond(jnp.asarray(True), lambda: table(3), lambda: table(4)[:3]).sum(), 3),
    "switch": (lambda: graftax.switch(jnp.asarray(1), [lambda: table(4)[:3], lambda: table(3)]).sum(), 3),
    "map": (lambda: graftax.map(lambda y: (y + table(3)).sum(), x).sum(), 18),
    "state": (lambda: with_state(Counter()), 9),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_memo_is_filled_once_and_found_later(loop):
    memo.clear()
    run, expected = LOOPS[loop]
    for _ in range(3):
        assert float(run()) == expected
        assert list(memo) == [3] and memo[3].tolist() == [0, 1, 2]
    memo[3] = memo[3] * 3
    assert float(run()) != expected


def test_a_list_that_a_helper_fills_has_the_values():
    log.clear()
    for _ in range(2):
        assert float(graftax.scan(lambda c, y: (c + noted(y), y), 0.0, x)[0]) == 3
    assert [float(v) for v in log] == [0, 1, 2, 0, 1, 2]


def test_inside_of_jit_the_error_says_where():
    memo.clear()
    with pytest.raises(graftax.MutationError, match=r"memo\[3\] was given a value of an inner transform"):
        graftax.jit(lambda: graftax.scan(lambda c, y: (c + table(3).sum(), y), 0.0, x))()
    assert memo == {}
