# SPDX-License-Identifier: Apache-2.0
"""What a tracer of JAX's tells: its trace, the transform that made it, the equation that it comes from.

Nothing public says so. A version of JAX that keeps less has less said: no transform, no equation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import ReferenceType

from jax.core import Tracer
from jax.extend.core import Literal

from graftax._jax.compat import current_trace

_MAKES = {  # what makes a trace, as JAX names it: the user's name, and this package's
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
    """The traces that run in this thread, the innermost first."""
    found: list[Any] = []
    trace = current_trace()
    while trace is not None:
        found += [trace, *filter(None, [getattr(trace, "tangent_trace", None)])]
        trace = getattr(trace, "parent_trace", None)
    return found


def trace_of(leaf: Any) -> Any:
    """The trace that a tracer belongs to; None for what is no tracer."""
    return getattr(leaf, "_trace", None) if isinstance(leaf, Tracer) else None


def is_ended(leaf: Any, live: list[Any]) -> bool:
    """Is this a tracer of a trace that has ended? `live` are those that run.

    JAX says so of some kinds. A trace that makes a program forgets its equations when it ends.
    """
    trace = trace_of(leaf)
    if trace is None or not live or any(one is trace for one in live):  # none at all: this JAX does not tell
        return False
    return not (hasattr(trace, "frame") and trace.frame.tracing_eqns) or not trace.is_valid()


def read_in_trace() -> set[int]:
    """The ids of the values that the program reads which is traced now: its own, and those around it."""
    trace = current_trace()
    frame = getattr(trace, "frame", None)
    found = set(map(id, getattr(frame, "constvar_to_val", {}).values()))
    for equation in getattr(frame, "tracing_eqns", ()):
        alive: Any = equation() if isinstance(equation, ReferenceType) or not hasattr(equation, "params") else equation
        found.update(map(id, getattr(alive, "in_tracers", ())))
    return found


class Made(NamedTuple):
    """What made a value of a program."""

    equation: Any
    operands: list[Any]
    result: int  # which of the results it is

    @property
    def name(self) -> str:
        """Of the operation."""
        return self.equation.primitive.name

    @property
    def params(self) -> dict[str, Any]:
        """Of the operation: those of a loop hold its program."""
        return self.equation.params


def made_by(value: Any, equations: Mapping[Any, Any]) -> Made | None:
    """What made a tracer, or a variable of a program; None for arguments, and where JAX does not keep it.

    Args:
        equations: those of the program that a variable is of.
    """
    if isinstance(value, Tracer):
        equation: Any = getattr(value, "parent", None)
        operands, variable = getattr(equation, "in_tracers", None), getattr(value, "val", None)
    else:
        equation, variable = None if isinstance(value, Literal) else equations.get(value), value
        operands = getattr(equation, "invars", None)
    if operands is None:
        return None
    index = next((i for i, result in enumerate(equation.outvars) if result is variable), None)
    return None if index is None else Made(equation, list(operands), index)


def is_literal(value: Any) -> bool:
    """Is it a number that stands in the program?"""
    return isinstance(getattr(value, "val", None) if isinstance(value, Tracer) else value, Literal)


def carry_of_scan(params: dict[str, Any]) -> tuple[int, int]:
    """(how many operands of a scan stand before the carry, how many are the carry); zeros where JAX does not say.

    Until JAX 0.11 these are two parameters.
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    parts = getattr(params.get("ft_in"), "elts", ())
    return (len(parts[0]), len(parts[1])) if len(parts) == 3 else (0, 0)


def traced_for(trace: Any) -> str:
    """What a trace makes a program for, such as "jit" or "scan"; the name of its class where it makes none."""
    about = getattr(getattr(trace, "frame", None), "debug_info", None)
    return type(trace).__name__ if about is None else about.traced_for


def transform_of(tracer: Any) -> tuple[str, str]:
    """(the transform of JAX's that a tracer is of, the name of this package's); both are empty for an unknown one."""
    trace = trace_of(tracer)
    kind = traced_for(trace)
    if kind == "LinearizeTrace" and not getattr(trace, "is_vjp", True):
        return "jax.linearize", "linearize"
    return _MAKES.get(kind, ("", ""))
