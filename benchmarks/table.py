# SPDX-License-Identifier: Apache-2.0
"""The measured table: every case with every measure and every subject."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType

from benchmarks.inputs import Case
from benchmarks.measures import MEASURES, Measure, Ready
from benchmarks.rounds import interleave, median, ratios

# First calls compile: a thousand-array program costs seconds, and its ratio tells nothing more.
_LARGEST_FIRST_CALL = 100
_FIRST_CALL_ROUNDS = 5


@dataclass(frozen=True)
class Row:
    """One number of the table: an error, or seconds with their ratio to the baseline of the case."""

    case: str
    measure: str
    subject: str
    seconds: float | None = None
    ratio: float | None = None
    quartiles: tuple[float, float] | None = None
    fastest: float | None = None  # fastest round over fastest round: what a busy machine disturbs least
    equal: bool | None = None
    error: str | None = None


def short(error: Exception) -> str:
    """An error in one line."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:160].rstrip(": ")


def prepare(measure: Measure, case: Case, subjects: dict[str, ModuleType]) -> tuple[dict[str, Ready], list[Row]]:
    """The calls that can be timed, and a row for each subject whose call failed."""
    arrays = case.arrays()
    ready: dict[str, Ready] = {}
    failed: list[Row] = []
    for name, subject in subjects.items():
        if not subject.accepts(case.form):
            continue
        try:
            made = measure.prepare(subject, case, arrays)
            if made is not None:
                made.call()
        except Exception as e:  # one competitor's failure is a result, not the end of the run
            failed.append(Row(case.name, measure.name, name, error=short(e)))
            continue
        if made is not None:
            ready[name] = made
    return ready, failed


def compare(
    measure: Measure,
    case: Case,
    subjects: dict[str, ModuleType],
    rounds: int,
    on_round: Callable[[], None] = lambda: None,
) -> list[Row]:
    """All subjects on one case. The first subject that takes part is the baseline."""
    ready, rows = prepare(measure, case, subjects)
    if not ready:
        return rows
    samples = interleave({n: r.call for n, r in ready.items()}, rounds, once=measure.once, on_round=on_round)
    baseline = samples[next(iter(samples))]
    for name, taken in samples.items():
        per_round = ratios(taken, baseline)
        quarter = len(per_round) // 4
        rows.append(
            Row(
                case.name,
                measure.name,
                name,
                seconds=median(taken),
                ratio=median(per_round),
                quartiles=(per_round[quarter], per_round[-1 - quarter]),
                fastest=min(taken) / min(baseline),
                equal=ready[name].equal,
            )
        )
    return rows


def plan(cases: Iterable[Case], measures: Iterable[str]) -> list[tuple[Case, Measure]]:
    """The comparisons to make, in order."""
    return [
        (case, MEASURES[name])
        for case in cases
        if case.missing() is None
        for name in measures
        if not (MEASURES[name].once and case.size > _LARGEST_FIRST_CALL)
    ]


def rounds_for(measure: Measure, rounds: int) -> int:
    return min(rounds, _FIRST_CALL_ROUNDS) if measure.once else rounds
