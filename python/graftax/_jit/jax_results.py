# SPDX-License-Identifier: Apache-2.0
"""Results as `jax.jit` makes them: new trees, with an array of its own at each leaf."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from graftax._capture.numbers.symbols import is_symbol
from graftax._jax.arrays import ref_types

_RETURNED_AS_ARRAYS = (int, float, complex, np.ndarray, np.generic)


def as_jax_returns(result: object, inputs: Iterable[object] = ()) -> Any:
    """The result with JAX arrays in place of numbers and NumPy arrays, and with a copy of each array that has an owner.

    `inputs` are the arrays of the arguments and captures, which own themselves.
    """
    try:
        leaves, treedef = jax.tree.flatten(result)
    except Exception:  # keys that cannot be sorted, a flatten that raises: `jax.jit` would not take the result
        return result
    # A program may donate a result and go on using the argument, or another result: so no two of them share an array.
    owned = set(map(id, inputs))
    arrays = [_as_array(leaf, owned) for leaf in leaves]
    return jax.tree.unflatten(treedef, arrays)


def _as_array(leaf: object, owned: set[int]) -> Any:
    if isinstance(leaf, _RETURNED_AS_ARRAYS) or is_symbol(leaf):
        try:
            return jnp.array(leaf) if isinstance(leaf, np.ndarray) else jnp.asarray(leaf)
        except TypeError:  # of strings or objects, which `jax.jit` refuses
            return leaf
    if not isinstance(leaf, jax.Array) or isinstance(leaf, ref_types):
        return leaf
    if id(leaf) in owned:
        return jnp.copy(leaf)
    owned.add(id(leaf))
    return leaf
