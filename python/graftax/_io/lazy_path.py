# SPDX-License-Identifier: Apache-2.0
"""Paths of a walk, which are built only when they are needed: they may be as long as the graph is deep."""

from __future__ import annotations

from graftax._graph.path import Path
from graftax._graph.structure import KeyEntry
from graftax._graph.structure_diff import LinkedPath, linked_entries


class LazyPath:
    """A path as a linked list, for walks and messages. Calling it builds the `Path`."""

    __slots__ = ("linked",)

    def __init__(self, linked: LinkedPath) -> None:
        self.linked = linked

    def __call__(self) -> Path:
        return path_from_linked(self.linked)

    def __repr__(self) -> str:
        return repr(self())

    def __add__(self, entries: tuple[KeyEntry, ...]) -> LazyPath:
        linked = self.linked
        for entry in entries:
            linked = (linked, entry)
        return LazyPath(linked)


def path_from_linked(linked: LinkedPath, max_entries: int | None = None) -> Path:
    """The path of a linked path; of one with more than `max_entries` entries, the last ones."""
    return Path(linked_entries(linked, max_entries))
