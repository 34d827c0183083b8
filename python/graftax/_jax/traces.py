# SPDX-License-Identifier: Apache-2.0
"""The traces that run in this thread: which they are, and one that is given further arguments."""

from __future__ import annotations

import contextlib
import sys
import traceback
from typing import Any

import jax
import jax.core
import jax.extend.core
from jax._src import config as _config
from jax._src import core as _jax_core
from jax._src import pjit as _pjit
from jax._src import source_info_util as _source_info_util
from jax._src.interpreters import partial_eval as _pe

from graftax._jax.equations import with_constants
from graftax._jax.missing_names import lacking


def in_same_trace(x: object, tracer: object) -> bool:
    """Do both belong to one trace? Equinox omits the tangents of other values. There is no public way to ask."""
    trace = getattr(tracer, "_trace", None)
    return trace is not None and getattr(x, "_trace", None) is trace


def equations() -> list[Any]:
    """The equations of the current trace so far. There is no public way to ask."""
    # JAX holds equations without effects weakly; 0.8 has the others behind a function of no arguments.
    trace: Any = current_trace()
    # The traces of transforms such as `jax.vmap` hand their equations on to the one around them.
    while trace is not None and not hasattr(trace, "frame"):
        trace = getattr(trace, "parent_trace", None)
    return getattr(getattr(trace, "frame", None), "tracing_eqns", [])


def outside_of_traces() -> bool:
    """Is no trace running in this thread? There is no public way to ask."""
    clean = getattr(_jax_core, "trace_state_clean", None)
    if clean is None:
        lacking["transforms that keep their trace"] = "jax._src.core.trace_state_clean"
    return clean is not None and bool(clean())


def current_trace() -> Any:
    """The trace that new tracers in this thread belong to."""
    return getattr(getattr(_jax_core, "trace_ctx", None), "trace", None)


def is_trace(value: object) -> bool:
    """Is it a trace of JAX? What it holds is JAX's own, also where a library keeps it in an object of the user's."""
    return isinstance(value, jax.core.Trace)


def trace_context() -> Any:
    """The settings, meshes and named axes that a trace depends on. There is no public way to ask."""
    return _config.trace_context()


def can_grow(trace: object) -> bool:
    """Can `add_argument` and `jaxpr_of` be used with this trace?"""
    parts = getattr(trace, "new_arg", None), getattr(getattr(trace, "frame", None), "to_jaxpr", None)
    return all(map(callable, parts)) and hasattr(_jax_core, "set_current_trace")


def add_argument(trace: Any, like: object) -> Any:
    """A tracer of one more argument of a running trace, with the type of `like`. There is no public way."""
    return trace.new_arg(jax.typeof(like), source_info=_source_info_util.current())


def within_trace(trace: Any) -> contextlib.AbstractContextManager[Any]:
    """While entered, what is computed is part of this trace."""
    return _jax_core.set_current_trace(trace)


def jaxpr_of(trace: Any, outputs: list[Any]) -> Any:
    """The closed Jaxpr of a running trace with these tracers of it as outputs."""
    info, source = trace.frame.debug_info, _source_info_util.current()
    # The names in the debug info are those of the arguments and results that JAX knows of: there are more by now.
    jaxpr, constants = trace.frame.to_jaxpr(trace, outputs, info and info.with_unknown_names(), source)
    return with_constants(jax.extend.core.ClosedJaxpr, jaxpr, constants)  # pyright: ignore[reportPrivateImportUsage]


def is_of_trace(value: object, trace: object) -> bool:
    """Is it a tracer of this very trace?"""
    return isinstance(value, jax.core.Tracer) and getattr(value, "_trace", None) is trace


def enclosing_jits() -> list[Any]:
    """The functions that JAX is tracing now in this thread, as its caches know them, innermost first."""
    # While JAX traces a jitted function, this frame is on the stack, and its local `fun` is the key in the caches.
    code = getattr(getattr(_pjit, "_infer_params", None), "__code__", None)
    frames = [frame for frame, _ in traceback.walk_stack(sys._getframe()) if frame.f_code is code]
    return [frame.f_locals["fun"] for frame in frames if "fun" in frame.f_locals]


def forget_traces(function: object) -> None:
    """Removes the traces of a function from JAX's caches. Its compiled programs stay."""
    # `id` does nothing: this JAX has no such cache.
    for cache in (getattr(_pe, "trace_to_jaxpr", None), getattr(_pjit, "_infer_params_cached", None)):
        getattr(cache, "evict_weakref", id)(function)
