# SPDX-License-Identifier: Apache-2.0
"""The programs of one function and why they were compiled. It is updated only when something compiles."""

from __future__ import annotations

import warnings
from collections import Counter, deque

from graftax import _core
from graftax._base.errors import RecompileWarning
from graftax._explain import log
from graftax._explain.cause_texts import TEXTS, Cause
from graftax._explain.variant import Variant, nearest
from graftax._jax.tracebacks import caller_level

KEEPS_COMPILING = "{name} was compiled {count} times because {path} keeps changing (last values: {values}). {remedy}"
KEEPS_BEING_DROPPED = "{name} was compiled {count} times: {cause}. {remedy}"
COMPILES_ON_MOST_CALLS = (
    "{name} compiles again on most calls: {count} times in a row, each time for a different structure. What differed "
    "the last time:\n{causes}\n{remedies}"
)

_MAX_COMPILATIONS = 3  # compilations for one cause
_MAX_SHOWN = 3  # differences or values in a message
_MAX_DROPPED = 8  # how many variants are kept whose entry is gone

# Kinds that compile by themselves. Changes of structure (below) are normal while a model is being set up.
_SINGLE = {
    *("number", "packed number", "bool", "text", "value", "identity", "code"),
    *("shape", "dtype", "weak type", "sharding", "committed"),
    *("setting", "read", "id", "guard", "asked", "set order", "evicted", "cleared", "donation"),
}


_STRUCTURE = {"number type", "type", "class", "array", "added", "removed", "content", "order", "sharing", "packed"}

CauseKey = tuple[str, str]  # Cause.recurrence_key


class History:
    """The variants of one function, and how often each cause made one."""

    def __init__(self) -> None:
        self.variants: list[Variant] = []
        self.count = 0  # of all programs ever compiled
        self._seconds_before = 0.0  # of variants that are no longer kept
        self.warns = False  # give RecompileWarning
        self._calls = -1  # the number of calls when the last program was compiled
        self._values: dict[CauseKey, deque[str]] = {}  # the last values at a key path
        self._counts: Counter[CauseKey] = Counter()
        self._streak: dict[CauseKey, int] = {}  # compilations in a row without a cache hit in between
        self._warned: set[CauseKey] = set()
        self._first_cause = Cause("first", "")
        self._pending_warnings: list[str] = []

    # ---- while a call is compiled

    def longest(self, stage: str) -> float:
        """The most seconds that a stage of a compilation has taken."""
        return max((variant.seconds.get(stage, 0.0) for variant in self.variants), default=0.0)

    @property
    def seconds(self) -> float:
        """The seconds of all compilations."""
        return self._seconds_before + sum(variant.all_seconds for variant in self.variants)

    def add(self, variant: Variant, calls: int, expected: bool = False) -> None:
        """Adds a program that was just compiled, in call number `calls`. `expected`: the user requested it."""
        variant.nearest, variant.causes = self.explain(variant)
        self.count += 1
        variant.number = self.count
        for previous in self.variants:
            # So that `jax.clear_caches()` in a loop does not fill the history: such variants may be dropped though
            # their entry lives.
            previous.is_replaced = previous.is_replaced or variant.replaces(previous)
        self.variants.append(variant)
        # Some variants without an entry are kept, so that an eviction can be named as the cause.
        dropped = [v for v in self.variants if not v.is_live or v.is_replaced][:-_MAX_DROPPED]
        self._seconds_before += sum(v.all_seconds for v in dropped)
        self.variants = [v for v in self.variants if v not in dropped]  # another thread may be reading the list
        if not expected:
            self._count_causes(variant, calls - self._calls == 1)
        self._calls = calls
        log.compiled(variant)

    def add_ready(self, variant: Variant, cause: str) -> None:
        """Adds a program that was not compiled here: `loaded` from a file, from the `disk`, or `shared`."""
        variant.causes = (Cause(cause, ""),)
        self.count += 1
        variant.number = self.count
        self.variants.append(variant)

    def explain(self, variant: Variant) -> tuple[int, tuple[Cause, ...]]:
        """(the number of the nearest variant, how a call differs from it); the number is 0 if there is none."""
        if not self.variants:
            return 0, (self._first_cause,)
        best, causes = nearest(self._candidates(), variant)
        if best is None:
            return 0, (Cause("unknown", "it differs in parts that cannot be compared"),)
        if not causes:
            causes = [best.cause_if_equal(variant.entry())]
        return best.number, tuple(causes)

    def _candidates(self) -> list[Variant]:
        """All variants: the newest two first, then the others, most recently used first."""

        def age(variant: Variant) -> tuple[bool, int]:
            entry = variant.entry()
            return variant.is_live, entry.used if entry is not None else 0

        return [*reversed(self.variants[-2:]), *sorted(self.variants[:-2], key=age, reverse=True)]

    def variants_of(self, entry: _core.Entry | None) -> list[Variant]:
        """The variants of an entry, the newest first."""
        return [variant for variant in reversed(self.variants) if entry is not None and variant.entry() is entry]

    def latest_variant(self, entry: _core.Entry | None) -> Variant | None:
        return next(iter(self.variants_of(entry)), None)

    def dropped(self, entry: _core.Entry, reason: str) -> None:
        for variant in self.variants:
            if variant.entry() is entry:
                variant.dropped = reason

    def all_dropped(self, reason: str) -> None:
        for variant in self.variants:
            variant.dropped = variant.dropped or reason

    def fresh(self) -> History:
        """An empty history for a cleared cache."""
        # Not this one, emptied: its variants keep classes of the user's alive.
        history = History()
        if self.variants:
            history._first_cause = Cause("cleared", "clear_cache() was called")
        return history

    # ---- warnings

    def _count_causes(self, variant: Variant, in_a_row: bool) -> None:
        """Counts the causes of a variant, and prepares a warning if one of them has recurred too often."""
        roots = set(variant.names)
        causes = [c for c in variant.causes if c.kind in _SINGLE or (c.kind in _STRUCTURE and c.path not in roots)]
        is_only_cause = len(variant.causes) == 1
        causes_by_key = {cause.recurrence_key: cause for cause in reversed(causes)}
        # A cache hit since the last program ends all streaks: the structure was only being set up.
        self._streak = {key: count for key, count in self._streak.items() if key in causes_by_key and in_a_row}
        causes_to_report: list[Cause] = []
        for key, cause in causes_by_key.items():
            values = self._values.setdefault(key, deque([cause.before], _MAX_SHOWN))
            if values[-1] != cause.now:
                values.append(cause.now)
            self._streak[key] = self._streak.get(key, 0) + 1
            # Of several causes any may have been enough, so they count only while one call after another compiles.
            if cause.kind in _SINGLE and (is_only_cause or in_a_row):
                self._counts[key] += 1
            if max(self._counts[key], self._streak[key] * in_a_row) >= _MAX_COMPILATIONS and key not in self._warned:
                causes_to_report.append(cause)
        if causes_to_report:
            # One warning is enough for causes that came together.
            self._warned |= causes_by_key.keys()
            self._pending_warnings.append(self._warning(variant, causes_to_report))

    def _warning(self, variant: Variant, causes: list[Cause]) -> str:
        if len(causes) == 1 and causes[0].kind in _SINGLE:
            cause = causes[0]
            count, values = self._counts[cause.recurrence_key] + 1, ", ".join(self._values[cause.recurrence_key])
            fields = {"name": variant.name, "count": count, "remedy": cause.remedy}
            if cause.kind in TEXTS:
                return KEEPS_BEING_DROPPED.format(cause=cause, **fields)
            return KEEPS_COMPILING.format(path=cause.path, values=values, **fields)
        lines = "\n".join(f"  {cause}" for cause in variant.causes[:_MAX_SHOWN])
        remedies = "\n".join(dict.fromkeys(cause.remedy for cause in causes[:_MAX_SHOWN]))
        return COMPILES_ON_MOST_CALLS.format(
            name=variant.name, count=_MAX_COMPILATIONS + 1, causes=lines, remedies=remedies
        )

    def warn(self) -> None:
        """Gives the pending warnings, at the line of the call."""
        messages, self._pending_warnings = self._pending_warnings, []
        for message in messages if self.warns else ():
            warnings.warn(message, RecompileWarning, caller_level())
