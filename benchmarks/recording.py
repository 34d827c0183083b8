# SPDX-License-Identifier: Apache-2.0
"""What recording costs a call: `graftax.record` beside `jax_debug_nans` and checkify.

    python benchmarks/recording.py [ROUNDS]

Rounds are interleaved, with an order that rotates. Times are those of the calling thread's processor, in microseconds:
the fastest round and the median, and the differences to `jit` of both.
"""

from __future__ import annotations

import collections
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import checkify

import graftax

SIZES = ((1, 8), (10, 8), (100, 8), (4, 100_000))  # arrays, elements
CALLS = 20  # of a slice
NANS = "jax.jit, jax_debug_nans"


def advance(arrays: list[Any], x: Any) -> list[Any]:
    return [array * 0.5 + x for array in arrays]


def with_scalar(arrays: list[Any], x: Any) -> tuple[list[Any], Any]:
    """The same with the scalar that a recorder's program has: what remains is the recorder's own."""
    new = advance(arrays, x)
    finite = jnp.isfinite(new[0])
    for array in new[1:]:
        finite = finite & jnp.isfinite(array)
    return new, finite.all()


def fresh() -> Callable[[list[Any], Any], list[Any]]:
    """`advance` as a function of its own, which shares no compiled program."""

    def step(arrays: list[Any], x: Any) -> list[Any]:
        return advance(arrays, x)

    return step


def subjects(folder: str) -> dict[str, Callable[[list[Any], Any], list[Any]]]:
    """Each takes arrays and a number, and returns new arrays."""
    scalar, kept = graftax.jit(with_scalar), collections.deque[Any](maxlen=3)
    plain = graftax.jit(fresh())
    checked = jax.jit(checkify.checkify(advance, errors=checkify.float_checks))

    def without_scalar(arrays: list[Any], x: Any) -> list[Any]:
        return scalar(arrays, x)[0]

    def kept_by_caller(arrays: list[Any], x: Any) -> list[Any]:
        kept.append((arrays, x, new := plain(arrays, x)))
        return new

    def without_error(arrays: list[Any], x: Any) -> list[Any]:
        return checked(arrays, x)[1]

    return {
        "jit": graftax.jit(fresh()),
        "jit, with the scalar": without_scalar,
        "jit, a list of the calls": kept_by_caller,
        "record(nonfinite=False)": graftax.record(fresh(), nonfinite=False, dir=folder),
        "record": graftax.record(fresh(), dir=folder),
        "jax.jit": jax.jit(fresh()),
        NANS: jax.jit(fresh()),
        "jax.jit of checkify": without_error,
    }


def measure(count: int, size: int, rounds: int, folder: str) -> dict[str, list[float]]:
    """Microseconds of a call, one for each round."""
    functions = subjects(folder)
    state = {name: [jnp.ones(size)] * count for name in functions}
    times: dict[str, list[float]] = {name: [] for name in functions}
    # JAX's setting is on for a series of its own: a program that has run without it is not checked afterwards.
    for names in ([name for name in functions if name != NANS], [NANS]):
        jax.config.update("jax_debug_nans", names == [NANS])
        _measure(names, functions, state, times, rounds)
    jax.config.update("jax_debug_nans", False)
    return times


def _measure(
    names: list[str],
    functions: dict[str, Callable[[list[Any], Any], list[Any]]],
    state: dict[str, list[Any]],
    times: dict[str, list[float]],
    rounds: int,
) -> None:
    x = jnp.float32(0.5)
    for round_number in range(-5, rounds):
        names.append(names.pop(0))
        gc.collect()
        gc.disable()
        for name in names:
            arrays, call = state[name], functions[name]
            arrays = jax.block_until_ready(call(arrays, x))
            begin = time.thread_time_ns()
            for _ in range(CALLS):
                arrays = call(arrays, x)
            end = time.thread_time_ns()
            state[name] = jax.block_until_ready(arrays)
            if round_number >= 0:
                times[name].append((end - begin) / CALLS / 1000)
        gc.enable()


def main(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for count, size in SIZES:
            times = measure(count, size, rounds, folder)
            base = times["jit"]
            print(f"{count} arrays of {size}")
            for name, values in times.items():
                fastest, median = min(values), statistics.median(values)
                differences = f"{fastest - min(base):+7.1f} {median - statistics.median(base):+7.1f}"
                print(f"  {name:26} {fastest:8.1f} {median:8.1f}   {differences}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
