# SPDX-License-Identifier: Apache-2.0
"""Comparison of loaded values with those in `like`, and containers that are refilled in place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from jax.tree_util import DictKey

from graftax._base.errors import some
from graftax._graph.structure import KeyEntry
from graftax._jax.arrays import ref_types

OTHER_STATE = (
    "the packed state is {file} in the file, {like} in like. Its arrays lie in the file one after "
    "another, and everything else comes from like: give like= the same structure, shapes and values; or "
    "save what is not packed (state.unpack()), which is matched by name, and pack what is loaded"
)
_MAX_LINES = 3  # of packed state in a message

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, *ref_types)


def without_nan(entry: KeyEntry) -> KeyEntry:
    """Replaces a NaN key by `math.nan`, so that all NaN keys are found as the same key."""
    key = getattr(entry, "key", None)
    return DictKey(math.nan) if type(key) is float and key != key else entry


# Containers whose content is replaced in place.
REFILL: dict[type, Callable[[Any, Any], Any]] = {
    list: lambda value, content: value.__setitem__(slice(None), content),
    bytearray: lambda value, content: value.__setitem__(slice(None), content),
    dict: lambda value, content: (value.clear(), value.update(content)),
    set: lambda value, content: (value.clear(), value.update(content)),
}


def can_refill(value: object, content: object) -> bool:
    return type(value) in REFILL and type(content) is type(value)


def committed_sharding(value: object) -> Sharding | None:
    """The sharding of an array of `like`; None if it is not committed to its device."""
    if isinstance(value, jax.Array) and not value.committed:
        return None
    return getattr(value, "sharding", None)


# The plain value of an instance of a subclass, whatever the subclass overrides.
PLAIN_VALUES: dict[type, Any] = {
    int: int.__int__,
    float: float.__float__,
    complex: complex.__complex__,
    str: str.__str__,
    bytes: bytes.__bytes__,
}


def typed_values(values: Iterable[object]) -> set[tuple[type, Any]]:
    """Values with their types: 1 and True are equal, but differ here."""
    return {(type(value), value) for value in values}


def is_array(value: object) -> bool:
    """Is it an array that is a tensor of a file? NumPy arrays of texts and dates are not: they are values."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype.kind not in "USMm" and value.dtype != jax.dtypes.float0
    return isinstance(value, _ARRAYS)


def is_same(loaded: object, value: object) -> bool:
    """Does a loaded value equal the one in `like`? NaN equals itself, and -0.0 differs from 0.0."""
    if loaded is value:
        return True
    if isinstance(loaded, (float, complex)):
        return repr(loaded) == repr(value)
    try:
        return bool(loaded == value)
    except Exception:  # not comparable
        return False


def packed_state_difference(file_lines: list[Any], like_lines: list[str]) -> str | None:
    """The message for lines of packed state that differ in the file and in `like`; None where they are the same."""
    if file_lines == like_lines:
        return None
    # The message shows what only one side has, in order; if that is nothing, the same lines in another order.
    in_file, in_like = set(map(str, file_lines)), set(like_lines)
    only_file = [line for line in file_lines if line not in in_like]
    only_like = [line for line in like_lines if line not in in_file]
    if not only_file and not only_like:
        only_file, only_like = file_lines, like_lines
    file_text, like_text = (f"({some(list(map(str, lines)), _MAX_LINES)})" for lines in (only_file, only_like))
    return OTHER_STATE.format(file=file_text, like=like_text)
