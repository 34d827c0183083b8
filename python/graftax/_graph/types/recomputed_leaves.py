# SPDX-License-Identifier: Apache-2.0
"""Leaves that a registered class makes anew each time that it is flattened: no identity tells whether one was changed.

A flatten that computes is asked once more after a trace, in `jax.ensure_compile_time_eval`: there it computes at once,
and not in the trace that runs, where it would give tracers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.core
import numpy as np


def made_alike(leaf: Any, again: Any) -> bool:
    """Is what a flatten made after the trace the same as before? Of tracers only the type can tell.

    A tracer where there was an array is one that the trace has put there; the other way round, an outer trace has
    recorded the flatten.
    """
    if np.shape(leaf) != np.shape(again) or jax.numpy.result_type(leaf) != jax.numpy.result_type(again):
        return False
    if isinstance(leaf, jax.core.Tracer):
        return True
    return not isinstance(again, jax.core.Tracer) and _bits(leaf) == _bits(again)


def _bits(leaf: Any) -> bytes:
    is_key = isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf).tobytes()
