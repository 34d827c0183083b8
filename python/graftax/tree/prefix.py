# SPDX-License-Identifier: Apache-2.0
"""Prefix trees: one value for everything below its place."""

from __future__ import annotations

from typing import Any

from graftax import _core
from graftax.tree._core_hooks import differences, mismatch_text
from graftax.tree.functions import IsLeaf


def broadcast_prefix(prefix_tree: Any, full_tree: Any, is_leaf: IsLeaf | None = None) -> list[Any]:
    """The leaves of a prefix, each repeated for all leaves of the full tree in its place.

    Args:
        prefix_tree: has a leaf where the full tree may have a subtree: `in_axes`, shardings, masks.
        full_tree: the tree whose leaves are counted.
        is_leaf: as in `flatten`, for the prefix.

    Returns:
        one value for each leaf of the full tree.

    Raises:
        ValueError: if it is not a prefix. The error names the paths, what was expected and found, and missing keys.

    Example:
        >>> graftax.tree.broadcast_prefix((0, None), ({"a": 1, "b": 2}, 3), is_leaf=lambda x: x is None)
        [0, 0, None]
    """
    values, treedef = _core.tree_flatten(prefix_tree, is_leaf)
    try:
        subtrees = treedef.flatten_up_to(full_tree)
    except ValueError:
        # Without a mismatch to name, the error is another one: a flatten function of the user's has raised it.
        mismatches = differences(treedef, full_tree)
        if not mismatches:
            raise
        raise ValueError(mismatch_text(mismatches, "broadcast_prefix: a prefix and the full tree")) from None
    result: list[Any] = []
    for value, subtree in zip(values, subtrees, strict=True):
        result += [value] * len(_core.tree_leaves(subtree))
    return result


def tree_broadcast(prefix_tree: Any, full_tree: Any, is_leaf: IsLeaf | None = None) -> Any:
    """A tree of the structure of `full_tree` with the values of a prefix. See `broadcast_prefix`."""
    values = broadcast_prefix(prefix_tree, full_tree, is_leaf)
    return _core.tree_structure(full_tree).unflatten(values)
