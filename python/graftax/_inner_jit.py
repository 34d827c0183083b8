# SPDX-License-Identifier: Apache-2.0
"""Functions that JAX jits inside of a traced function: `jax.jit`, and what `eqx.filter_jit` and `nnx.jit` make of it.

JAX traces such a function once for all its callers. Where it reads a root by another way than its arguments, that trace
holds tracers of ours, and the next caller would be given them. So a trace with such a function has JAX's caches for
itself.
"""

from __future__ import annotations

import contextlib
from typing import Any

import jax

from ._tracers import live_traces, traced_for

# Part of the key of JAX's caches. A JAX without it has one cache for all, and raises UnexpectedTracerError.
_WHOSE = jax.make_user_context(None) if hasattr(jax, "make_user_context") else None


def is_inside_jit(outer: Any) -> bool:
    """Does JAX jit a function now, inside of this trace?"""
    for trace in live_traces():
        if trace is outer:
            return False
        if traced_for(trace) == "jit":
            return True
    return False


def own_caches(wanted: bool) -> contextlib.AbstractContextManager[Any]:
    """While entered, JAX finds nothing that was traced before, and nothing of this is found afterwards."""
    return _WHOSE(object()) if wanted and _WHOSE is not None else contextlib.nullcontext()
