# SPDX-License-Identifier: Apache-2.0
"""Sixteen threads that share functions and objects: `python tests/support/threads.py SECONDS`, or `make threads`.

Each thread calls one compiled function with objects of its own and with one that all share, whose structure changes. It
clears caches, traces anew, traces under a transformation, raises, and pickles. What comes back is compared with plain
Python wherever an object belongs to one thread.
"""

from __future__ import annotations

import pickle
import random
import sys
import threading
import time
import traceback
import warnings
from typing import Any

import jax.numpy as jnp

import graftax
from records import record

THREADS = 16


class Model:
    def __init__(self, seed: int) -> None:
        self.w = jnp.full(2, float(seed))
        self.layers = [jnp.full(2, 1.0)] * (seed % 3)
        self.name = f"m{seed % 4}"
        self.steps = 0


def step(model: Any, x: Any) -> Any:
    model.w = model.w + x
    model.steps = model.steps + 1
    model.last = [model.w, *model.layers]
    return model.w * len(model.layers)


def loss(model: Any, x: Any) -> Any:
    return ((model.w * x) ** 2).sum()


def fail(model: Any) -> Any:
    model.w = None
    raise ValueError("the user's own")


STEP, GRAD, FAIL = graftax.jit(step, cache_size=8), graftax.jit(graftax.grad(loss)), graftax.jit(fail)
SHARED = Model(1)
# A shared object may be seen half changed by another thread's Python; these say so, and leave it whole.
ALLOWED = (graftax.ConcurrentChangeError, graftax.MutationError, AttributeError, KeyError, IndexError)


def own(rng: random.Random) -> None:
    """An object of this thread: as plain Python does it."""
    seed = rng.randrange(6)
    mine, plain = Model(seed), Model(seed)
    for _ in range(rng.randrange(1, 4)):
        x = float(rng.randrange(3))
        got, expected = STEP(mine, x), step(plain, x)
        assert got.tolist() == expected.tolist() and mine.w.tolist() == plain.w.tolist()
        assert (
            int(mine.steps) == plain.steps
            and len(mine.last) == len(plain.last)
            and mine.last[0].tolist() == plain.w.tolist()
        )
    with_grad = GRAD(mine, 2.0)
    assert with_grad.w.tolist() == (8 * mine.w).tolist()


def one_turn(rng: random.Random) -> None:
    what = rng.randrange(10)
    if what < 4:
        own(rng)
    elif what == 4:
        STEP(SHARED, 1.0)
    elif what == 5:
        SHARED.layers = [jnp.ones(2)] * rng.randrange(3)
        setattr(SHARED, f"extra{rng.randrange(2)}", rng.randrange(2))
    elif what == 6:
        graftax.jit(step)(Model(rng.randrange(6)), 1.0)  # a function of one call: a trace
    elif what == 7:
        mine = Model(rng.randrange(6))
        before = mine.w
        try:
            FAIL(mine)
        except ValueError:
            assert mine.w is before
    elif what == 8:
        leaves, graphdef = graftax.flatten(SHARED)
        again = pickle.loads(pickle.dumps(graphdef))
        graftax.unflatten(again, leaves)
        assert graftax.copy(Model(2)).name == "m2"
    elif rng.random() < 0.1:
        STEP.clear_cache()


def run(seconds: float, threads: int = THREADS) -> tuple[int, list[str]]:
    """The number of turns, and what went wrong."""
    end, wrong, turns = time.monotonic() + seconds, list[str](), [0] * threads
    begin = threading.Barrier(threads)

    def work(number: int) -> None:
        rng = random.Random(number)
        begin.wait()
        while time.monotonic() < end and not wrong:
            try:
                one_turn(rng)
            except ALLOWED:
                pass
            except BaseException:
                wrong.append(traceback.format_exc())
            turns[number] += 1

    warnings.filterwarnings("ignore", category=graftax.RecompileWarning)
    workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads meet more often
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(seconds + 300)
            if worker.is_alive():
                wrong.append("a thread does not end")
                break
    finally:
        sys.setswitchinterval(before)
    leftover = Model(1)
    STEP(leftover, 1.0)  # usable afterwards
    return sum(turns), wrong


def main() -> int:
    turns, wrong = run(float(sys.argv[1]) if len(sys.argv) > 1 else 60.0)
    record("threads", "make threads", f"{turns:,} turns of {THREADS} threads", wrong)
    print(f"{turns:,} turns of {THREADS} threads; {len(wrong)} went wrong")
    print("\n".join(wrong[:3]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
