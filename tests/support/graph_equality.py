# SPDX-License-Identifier: Apache-2.0
"""Are two object graphs equal, with equal arrays?"""

import jax
import jax.numpy as jnp
import numpy as np

import graftax


def same(a, b) -> bool:
    """Equal graphs with equal arrays: values, shapes, dtypes, weak types, and NumPy stays NumPy."""
    (la, ga), (lb, gb) = graftax.flatten(a), graftax.flatten(b)
    if ga != gb:
        return False
    for x, y in zip(la, lb, strict=True):
        if isinstance(x, np.ndarray) != isinstance(y, np.ndarray):
            return False
        if getattr(x, "weak_type", False) != getattr(y, "weak_type", False):
            return False
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        if x.dtype != y.dtype or x.shape != y.shape or not np.array_equal(np.asarray(x), np.asarray(y)):
            return False
    return True
