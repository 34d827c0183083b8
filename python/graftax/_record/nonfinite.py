# SPDX-License-Identifier: Apache-2.0
"""`graftax.nonfinite`: which equation of a call made its first nan or infinity, and does it reach a result?"""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from graftax._jax.arrays import new_ref, ref_types
from graftax._jax.tracebacks import boundary
from graftax._jit.api import jit
from graftax._jit.jitted import Jitted
from graftax._jit.leaf_names import leaf_names, output_names
from graftax._jit.stages import Staging, Traced, copy_numpy_leaves, match_structure
from graftax._record.nonfinite_report import Origin
from graftax._record.nonfinite_search import Interpreter
from graftax._record.origin_marks import MOST_BITS, Value, are_finite, bits

ALL_FINITE = "{name}: all results are finite"
NO_ORIGIN = "no equation makes one when they run one after the other: the compiled program rounds differently"


class NonfiniteReport:
    """What `graftax.nonfinite` returns. It is true if a result is not finite. `print` it, or let a notebook show it.

    Attributes:
        name: of the function.
        results: the key paths of the results, and of what the call would change, that are not finite.
        cause: the first `Origin` of a value that reaches them; None if all results are finite.
        origins: all origins that reach a result, in the order of the program.
        masked: origins that reach no result.
    """

    def __init__(self, name: str, results: list[str], reaching: list[Origin], masked: list[Origin]) -> None:
        self.name, self.results, self.origins, self.masked = name, results, reaching, masked
        # A constant is written on purpose: it is the cause only where nothing else is.
        computed = [origin for origin in reaching if origin.kind != "constant"]
        self.cause: Origin | None = next(iter([*computed, *reaching]), None)

    def __bool__(self) -> bool:
        return bool(self.results)

    def __str__(self) -> str:
        if not self:
            lines = [ALL_FINITE.format(name=self.name)]
        else:
            lines = [f"{self.name}: not finite: {', '.join(self.results)}", f"cause: {self.cause or NO_ORIGIN}"]
        lines += [f"then: {origin}" for origin in self.origins if origin is not self.cause]
        lines += [f"masked: {origin}" for origin in self.masked]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<graftax.nonfinite of {self.name}: {self.cause or 'all results are finite'}>"

    def table(self) -> list[dict[str, Any]]:
        """A row for each origin: its role (cause, then, masked), value, operation, path, file, line and the rest."""
        rows: list[dict[str, Any]] = []
        for origin in (*self.origins, *self.masked):
            role = "cause" if origin is self.cause else "then" if origin.reaches_result else "masked"
            rows.append({"role": role, **vars(origin)})
        return rows

    def _repr_html_(self) -> str:
        columns = ("role", "value", "operation", "path", "place", "loops", "inputs")
        head = "".join(f"<th>{column}</th>" for column in columns)
        body = ""
        for row in self.table():
            place = f"{os.path.basename(row['file'])}:{row['line']} ({row['function']})" if row["file"] else ""
            operands = f" of {' and '.join(row['operands'])}" if row["operands"] else ""
            cells = (row["role"], row["value"], row["operation"] + operands, row["path"], place)
            cells = (*cells, ", ".join(row["loops"]), "; ".join(row["inputs"]))
            body += f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in cells)}</tr>"
        return f"<p>{html.escape(str(self).splitlines()[0])}</p><table><tr>{head}</tr>{body}</table>"


@boundary
def nonfinite(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> NonfiniteReport:
    """Finds the operation that produces the first nan or infinity of a call.

    The function is traced as by `graftax.jit`, and its equations are run one after the other, including those inside
    loops, branches, custom rules and derivatives. None of your objects is changed. A nan that a `where` drops, so
    that it reaches no result, is listed in `masked` and is not the cause. Callbacks that return a value are called.

    Args:
        function: any function, or one of `graftax.jit`.
        *args, **kwargs: the arguments of the call.

    Returns:
        a `NonfiniteReport`, with the cause: the key path of the object, the file and line, the operation, its inputs.

    Raises:
        UnsupportedValueError: if the function uses a value with hidden state, such as an iterator; names its path. An
            exception of the function itself is raised as usual.

    Example:
        >>> def loss(x):
        ...     return jnp.log(x - 2).sum()
        >>> graftax.nonfinite(loss, jnp.ones(3)).cause.operands
        ('-1',)
    """
    jitted = cast("Jitted[..., Any]", function if isinstance(function, Jitted) else jit(function))
    return find_origins(trace_call(jitted, args, kwargs, repeated=()))[1]


class TracedCall(NamedTuple):
    """The program of a call, and its inputs."""

    traced: Traced[..., Any]
    staging: Staging
    leaves: list[Any]


def trace_call(jitted: Jitted[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any) -> TracedCall:
    """The program of a call with other options of `jit`. Without shared parts, equations have the paths of objects."""
    # Whatever jit has found out about the function's reads is in the stage by now.
    # The check of a recorder would be an equation of the program.
    unchecked = jitted._with_options(finite=None, **options)  # pyright: ignore[reportPrivateUsage]
    traced = unchecked.trace(*args, **kwargs)
    staging = traced._staging  # pyright: ignore[reportPrivateUsage]
    return TracedCall(traced, staging, _leaves(staging, args, kwargs))


def find_origins(call: TracedCall) -> tuple[Interpreter, NonfiniteReport]:
    """Runs the equations of a call."""
    traced, staging, leaves = call
    jaxpr, interpreter = traced.jaxpr, Interpreter()
    names = leaf_names(staging.graphdef, staging.names)
    inputs = [interpreter.argument(name, x) for name, x in zip(names, leaves, strict=True)]
    outputs = interpreter.run(jaxpr.jaxpr, jaxpr.consts, inputs)
    result_names = [name for name, _ in output_names(staging, traced._stage)]  # pyright: ignore[reportPrivateUsage]
    named = [*zip(result_names, outputs, strict=True)]
    # A Ref is a result as well: the caller reads what was written into it.
    for name, value in zip(names, inputs, strict=True):
        if isinstance(value.data, ref_types) and not are_finite(value.data[...]):
            named.append((name, Value(value.data, np.asarray(interpreter.in_refs.get(id(value.data), 0)))))
    return interpreter, _report(interpreter, staging.plan.name, named)


def _leaves(staging: Staging, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    plan = staging.plan
    roots, layout = staging.caller._bind_arguments(args, kwargs, plan)
    match = (plan.name, staging.graphdef, staging.layout, staging.names, roots, layout, plan.record)
    leaves = copy_numpy_leaves(match_structure(*match)[0])
    # A Ref is copied, so that the caller's own stays as it is.
    copies = [new_ref(x[...]) if isinstance(x, ref_types) else x for x in leaves]
    return [x if isinstance(x, (jax.Array, *ref_types)) else jax.numpy.asarray(x) for x in copies]


def _report(interpreter: Interpreter, function_name: str, outputs: Sequence[tuple[str, Value]]) -> NonfiniteReport:
    reached, results = 0, list[str]()
    for name, value in outputs:
        if value.marks is not None and value.marks.any():
            reached |= bits(value.marks)
            results.append(name)
    # Backwards: an origin that reaches a result takes along the infinities it was computed from, which come before it.
    for number in reversed(range(len(interpreter.origins))):
        origin = interpreter.origins[number]
        origin.reaches_result = bool(reached & 1 << min(number, MOST_BITS - 1))
        if origin.reaches_result:
            reached |= interpreter.causes[number]
    reaching = [origin for origin in interpreter.origins if origin.reaches_result]
    masked = [o for o in interpreter.origins if not o.reaches_result and o.kind != "constant"]
    return NonfiniteReport(function_name, results, reaching, masked)
