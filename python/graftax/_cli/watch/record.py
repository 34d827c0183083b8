# SPDX-License-Identifier: Apache-2.0
"""The observations of each function of a program."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from graftax._base.size_text import count_text
from graftax._cli.watch.signature import MADE_ANEW, CompiledCall

_KEPT_CALLS = 1000  # whose time is kept
_WORTH_DONATING = 1 << 16  # bytes
_MOST_TEXTS = 20  # kept of one kind


@dataclass
class Compilation:
    """One program: why it was compiled, and the seconds of each stage."""

    cause: str
    seconds: dict[str, float]


@dataclass
class Record:
    """The observations of one function, including all function objects made from the same code."""

    name: str
    location: str
    jit: str
    functions: int = 0
    calls: int = 0
    nanoseconds: deque[int] = field(default_factory=lambda: deque(maxlen=_KEPT_CALLS))
    walk_nanoseconds: int = 0  # of graftax, for the same arguments
    compilations: list[Compilation] = field(default_factory=list)
    compiled_calls: list[CompiledCall] = field(default_factory=list)
    stale: Counter[str] = field(default_factory=Counter)  # reads that a call did not see, and in how many calls
    lost_changes: Counter[str] = field(default_factory=Counter)
    lost_ties: dict[str, int] = field(default_factory=dict)  # by the two paths: bytes of the second array
    constants: dict[str, int] = field(default_factory=dict)  # by path: bytes in each program
    missed_donation: int = 0  # bytes: the most of one call
    missed_donations: int = 0  # in how many calls

    @property
    def seconds(self) -> float:
        return sum(sum(compilation.seconds.values()) for compilation in self.compilations)

    @property
    def median_microseconds(self) -> float:
        """The time of a call up to its return; 0 where none was made without a compilation."""
        return statistics.median(self.nanoseconds) / 1e3 if self.nanoseconds else 0.0

    @staticmethod
    def count(counter: Counter[str], texts: list[str]) -> None:
        """Counts texts, up to a maximal number of different ones."""
        for text in texts:
            if text in counter or len(counter) < _MOST_TEXTS:
                counter[text] += 1

    def findings(self) -> list[tuple[str, str, str]]:
        """(observation, what graftax does, how that is known) for everything that graftax would change."""
        rows: list[tuple[str, str, str]] = []
        # Of a new function object that graftax would recognise as equal to an earlier one.
        if recreations := [compilation for compilation in self.compilations if compilation.cause == MADE_ANEW]:
            seconds = sum(sum(compilation.seconds.values()) for compilation in recreations)
            observation = (
                f"{count_text(len(recreations), 'compilation')} in {seconds:.2f} s of a function that was made anew"
            )
            rows.append((observation, "none: functions are compared by content", "measured"))
        for text, times in self.stale.items():
            rows.append((f"stale in {count_text(times, 'call')}: {text}", "the call sees it", "seen"))
        for text, times in self.lost_changes.items():
            observation = f"a change made in a trace alone ({count_text(times, 'time')}): {text}"
            rows.append((observation, "each call makes it", "seen"))
        for text, size in self.lost_ties.items():
            rows.append((f"one array comes back as two: {text}", f"stays one: {_bytes(size)} less", "measured"))
        if self.constants:
            paths = ", ".join(sorted(self.constants)[:3])
            observation = f"{_bytes(sum(self.constants.values()))} in each program as constants: {paths}"
            rows.append((observation, "arguments of the program; NumPy arrays are copied in each call", "measured"))
        if self.missed_donation >= _WORTH_DONATING:
            observation = (
                f"{_bytes(self.missed_donation)} were free after each of {count_text(self.missed_donations, 'call')}"
            )
            rows.append((observation, 'reused with graftax.jit(..., donate="all")', "measured"))
        return rows


def records_by_cost(records: dict[Any, Record]) -> list[Record]:
    """The functions that were called, the most expensive first."""
    called = [record for record in records.values() if record.calls]
    return sorted(called, key=lambda r: -(r.seconds + r.median_microseconds * r.calls / 1e6))


def summary(records: dict[Any, Record]) -> str:
    """One line for the program, and one for each finding."""
    called = records_by_cost(records)
    compilations = sum(len(record.compilations) for record in called)
    seconds = sum(record.seconds for record in called)
    calls = sum(record.calls for record in called)
    lines = [
        f"graftax --watch: {count_text(len(called), 'function')}, {count_text(calls, 'call')}, "
        f"{count_text(compilations, 'compilation')} in {seconds:.2f} s"
    ]
    for record in called:
        lines += [
            f"  {record.name} ({record.location}): {observation} -> {change}"
            for observation, change, _ in record.findings()
        ]
    return "\n".join(lines)


def _bytes(size: int) -> str:
    for unit in ("bytes", "KB", "MB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size = size / 1024  # type: ignore[assignment]
    return f"{size:.1f} GB"
