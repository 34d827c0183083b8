# SPDX-License-Identifier: Apache-2.0
"""A limit on the time of one call over that of another."""

from dataclasses import dataclass, replace
from types import ModuleType

from benchmarks.cases import case
from benchmarks.measures import MEASURES
from benchmarks.subjects import load
from benchmarks.table import Row, compare
from benchmarks.verdicts import OnRound, Verdict

_FIRST_CALL_ROUNDS = 25
# A ratio this close to its limit, on either side, may be the machine's doing: it is measured again.
_NARROW = 0.05
_FLOOR, _BY_HAND = "executable", "by_hand"


@dataclass(frozen=True)
class Timed:
    """The time of one subject over that of another, on the same objects."""

    title: str
    limit: float
    measure: str
    case: str
    baseline: str
    subject: str = "graftax_jit"
    beside_floor: bool = False  # the executable alone is measured in the same rounds

    def rounds(self, rounds: int) -> int:
        # A first call compiles, so its rounds are few and long.
        return min(rounds, _FIRST_CALL_ROUNDS) if MEASURES[self.measure].once else rounds

    def run(self, subjects: dict[str, ModuleType], rounds: int, on_round: OnRound) -> Verdict:
        absent = [name for name in (self.baseline, self.subject) if name not in subjects]
        if absent:
            return Verdict(self.title, self.limit, None, False, f"absent: {', '.join(absent)}")
        # The baseline comes first: ratios are to the first subject.
        pair = {name: subjects[name] for name in (self.baseline, self.subject)}
        if self.beside_floor:
            pair |= load((_FLOOR, _BY_HAND) if self.measure == "update" else (_FLOOR,))[0]
        rounds = self.rounds(rounds)
        first = self._measure(pair, rounds, on_round)
        if first.measured is None or abs(first.measured / self.limit - 1) > _NARROW:
            return first
        again = self._measure(pair, 2 * rounds, on_round)
        detail = f"measured again with {2 * rounds} rounds, after {first.measured:.3f} with {rounds}: {again.detail}"
        return replace(again, detail=detail)

    def _measure(self, pair: dict[str, ModuleType], rounds: int, on_round: OnRound) -> Verdict:
        rows = compare(MEASURES[self.measure], case(self.case), pair, rounds, on_round)
        errors = [f"{row.subject}: {row.error}" for row in rows if row.error]
        if errors:
            return Verdict(self.title, self.limit, None, False, "; ".join(errors))
        return self._judge({row.subject: row for row in rows})

    def _judge(self, rows: dict[str, Row]) -> Verdict:
        ours, theirs = rows[self.subject], rows[self.baseline]
        assert ours.ratio and ours.quartiles and ours.fastest and ours.seconds and theirs.seconds
        equal = bool(ours.equal and theirs.equal)
        low, high = ours.quartiles
        floor = rows[_FLOOR].ratio if self.beside_floor else None
        detail = (
            f"{ours.seconds * 1e6:,.1f} us against {theirs.seconds * 1e6:,.1f} us; quartiles {low:.2f} to "
            f"{high:.2f}, fastest rounds {ours.fastest:.2f}; results {'equal' if equal else 'DIFFER'}"
        )
        if floor is not None:
            detail += f"; the executable alone {floor:.2f}, fastest rounds {rows[_FLOOR].fastest:.2f}"
        by_hand = rows[_BY_HAND].ratio if _BY_HAND in rows else None
        if by_hand is not None:
            detail += f", with the objects made by hand {by_hand:.2f}"
        if low <= self.limit <= high:
            detail += "; within noise"
        return Verdict(self.title, self.limit, ours.ratio, equal and ours.ratio <= self.limit, detail, floor, by_hand)
