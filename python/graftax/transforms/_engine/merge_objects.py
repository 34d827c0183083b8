# SPDX-License-Identifier: Apache-2.0
"""Objects that one branch replaces and another leaves: their contents are selected, in the new object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graftax import _core
from graftax._graph.structure import Structure
from graftax.transforms._engine.graph_after import Provenance, StateAfter
from graftax.transforms._engine.program import Program


class Objects:
    """Which object stands where after each branch: an input node, or None for a new one.

    An input node that is new in some branches and stays in the others, in one place, has no identity afterwards: the
    place holds the new object, whichever branch runs, and the old one is left as it was.

    Args:
        state: the graph of the state after each branch, all of one structure.
    """

    def __init__(self, state: Sequence[Provenance]) -> None:
        self.first = state[0]
        self.origins: list[list[int | None]] = []
        for after in state:
            found = after.like(self.first)
            self.origins.append([] if found is None else [after.origins[i] for i in found[1]])
        places: dict[int, set[int]] = {}
        for origins in self.origins:
            for place, origin in enumerate(origins):
                if origin is not None:
                    places.setdefault(origin, set()).add(place)
        self._once = {origin for origin, found in places.items() if len(found) == 1}
        self.replaced = {node for place in range(len(self.first.origins)) for node in self._replaced_at(place)}

    def _at(self, place: int) -> list[int | None]:
        return [origins[place] for origins in self.origins if origins]

    def _replaced_at(self, place: int) -> set[int]:
        found = self._at(place)
        stays = {node for node in found if node is not None}
        return stays if None in found and len(stays) == 1 and stays <= self._once else set()

    def differing(self) -> tuple[int, int] | None:
        """(a branch, an input node) where it differs from the first one in what cannot be selected."""
        for place in range(len(self.first.origins)):
            if self._replaced_at(place):
                continue
            for number, origins in enumerate(self.origins):
                one, other = self.first.origins[place], origins[place] if origins else self.first.origins[place]
                if one != other:
                    return number, (one if one is not None else other) or 0
        return None

    def without_replaced(self, after: StateAfter) -> StateAfter:
        """The same, where a replaced node counts as a new one."""
        origins = [None if origin in self.replaced else origin for origin in after.after.origins]
        number = {key: node for key, node in after.number.items() if node not in self.replaced}
        return after._replace(after=Provenance(after.after.graphdef, origins), number=number)


class Writing:
    """The objects at the places of the state, while the changes of one branch after the other are written.

    In place of a replaced node it begins with a copy: what is written to that is written to the new object too, and the
    old one stays as it was.
    """

    def __init__(self, objects: Objects, program: Program, nodes: Sequence[Any]) -> None:
        walked = _core.walk(program.graphdef, program.rebuilt(program.leaves))
        assert walked is not None
        self._objects, self._nodes = objects, nodes
        structure = Structure(objects.first.graphdef)
        rows = structure.tracked
        self._rows = [rows[place] for place in range(len(objects.first.origins))]
        self._structure = structure
        self._now: list[Any] = [None] * len(self._rows)
        for origins in objects.origins:
            for place, origin in enumerate(origins):
                if origin is not None:
                    self._now[place] = (walked[1] if origin in objects.replaced else nodes)[origin]

    def nodes(self, branch: int) -> list[Any]:
        """The input nodes, as a branch's Outcome is to be given them."""
        given = list(self._nodes)
        for place, origin in enumerate(self._objects.origins[branch]):
            if origin in self._objects.replaced:
                given[origin] = self._now[place]
        return given

    def written(self, branch: int) -> None:
        """Finds the objects that are new since the Outcome of a branch was applied: where they are, it has written."""
        for place, origin in enumerate(self._objects.origins[branch]):
            if origin is None:
                self._now[place] = self._below(self._rows[place])

    def _below(self, row: _core.Row) -> Any:
        if row.track >= 0 and row.parent < 0:
            return self._now[row.track]
        above = self._structure.rows[row.parent]
        found = self._now[above.track] if above.track >= 0 else self._below(above)
        return next(child for entry, child in _core.children_with_keys(found) if entry == row.key_entry)
