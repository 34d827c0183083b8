# SPDX-License-Identifier: Apache-2.0
"""Where a walk has come to. The path is spelled only where somebody asks: it may be as long as the graph is deep."""

from __future__ import annotations

from typing import Any, cast

from graftax._graph.path import Path
from graftax._graph.structure_diff import Way


class Where:
    """A place, as the chain of the steps that led there."""

    __slots__ = ("way",)

    def __init__(self, way: Way) -> None:
        self.way = way

    def __call__(self) -> Path:
        return path_of(self.way)

    def __repr__(self) -> str:
        return repr(self())

    def __add__(self, entries: tuple[Any, ...]) -> Where:
        way = self.way
        for entry in entries:
            way = (way, entry)
        return Where(way)


def path_of(way: Way, most: int | None = None) -> Path:
    """The path of a chain; of one with more than `most` steps, the last ones."""
    entries: list[Any] = []
    while way is not None and len(entries) != most:
        way, entry = cast(Any, way)
        entries.append(entry)
    return Path(reversed(entries))
