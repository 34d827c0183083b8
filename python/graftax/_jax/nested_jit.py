# SPDX-License-Identifier: Apache-2.0
"""Functions jitted by JAX inside a traced function: with `jax.jit`, `eqx.filter_jit` or `nnx.jit`.

JAX traces such a function once for all its callers. If it reads a global or capture that is a root, its cached trace
holds tracers of this trace, and the next caller would get leaked tracers. So such a trace has private caches in JAX.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator
from typing import Any

import jax

from graftax._jax.tracers import live_traces, traced_for
from graftax._jax.traces import current_trace, enclosing_jits, forget_traces

# A part of JAX's cache keys. A JAX without it shares one cache, and raises UnexpectedTracerError.
_CACHE_CONTEXT = jax.make_user_context(None) if hasattr(jax, "make_user_context") else None


class _ThreadState(threading.local):
    """State of the running trace with private caches, for each thread."""

    def __init__(self) -> None:
        self.jitted: dict[int, Any] = {}  # functions that JAX has traced in it
        self.parts: list[Any] = []  # traces of JAX for parts of it, which no other trace finds


_state = _ThreadState()


def is_inside_jit(outer: object) -> bool:
    """Is JAX tracing a jitted function now, inside the trace `outer`? Notes the function."""
    # The traces within `outer`, without those of parts of it, which are not shared with other callers.
    live = live_traces()
    inner = live[: next((i for i, trace in enumerate(live) if trace is outer), 0)]
    count = sum(traced_for(trace) == "jit" and not any(trace is part for part in _state.parts) for trace in inner)
    _state.jitted.update((id(function), function) for function in enclosing_jits()[:count])
    return count > 0


@contextlib.contextmanager
def tracing_part() -> Generator[None]:
    """In the block, the current trace of JAX is one of a program that this trace alone calls."""
    _state.parts.append(current_trace())
    try:
        yield
    finally:
        _state.parts.pop()


@contextlib.contextmanager
def caches_of(owner: object) -> Generator[None]:
    """In the block, JAX finds no earlier traces but those that were made in such a block of the same owner."""
    with contextlib.nullcontext() if _CACHE_CONTEXT is None else _CACHE_CONTEXT(owner):
        yield


@contextlib.contextmanager
def private_caches(is_needed: bool) -> Generator[None]:
    """In the block, JAX finds no earlier traces; those made in the block are dropped from its caches afterwards."""
    if not is_needed or _CACHE_CONTEXT is None:
        yield
        return
    outer, _state.jitted = _state.jitted, {}
    try:
        with _CACHE_CONTEXT(object()):
            yield
    finally:
        for function in _state.jitted.values():
            forget_traces(function)
        _state.jitted = outer
