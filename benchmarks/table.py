# SPDX-License-Identifier: Apache-2.0
"""The measured table: every case with every measure and every subject."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType

from benchmarks.amounts import AMOUNTS
from benchmarks.inputs import Case
from benchmarks.measures import MEASURES, Measure, Ready
from benchmarks.rounds import interleave, median, ratios

# First calls compile: a thousand-array program costs seconds, and its ratio tells nothing more.
_LARGEST_FIRST_CALL = 150
_FIRST_CALL_ROUNDS = 5
# A count compiles with every allocation traced, and twice: these cases stand for the others.
COUNTED = ("one array", "list 100", "dict 100", "eqx.Module 100", "object 100", "nnx.Module 100")


ALL_MEASURES = MEASURES | AMOUNTS


@dataclass(frozen=True)
class Row:
    """One number of the table: an error, or seconds with their ratio to the baseline of the case, or a count."""

    case: str
    measure: str
    subject: str
    leaves: int = 0
    seconds: float | None = None
    ratio: float | None = None
    quartiles: tuple[float, float] | None = None
    fastest: float | None = None  # fastest round over fastest round: what a busy machine disturbs least
    amount: float | None = None
    unit: str = "s"
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
        if not subject.accepts(case.form) or measure.name in getattr(subject, "WITHOUT", ()):
            continue
        try:
            made = measure.prepare(subject, case, arrays)
            if made is not None:
                made.call()
        except Exception as e:  # one competitor's failure is a result, not the end of the run
            failed.append(Row(case.name, measure.name, name, leaves=case.size, error=short(e)))
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
    if measure.unit != "s":
        return rows + _counted(measure, case, ready, on_round)
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
                leaves=case.size,
                seconds=median(taken),
                ratio=median(per_round),
                quartiles=(per_round[quarter], per_round[-1 - quarter]),
                fastest=min(taken) / min(baseline),
                equal=ready[name].equal,
            )
        )
    return rows


def _counted(measure: Measure, case: Case, ready: dict[str, Ready], on_round: Callable[[], None]) -> list[Row]:
    """Counts are no times: one is enough, the second one (`prepare` took the first), with every cache warm."""
    counts = {name: made.call() for name, made in ready.items()}
    on_round()
    return [
        Row(
            case.name,
            measure.name,
            name,
            leaves=case.size,
            amount=counts[name],
            unit=measure.unit,
            equal=made.equal,
        )
        for name, made in ready.items()
    ]


def plan(cases: Iterable[Case], measures: Iterable[str] | None = None) -> list[tuple[Case, Measure]]:
    """The comparisons to make, in order. Unless measures are named, only a few cases are counted."""
    return [
        (case, ALL_MEASURES[name])
        for case in cases
        if case.missing() is None
        for name in measures or (ALL_MEASURES if case.name in COUNTED else MEASURES)
        if not (ALL_MEASURES[name].once and case.size > _LARGEST_FIRST_CALL)
    ]


def rounds_for(measure: Measure, rounds: int) -> int:
    if measure.unit != "s":
        return 1
    return min(rounds, _FIRST_CALL_ROUNDS) if measure.once else rounds
