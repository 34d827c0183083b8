# SPDX-License-Identifier: Apache-2.0
"""`explain`: which programs a function was compiled to and why, or what a call would do."""

from __future__ import annotations

import dataclasses
import json
import time

from graftax._base.size_text import count_text
from graftax._explain.cause_texts import Cause
from graftax._explain.log import cause_lines, headline, record
from graftax._explain.variant import Variant


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The programs that a function was compiled to. Prints as text; `to_json()` gives the same as data."""

    name: str
    variants: tuple[Variant, ...]
    calls: int
    count: int  # of all programs ever compiled
    seconds: float  # of all compilations
    donation: str = ""  # with `donate="auto"`: what the last call donated and kept

    def to_json(self) -> str:
        """The same as JSON: an object with `function`, `calls`, `programs`, `seconds`, and `variants`, a list."""
        variants = [record(variant) | {"live": variant.is_live} for variant in self.variants]
        counts = {"calls": self.calls, "programs": self.count, "seconds": round(self.seconds, 6)}
        donation = {"donation": self.donation} if self.donation else {}
        return json.dumps({"function": self.name, **counts, "variants": variants, **donation})

    def __str__(self) -> str:
        if not self.count:
            return f"{self.name}: nothing was compiled"
        lines = [f"{self.name}: {count_text(self.count, 'program')} in {self.seconds:.2f} s, {self.calls} calls"]
        if self.count > len(self.variants):
            lines.append(f"({self.count - len(self.variants)} that were dropped are not shown)")
        for variant in self.variants:
            dropped = f", dropped: {variant.dropped}" if variant.dropped else ""
            clock = time.strftime("%H:%M:%S", time.localtime(variant.when))
            lines.append(f"#{variant.number}  {clock}  {headline(variant)}{dropped}")
            lines += cause_lines(variant.nearest, variant.causes, "    ")
            lines += [f"    cache on disk: {variant.on_disk}"] if variant.on_disk else []
            lines += [f"    {line}" for line in variant.notes]
        return "\n".join([*lines, *filter(None, [self.donation])])

    __repr__ = __str__


@dataclasses.dataclass(frozen=True)
class CallExplanation:
    """What a call would do. `hit`: there is a program for it. `causes`: how it differs from the nearest program."""

    name: str
    hit: bool
    number: int  # of the program, or of the most similar one
    causes: tuple[Cause, ...]

    def to_json(self) -> str:
        """The same as JSON."""
        causes = [cause._asdict() | {"text": str(cause), "remedy": cause.remedy} for cause in self.causes]
        return json.dumps({"function": self.name, "hit": self.hit, "nearest": self.number or None, "causes": causes})

    def __str__(self) -> str:
        if self.hit:
            return f"{self.name}: a hit, program #{self.number} runs"
        return "\n".join([f"{self.name}: a miss, this call compiles", *cause_lines(self.number, self.causes, "  ")])

    __repr__ = __str__
