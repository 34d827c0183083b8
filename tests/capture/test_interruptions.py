# SPDX-License-Identifier: Apache-2.0
"""What runs while a function is traced and is no part of it: the collector's callbacks, finalizers, handlers of
signals, other threads."""

import _thread
import functools
import gc
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import pytest

import graftax

COUNTS = {"freed": 0, "collections": 0, "signals": 0}
LOG: list[int] = []


class Cyclic:
    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        COUNTS["freed"] += 1


class Handler:
    def handle(self, number: int, frame: object) -> None:
        LOG.append(number)
        COUNTS["signals"] += 1

    def __call__(self, number: int, frame: object) -> None:
        self.handle(number, frame)


def after_another(other: int, number: int, frame: object) -> None:
    Handler().handle(number, frame)


def of_any_arguments(*arguments: Any) -> None:
    Handler().handle(*arguments)


def note_collection(phase: str, info: dict[str, int]) -> None:
    COUNTS["collections"] += phase == "start"


@pytest.fixture(autouse=True)
def counts() -> Iterator[None]:
    gc.collect()
    COUNTS.update(dict.fromkeys(COUNTS, 0))
    LOG.clear()
    yield


@pytest.fixture
def frequent_collections() -> Iterator[None]:
    threshold = gc.get_threshold()
    gc.set_threshold(100)
    yield
    gc.set_threshold(*threshold)


def allocating() -> Callable[[Any], Any]:
    return graftax.jit(lambda x: x + len([[i] for i in range(300)]))


@pytest.mark.usefixtures("frequent_collections")
def test_a_callback_of_the_collector_is_no_part_of_the_function() -> None:
    step = allocating()
    gc.callbacks.append(note_collection)
    try:
        assert float(step(jnp.ones(()))) == 301
    finally:
        gc.callbacks.remove(note_collection)
    traced = COUNTS["collections"]
    assert traced > 0
    assert float(step(jnp.ones(()))) == 301 and COUNTS["collections"] == traced
    assert "1 program in" in str(graftax.explain(step))


@pytest.mark.usefixtures("frequent_collections")
def test_a_finalizer_that_the_collector_calls_runs_once() -> None:
    step = allocating()
    for _ in range(3):
        weakref.finalize(Cyclic(), LOG.append, 1)
        assert float(step(jnp.ones(()))) == 301
    gc.collect()
    assert COUNTS["freed"] == len(LOG) == 3


def test_the_collector_has_no_callback_of_a_trace_that_has_ended() -> None:
    before = list(gc.callbacks)
    allocating()(jnp.ones(()))
    assert gc.callbacks == before


@pytest.mark.parametrize(
    "handler",
    [Handler().handle, Handler(), functools.partial(after_another, 1), of_any_arguments, lambda n, f: LOG.append(n)],
    ids=["method", "object", "partial", "any arguments", "function"],
)
def test_the_handler_of_a_signal_is_no_part_of_the_function(handler: Any) -> None:
    def interrupted(x: Any) -> Any:
        _thread.interrupt_main(signal.SIGUSR1)
        return x + sum(range(3))

    original_handler, step = signal.signal(signal.SIGUSR1, handler), graftax.jit(interrupted)
    try:
        assert [float(step(jnp.ones(()))) for _ in range(3)] == [4, 4, 4]
    finally:
        signal.signal(signal.SIGUSR1, original_handler)
    assert [signal.SIGUSR1] == LOG


def test_a_function_of_a_number_and_a_frame_is_no_handler() -> None:
    def handle(number: int, frame: object) -> float:
        LOG.append(number)
        return COUNTS["signals"] + 1.0

    step = graftax.jit(lambda x: x * handle(3, sys._getframe()))
    assert [float(step(jnp.ones(()))) for _ in range(2)] == [1, 1] and LOG == [3, 3]
    COUNTS["signals"] = 5
    assert float(step(jnp.ones(()))) == 6


class Fails(Cyclic):
    """Its finalizer catches an error, as one of a symbolic number would be caught."""

    def __del__(self) -> None:
        super().__del__()
        try:
            len(5)  # type: ignore[arg-type]
        except TypeError:
            COUNTS["freed"] += 1


def counts_up(state: dict[str, Any]) -> None:
    following = [state["n"] + 1]
    Fails()
    gc.collect()
    state["n"] = following[0]


def test_what_a_finalizer_catches_says_nothing_of_symbolic_numbers() -> None:
    step, state = graftax.jit(counts_up), {"n": 0, "w": jnp.ones(2)}
    for _ in range(4):
        step(state)
    assert state["n"] == 4 and COUNTS["freed"] > 0
    assert step.cache_info().misses <= 2


def catching_handler(number: int, frame: object) -> None:
    try:
        len(5)  # type: ignore[arg-type]
    except TypeError:
        LOG.append(number)


def test_what_a_handler_of_a_signal_catches_says_nothing_of_symbolic_numbers() -> None:
    def step(state: dict[str, Any]) -> None:
        _thread.interrupt_main(signal.SIGUSR1)
        state["n"] = [state["n"] + sum(range(2))][0]

    original_handler = signal.signal(signal.SIGUSR1, catching_handler)
    compiled, state = graftax.jit(step), {"n": 0, "w": jnp.ones(2)}
    try:
        for _ in range(4):
            compiled(state)
    finally:
        signal.signal(signal.SIGUSR1, original_handler)
    assert state["n"] == 4 and LOG
    assert compiled.cache_info().misses <= 2


def test_what_another_thread_catches_says_nothing_of_symbolic_numbers() -> None:
    ended, running = threading.Event(), threading.Event()

    def catch_errors() -> None:
        while not ended.is_set():
            catching_handler(0, None)
            running.set()

    def step(state: dict[str, Any]) -> None:
        state["n"] = [state["n"] + len([[i] for i in range(100_000)]) // 100_000][0]

    _thread.start_new_thread(catch_errors, ())  # which `threading` does not know of
    running.wait()
    compiled, state, interval = graftax.jit(step), {"n": 0, "w": jnp.ones(2)}, sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        for _ in range(4):
            compiled(state)
    finally:
        ended.set()
        sys.setswitchinterval(interval)
    assert state["n"] == 4
    assert compiled.cache_info().misses <= 2
