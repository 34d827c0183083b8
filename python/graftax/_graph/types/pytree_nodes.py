# SPDX-License-Identifier: Apache-2.0
"""One node as JAX sees it: its treedef, the key of a child, whether it is a leaf."""

from __future__ import annotations

from typing import Any

import jax.core
from jax import tree_util

from graftax._jax.compat import is_jaxpr, treedef_of_node
from graftax._jax.jaxprs import JaxprTreeDef

_LEAF = tree_util.tree_structure(0)


def is_leaf(value: object) -> bool:
    """Does JAX count this value as a leaf?"""
    return tree_util.all_leaves([value])


def is_tracer(value: object) -> bool:
    """Is it an array of a running transform, which has no value yet?"""
    return isinstance(value, jax.core.Tracer)


def one_level_treedef(cls: type, aux: Any, children: int) -> Any:
    """JAX's treedef of one registered node over `children` leaves: what its registered unflatten is called through."""
    if is_jaxpr(aux):
        return JaxprTreeDef(cls, aux)
    return treedef_of_node(tree_util.default_registry, (cls, aux), [_LEAF] * children)


class NoneKey:
    """The key path entry of a dict's key None, where JAX's own `DictKey` (before 0.10) takes no None."""

    key = None

    def __str__(self) -> str:
        return "[None]"

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NoneKey)

    def __hash__(self) -> int:
        return hash(NoneKey)


def dict_key(key: Any) -> Any:
    """The key path entry of a dict's key."""
    try:
        return tree_util.DictKey(key)
    except TypeError:
        return NoneKey()
