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

from benchmarks.inputs import DICT, Case
from benchmarks.measures import Measure, Ready, plus, same, user_function
from benchmarks.table import Row, compare

SIZES = (1, 10, 100, 1_000, 10_000, 100_000)
SUBJECTS = ("jax_flat", "jax_tree", "graftax_jit", "equinox_filter_jit")
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


MEASURES = {
    m.name: m
    for m in (
        Measure("read_one", "reads one leaf, returns a scalar", _read_one),
        Measure("update_one", "changes one leaf, returns the object", _update_one),
    )
}


def plan(largest: int = SIZES[-1]) -> list[tuple[Case, Measure]]:
    """The comparisons to make, small sizes first. The object is a dict; `jax_flat` gets the same arrays as a list."""
    return [
        (Case(f"dict {n}", DICT, n), m)
        for n in SIZES
        for m in MEASURES.values()
        if n <= min(largest, _LARGEST.get(m.name, largest))
    ]


def rounds_for(case: Case, rounds: int) -> int:
    return min(rounds, _MOST_ROUNDS.get(case.size, rounds))


def measure(
    case: Case, measure: Measure, subjects: dict[str, ModuleType], rounds: int, on_round: Callable[[], None]
) -> list[Row]:
    return compare(measure, case, subjects, rounds_for(case, rounds), on_round)
