# SPDX-License-Identifier: Apache-2.0
"""Numbers for tests of symbolic numbers, and how their results are compared."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

INTEGERS = (1, 2, 3, 7, 8, 4, 5)
FLOATS = (0.5, 1.5, 2.25, 3.5)


def x() -> jax.Array:
    return jnp.arange(3.0)


def traces(f: Any) -> int:
    return f.cache_info().traces


def same(one: Any, other: Any) -> bool:
    """Equal structures, numbers of equal type and value, arrays of equal type and bits."""
    leaves, structure = jax.tree.flatten(one)
    others, other_structure = jax.tree.flatten(other)
    return structure == other_structure and all(map(same_leaf, leaves, others))


def same_leaf(one: Any, other: Any) -> bool:
    if isinstance(one, jax.Array):
        typed = (other.shape, other.dtype, other.weak_type) == (one.shape, one.dtype, one.weak_type)
        return isinstance(other, jax.Array) and typed and np.asarray(one).tobytes() == np.asarray(other).tobytes()
    if isinstance(one, np.ndarray | np.generic):
        return type(one) is type(other) and one.dtype == other.dtype and np.array_equal(one, other)
    return type(one) is type(other) and repr(one) == repr(other)
