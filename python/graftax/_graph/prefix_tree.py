# SPDX-License-Identifier: Apache-2.0
"""Prefix trees: an entry applies to a whole subtree. `in_axes`, `in_specs`, shardings and trees of bools are some."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, cast

import numpy as np
from jax.sharding import PartitionSpec
from jax.tree_util import GetAttrKey

from graftax._base.errors import StructureError
from graftax._graph.path import Graph, open_node
from graftax._graph.structure import KeyEntry, plain_key
from graftax._graph.structure_diff import LinkedPath, lockstep, short_text

NOT_SELECTED = "{spec} at {path!r} does not say whether a leaf is selected: give a bool, or a tree of bools."
NO_BOOL = "the tree of bools has nothing for {path!r}: give True or False for it, or for a part that contains it."
NO_SUCH_BOOL = "the tree of bools has an entry for {path!r}, and there is no such place."

ABSENT: Any = object()


def is_prefix(spec: object) -> bool:
    """Is this a tree of entries, and not a single entry for everything?"""
    return isinstance(spec, (tuple, list, dict)) and not isinstance(spec, PartitionSpec)


def child_spec(spec: object, key: KeyEntry) -> Any:
    """The part of a prefix tree for the child at a key entry; ABSENT if there is none."""
    plain = plain_key(key)
    try:
        # The items of an `nnx.List` are attributes '0', '1' and so on; in an `nnx.State` their keys are integers.
        if isinstance(spec, Mapping) and (plain in spec or not isinstance(key, GetAttrKey) or plain.isdigit()):
            mapping = cast("Mapping[Any, Any]", spec)
            return mapping[plain] if plain in mapping or not str(plain).isdigit() else mapping[int(plain)]
        if isinstance(spec, (tuple, list)) and (isinstance(plain, int) or plain not in getattr(spec, "_fields", ())):
            return cast("Sequence[Any]", spec)[plain]
        return getattr(spec, str(plain))
    except (LookupError, AttributeError, TypeError):
        return ABSENT


def selected_rows(graph: Graph, bools: object) -> list[int]:
    """The rows of a graph for which a prefix tree of bools says True, by number; a node stands for its subtree.

    Any graph of bools may be the prefix tree. It needs an entry for each part with leaves below it.

    Raises:
        StructureError: if the prefix tree does not fit the graph.
    """
    needed = _leaves_and_ancestors(graph)
    visited: dict[tuple[int, int], Any] = {}  # keyed by id; the values keep the objects alive, so no id is reused

    def select_pair(
        number: int, selector: object, path: LinkedPath
    ) -> Generator[int, None, list[tuple[int, Any, KeyEntry]]]:
        if isinstance(selector, (bool, np.bool_)):
            if selector:
                yield number
            return []
        number = graph.rows[number].target
        is_empty = selector is None and graph.rows[number].value is None  # a map over the graph keeps its None
        if is_empty or (number, id(selector)) in visited:
            return []
        visited[number, id(selector)] = selector
        parts, key_entries = dict(open_node(selector)), graph.key_entries(number)
        # An empty container fits an empty node. Any other entry without parts is a value, and not a bool.
        is_value = not parts and (key_entries or Graph(selector).rows[0].is_leaf)
        if is_value or graph.rows[number].is_leaf:
            raise StructureError(NOT_SELECTED.format(spec=short_text(selector), path=graph.path(number)))
        entries = {entry for entry, _ in key_entries}
        for entry in parts:
            if entry not in entries:
                raise StructureError(NO_SUCH_BOOL.format(path=graph.path(number) + (entry,)))
        # Static parts without leaves below them may be left out.
        pairs = [(child, parts.get(entry, ABSENT), entry) for entry, child in key_entries]
        pairs = [p for p in pairs if not graph.rows[p[0]].aux or graph.rows[p[0]].target in needed]
        for child, part, _ in pairs:
            if part is ABSENT:
                raise StructureError(NO_BOOL.format(path=graph.path(child)))
        return pairs

    return list(lockstep(select_pair, 0, bools))


def _leaves_and_ancestors(graph: Graph) -> set[int]:
    """The rows that JAX counts as leaves, and all nodes above them."""
    numbers: set[int] = set()
    for number, row in enumerate(graph.rows):
        ancestor = number if row.is_leaf and not row.aux else -1
        while ancestor >= 0 and ancestor not in numbers:
            numbers.add(ancestor)
            ancestor = graph.rows[ancestor].parent
    return numbers
