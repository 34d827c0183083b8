# SPDX-License-Identifier: Apache-2.0
"""Objects that some branches replace and others keep: the contents of the chosen branch go into a new object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graftax import _core
from graftax._graph.structure import Structure
from graftax.transforms._engine.loop_state import Provenance, StateAfter
from graftax.transforms._engine.program import Program


class BranchObjects:
    """Which object is at which position of the state after each branch: an input node, or None for a new object.

    A position is the index of a tracked node. If some branches put a new object at a position and others keep the input
    node, then the position holds the new object, whichever branch runs, and the input node is left unchanged.
    """

    def __init__(self, states: Sequence[Provenance]) -> None:
        self.reference = states[0]
        # Empty where nodes share a key path and cannot be matched: such a branch counts as equal to the first.
        self.origins: list[list[int | None]] = [state.origins_along(self.reference) or [] for state in states]
        positions: dict[int, set[int]] = {}
        for origins in self.origins:
            for position, origin in enumerate(origins):
                if origin is not None:
                    positions.setdefault(origin, set()).add(position)
        # A node at two positions cannot be replaced at one of them without losing what they share.
        self._unique_nodes = {origin for origin, positions_of in positions.items() if len(positions_of) == 1}
        self.replaced = {
            node for position in range(len(self.reference.origins)) for node in self._replaced_at(position)
        }

    def _replaced_at(self, position: int) -> set[int]:
        origins = [origins[position] for origins in self.origins if origins]
        kept_nodes = {node for node in origins if node is not None}
        return kept_nodes if None in origins and len(kept_nodes) == 1 and kept_nodes <= self._unique_nodes else set()

    def differing(self) -> tuple[int, int] | None:
        """(a branch, an input node) where the branch differs from the first one in a way that cannot be merged."""
        for position in range(len(self.reference.origins)):
            if self._replaced_at(position):
                continue
            for number, origins in enumerate(self.origins):
                expected = self.reference.origins[position]
                actual = origins[position] if origins else expected
                if expected != actual:
                    return number, (expected if expected is not None else actual) or 0
        return None

    def without_replaced(self, state: StateAfter) -> StateAfter:
        """The state with every replaced node counted as a new object."""
        origins = [None if origin in self.replaced else origin for origin in state.final.origins]
        number = {key: node for key, node in state.node_index.items() if node not in self.replaced}
        return state._replace(final=Provenance(state.final.graphdef, origins), node_index=number)


class BranchWriter:
    """The objects at the positions of the state, while the changes of the branches are written one after the other."""

    # For a replaced node it begins with a copy. Writes go to the copy, and so to the new object later; the caller's old
    # object stays unchanged.
    def __init__(self, objects: BranchObjects, program: Program, nodes: Sequence[object]) -> None:
        walked = _core.walk(program.graphdef, program.rebuilt(program.leaves))
        assert walked is not None
        self._objects, self._nodes = objects, nodes
        self._structure = Structure(objects.reference.graphdef)
        self._rows = [self._structure.tracked[position] for position in range(len(objects.reference.origins))]
        self._current: list[Any] = [None] * len(self._rows)
        for origins in objects.origins:
            for position, origin in enumerate(origins):
                if origin is not None:
                    self._current[position] = (walked[1] if origin in objects.replaced else nodes)[origin]

    def nodes(self, branch: int) -> list[Any]:
        """The input nodes to apply a branch's Outcome to."""
        nodes = list(self._nodes)
        for position, origin in enumerate(self._objects.origins[branch]):
            if origin in self._objects.replaced:
                nodes[origin] = self._current[position]
        return nodes

    def note_written(self, branch: int) -> None:
        """Finds the objects that the Outcome of a branch has created, once it has been applied."""
        for position, origin in enumerate(self._objects.origins[branch]):
            if origin is None:
                self._current[position] = self._find(self._rows[position])

    def _find(self, row: _core.Row) -> Any:
        # A new object is the child of its parent by the same key: the parent has been written to already.
        if row.track >= 0 and row.parent < 0:
            return self._current[row.track]
        parent = self._structure.rows[row.parent]
        parent_object = self._current[parent.track] if parent.track >= 0 else self._find(parent)
        return next(child for entry, child in _core.children_with_keys(parent_object) if entry == row.key_entry)
