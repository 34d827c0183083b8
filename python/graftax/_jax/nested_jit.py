# SPDX-License-Identifier: Apache-2.0
"""Functions that JAX jits inside of a traced function: `jax.jit`, and what `eqx.filter_jit` and `nnx.jit` make of it.

JAX traces such a function once for all its callers. Where it reads a root by another way than its arguments, that trace
holds tracers of ours, and the next caller would be given them. So a trace with such a function has JAX's caches for
itself.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator
from typing import Any

import jax

from graftax._jax.compat import forget_traces, jitted_around
from graftax._jax.tracers import live_traces, traced_for

# Part of the key of JAX's caches. A JAX without it has one cache for all, and raises UnexpectedTracerError.
_WHOSE = jax.make_user_context(None) if hasattr(jax, "make_user_context") else None


class _Now(threading.local):
    """The trace that has JAX's caches for itself, in this thread."""

    def __init__(self) -> None:
        self.jitted: dict[int, Any] = {}  # functions that JAX has traced in it


_now = _Now()


def is_inside_jit(outer: Any) -> bool:
    """Does JAX jit a function now, inside of this trace?"""
    live = live_traces()
    inner = live[: next((i for i, trace in enumerate(live) if trace is outer), 0)]
    count = sum(traced_for(trace) == "jit" for trace in inner)
    _now.jitted.update((id(function), function) for function in jitted_around()[:count])
    return count > 0


@contextlib.contextmanager
def own_caches(wanted: bool) -> Generator[None]:
    """While entered, JAX finds nothing that was traced before, and nothing of this is found afterwards."""
    if not wanted or _WHOSE is None:
        yield
        return
    around, _now.jitted = _now.jitted, {}
    try:
        with _WHOSE(object()):
            yield
    finally:
        for function in _now.jitted.values():
            forget_traces(function)
        _now.jitted = around
