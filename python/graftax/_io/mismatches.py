# SPDX-License-Identifier: Apache-2.0
"""Everything in which a file differs from `like`, and the one error that says it."""

from __future__ import annotations

import difflib

from graftax._graph.path import Path
from graftax._io.errors import LoadError
from graftax._io.lazy_path import Where

_NAMES = 500  # of those that a message looks through for one that is close


class Differences:
    """Places that only one side has, and texts of what else differs."""

    def __init__(self) -> None:
        self.missing: list[tuple[Where | Path, str]] = []  # in the file
        self.extra: list[tuple[Where | Path, str]] = []  # in the file alone
        self.others: list[str] = []

    def differ(self, path: Where | Path, text: str) -> None:
        self.others.append(f"{path!r}: {text}")

    def refuse(self, path: str, strict: bool) -> None:
        """Raises LoadError where there are any that count. An abstract array has nothing that could stay."""
        abstract = [m for m in self.missing if m[1].startswith("ShapeDtypeStruct")]
        lines = list(self.others)
        missing, extra = (self.missing, self.extra) if strict else (abstract, [])
        names = [repr(path) for path, _ in self.extra][:_NAMES]
        for place, text in missing:
            close = difflib.get_close_matches(repr(place), names, n=1) if len(missing) <= _NAMES else []
            near = f"; the file has {close[0]}" if close else ""
            lines.append(f"{place!r}: {text} in like, missing in the file{near}")
        lines += [f"{place!r}: {text} in the file, not in like" for place, text in extra]
        if lines:
            raise LoadError(f"{path} differs from like:", lines)
