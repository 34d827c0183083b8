# SPDX-License-Identifier: Apache-2.0
"""Numbers that an executable reads in place: a call that still waits must not see those of a later one."""

import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from graftax._jax import fast_dispatch


class Counter:
    def __init__(self, n=0):
        self.n = n


def added(counter, x):
    counter.n += 1
    return x + counter.n * 2.0, x.sum()


@jax.jit
def slow(x):
    return jax.lax.fori_loop(0, 60, lambda _, y: jnp.tanh(y @ y), x)[:3, 0] * 0


def rings(monkeypatch):
    found, make = [], fast_dispatch._ring

    def noted(*args):
        found.append(make(*args))
        return found[-1]

    monkeypatch.setattr(fast_dispatch, "_ring", noted)
    return found


@pytest.fixture
def made(monkeypatch):
    if fast_dispatch.status() != "on":
        pytest.skip("no direct calls here")
    return rings(monkeypatch)


def test_numbers_are_read_in_place_on_the_cpu(made):
    f, counter = graftax.jit(added), Counter()
    for i in range(1, 80):
        assert f(counter, jnp.zeros(3))[0].tolist() == [2.0 * i] * 3
    assert jax.default_backend() != "cpu" or any(made)


def test_a_numpy_array_between_the_numbers_is_not_taken_for_one(made):
    f = graftax.jit(lambda a, n, b, m: (a * n, b + m, n))
    for i in range(80):
        a, b = np.full(16, i, "int32"), np.full(16, -i, "float32")  # as the vectors of the numbers are
        result = f(a, i + 1, b, i * 0.5)
        assert [x.tolist() for x in result[:2]] == [[i * (i + 1)] * 16, [i * -0.5] * 16] and result[2] == i + 1


def test_calls_that_wait_for_their_arrays_see_their_own_numbers(made):
    f, counter = graftax.jit(added), Counter()
    for _ in range(60):
        f(counter, jnp.zeros(3))
    big, out = jnp.ones((300, 300)), []
    for _ in range(120):  # more than there are places, all of them wait
        x = slow(big) if counter.n % 40 == 20 else jnp.zeros(3)
        out.append(f(counter, x)[0])
    for i, found in enumerate(out, 61):
        assert found.tolist() == [2.0 * i] * 3


@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_donated_results_tell_nothing(made):
    def step(counter, w, x):
        counter.n += 1
        return w + counter.n, (x * counter.n).sum()

    f, counter = graftax.jit(step, donate="w"), Counter()
    w, expected = jnp.zeros(2), 0
    for i in range(1, 150):
        w, total = f(counter, w, jnp.ones(2))
        expected += i
        assert float(total) == 2 * i
    assert w.tolist() == [expected] * 2


def test_threads_have_numbers_of_their_own(made):
    f, wrong = graftax.jit(added), []
    for counter in (Counter(), Counter()):
        for _ in range(40):
            f(counter, jnp.zeros(3))

    def work(start):
        counter = Counter(start)
        for i in range(start + 1, start + 400):
            out = f(counter, jnp.zeros(3))[0]
            if not np.array_equal(out, np.full(3, 2.0 * i, "float32")):
                wrong.append((i, out))

    threads = [threading.Thread(target=work, args=(1000 * k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.quick(0)
def test_a_call_that_raises_leaves_the_others_right(made):
    f, counter = graftax.jit(added), Counter()
    for _ in range(60):
        f(counter, jnp.zeros(3))
    gone = jnp.zeros(3)
    gone.delete()
    for _ in range(100):
        with pytest.raises(RuntimeError, match="deleted"):
            f(counter, gone)
    before = counter.n
    assert f(counter, jnp.zeros(3))[0].tolist() == [2.0 * (before + 1)] * 3


def test_wide_numbers(made):
    with jax.enable_x64(True):
        f, counter = graftax.jit(lambda c, x: (x + c.n, c.n)), Counter(1 << 40)
        for _ in range(80):
            counter.n += 1
            out, n = f(counter, jnp.zeros(2, "int64"))
            assert out.tolist() == [counter.n] * 2 and n == counter.n


def test_a_big_result_is_not_kept_to_tell_when_the_numbers_were_read(made):
    f, x = graftax.jit(lambda c, x: x * c.n), jnp.ones(fast_dispatch._SMALL)
    counter = Counter()
    for counter.n in range(80):
        out = f(counter, x)
        assert out[0] == out[-1] == counter.n
        seen = weakref.ref(out)
        del out
        assert seen() is None
    assert made and not any(made)
