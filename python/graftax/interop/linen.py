# SPDX-License-Identifier: Apache-2.0
"""Flax linen: the boxes that keep the names of axes beside an array."""

from __future__ import annotations

from typing import Any

from flax.core.meta import Partitioned
from flax.core.spmd import get_logical_axis_rules
from jax.sharding import PartitionSpec


def axes(node: object) -> PartitionSpec | None:
    """The mesh axes named in the box of an array."""
    if not isinstance(node, Partitioned):
        return None
    return mesh_axes(node.names, (*(getattr(node, "rules", None) or ()), *(get_logical_axis_rules() or ())))


def mesh_axes(names: Any, rules: Any) -> PartitionSpec:
    """The mesh axes for names of axes. Logical names are translated by the first rule that has them."""
    axis_of: dict[str, Any] = {}
    for name, axis in rules:
        axis_of.setdefault(name, axis)
    return PartitionSpec(*(axis_of.get(name, name) if isinstance(name, str) else name for name in names))
