# SPDX-License-Identifier: Apache-2.0
"""Numbers for which code decides otherwise. They are found by trying, since what it compares may be any arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from graftax._capture.numbers.host_program import HostProgram

_NEIGHBORS = 64  # integers that are tried one by one: `n % 10 == 0` holds for one in ten
_BITS = 31  # bits of the integers that are tried

Number = int | float
Numbers = tuple[Number, ...]


def other_answers(program: HostProgram, numbers: Sequence[Number], directions: Sequence[int]) -> list[Numbers]:
    """Sets of numbers, each with one number changed, for which a decision comes out otherwise.

    Args:
        program: what the code does with the numbers.
        numbers: of a call.
        directions: of each number, whether it grows (1), shrinks (-1), or is not known to do either (0). Then the
            nearest above is taken, as most counters count up, or else the nearest below.
    """
    search = _Search(program, tuple(numbers))
    if not search.answers(search.numbers):
        return []
    turning_points: dict[Numbers, None] = {}
    for i in range(len(numbers)):
        # Only one number is changed at a time, in the direction in which it was seen to change.
        wanted = set(search.decisions)
        for sign in (directions[i],) if directions[i] else (1, -1):
            for decision, changed_numbers in list(search.turns(i, sign, wanted)):
                wanted.discard(decision)
                turning_points[changed_numbers] = None
    return list(turning_points)


class _Search:
    """The decisions of a program, and how they come out for the `numbers` of a call."""

    def __init__(self, program: HostProgram, numbers: Numbers) -> None:
        self.numbers = numbers
        self._decide = program.decisions()
        self._current_answers = self.answers(numbers)
        self.decisions = range(len(self._current_answers))
        self._constants = [constant for constant in program.constants() if type(constant) in (int, float)]

    def answers(self, numbers: Numbers) -> tuple[bool, ...]:
        """How each decision comes out; empty where the arithmetic raises."""
        try:
            return self._decide(*numbers)
        except Exception:
            return ()

    def turns(self, i: int, sign: int, wanted: set[int]) -> Iterator[tuple[int, Numbers]]:
        """(decision, numbers for which it comes out otherwise) where number `i` is above (1) or below (-1)."""
        waiting, last = set(wanted), self.numbers[i]
        for value in self._candidates(i, sign):
            answers = self.answers(self._with(i, value))
            # Where the arithmetic raises, the code would end: nothing is looked for behind that.
            if not answers or not waiting:
                return
            for decision in [k for k in waiting if answers[k] != self._current_answers[k]]:
                waiting.discard(decision)
                yield decision, self._with(i, self._nearest(decision, i, last, value))
            last = value

    def _candidates(self, i: int, sign: int) -> list[Number]:
        """What to try in the place of number `i`, the nearest first."""
        # Around each constant of the code; for an integer, also its neighbours, and steps that double.
        number, near = self.numbers[i], list[Number]()
        for constant in self._constants:
            if type(number) is int and math.isfinite(constant):
                near += [math.floor(constant) + step for step in (-1, 0, 1, 2)]
            # Of a float there are too many values to try: only what lies at a constant of the code, or just beside it.
            elif type(number) is float:
                near += [math.nextafter(constant, -math.inf), float(constant), math.nextafter(constant, math.inf)]
        if type(number) is int:
            near += [number + sign * step for step in range(1, _NEIGHBORS)]
            near += [number + sign * (1 << bit) for bit in range(_BITS)]
            near = [value for value in near if -(1 << _BITS) <= value < 1 << _BITS]
        return sorted({value for value in near if sign * value > sign * number}, reverse=sign < 0)

    def _nearest(self, decision: int, i: int, near: Number, far: Number) -> Number:
        """Bisects integers between one for which the decision is the same and one for which it is not."""
        while type(near) is int and type(far) is int and abs(far - near) > 1:
            middle = (near + far) // 2
            answers = self.answers(self._with(i, middle))
            if answers and answers[decision] == self._current_answers[decision]:
                near = middle
            else:
                far = middle
        return far

    def _with(self, i: int, value: Number) -> Numbers:
        """The numbers of the call, with another value for number `i`."""
        return *self.numbers[:i], value, *self.numbers[i + 1 :]
