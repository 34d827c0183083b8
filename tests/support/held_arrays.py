# SPDX-License-Identifier: Apache-2.0
"""Random programs with `donate="auto"` in which arrays are held in random ways: none that can be reached is deleted.

python tests/support/held_arrays.py 100000 [seed]
"""

from __future__ import annotations

import collections
import random
import sys
import time
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

import graftax
from array_holders import HOLDERS

SIZE = 1 << 14  # float32: the smallest array that is looked at
SLOW = {"pullback", "jit", "graftax_jit", "thread"}  # compile or start something: drawn seldom


def replaces_all(state: Any) -> None:
    for name in ("a", "b"):
        state[name] = state[name] * 0.5 + 1
    state["layers"][0].w = state["layers"][0].w + state["a"].sum() * 0
    state["layers"][1].w = state["layers"][1].w + 2


def replaces_some(state: Any) -> None:
    state["a"] = state["a"] + state["b"]
    state["layers"][1].w = state["layers"][1].w * 0.25


def swaps(state: Any) -> None:
    state["a"], state["b"] = state["b"], state["a"]
    state["layers"][0].w = state["layers"][0].w + 1


def keeps_the_last(state: Any) -> None:
    state["last"] = state["a"]
    state["a"] = state["a"] * 0.5 + 1
    state["layers"][0].w = state["layers"][0].w - 1


def returns_one(state: Any) -> Any:
    old = state["b"]
    state["b"] = old * 0.5
    state["a"] = state["a"] + 1
    return old


def makes_a_new_list(state: Any) -> None:
    state["layers"] = [SimpleNamespace(w=layer.w + 1) for layer in state["layers"]]
    state["a"] = state["a"] * 0.5


def ties(state: Any) -> None:
    state["a"] = state["layers"][0].w
    state["b"] = state["b"] + state["a"]


STEPS = [replaces_all, replaces_some, swaps, keeps_the_last, returns_one, makes_a_new_list, ties]


def new_state(make: Any) -> Any:
    layers = [SimpleNamespace(w=make(i + 2.0)) for i in range(2)]
    return {"a": make(0.0), "b": make(1.0), "last": make(9.0), "layers": layers}


def places(state: Any) -> dict[str, Any]:
    named = {name: state[name] for name in ("a", "b", "last")}
    return named | {f"layers[{i}].w": layer.w for i, layer in enumerate(state["layers"])}


class Programs:
    """Runs programs with one set of compiled functions, and counts what they did."""

    def __init__(self) -> None:
        self.steps = [graftax.jit(step, donate="auto") for step in STEPS]
        self.counts: collections.Counter[str] = collections.Counter()

    def run(self, seed: int) -> None:
        draw = random.Random(seed)
        state, plain = new_state(lambda x: jnp.full(SIZE, x) + 0), new_state(lambda x: np.float32(x))
        held: list[tuple[str, Any, np.float32]] = []
        log: list[str] = []
        for _ in range(draw.randint(2, 7)):
            for _ in range(draw.choice([0, 0, 1, 1, 2])):
                place = draw.choice(list(places(state)))
                name = draw.choice(list(HOLDERS))
                if name in SLOW and draw.random() > 0.02:
                    continue
                log.append(f"{place} in {name}")
                held.append((log[-1], HOLDERS[name](places(state)[place]), places(plain)[place]))
                self.counts["held"] += 1
            if held and draw.random() < 0.3:
                held.pop(draw.randrange(len(held)))
            index = draw.randrange(len(STEPS))
            log.append(STEPS[index].__name__)
            result, expected = self.steps[index](state), STEPS[index](plain)
            self.counts["calls"] += 1
            if result is not None and draw.random() < 0.5:
                held.append((f"result of {STEPS[index].__name__}", lambda result=result: result, expected))
            del result
        for name, value in places(state).items():
            self._check(seed, log, name, value, places(plain)[name])
        for name, read, value in held:
            self._check(seed, log, name, read(), value)

    def calls_donated(self) -> int:
        entries = [entry for step in self.steps for entry in step._table.entries.values()]  # pyright: ignore
        return sum(donation[0] for entry in entries for donation in entry.donations())

    def _check(self, seed: int, log: list[str], name: str, value: Any, expected: np.float32) -> None:
        try:
            first = np.asarray(value)[:2]
        except RuntimeError as error:
            raise AssertionError(f"program {seed}, {name}: {error}\n{log}") from error
        if not np.allclose(first, expected):
            raise AssertionError(f"program {seed}, {name}: {first}, not {expected}\n{log}")


def main() -> None:
    count, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    programs, begin = Programs(), time.perf_counter()
    for seed in range(first, first + count):
        programs.run(seed)
        if (seed + 1 - first) % 1000 == 0:
            seconds = time.perf_counter() - begin
            counts = f"{programs.counts['calls']} calls, of which {programs.calls_donated()} donated"
            print(
                f"{seed + 1 - first} programs, {counts}, {programs.counts['held']} holders, {seconds:.0f} s", flush=True
            )
    print("nothing was found")


if __name__ == "__main__":
    main()
