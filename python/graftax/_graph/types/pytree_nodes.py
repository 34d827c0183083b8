# SPDX-License-Identifier: Apache-2.0
"""A single node as JAX sees it: its treedef, the key entries of its children, whether it is a leaf."""

from __future__ import annotations

from typing import Any

import jax.core
from jax import tree_util

from graftax._jax.equations import is_jaxpr
from graftax._jax.jaxprs import JaxprTreeDef
from graftax._jax.tree_registry import treedef_of_node

_LEAF = tree_util.tree_structure(0)


def is_leaf(value: object) -> bool:
    """Is this value a leaf for JAX?"""
    return tree_util.all_leaves([value])


def is_tracer(value: object) -> bool:
    return isinstance(value, jax.core.Tracer)


def one_level_treedef(cls: type, aux: object, children: int) -> Any:
    """JAX's treedef of a registered node with this many leaves: its unflatten calls the registered function."""
    # Jaxprs are not registered with JAX.
    if is_jaxpr(aux):
        return JaxprTreeDef(cls, aux)
    return treedef_of_node(tree_util.default_registry, (cls, aux), [_LEAF] * children)


class NoneKey:
    """The key entry of the dict key None, which JAX's own `DictKey` does not take before 0.10."""

    key = None

    def __str__(self) -> str:
        return "[None]"

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NoneKey)

    def __hash__(self) -> int:
        return hash(NoneKey)


def dict_key(key: object) -> Any:
    """The key entry of a dict key."""
    # JAX before 0.10 raises for None.
    try:
        return tree_util.DictKey(key)
    except TypeError:
        return NoneKey()
