# SPDX-License-Identifier: Apache-2.0
"""Random programs with `donate="auto"` in which arrays are held in random ways: none that can be reached is deleted.

python tests/support/held_arrays.py 100000 [seed]
"""

from __future__ import annotations

import collections
import functools
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


def makes_new_containers(state: Any) -> None:
    moments = state["moments"]
    state["moments"] = (moments[0] + 1, {"m": moments[1]["m"] * 0.5})
    state["layers"][0] = SimpleNamespace(w=state["layers"][0].w + 1)


def moves_a_container(state: Any) -> None:
    state["layers"][0] = state["layers"][1]
    state["layers"][1] = SimpleNamespace(w=state["a"] + 1)
    state["moments"] = (state["moments"][0], {"m": state["a"]})


STEPS = [replaces_all, replaces_some, swaps, keeps_the_last, returns_one, makes_a_new_list, ties]
STEPS += [makes_new_containers, moves_a_container]

# What is held besides arrays: an object of the state, and how an array is read from it.
PARTS = {
    "layers": (lambda state: state["layers"], lambda layers: layers[0].w),
    "layer": (lambda state: state["layers"][1], lambda layer: layer.w),
    "attributes": (lambda state: vars(state["layers"][0]), lambda attributes: attributes["w"]),
    "moments": (lambda state: state["moments"], lambda moments: moments[0]),
    "mapping": (lambda state: state["moments"][1], lambda mapping: mapping["m"]),
    "values": (lambda state: state["moments"][1].values(), lambda values: next(iter(values))),
    "items": (lambda state: iter(state["layers"]), lambda layers: next(layers).w),
}


def new_state(make: Any) -> Any:
    layers = [SimpleNamespace(w=make(i + 2.0)) for i in range(2)]
    moments = (make(4.0), {"m": make(5.0)})
    return {"a": make(0.0), "b": make(1.0), "last": make(9.0), "layers": layers, "moments": moments}


def places(state: Any) -> dict[str, Any]:
    named = {name: state[name] for name in ("a", "b", "last")}
    named |= {"moments[0]": state["moments"][0], "moments[1].m": state["moments"][1]["m"]}
    return named | {f"layers[{i}].w": layer.w for i, layer in enumerate(state["layers"])}


class Programs:
    """Runs programs of the last so many steps, compiled once, and counts what they did."""

    def __init__(self, count: int = len(STEPS)) -> None:
        self.plain = STEPS[-count:]
        self.steps = [graftax.jit(step, donate="auto") for step in self.plain]
        self.counts: collections.Counter[str] = collections.Counter()

    def run(self, seed: int) -> None:
        draw = random.Random(seed)
        state, plain = new_state(lambda x: jnp.full(SIZE, x) + 0), new_state(lambda x: np.float32(x))
        held: list[tuple[str, Any, Any]] = []
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
            if draw.random() < 0.3:
                name = draw.choice(list(PARTS))
                take, read = PARTS[name]
                log.append(f"part {name}")
                parts = take(state), take(plain)
                held.append((log[-1], *(functools.partial(read, part) for part in parts)))
                del parts
            if held and draw.random() < 0.3:
                held.pop(draw.randrange(len(held)))
            index = draw.randrange(len(self.plain))
            log.append(self.plain[index].__name__)
            result, expected = self.steps[index](state), self.plain[index](plain)
            self.counts["calls"] += 1
            if result is not None and draw.random() < 0.5:
                held.append((f"result of {self.plain[index].__name__}", lambda result=result: result, expected))
            del result
        for name, value in places(state).items():
            self._check(seed, log, name, value, places(plain)[name])
        for name, read, value in held:
            self._check(seed, log, name, read(), value)

    def calls_donated(self) -> int:
        entries = [entry for step in self.steps for entry in step._table.entries.values()]  # pyright: ignore
        return sum(donation[0] for entry in entries for donation in entry.donations())

    def _check(self, seed: int, log: list[str], name: str, value: Any, expected: Any) -> None:
        expected = expected() if callable(expected) else expected
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
