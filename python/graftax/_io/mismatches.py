# SPDX-License-Identifier: Apache-2.0
"""All mismatches between a file and `like`, and the error that lists them."""

from __future__ import annotations

import difflib

from graftax._graph.path import Path
from graftax._graph.structure import KeyEntry
from graftax._graph.structure_diff import LinkedPath, linked_entries
from graftax._io.errors import LoadError

_NAMES_COMPARED = 500  # among which a message looks for similar names


class LazyPath:
    """A path as a linked list. Calling it builds the `Path`: only where it is needed, since it may be very long."""

    __slots__ = ("linked",)

    def __init__(self, linked: LinkedPath) -> None:
        self.linked = linked

    def __call__(self) -> Path:
        return Path(linked_entries(self.linked))

    def __repr__(self) -> str:
        return repr(self())

    def __add__(self, entries: tuple[KeyEntry, ...]) -> LazyPath:
        linked = self.linked
        for entry in entries:
            linked = (linked, entry)
        return LazyPath(linked)


class Mismatches:
    """The paths that only one side has, and the texts of all other differences."""

    def __init__(self) -> None:
        self.missing: list[tuple[LazyPath | Path, str]] = []  # only in `like`
        self.extra: list[tuple[LazyPath | Path, str]] = []  # only in the file
        self.texts: list[str] = []

    def differ(self, path: LazyPath | Path, text: str) -> None:
        self.texts.append(f"{path!r}: {text}")

    def refuse(self, path: str, strict: bool) -> None:
        """Raises LoadError if there are mismatches that count.

        Without `strict`, a missing or extra part does not count, unless it is an abstract array: there is no value in
        `like` that could stay.
        """
        abstract = [m for m in self.missing if m[1].startswith("ShapeDtypeStruct")]  # as `LoadInto._text` names it
        lines = list(self.texts)
        missing, extra = (self.missing, self.extra) if strict else (abstract, [])
        # Suggestions take time by the product of both numbers: a file of another model has thousands of names.
        names = [repr(path) for path, _ in self.extra][:_NAMES_COMPARED]
        for mismatch_path, text in missing:
            few = len(missing) <= _NAMES_COMPARED
            similar = difflib.get_close_matches(repr(mismatch_path), names, n=1) if few else []
            hint = f"; the file has {similar[0]}" if similar else ""
            lines.append(f"{mismatch_path!r}: {text} in like, missing in the file{hint}")
        lines += [f"{mismatch_path!r}: {text} in the file, not in like" for mismatch_path, text in extra]
        if lines:
            raise LoadError(f"{path} differs from like:", lines)
