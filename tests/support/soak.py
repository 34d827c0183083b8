# SPDX-License-Identifier: Apache-2.0
"""A long life of one process: `python tests/support/soak.py CALLS`, or `make soak`.

Calls whose structures change, models that are thrown away, traces that fail, arguments that are refused, functions that
are made for one call. Blocks, objects of the collector and resident memory are counted at the end of each of eight
equal parts; the first half warms caches up, in the second nothing may grow.
"""

from __future__ import annotations

import contextlib
import gc
import pathlib
import resource
import sys
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import graftax
from records import record

PARTS = 8
CACHE = 64
# An entry that is traced once more, since JAX's caches were cleared at the end of a part, keeps one outcome more.
MOST_OBJECTS = CACHE * PARTS // 2 + 100


class Model:
    def __init__(self, n: int) -> None:
        self.w = X
        self.layers = [X] * (n % 5)
        self.more = {f"k{n % 7}": n % 3}


class Amounts(NamedTuple):
    blocks: int
    objects: int
    kilobytes: int


X = jnp.ones(3)


def step(model: Any, x: Any) -> Any:
    model.w = model.w + x
    model.count = getattr(model, "count", 0)
    return model.w


def fail(model: Any) -> Any:
    model.w = None
    raise ValueError("the user's own")


STEP, FAIL = graftax.jit(step, cache_size=CACHE), graftax.jit(fail)
KEPT = Model(3)


def one(n: int) -> None:
    """One call, of the kind that its number says. Most are cheap: what compiles comes once in 500."""
    kind = n % 500
    if kind == 0:
        graftax.jit(lambda m, x: m.w * x)(Model(n), X)
    elif kind == 1:
        with contextlib.suppress(ValueError):
            FAIL(Model(n // 500))
    elif kind % 25 == 2:
        with contextlib.suppress(TypeError):
            STEP(iter((1, 2)), X)
    elif kind % 25 == 3:
        with contextlib.suppress(TypeError):
            STEP(X)
    elif kind % 25 == 4:
        graftax.jit(lambda m: m)
    elif kind % 25 == 5:
        graftax.copy(Model(n))
    elif kind % 3 == 0:
        STEP(Model(n), X)
    else:
        STEP(KEPT, X)


def amounts() -> Amounts:
    jax.clear_caches()  # JAX's own, which hold as many entries as they do
    for _ in range(3):
        gc.collect()
    try:
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        kilobytes = pages * resource.getpagesize() // 1024
    except OSError:
        kilobytes = 0
    return Amounts(sys.getallocatedblocks(), len(gc.get_objects()), kilobytes)


def soak(calls: int) -> list[Amounts]:
    """The amounts at the end of each part."""
    found: list[Amounts] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for part in range(PARTS):
            for n in range(calls // PARTS):
                one(n + part)
            found.append(amounts())
    return found


def growth(found: list[Amounts], calls: int) -> tuple[float, float, float]:
    """Blocks, objects and bytes that a call of the second half leaves behind."""
    half = calls * (PARTS // 2) / PARTS
    return tuple((b - a) / half for a, b in zip(found[PARTS // 2 - 1], found[-1], strict=True))  # type: ignore[return-value]


def main() -> int:
    calls = int(sys.argv[1])
    found = soak(calls)
    for row in found:
        print(*(f"{value:>12,}" for value in row), flush=True)
    blocks, objects, kilobytes = growth(found, calls)
    print(f"a call of the second half leaves {blocks:.5f} blocks, {objects:.5f} objects, {kilobytes * 1024:.1f} bytes")
    # Each name that a type was asked for stays in a table of the interpreter, until all its 4,096 places are taken.
    middle, last = found[PARTS // 2 - 1], found[-1]
    grows = last.blocks - middle.blocks > 4096 or last.objects - middle.objects > MOST_OBJECTS
    record("soak", "make soak", f"{calls:,} calls in one process", ["memory grows"] * grows)
    return grows


if __name__ == "__main__":
    sys.exit(main())
