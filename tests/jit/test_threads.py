# SPDX-License-Identifier: Apache-2.0
"""Calls from several threads at once: first calls, many structures, many shapes."""

import contextlib
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import pytest

import graftax
import threads
from graftax._jit.same_function import Sharing
from sizes import sized


def together(n, work):
    barrier, errors = threading.Barrier(n), []

    def run(i):
        try:
            barrier.wait()
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_first_calls_at_once_with_other_shapes_get_their_own_static_results():
    for _ in range(sized(10, 3)):
        f = graftax.jit(lambda x: (x + 1, x.shape))
        together(8, lambda i, f=f: [check_shape(f, 1 + i % 4) for _ in range(5)])


def check_shape(f, n):
    y, shape = f(jnp.zeros(n))
    assert shape == (n,)
    assert y.tolist() == [1.0] * n


@pytest.mark.filterwarnings("ignore::graftax.RecompileWarning")  # as many compile as there are keys and shapes
def test_structures_and_statics_do_not_mix():
    @graftax.jit
    def f(box, key):
        box[key] = box[key] * 2
        box.setdefault("log", []).append(key)
        return key

    def work(i):
        for turn in range(20):
            key = f"k{(i + turn) % 5}"
            box = {key: jnp.full(1 + i % 3, float(turn))}
            assert f(box, key) == key
            assert box["log"] == [key]
            assert box[key].tolist() == [2.0 * turn] * (1 + i % 3)

    together(8, work)


def test_each_thread_may_change_its_own_object_of_one_structure():
    @graftax.jit
    def bump(counter):
        counter["n"] = counter["n"] + 1

    def work(i):
        counter = {"n": jnp.asarray(i)}
        for _ in range(50):
            bump(counter)
        assert int(counter["n"]) == i + 50

    together(8, work)


class Board:
    latest = None


def test_two_traces_of_one_function_at_once_each_put_back_what_they_set():
    meeting = threading.Barrier(2)

    def meet():
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait(0.5)
            meeting.reset()

    @graftax.jit
    def post(x, name):
        meet()
        Board.latest = {"of": name, "value": x * 2}
        meet()
        return x + 1

    def work(i):
        for turn in range(3):
            assert float(post(jnp.asarray(float(i)), f"{i} {turn}")) == i + 1

    together(2, work)
    assert Board.latest["of"] in ("0 2", "1 2")
    assert float(Board.latest["value"]) == 2 * int(Board.latest["of"][0])


class Account:
    pass


@pytest.mark.parametrize("is_there", [True, False])
def test_a_call_beside_a_trace_that_has_assigned_a_class_attribute(is_there):
    in_trace, go_on, results = threading.Event(), threading.Event(), []

    @graftax.jit(warn_impure=False)
    def add(x, speed):
        Account.total = getattr(Account, "total", 0.0) + x
        if speed == "slow":
            in_trace.set()
            assert go_on.wait(60)
        return Account.total

    Account.total = jnp.float32(1.0)
    add(jnp.float32(1.0), "fast")
    if not is_there:
        del Account.total
        add(jnp.float32(1.0), "fast")
        del Account.total
    slow = threading.Thread(target=lambda: results.append(float(add(jnp.float32(10.0), "slow"))))
    slow.start()
    assert in_trace.wait(60)
    beside = [float(add(jnp.float32(1.0), "fast")) for _ in range(3)]
    go_on.set()
    slow.join()
    before = 2.0 if is_there else 0.0
    assert beside == [before + 1, before + 2, before + 3]
    assert results == [before + 10] and float(Account.total) == before + 10


@pytest.mark.filterwarnings("ignore::graftax.RecompileWarning")
@pytest.mark.quick(0)
def test_sixteen_threads_do_all_of_it_at_once():
    turns, wrong = threads.run(sized(10, 2))
    assert turns >= threads.THREADS and not wrong, wrong[0]


DAEMONS = """
import threading, time
import graftax

class Key:  # its comparisons are where a thread may lose the lock
    def __init__(self, n):
        self.n = n
    def __hash__(self):
        return sum(range(50)) + self.n
    def __eq__(self, other):
        return sum(range(50)) >= 0 and self.n == other.n

def work():
    n = 0
    while True:
        n += 1
        graph = {"k": {Key(i): [i] for i in range(20)}, "n": n % 7}
        leaves, graphdef = graftax.flatten(graph)
        graftax.unflatten(graphdef, leaves)
        graftax.copy(graph)
        graphdef == graftax.flatten(graph)[1]

for _ in range(6):
    threading.Thread(target=work, daemon=True).start()
time.sleep(1)
print("main ends")
"""


@pytest.mark.quick(0)
@pytest.mark.skipif(sys.platform == "win32", reason="a thread ends otherwise there")
def test_the_process_ends_quietly_while_daemon_threads_walk():
    for _ in range(sized(3, 1)):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", DAEMONS], text=True, capture_output=True, timeout=120
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "main ends\n", "")


class Gained:
    gain = 1.0

    def total(self, x):
        return x.sum() * self.gain + len(SEEN)


SEEN: list[int] = []


@pytest.mark.quick(0)
def test_threads_that_meet_at_once_what_a_helper_reads():
    """Each round its class has another attribute, and the function or JAX may have forgotten what they knew."""
    f, x = graftax.jit(lambda model, x: model.total(x)), jnp.ones(2)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for turn in range(sized(60, 12)):
            Gained.gain, SEEN[:] = float(turn), range(turn % 3)
            wanted, results = float(Gained().total(x)), [[] for _ in range(6)]

            def call(mine):
                for _ in range(3):
                    mine.append(float(f(Gained(), x)))

            threads = [threading.Thread(target=call, args=(mine,)) for mine in results]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert results == [[wanted] * 3] * 6
            if turn % 3 == 0:
                jax.clear_caches()
            elif turn % 3 == 1:
                f.clear_cache()
    finally:
        sys.setswitchinterval(interval)


def test_what_equal_functions_share_is_listed_while_other_threads_add_to_it():
    class Entry:
        pass

    sharing, entries = Sharing(lambda: None), [Entry() for _ in range(4000)]

    def work(i):
        for number in range(i, len(entries), 4):
            if i % 2:
                sharing.add((number, None), entries[number])
            elif number % 8 == 0:
                sharing.entries()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        together(4, work)
    finally:
        sys.setswitchinterval(before)
    assert len(sharing.entries()) == len(entries) // 2
