# SPDX-License-Identifier: Apache-2.0
"""Detects changes to the copies that a function is given, which would be lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from graftax import _core
from graftax._graph.structure import place_name
from graftax._graph.structure_diff import differences_text


class Snapshot(NamedTuple):
    """The graph that a function with copies as arguments can reach, recorded before the function runs."""

    roots: tuple[object, ...]
    names: tuple[str, ...]
    graphdef: _core.GraphDef
    leaves: Sequence[object]

    @staticmethod
    def take(roots: tuple[object, ...], names: tuple[str, ...]) -> Snapshot:
        leaves, graphdef = _core.record(roots, names)
        return Snapshot(roots, names, graphdef, leaves)

    def changes(self) -> str:
        """Describes what has changed since then; empty if nothing has."""
        walked = _core.walk(self.graphdef, self.roots)
        if walked is None:  # more than arrays has changed
            return differences_text(self.graphdef, Snapshot.take(self.roots, self.names).graphdef, self.names)
        pairs = zip(self.graphdef.leaf_places(), self.leaves, walked[0], strict=True)
        changed = [place_name(key_path, self.names) for key_path, initial, current in pairs if initial is not current]
        return f"  {', '.join(changed)}: another array" if changed else ""
