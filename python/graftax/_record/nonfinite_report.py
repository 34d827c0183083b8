# SPDX-License-Identifier: Apache-2.0
"""One place where a program makes a non-finite value, and what is said about it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from graftax._capture.code_owner import is_users
from graftax._jax.equations import name_scopes, source_frames
from graftax._record.origin_marks import Value, is_elementwise, is_floating


@dataclasses.dataclass(frozen=True)
class Enclosing:
    """An equation whose inner program is run, such as a scan, and the number of the iteration or branch."""

    equation: JaxprEqn
    number: int | None = None

    def text(self) -> str:
        # JAX's function has another name than its primitive.
        name = {"while": "while_loop"}.get(self.equation.primitive.name, self.equation.primitive.name)
        unit = "branch" if name == "cond" else "iteration"
        return "" if self.number is None else f"{unit} {self.number} of {name}"


@dataclasses.dataclass
class Origin:
    """Where a non-finite value comes from: an equation, an argument, or a constant of the program.

    Attributes:
        kind: "equation", "argument" or "constant".
        value: "nan" or "inf", as it was first.
        operation: JAX's name of the operation; of an argument or a constant, empty.
        path: the key path of the object whose method made it, or of the argument; empty for plain functions.
        file, line, function: the innermost code outside of installed packages, or the innermost of all.
        inside: the library function that ran the operation, `file:line (function)`; empty if it is your own code.
        is_backward: it belongs to a derivative alone.
        loops: "iteration 3 of scan" and the like, outermost first.
        operands: the operands where the value is, in order.
        inputs: the ranges of the inputs.
        times: how often the same equation made such a value, with the iterations of loops.
        reaches_result: False if no result depends on it.
    """

    kind: str
    value: str
    operation: str = ""
    path: str = ""
    file: str = ""
    line: int = 0
    function: str = ""
    inside: str = ""
    is_backward: bool = False
    loops: tuple[str, ...] = ()
    operands: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    times: int = 1
    reaches_result: bool = False

    def __str__(self) -> str:
        place = f" at {os.path.basename(self.file)}:{self.line}" if self.file else ""
        if self.kind == "argument":
            return f"{self.path}: the argument is {self.value} already"
        if self.kind == "constant":
            return f"the constant {self.value}{place}"
        subject = f"{self.path}: " if self.path else f"{self.function}: " if self.function else ""
        operands = f" of {' and '.join(self.operands)}" if self.operands else ""
        parts = [f"{subject}{self.operation}{operands} is {self.value}{place}"]
        parts += [f"in {self.inside}"] if self.inside else []
        parts += [", ".join(self.loops)] if self.loops else []
        parts += ["in the derivative"] if self.is_backward else []
        parts += [f"inputs: {', '.join(self.inputs)}"] if self.inputs else []
        return "; ".join(parts)


def origin_of_equation(
    equation: JaxprEqn,
    enclosing: Sequence[Enclosing],
    inputs: Sequence[Value],
    output: Any,
    is_made: np.ndarray[Any, Any],
) -> Origin:
    """The origin of the elements of an output that `is_made` marks; the first of them is described."""
    origin = _placed(equation, enclosing)
    first = tuple(np.argwhere(is_made)[0]) if is_made.any() else ()
    origin.value = "nan" if np.isnan(np.asarray(output)[first]) else "inf"
    origin.operation = equation.primitive.name
    if is_elementwise(equation):
        shape = is_made.shape
        origin.operands = tuple(_number(np.broadcast_to(np.asarray(x.data), shape)[first]) for x in inputs)
    origin.inputs = tuple(range_text(x.data) for x in inputs if is_floating(x.data))
    return origin


def origin_of_constant(equation: JaxprEqn, enclosing: Sequence[Enclosing], value: Any) -> Origin:
    origin = _placed(equation, enclosing)
    origin.kind, origin.value = "constant", "nan" if np.isnan(np.asarray(value)).any() else "inf"
    return origin


def _placed(equation: JaxprEqn, enclosing: Sequence[Enclosing]) -> Origin:
    frames: list[tuple[str, int, str]] = []
    scopes: list[str] = []
    transforms: list[str] = []
    for level in (*(e.equation for e in enclosing), equation):
        # Levels begin with the outermost equation, and frames with the innermost call.
        frames = [*source_frames(level), *frames]
        more_transforms, more_scopes = name_scopes(level)
        transforms += more_transforms
        scopes += more_scopes
    origin = Origin("equation", "nan", path=_object_path(scopes), is_backward="transpose" in transforms)
    # An equation without a number is a call, and neither a loop nor a branch.
    origin.loops = tuple(text for e in enclosing if (text := e.text()))
    if frames:
        users_frame = next((frame for frame in frames if is_users(frame[0])), frames[0])
        origin.file, origin.line, origin.function = users_frame
        if users_frame is not frames[0]:
            file, line, function = frames[0]
            origin.inside = f"{os.path.basename(file)}:{line} ({function})"
    return origin


def _object_path(scopes: Sequence[str]) -> str:
    """The last scope that is below an earlier one: those of objects are nested, as `model`, `model.layers[0]`."""
    for i in reversed(range(len(scopes))):
        root = scopes[i].partition(".")[0].partition("[")[0]
        if root in scopes[:i] or any(scope.startswith((root + ".", root + "[")) for scope in scopes[:i]):
            return scopes[i]
    return scopes[-1] if scopes else ""


def _number(x: Any) -> str:
    return f"{x:.6g}" if np.issubdtype(np.asarray(x).dtype, np.floating) else str(x)


def range_text(x: Any) -> str:
    """`float32[3,4] from -1 to 112.4, 2 nan`."""
    array = np.asarray(x)
    head = f"{array.dtype}[{','.join(map(str, array.shape))}]"
    # Complex numbers have no order, and so no range.
    if array.size == 0 or np.iscomplexobj(array):
        return head
    numbers = array.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    nans, infs = int(np.isnan(numbers).sum()), int(np.isinf(numbers).sum())
    parts = [f"from {finite.min():.6g} to {finite.max():.6g}"] if finite.size else []
    return " ".join([head, ", ".join([*parts, *([f"{nans} nan"] if nans else []), *([f"{infs} inf"] if infs else [])])])
