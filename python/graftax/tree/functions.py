# SPDX-License-Identifier: Apache-2.0
"""Functions of `jax.tree` that need only a list of leaves, or structures."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from graftax import _core
from graftax._core import PyTreeDef
from graftax.tree._core_hooks import from_jax

T = TypeVar("T")
IsLeaf = Callable[[Any], bool]


class _Unspecified:
    """The default of an argument that was not passed."""

    def __repr__(self) -> str:
        return "unspecified"


# Not None, which is a valid initializer and identity.
_UNSPECIFIED: Any = _Unspecified()


def static(**kwargs: Any) -> Any:
    """`dataclasses.field` for a field that is not a child: `register_dataclass` makes it part of the structure.

    Args:
        kwargs: as for `dataclasses.field`; `metadata` is kept, and what it says of "static" counts.

    Example:
        >>> @graftax.tree.register_dataclass
        ... @dataclasses.dataclass
        ... class Layer:
        ...     weight: jax.Array
        ...     name: str = graftax.tree.static(default="layer")
    """
    metadata = {"static": True, **(kwargs.pop("metadata", None) or {})}
    return dataclasses.field(metadata=metadata, **kwargs)


def all_leaves(iterable: Iterable[Any], is_leaf: IsLeaf | None = None) -> bool:
    """Is every element a leaf? See `flatten` for `is_leaf`."""
    if is_leaf is None:
        return _core.tree_all_leaves(iterable)
    # A list of leaves is flattened to just these.
    items = list(iterable)
    leaves = _core.tree_leaves(items, is_leaf)
    return len(leaves) == len(items) and all(a is b for a, b in zip(items, leaves, strict=True))


def tree_all(tree: Any, *, is_leaf: IsLeaf | None = None) -> bool:
    """Is every leaf true? See `flatten` for `is_leaf`."""
    return all(_core.tree_leaves(tree, is_leaf))


def tree_leaves_with_path(
    tree: Any, is_leaf: Callable[..., bool] | None = None, is_leaf_takes_path: bool = False
) -> list[tuple[tuple[Any, ...], Any]]:
    """Pairs (key path, leaf). See `flatten_with_path` for the arguments."""
    return _core.tree_flatten_with_path(tree, is_leaf, is_leaf_takes_path)[0]


def tree_reduce(
    function: Callable[[T, Any], T], tree: Any, initializer: T = _UNSPECIFIED, is_leaf: IsLeaf | None = None
) -> T:
    """`functools.reduce` over the leaves.

    Args:
        function: takes what was reduced so far, and the next leaf.
        tree: gives the leaves.
        initializer: what to begin with; without one, the first leaf.
        is_leaf: as in `flatten`.

    Raises:
        TypeError: if there is neither a leaf nor an initializer.
    """
    leaves = _core.tree_leaves(tree, is_leaf)
    if initializer is _UNSPECIFIED:
        return functools.reduce(function, leaves)
    return functools.reduce(function, leaves, initializer)


def tree_reduce_associative(
    operation: Callable[[T, T], T], tree: Any, *, identity: T = _UNSPECIFIED, is_leaf: IsLeaf | None = None
) -> T:
    """Reduces the leaves pairwise, as a balanced tree of calls.

    Args:
        operation: an associative function of two leaves.
        tree: gives the leaves.
        identity: the result where there are no leaves.
        is_leaf: as in `flatten`.

    Raises:
        TypeError: if there is neither a leaf nor an identity.
    """
    leaves: list[T] = _core.tree_leaves(tree, is_leaf)
    if not leaves:
        if identity is _UNSPECIFIED:
            raise TypeError("a tree without leaves cannot be reduced. Give identity=, which is then the result.")
        return identity
    return _balanced(leaves, operation)


def _balanced(leaves: Sequence[T], operation: Callable[[T, T], T]) -> T:
    if len(leaves) == 1:
        return leaves[0]
    middle = len(leaves) // 2
    return operation(_balanced(leaves[:middle], operation), _balanced(leaves[middle:], operation))


def tree_transpose(outer_treedef: Any, inner_treedef: Any | None, pytree_to_transpose: Any) -> Any:
    """Turns a tree of trees inside out: the structure inside comes outside.

    Args:
        outer_treedef: the structure that is outside now.
        inner_treedef: the structure of what stands at its leaves; None: that of the first of them.
        pytree_to_transpose: a tree of the outer structure, with trees of the inner one as its leaves.

    Raises:
        TypeError: if the tree does not have this structure.

    Example:
        >>> pair, named = graftax.tree.structure([0, 0]), graftax.tree.structure({"a": 0, "b": 0})
        >>> graftax.tree.transpose(pair, named, [{"a": 1, "b": 2}, {"a": 3, "b": 4}])
        {'a': [1, 3], 'b': [2, 4]}
    """
    outer = from_jax(outer_treedef)
    leaves, treedef = _core.tree_flatten(pytree_to_transpose)
    if inner_treedef is None:
        inner = _core.tree_structure(outer.flatten_up_to(pytree_to_transpose)[0])
    else:
        inner = from_jax(inner_treedef)
    size, count = inner.num_leaves, outer.num_leaves
    if treedef.num_leaves != size * count:
        raise TypeError(
            "the tree does not have the structure that the two treedefs describe.\n"
            f"found    {treedef}\nexpected {outer.compose(inner)}"
        )
    # Each inner tree has `size` leaves in a row: a stride of that size takes the same leaf of each.
    return inner.unflatten([outer.unflatten(leaves[i::size]) for i in range(size)])


def treedef_children(treedef: Any) -> list[PyTreeDef]:
    """The structures of the root's children."""
    return from_jax(treedef).children()


def treedef_is_leaf(treedef: Any) -> bool:
    """Is this the structure of a single node: a leaf, or a node without children?"""
    return from_jax(treedef).num_nodes == 1


def treedef_tuple(treedefs: Iterable[Any]) -> PyTreeDef:
    """The structure of a tuple of trees of these structures."""
    return PyTreeDef.from_node_data_and_children(None, (tuple, None), list(treedefs))
