# SPDX-License-Identifier: Apache-2.0
"""Equinox modules: read as fields."""

from __future__ import annotations

import sys
from typing import Any

from equinox import Module
from equinox.nn import State

from .._description import Description, TreeDescription

# Equinox's own unflatten fills attributes that are not there with a mark of its own.
_ABSENT = getattr(sys.modules.get("equinox._module._flatten"), "MISSING", None)


def describe(cls: type[Any]) -> Description | None:
    """A module is its dataclass fields, in their order: what Equinox flattens it to. None for other classes."""
    if cls is State:
        # Its flatten refuses a state that is used up. Reading its one attribute, a dict, gives the same leaves, and the
        # caller's state is told that it is used up.
        return Description("node", frozen=False, expires=True)
    if not issubclass(cls, Module):
        return None
    fields: dict[str, Any] = cls.__dataclass_fields__
    static = frozenset(name for name, field in fields.items() if field.metadata.get("static", False))
    return Description("node", static_fields=static, order=tuple(fields), absent=_ABSENT)


def tree_fields(cls: type[Any], flatten: Any, unflatten: Any) -> TreeDescription | None:
    """A module's fields, where JAX has the functions that Equinox generates for them."""
    if _ABSENT is None or not issubclass(cls, Module) or getattr(unflatten, "args", None) != (cls,):
        return None
    fields: dict[str, Any] = cls.__dataclass_fields__
    others = tuple(name for name, field in fields.items() if field.metadata.get("static", False))
    children = tuple(name for name in fields if name not in others)
    order = tuple(range(len(fields)))
    return TreeDescription("fields", flatten, unflatten, children, others, order, _ABSENT, len(fields))
