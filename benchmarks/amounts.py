# SPDX-License-Identifier: Apache-2.0
"""What is counted and not timed: bytes of Python's allocators and objects that the garbage collector knows.

A count is the same on a busy machine. It leaves out what C++ allocates by itself and the buffers of arrays.
"""

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from benchmarks.inputs import Case
from benchmarks.measures import Measure, Ready, update_step

_CALLS = 100


@contextmanager
def _traced() -> Iterator[None]:
    gc.collect()
    gc.disable()  # what a collection frees in the middle is not what a call frees
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
        gc.enable()


def _objects() -> int:
    gc.collect()
    return len(gc.get_objects())


def _warm(step: Callable[[Any], Any], obj: Any) -> None:
    for _ in range(4):
        step(obj)


def _allocated(subject: ModuleType, case: Case, arrays: list[Any]) -> Ready:
    step, obj, probe, equal = update_step(subject, case, arrays)

    def count() -> int:
        with _traced():
            _warm(step, obj)
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            probe(step(obj)).block_until_ready()
            return tracemalloc.get_traced_memory()[1] - before

    return Ready(count, equal)


def _kept(subject: ModuleType, case: Case, arrays: list[Any]) -> Ready:
    *_, equal = update_step(subject, case, arrays)

    def count() -> int:
        # What libraries load and cache with the first function of all is there by now.
        with _traced():
            step, obj, _, _ = update_step(subject, case, arrays)
            _warm(step, obj)
            gc.collect()
            held = tracemalloc.get_traced_memory()[0]
            del step
            gc.collect()
            return held - tracemalloc.get_traced_memory()[0]

    return Ready(count, equal)


def _grown(subject: ModuleType, case: Case, arrays: list[Any]) -> Ready:
    step, obj, _, equal = update_step(subject, case, arrays)

    def count() -> int:
        _warm(step, obj)
        before = _objects()
        for _ in range(_CALLS):
            step(obj)
        return _objects() - before

    return Ready(count, equal)


def _left(subject: ModuleType, case: Case, arrays: list[Any]) -> Ready:
    *_, equal = update_step(subject, case, arrays)

    def count() -> int:
        before = _objects()
        step, obj, probe, _ = update_step(subject, case, arrays)
        _warm(step, obj)
        del step, obj, probe
        return _objects() - before

    return Ready(count, equal)


AMOUNTS = {
    m.name: m
    for m in (
        Measure("allocated", "allocated in a call", _allocated, unit="B"),
        Measure("kept", "freed with the function", _kept, once=True, unit="B"),
        Measure("grown", f"objects after {_CALLS} calls", _grown, unit="objects"),
        Measure("left", "objects after the function", _left, once=True, unit="objects"),
    )
}
