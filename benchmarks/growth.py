# SPDX-License-Identifier: Apache-2.0
"""How the cost of a call grows with the number of leaves, from one to 100,000.

The functions touch one leaf, so that what grows is the call: finding the leaves, checking them, putting the result
together. A program with an output for each leaf compiles for a quarter of a minute at 10,000 leaves and did not
finish at 100,000 (tried with `jax.jit`), so the function that returns its object stops at 10,000.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from benchmarks.inputs import DICT, NNX, Case
from benchmarks.measures import Measure, Ready, plus, same, user_function
from benchmarks.table import Row, compare

SIZES = (1, 10, 100, 1_000, 10_000, 100_000)
SUBJECTS = ("jax_flat", "jax_tree", "graftax_jit", "equinox_filter_jit", "nnx_jit", "nnx_cached_partial")
VARIABLES = 7_600  # as many as the model had for which vLLM's engineers found NNX to be bound by the host
# A round of the largest sizes takes up to seconds.
_MOST_ROUNDS = {10_000: 15, 100_000: 7}
_LARGEST = {"update_one": 10_000}


def _read_one(subject: ModuleType, case: Case, arrays: list[Any]) -> Ready:
    form = subject.taken_as(case.form)
    obj = form.build(arrays)
    step = subject.jit(user_function(lambda obj: form.arrays(obj)[0].sum()))
    more = form.build([arrays[0] + 1, *arrays[1:]])
    first = case.values()[0]
    equal = float(step(obj)) == float(first.sum()) and float(step(more)) == float((first + 1).sum())
    return Ready(lambda: step(obj).block_until_ready(), equal)


def _update_one(subject: ModuleType, case: Case, arrays: list[Any]) -> Ready:
    form = subject.taken_as(case.form)
    obj = form.build(arrays)

    def changed(obj: Any) -> Any:
        first, *rest = form.arrays(obj)
        return form.build([first + 1, *rest])

    step = subject.jit(user_function(changed))
    expected = [plus(case, 2)[0], *case.values()[1:]]
    equal = same([np.asarray(x) for x in form.arrays(step(step(obj)))], expected)
    return Ready(lambda: form.probe(step(obj)).block_until_ready(), equal)


_DECODE = Measure("decode", "of an nnx.Module; reads one Variable, returns a scalar", _read_one)
SERIES = (
    Measure("read_one", "reads one leaf, returns a scalar", _read_one),
    Measure("update_one", "changes one leaf, returns the object", _update_one),
)
MEASURES = {m.name: m for m in (*SERIES, _DECODE)}


def plan(largest: int = SIZES[-1]) -> list[tuple[Case, Measure]]:
    """The comparisons to make, small sizes first. The object is a dict; `jax_flat` gets the same arrays as a list."""
    return [
        (Case(f"dict {n}", DICT, n), m)
        for n in SIZES
        for m in SERIES
        if n <= min(largest, _LARGEST.get(m.name, largest))
    ]


def decoding() -> list[tuple[Case, Measure]]:
    """What a step of decoding costs the host with a large NNX module, which it does not change."""
    return [(Case(f"{NNX.name} {VARIABLES}", NNX, VARIABLES), _DECODE)]


def rounds_for(case: Case, rounds: int) -> int:
    return min(rounds, _MOST_ROUNDS.get(case.size, rounds))


def measure(
    case: Case, measure: Measure, subjects: dict[str, ModuleType], rounds: int, on_round: Callable[[], None]
) -> list[Row]:
    of_nnx = {name for name in subjects if name.startswith("nnx")}
    left_out = set[str]() if case.form is NNX else of_nnx
    subjects = {name: subject for name, subject in subjects.items() if name not in left_out}
    return compare(measure, case, subjects, rounds_for(case, rounds), on_round)
