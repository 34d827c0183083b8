# SPDX-License-Identifier: Apache-2.0
"""Prefix trees: one entry for everything below its place. `in_axes`, `in_specs`, shardings; trees of bools."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, cast

import numpy as np
from jax.sharding import PartitionSpec
from jax.tree_util import GetAttrKey

from graftax._base.errors import StructureError
from graftax._graph.path import Graph, open_node
from graftax._graph.structure import plain_key
from graftax._graph.structure_diff import Way, lockstep, short_text

NOT_SELECTED = "{spec} at {path!r} does not say whether a leaf is selected: give a bool, or a tree of bools."
NO_BOOL = "the tree of bools has nothing for {path!r}: give True or False for it, or one for all that contains it."
NO_SUCH_BOOL = "the tree of bools has an entry for {path!r}, and there is no such place."

ABSENT: Any = object()


def is_prefix(spec: Any) -> bool:
    """Has this a structure, rather than being one entry for everything?"""
    return isinstance(spec, (tuple, list, dict)) and not isinstance(spec, PartitionSpec)


def part_of(spec: Any, key: Any) -> Any:
    """The part of a prefix for the child at a key entry; ABSENT where it has none."""
    plain = plain_key(key)
    try:
        # The items of an `nnx.List` are attributes, '0' and so on, and have numbers in an `nnx.State`.
        if isinstance(spec, Mapping) and (plain in spec or not isinstance(key, GetAttrKey) or plain.isdigit()):
            there = cast("Mapping[Any, Any]", spec)
            return there[plain] if plain in there or not str(plain).isdigit() else there[int(plain)]
        if isinstance(spec, (tuple, list)) and (isinstance(plain, int) or plain not in getattr(spec, "_fields", ())):
            return cast("Sequence[Any]", spec)[plain]
        return getattr(spec, str(plain))
    except (LookupError, AttributeError, TypeError):
        return ABSENT


def chosen(graph: Graph, bools: Any) -> list[int]:
    """The rows of a graph for which a prefix of bools says True, by number: leaves, and nodes with all below them.

    Any graph may be such a prefix. It has to say something of each part, except of parts that are structure alone.

    Raises:
        StructureError: where it does not fit.
    """
    above = _above_leaves(graph)
    seen: dict[tuple[int, int], Any] = {}  # by ids, with the objects: an id must not be used again

    def meet(number: int, wanted: Any, way: Way) -> Generator[int, None, list[tuple[int, Any, Any]]]:
        if isinstance(wanted, (bool, np.bool_)):
            if wanted:
                yield number
            return []
        number = graph.rows[number].target
        nothing = wanted is None and graph.rows[number].value is None  # what a map over the graph leaves there
        if nothing or (number, id(wanted)) in seen:
            return []
        seen[number, id(wanted)] = wanted
        parts, key_entries = dict(open_node(wanted)), graph.key_entries(number)
        is_value = not parts and (key_entries or Graph(wanted).rows[0].is_leaf)
        if is_value or graph.rows[number].is_leaf:
            raise StructureError(NOT_SELECTED.format(spec=short_text(wanted), path=graph.path(number)))
        known = {entry for entry, _ in key_entries}
        for entry in parts:
            if entry not in known:
                raise StructureError(NO_SUCH_BOOL.format(path=graph.path(number) + (entry,)))
        pairs = [(child, parts.get(entry, ABSENT), entry) for entry, child in key_entries]
        # Parts that are structure alone may be left out.
        pairs = [p for p in pairs if not graph.rows[p[0]].aux or graph.rows[p[0]].target in above]
        for child, part, _ in pairs:
            if part is ABSENT:
                raise StructureError(NO_BOOL.format(path=graph.path(child)))
        return pairs

    return list(lockstep(meet, 0, bools))


def _above_leaves(graph: Graph) -> set[int]:
    """The leaves for JAX, and every node that one is below."""
    above: set[int] = set()
    for number, row in enumerate(graph.rows):
        at = number if row.is_leaf and not row.aux else -1
        while at >= 0 and at not in above:
            above.add(at)
            at = graph.rows[at].parent
    return above
