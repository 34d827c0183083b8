# SPDX-License-Identifier: Apache-2.0
"""Where the arrays of a graph are: Equinox's `filter_shard`."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from .. import _core
from .._prefix import is_prefix
from .._structure import Structure
from .._tracebacks import boundary
from ..tree import tree_broadcast
from .jvp import _is_none


@boundary
def filter_shard(x: Any, device_or_shardings: Any) -> Any:
    """As `equinox.filter_shard`: a copy of `x` whose arrays are on a device, or have shardings.

    Args:
        x: any graph.
        device_or_shardings: a device; a sharding for all arrays; or a tree of shardings, of which `x` is an extension.
    """
    spec = device_or_shardings
    if isinstance(spec, jax.Device):
        spec = SingleDeviceSharding(spec)
    leaves, graphdef = _core.flatten(x)
    if is_prefix(spec) or not jax.tree_util.all_leaves([spec]):
        full = tree_broadcast(spec, x, is_leaf=_is_none)
        structure = Structure(_core.flatten(full)[1])
        at = {structure.place(row): value for row, value in structure.statics()}
        spec = [at[place] for place in graphdef.leaf_places()]
    return _core.unflatten(graphdef, jax.lax.with_sharding_constraint(leaves, spec))
