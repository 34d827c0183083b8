# SPDX-License-Identifier: Apache-2.0
"""What stands in `like`, beside what a file has for it: which values are one, and which objects get others in place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.tree_util import DictKey

from graftax._jax.compat import ref_types

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, *ref_types)


def without_nan(entry: Any) -> Any:
    """A key that is NaN equals itself alone: here all of them are one."""
    key = getattr(entry, "key", None)
    return DictKey(math.nan) if type(key) is float and key != key else entry


# Containers that stay themselves and get other content.
REFILL: dict[type, Callable[[Any, Any], Any]] = {
    list: lambda value, new: value.__setitem__(slice(None), new),
    bytearray: lambda value, new: value.__setitem__(slice(None), new),
    dict: lambda value, new: (value.clear(), value.update(new)),
    set: lambda value, new: (value.clear(), value.update(new)),
}


def can_refill(value: Any, new: Any) -> bool:
    return type(value) in REFILL and type(new) is type(value)


def place_of(value: Any) -> Any:
    """The sharding of an array of `like`, where it has been committed to one."""
    if isinstance(value, jax.Array) and not value.committed:
        return None
    return getattr(value, "sharding", None)


# What a subclass of a plain type is without its attributes, whatever it overrides.
PLAIN_VALUES: dict[type, Any] = {
    int: int.__int__,
    float: float.__float__,
    complex: complex.__complex__,
    str: str.__str__,
    bytes: bytes.__bytes__,
}


def typed(values: Iterable[Any]) -> set[tuple[type, Any]]:
    """1 and True are one element, and another value."""
    return {(type(value), value) for value in values}


def is_array(value: Any) -> bool:
    """NumPy arrays of texts and dates are values."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype.kind not in "USMm" and value.dtype != jax.dtypes.float0
    return isinstance(value, _ARRAYS)


def is_same(new: Any, value: Any) -> bool:
    """Is a value what it was? A NaN is itself, and -0.0 is not 0.0."""
    if new is value:
        return True
    if isinstance(new, (float, complex)):
        return repr(new) == repr(value)
    try:
        return bool(new == value)
    except Exception:  # it does not say
        return False
