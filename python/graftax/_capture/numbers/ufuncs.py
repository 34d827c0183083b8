# SPDX-License-Identifier: Apache-2.0
"""The calls of NumPy with a symbol that the host repeats, and their names: those that make a scalar of scalars."""

from __future__ import annotations

import dis
import operator
import types
from collections.abc import Callable
from typing import Any, cast

import numpy as np

# What a HostProgram calls an operator -> the function of Python, the ufunc of NumPy.
OPERATORS: dict[str, tuple[Callable[[Any, Any], Any], Any]] = {
    "+": (operator.add, np.add),
    "-": (operator.sub, np.subtract),
    "*": (operator.mul, np.multiply),
    "/": (operator.truediv, np.divide),
    "//": (operator.floordiv, np.floor_divide),
    "%": (operator.mod, np.remainder),
    "**": (operator.pow, np.power),
    "<<": (operator.lshift, np.left_shift),
    ">>": (operator.rshift, np.right_shift),
    "&": (operator.and_, np.bitwise_and),
    "|": (operator.or_, np.bitwise_or),
    "^": (operator.xor, np.bitwise_xor),
    "<": (operator.lt, np.less),
    "<=": (operator.le, np.less_equal),
    "==": (operator.eq, np.equal),
    "!=": (operator.ne, np.not_equal),
    ">": (operator.gt, np.greater),
    ">=": (operator.ge, np.greater_equal),
}
_NAMES_OF_UFUNCS = {ufunc: name for name, (_, ufunc) in OPERATORS.items()}
_BY_INSTRUCTION = (dis.opmap["BINARY_OP"], dis.opmap["COMPARE_OP"])
_FUNCTIONS = frozenset({np.round, np.around, np.clip, np.nan_to_num, np.isclose, np.interp})
_KINDS = "biuf"


def is_scalar(value: object) -> bool:
    """Is it a NumPy scalar: a bool, an integer or a float of at most 64 bits?"""
    return isinstance(value, np.generic) and value.dtype.kind in _KINDS and value.itemsize <= 8


def name_of_ufunc(ufunc: Any, method: str, options: Any, frame: types.FrameType) -> str | None:
    """The name under which the host repeats a call of a ufunc; None if it does not.

    An operator of NumPy scalars comes here, too. It gets the name of the operator: `np.power` may round otherwise than
    `**` does.
    """
    # A node of the host's program has one result and no options, unlike `np.modf` and `np.add.reduce`.
    if method != "__call__" or options or ufunc.nout != 1:
        return None
    if ufunc in _NAMES_OF_UFUNCS and frame.f_code.co_code[frame.f_lasti] in _BY_INSTRUCTION:
        return _NAMES_OF_UFUNCS[ufunc]
    if ufunc is np.power and "power" not in frame.f_code.co_names:
        return None  # `pow` or `operator.pow`, of which one was given a NumPy scalar
    return f"np.{ufunc.__name__}" if getattr(np, ufunc.__name__, None) is ufunc else None


def name_of_function(f: Callable[..., object], options: object) -> str | None:
    """The same for a function of NumPy that is no ufunc."""
    return f"np.{f.__name__}" if not options and f in _FUNCTIONS else None


def type_may_change(operands: list[Any], value: object) -> bool:
    """Could other numbers of these types give a scalar of another type? An int may be too large for 64 bits."""
    plain = all(type(operand) in (int, float, bool) for operand in operands)
    return isinstance(value, np.generic) and plain and int in map(type, operands)


class Points(tuple[float, ...]):
    """The points of `np.interp`, none of which is a symbol."""

    __slots__ = ()


def as_points(value: object) -> Any:
    """A list, a tuple or an array of numbers as points; anything else as it is."""
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype in (np.float64, np.int64):
        value = cast("list[Any]", value.tolist())
    if type(value) not in (list, tuple):
        return value
    points = cast("list[Any]", value)
    return Points(points) if all(type(point) in (int, float) for point in points) else value
