# SPDX-License-Identifier: Apache-2.0
"""What was compiled of one function and why: kept with its table, written only where something is compiled."""

from __future__ import annotations

import warnings
from collections import Counter, deque

from graftax import _core
from graftax._base.errors import RecompileWarning
from graftax._explain import log
from graftax._explain.cause import SAID, Cause
from graftax._explain.variant import Variant, nearest
from graftax._jax.tracebacks import caller_level

KEEPS_COMPILING = "{name} was compiled {count} times because {path} keeps changing (last values: {values}). {remedy}"
KEEPS_BEING_DROPPED = "{name} was compiled {count} times: {cause}. {remedy}"
COMPILES_ON_MOST_CALLS = (
    "{name} compiles anew on most calls: {count} times in a row, each time for another structure. Between the last "
    "two:\n{causes}\n{remedies}"
)

_PATIENCE = 3  # compilations for one cause
_SHOWN = 3  # differences, or values
_MOST_DROPPED = 8  # variants that are remembered, though the table has dropped their entry

# Each of these is a program of its own whatever else happens; what a structure is made of changes while it is set up.
_SINGLE = {
    *("number", "packed number", "bool", "text", "value", "identity", "code"),
    *("shape", "dtype", "weak type", "sharding", "committed"),
    *("setting", "read", "id", "guard", "asked", "set order", "evicted", "cleared"),
}


_STRUCTURE = {"number type", "type", "class", "array", "added", "removed", "content", "order", "sharing", "packed"}

Spot = tuple[str, str]  # what two causes share that are the same one again


class History:
    """The variants of one function, and how often each cause made one."""

    def __init__(self) -> None:
        self.variants: list[Variant] = []
        self.count = 0  # of all that were compiled
        self._seconds_before = 0.0  # of those that are no more remembered
        self.warns = False  # of what keeps changing
        self._calls = -1  # of the function, when the last one was compiled
        self._values: dict[Spot, deque[str]] = {}  # that a place had
        self._counts: Counter[Spot] = Counter()
        self._streak: dict[Spot, int] = {}  # compilations in a row, without a call that found a program in between
        self._warned: set[Spot] = set()
        self._because: list[Cause] = []
        self._first = Cause("first", "")
        self._to_say: list[str] = []

    # ---- while a call is compiled

    @property
    def seconds(self) -> float:
        """Of all compilations."""
        return self._seconds_before + sum(variant.all_seconds for variant in self.variants)

    def because(self, cause: Cause) -> None:
        """The next variant is made for this, which its structure does not show: a guard that failed."""
        self._because.append(cause)

    def add(self, variant: Variant, calls: int, expected: bool = False) -> None:
        """A program that was compiled just now, in the call of this number; `expected`: somebody asked for it."""
        variant.nearest, variant.causes = self.explain(variant)
        self._because.clear()
        self.count += 1
        variant.number = self.count
        for old in self.variants:
            old.is_replaced = old.is_replaced or variant.replaces(old)
        self.variants.append(variant)
        dropped = [v for v in self.variants if not v.is_live or v.is_replaced][:-_MOST_DROPPED]
        self._seconds_before += sum(old.all_seconds for old in dropped)
        self.variants = [v for v in self.variants if v not in dropped]  # another thread may be reading the list
        if not expected:
            self._follow(variant, calls - self._calls == 1)
        self._calls = calls
        log.compiled(variant)

    def loaded(self, variant: Variant) -> None:
        """A program that was compiled elsewhere."""
        variant.causes = (Cause("loaded", ""),)
        self.count += 1
        variant.number = self.count
        self.variants.append(variant)

    def explain(self, variant: Variant) -> tuple[int, tuple[Cause, ...]]:
        """(the number of the nearest variant, how a call differs from it)."""
        if not self.variants:
            return 0, (*self._because, self._first)
        best, causes = nearest(self._candidates(), variant)
        if best is None:
            return 0, (Cause("unknown", "it differs in parts that cannot be compared"),)
        if not causes and not self._because:
            causes = [best.same_otherwise(variant.entry())]
        return best.number, (*self._because, *causes)

    def _candidates(self) -> list[Variant]:
        """The newest first, then those that were used last."""

        def age(variant: Variant) -> tuple[bool, int]:
            entry = variant.entry()
            return variant.is_live, entry.used if entry is not None else 0

        return [*reversed(self.variants[-2:]), *sorted(self.variants[:-2], key=age, reverse=True)]

    def of(self, entry: _core.Entry | None) -> Variant | None:
        """The newest variant of an entry."""
        found = (v for v in reversed(self.variants) if entry is not None and v.entry() is entry)
        return next(found, None)

    def dropped(self, entry: _core.Entry, why: str) -> None:
        for variant in self.variants:
            if variant.entry() is entry:
                variant.dropped = why

    def all_dropped(self, why: str) -> None:
        for variant in self.variants:
            variant.dropped = variant.dropped or why

    def anew(self) -> History:
        """What begins when all is cleared: a history holds classes."""
        history = History()
        if self.variants:
            history._first = Cause("cleared", "clear_cache() was called")
        return history

    # ---- what keeps changing

    def _follow(self, variant: Variant, in_a_row: bool) -> None:
        """Notes the causes of a variant; a warning waits where one of them has made too many."""
        roots = set(variant.names)
        causes = [c for c in variant.causes if c.kind in _SINGLE or (c.kind in _STRUCTURE and c.path not in roots)]
        alone = len(variant.causes) == 1
        places = {cause.place: cause for cause in reversed(causes)}
        self._streak = {p: n for p, n in self._streak.items() if p in places and in_a_row}
        due: list[Cause] = []
        for place, cause in places.items():
            values = self._values.setdefault(place, deque([cause.before], _SHOWN))
            if values[-1] != cause.now:
                values.append(cause.now)
            self._streak[place] = self._streak.get(place, 0) + 1
            if cause.kind in _SINGLE and (alone or in_a_row):
                self._counts[place] += 1
            if max(self._counts[place], self._streak[place] * in_a_row) >= _PATIENCE and place not in self._warned:
                due.append(cause)
        if due:
            self._warned |= places.keys()
            self._to_say.append(self._warning(variant, due))

    def _warning(self, variant: Variant, due: list[Cause]) -> str:
        if len(due) == 1 and due[0].kind in _SINGLE:
            cause = due[0]
            count, values = self._counts[cause.place] + 1, ", ".join(self._values[cause.place])
            said = {"name": variant.name, "count": count, "remedy": cause.remedy}
            if cause.kind in SAID:
                return KEEPS_BEING_DROPPED.format(cause=cause, **said)
            return KEEPS_COMPILING.format(path=cause.path, values=values, **said)
        lines = "\n".join(f"  {cause}" for cause in variant.causes[:_SHOWN])
        remedies = "\n".join(dict.fromkeys(cause.remedy for cause in due[:_SHOWN]))
        return COMPILES_ON_MOST_CALLS.format(name=variant.name, count=_PATIENCE + 1, causes=lines, remedies=remedies)

    def warn(self) -> None:
        """Says what waits to be said, at the line of the call."""
        waiting, self._to_say = self._to_say, []
        for message in waiting if self.warns else ():
            warnings.warn(message, RecompileWarning, caller_level())
