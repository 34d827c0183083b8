# SPDX-License-Identifier: Apache-2.0
"""What a function that is given copies can reach, as it was before the function ran."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from graftax import _core
from graftax._graph.structure import place_name
from graftax._graph.structure_diff import differences_text


class Snapshot(NamedTuple):
    """What a function that is called with copies can reach, before it runs."""

    roots: tuple[Any, ...]
    names: tuple[str, ...]
    graphdef: _core.GraphDef
    leaves: Sequence[Any]

    @staticmethod
    def of(roots: tuple[Any, ...], names: tuple[str, ...]) -> Snapshot:
        leaves, graphdef = _core.record(roots, names)
        return Snapshot(roots, names, graphdef, leaves)

    def changes(self) -> str:
        """What has changed since, as text; empty where nothing has."""
        walked = _core.walk(self.graphdef, self.roots)
        if walked is None:
            return differences_text(self.graphdef, Snapshot.of(self.roots, self.names).graphdef, self.names)
        places = zip(self.graphdef.leaf_places(), self.leaves, walked[0], strict=True)
        changed = [place_name(place, self.names) for place, old, new in places if old is not new]
        return f"  {', '.join(changed)}: another array" if changed else ""
