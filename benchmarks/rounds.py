# SPDX-License-Identifier: Apache-2.0
"""Interleaved timing in one process: every round times every competitor, ratios are taken within a round."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from itertools import repeat
from typing import TypeVar

Key = TypeVar("Key")

# Long enough to hide the clock's own cost, short enough that neighbours see the same machine: on a busy one,
# many short slices give a steadier median than few long ones.
_SLICE_SECONDS = 0.001


def seconds(call: Callable[[], object], times: int) -> float:
    """The time of one call, over `times` of them."""
    start = time.perf_counter()
    for _ in repeat(None, times):
        call()
    return (time.perf_counter() - start) / times


def calls_per_slice(call: Callable[[], object]) -> int:
    """How many calls fill a slice; runs the call a few times, which also warms it."""
    once = min(seconds(call, 1) for _ in range(3))
    return max(1, int(_SLICE_SECONDS / max(once, 1e-7)))


def interleave(
    calls: Mapping[Key, Callable[[], object]],
    rounds: int,
    *,
    once: bool = False,
    on_round: Callable[[], None] = lambda: None,
) -> dict[Key, list[float]]:
    """Seconds per call of each competitor, one number per round. `once` times single calls (first calls).

    The order rotates from round to round. The garbage collector runs between rounds only.
    """
    keys = list(calls)
    times = {key: 1 if once else calls_per_slice(calls[key]) for key in keys}
    result: dict[Key, list[float]] = {key: [] for key in keys}
    gc.collect()
    gc.freeze()  # what the setup made need not be looked at again between rounds
    gc.disable()
    try:
        for number in range(rounds):
            turn = number % len(keys)
            for key in keys[turn:] + keys[:turn]:
                result[key].append(seconds(calls[key], times[key]))
            gc.collect()
            on_round()
    finally:
        gc.enable()
        gc.unfreeze()
    return result


def median(samples: list[float]) -> float:
    return statistics.median(samples)


def ratios(samples: list[float], baseline: list[float]) -> list[float]:
    """The per-round ratios, sorted: their middle is the result, their quartiles its spread."""
    return sorted(a / b for a, b in zip(samples, baseline, strict=True))
