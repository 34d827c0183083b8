# SPDX-License-Identifier: Apache-2.0
"""Leaves that a registered class computes in every flatten, so that identity cannot tell whether one changed.

The core flattens such an object once more after a trace, in `jax.ensure_compile_time_eval`: within the trace, the
computation would give tracers.
"""

from __future__ import annotations

import jax
import jax.core
import numpy as np

from graftax._jax.arrays import without_key


def equal_leaves(leaf: object, recomputed: object) -> bool:
    """Does a leaf that was recomputed after the trace equal the earlier one? Tracers are compared by type only."""
    if np.shape(leaf) != np.shape(recomputed) or jax.numpy.result_type(leaf) != jax.numpy.result_type(recomputed):
        return False
    if isinstance(leaf, jax.core.Tracer):  # an outer trace had recorded the computation
        return True
    # A tracer in place of an array was put there by the trace.
    return not isinstance(recomputed, jax.core.Tracer) and _bits(leaf) == _bits(recomputed)


def _bits(leaf: object) -> bytes:
    return np.asarray(without_key(leaf)).tobytes()
