# SPDX-License-Identifier: Apache-2.0
"""`flatten` and `unflatten`: an object graph as its leaves and its structure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from graftax import _core
from graftax._graph.structure import Structure
from graftax._graph.types.describe import Symbolic, is_symbol


def flatten(obj: object) -> tuple[list[Any], _core.GraphDef]:
    """Splits an object graph into its arrays and its structure.

    Args:
        obj: any object; shared and cyclic references are part of the structure.

    Returns:
        (leaves, graphdef): the dynamic leaves (JAX and NumPy arrays) in walk order, and the `GraphDef`.

    Raises:
        UnsupportedValueError: for a value that hides state; names its path.

    Example:
        >>> layer = [jnp.ones(3)]
        >>> leaves, graphdef = graftax.flatten({"a": layer, "b": layer})
        >>> graphdef
        GraphDef({'a': #1=[*], 'b': #1})
    """
    leaves, graphdef = _core.flatten(obj)
    # A structure outlives the trace, and may not hold a number whose value is known only to the trace.
    if Symbolic.running:
        for _, value in Structure(graphdef).statics():
            if is_symbol(value):
                value.refuse()
    return leaves, graphdef


def unflatten(graphdef: _core.GraphDef, leaves: Iterable[object]) -> Any:
    """Builds a new object graph from a structure and its leaves, in the order in which `flatten` gave them.

    No `__init__` and no `__setattr__` of a user's class runs; a leaf may be any object.

    Args:
        graphdef: the structure, from `flatten`.
        leaves: one for each leaf of the structure.

    Returns:
        the new object graph.

    Raises:
        StructureError: if there are more or fewer leaves.

    Example:
        >>> leaves, graphdef = graftax.flatten({"w": jnp.ones(2), "name": "net"})
        >>> graftax.unflatten(graphdef, [leaf * 2 for leaf in leaves])
        {'w': Array([2., 2.], dtype=float32), 'name': 'net'}
    """
    return _core.unflatten(graphdef, list(leaves))
