# SPDX-License-Identifier: Apache-2.0
"""What the measurement of a budget says."""

from collections.abc import Callable
from dataclasses import dataclass

OnRound = Callable[[], None]


@dataclass(frozen=True)
class Verdict:
    """A budget with what was measured: None where it could not be, and then it is not held."""

    title: str
    limit: float
    measured: float | None
    held: bool
    detail: str
    # The same of the executable alone, measured in the same rounds: no call can be below. None where none was.
    floor: float | None = None
    # The same with the objects of the result made by Python code that does nothing else.
    by_hand: float | None = None
