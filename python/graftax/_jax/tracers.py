# SPDX-License-Identifier: Apache-2.0
"""Reads a JAX tracer: its trace, its transform, the equation that produced it.

None of this is public. Where a version of JAX lacks an attribute, the transform or the equation is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from weakref import ReferenceType

from jax.core import Tracer
from jax.extend.core import JaxprEqn, Literal

from graftax import _core
from graftax._jax.traces import current_trace

_TRANSFORM_NAMES = {  # JAX's internal name: (public names in JAX, name in graftax)
    "BatchTrace": ("jax.vmap", "vmap"),
    "JVPTrace": ("jax.jvp (or jacfwd, hessian)", "jvp"),
    "LinearizeTrace": ("jax.grad (or value_and_grad, vjp, jacrev)", "grad"),
    "scan": ("jax.lax.scan (or map)", "scan"),
    "fori_loop": ("jax.lax.fori_loop", "fori_loop"),
    "while_body": ("jax.lax.while_loop", "while_loop"),
    "while_cond": ("jax.lax.while_loop", "while_loop"),
    "cond": ("jax.lax.cond", "cond"),
    "switch": ("jax.lax.switch", "switch"),
    "checkpoint / remat": ("jax.checkpoint", "checkpoint"),
    "custom_jvp fun": ("jax.custom_jvp", "custom_jvp"),
    "custom_vjp fun": ("jax.custom_vjp", "custom_vjp"),
    "shard_map": ("jax.shard_map", "shard_map"),
    "jit": ("jax.jit (or make_jaxpr, eval_shape)", "jit"),
}


def live_traces() -> list[Any]:
    """The running traces of this thread, innermost first."""
    traces: list[Any] = []
    trace = current_trace()
    while trace is not None:
        traces += [trace, *filter(None, [getattr(trace, "tangent_trace", None)])]
        trace = getattr(trace, "parent_trace", None)
    return traces


def trace_of(leaf: object) -> Any:
    """The trace that a tracer belongs to; None for other values."""
    return getattr(leaf, "_trace", None) if isinstance(leaf, Tracer) else None


def has_tracer(values: Iterable[object]) -> bool:
    """Is one of these a tracer? Arrays have few classes, which are quicker to look at than a thousand arrays."""
    return any(issubclass(kind, Tracer) for kind in _core.types_of(values))


def copy_of_tracer(tracer: object) -> Any:
    """Another tracer of the same value."""
    copy = object.__new__(type(tracer))
    slots = {name for cls in type(tracer).__mro__ for name in getattr(cls, "__slots__", ()) if name != "__weakref__"}
    for name in slots:
        if hasattr(tracer, name):
            setattr(copy, name, getattr(tracer, name))
    return copy


def is_ended(leaf: object, live: list[Any]) -> bool:
    """Is this a leaked tracer, one of a trace that has ended? `live` are the running traces."""
    trace = trace_of(leaf)
    # Without any live trace, this JAX hides them, and nothing is known.
    if trace is None or not live or any(live_trace is trace for live_trace in live):
        return False
    # JAX invalidates only some kinds of traces. Those that make a program drop their equations when they end.
    return not (hasattr(trace, "frame") and trace.frame.tracing_eqns) or not trace.is_valid()


def read_in_trace() -> set[int]:
    """The ids of all values that equations of the current trace read, also from outer traces."""
    trace = current_trace()
    frame = getattr(trace, "frame", None)
    ids = set(map(id, getattr(frame, "constvar_to_val", {}).values()))
    for equation in getattr(frame, "tracing_eqns", ()):
        # A weak reference, a function, or the equation itself: see `traces.equations`.
        alive: Any = equation() if isinstance(equation, ReferenceType) or not hasattr(equation, "params") else equation
        ids.update(map(id, getattr(alive, "in_tracers", ())))
    return ids


class Producer(NamedTuple):
    """The equation that produced a value of a program."""

    equation: Any
    operands: list[Any]
    result: int  # index in the results of the equation

    @property
    def name(self) -> str:
        """The name of the primitive."""
        return self.equation.primitive.name

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the primitive: those of a loop hold its program."""
        return self.equation.params


def producer_of(value: object, equations: Mapping[Any, JaxprEqn]) -> Producer | None:
    """The producer of a tracer, or of a variable of a program; None for arguments, or if JAX has not kept it.

    Args:
        equations: of the program of a variable, by the variables that they set.
    """
    # A tracer knows its equation; a variable of an inner program is looked up.
    if isinstance(value, Tracer):
        equation: Any = getattr(value, "parent", None)
        operands, variable = getattr(equation, "in_tracers", None), getattr(value, "val", None)
    else:
        equation, variable = None if isinstance(value, Literal) else equations.get(value), value
        operands = getattr(equation, "invars", None)
    if operands is None:
        return None
    index = next((i for i, result in enumerate(equation.outvars) if result is variable), None)
    return None if index is None else Producer(equation, list(operands), index)


def is_literal(value: object) -> bool:
    return isinstance(getattr(value, "val", None) if isinstance(value, Tracer) else value, Literal)


def traced_for(trace: object) -> str:
    """What a trace makes a program for, such as "jit" or "scan"; the name of its class if it makes none."""
    about = getattr(getattr(trace, "frame", None), "debug_info", None)
    return type(trace).__name__ if about is None else about.traced_for


def transform_of(tracer: object) -> tuple[str, str]:
    """(JAX's name of the transform of a tracer, graftax's name); empty texts for an unknown transform."""
    trace = trace_of(tracer)
    trace_kind = traced_for(trace)
    if trace_kind == "LinearizeTrace" and not getattr(trace, "is_vjp", True):
        return "jax.linearize", "linearize"
    return _TRANSFORM_NAMES.get(trace_kind, ("", ""))
