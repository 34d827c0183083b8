# SPDX-License-Identifier: Apache-2.0
"""Texts of tree nodes and leaves for messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import jax

from graftax import _core
from graftax._base.errors import some
from graftax._graph.structure_diff import short_text


def keys_of(cls: type, data: Any) -> tuple[Any, ...]:
    """The keys of a dict from its node data in JAX."""
    # JAX's node data of a defaultdict begin with its factory.
    return tuple(data[1] if issubclass(cls, defaultdict) else data)


def node_text(cls: type, data: object, count: int) -> str:
    if cls is type(None):
        return "None"
    if issubclass(cls, dict):
        return f"{cls.__name__} with the keys {list_text(keys_of(cls, data))}" if count else f"an empty {cls.__name__}"
    if cls in (list, tuple):
        return f"{cls.__name__} of length {count}"
    return f"{cls.__qualname__} with {count} {'child' if count == 1 else 'children'}"


def value_text(value: object) -> str:
    """The text of a value: a node by its type and children, an array by dtype and shape, another leaf by its repr."""
    try:
        level = _core.tree_one_level(value)
    except Exception:  # its flatten function raises: the message is about its type anyway
        return f"{type(value).__qualname__} {short_text(value)}"
    if level is not None:
        return node_text(type(value), level[1], len(level[0]))
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None:
        text = f"{dtype}[{', '.join(map(str, shape))}]"
        return text if isinstance(value, jax.Array) else f"{type(value).__qualname__} {text}"
    return f"{type(value).__qualname__} {short_text(value)}"


def list_text(keys: Iterable[object]) -> str:
    return some([repr(key) for key in keys], 8)
