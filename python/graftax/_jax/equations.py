# SPDX-License-Identifier: Apache-2.0
"""Jaxprs and their equations, as this version of JAX has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.core
import jax.extend.core
from jax.extend.core import JaxprEqn

from graftax._jax.frame_filter import is_hidden_file


def is_jaxpr(value: object) -> bool:
    """Is it a Jaxpr, closed or not? JAX 0.12 has one class for both."""
    return isinstance(value, (jax.extend.core.Jaxpr, jax.extend.core.ClosedJaxpr))  # pyright: ignore[reportPrivateImportUsage]


def without_constants(jaxpr: Any) -> Any:
    """A closed Jaxpr without its constants: until JAX 0.11 what it is made of."""
    return jaxpr.with_consts(()) if hasattr(jaxpr, "with_consts") else jaxpr.jaxpr


def with_constants(cls: Any, bare: Any, constants: Sequence[Any]) -> Any:
    """A Jaxpr of this class, of what `without_constants` returned and these constants."""
    # JAX 0.12 has one class for both.
    return bare.with_consts(constants) if hasattr(bare, "with_consts") else cls(bare, constants)


def jaxprs_of(equation: JaxprEqn) -> Iterator[Any]:
    """The Jaxprs among the parameters of an equation: branches are several in one."""
    for value in equation.params.values():
        yield from filter(is_jaxpr, value if isinstance(value, list | tuple) else (value,))


def all_equations(jaxpr: Any) -> Iterator[JaxprEqn]:
    """The equations of a Jaxpr and of all Jaxprs inside of it."""
    todo = [jaxpr]
    while todo:
        for equation in todo.pop().eqns:
            yield equation
            todo += jaxprs_of(equation)


def holds_tracers(jaxpr: Any) -> bool:
    """Does a Jaxpr inside of this one have a tracer among its constants?"""
    inner_jaxprs = (inner for equation in all_equations(jaxpr) for inner in jaxprs_of(equation))
    return any(isinstance(x, jax.core.Tracer) for inner in inner_jaxprs for x in getattr(inner, "consts", ()))


def count_equations(jaxpr: Any) -> int:
    return sum(1 for _ in all_equations(jaxpr))


def user_callback(callback: object) -> Any:
    """The user's function inside the flat one of a callback's equation."""
    # JAX flattens the arguments of some callbacks in a closure, and those of others in an object.
    cells = getattr(callback, "__closure__", None) or ()
    names: tuple[str, ...] = getattr(getattr(callback, "__code__", None), "co_freevars", ())
    inner = dict(zip(names, cells, strict=True)).get("callback")
    return getattr(callback, "callback_func", callback) if inner is None else inner.cell_contents


def source_frames(equation: JaxprEqn) -> list[tuple[str, int, str]]:
    """(file, line, function) of the code that made an equation, innermost first, without that of JAX and graftax."""
    frames = getattr(equation.source_info.traceback, "frames", None) or ()
    folder_of_jax = str(Path(jax.__file__).parent)  # JAX hides only some of its own files
    users = [f for f in frames if not is_hidden_file(f.file_name) and not f.file_name.startswith(folder_of_jax)]
    return [(f.file_name, f.line_num, f.function_name) for f in users]


def run_equation(equation: JaxprEqn, operands: list[Any]) -> list[Any]:
    """The outputs of one equation. JAX 0.12 has the functions of a custom rule among the parameters."""
    params = equation.primitive.get_bind_params(equation.params)
    functions, params = params if isinstance(params, tuple) else ([], params)
    with equation.ctx.manager:
        outputs = equation.primitive.bind(*functions, *operands, **params)
    return list(outputs) if equation.primitive.multiple_results else [outputs]


def closed(jaxpr: Any) -> Any:
    """A closed Jaxpr of one without constants."""
    return jax.extend.core.ClosedJaxpr(jaxpr, ())  # pyright: ignore[reportPrivateImportUsage]


def scan_parts(params: dict[str, Any], count: int) -> tuple[int, int]:
    """(how many of the operands of a scan are constants, how many are carried), of this many operands.

    Raises:
        KeyError, AttributeError: if this JAX says it otherwise.
    """
    # JAX 0.12 says it with trees.
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carried, _ = params["ft_in"].update(list(range(count))).unpack()
    return len(list(constants)), len(list(carried))


def name_scopes(equation: JaxprEqn) -> tuple[list[str], list[str]]:
    """(transforms, named scopes) that an equation was made in, outermost first."""
    stack = getattr(equation.source_info.name_stack, "stack", ())
    transforms = [scope.name for scope in stack if type(scope).__name__ == "Transform"]
    return transforms, [scope.name for scope in stack if type(scope).__name__ != "Transform"]
