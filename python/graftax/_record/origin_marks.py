# SPDX-License-Identifier: Apache-2.0
"""Where the non-finite elements of a value come from: a bit for each origin, carried along by every equation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from graftax._jax.arrays import ref_types
from graftax._jit.finite_check import is_floating_dtype

MOST_BITS = 31  # further origins share the last one

# Equations that move elements and compute none: applied to the marks, they move these in the same way. For each, how
# many of its operands are data; the others are indices.
_MOVES = {
    **{"slice": 1, "reshape": 1, "transpose": 1, "broadcast_in_dim": 1, "squeeze": 1, "expand_dims": 1, "rev": 1},
    **{"copy": 1, "copy_p": 1, "dynamic_slice": 1, "dynamic_update_slice": 2, "gather": 1, "pad": 2, "split": 1},
}
# Each element of the output depends on those in its place.
# fmt: off
_ELEMENTWISE = frozenset((
    "abs", "acos", "acosh", "add", "add_any", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil",
    "clamp", "complex", "conj", "convert_element_type", "cos", "cosh", "digamma", "div", "erf", "erf_inv",
    "erfc", "exp", "exp2", "expm1", "floor", "imag", "integer_pow", "lgamma", "log", "log1p", "logistic", "max",
    "min", "mul", "neg", "nextafter", "pow", "real", "reduce_precision", "rem", "round", "rsqrt", "sign", "sin",
    "sinh", "sqrt", "square", "sub", "tan", "tanh",
))
# fmt: on
_REDUCES = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod")


class Value(NamedTuple):
    """A value of the program, with the marks of its elements: None where all of them are finite."""

    data: Any
    marks: np.ndarray[Any, Any] | None = None


def is_floating(x: object) -> bool:
    return not isinstance(x, ref_types) and is_floating_dtype(getattr(x, "dtype", None))


@jax.jit
def _all_finite(x: Any) -> Any:
    return jnp.isfinite(x).all()


_ON_HOST = 1 << 20  # bytes; a smaller array is copied to the host, a larger one reduced on its device


def are_finite(x: Any) -> bool:
    """Are all elements finite? True for what is not floating."""
    if not is_floating(x):
        return True
    return bool(np.isfinite(np.asarray(x)).all()) if x.nbytes <= _ON_HOST else bool(_all_finite(x))


def bits(marks: np.ndarray[Any, Any] | None) -> int:
    return 0 if marks is None else int(np.bitwise_or.reduce(marks, axis=None))


def move(equation: JaxprEqn, inputs: Sequence[Value]) -> list[np.ndarray[Any, Any]] | None:
    """The marks of the outputs of an equation that only moves elements; None for any other."""
    name = equation.primitive.name
    if name == "select_n":
        selector, *cases = inputs
        marks = [_marks(case) for case in cases]
        chosen = np.broadcast_to(np.asarray(selector.data), marks[0].shape).astype(np.intp)
        return [np.take_along_axis(np.stack(marks), chosen[None], 0)[0]]
    if name == "concatenate":
        return [np.concatenate([_marks(x) for x in inputs], axis=equation.params["dimension"])]
    # Each element of the result may come from all elements that it was reduced from.
    if name in _REDUCES:
        return [np.bitwise_or.reduce(_marks(inputs[0]), axis=tuple(equation.params["axes"]))]
    count = _MOVES.get(name)
    if count is None:
        return None
    operands = [jnp.asarray(_marks(x)) for x in inputs[:count]] + [x.data for x in inputs[count:]]
    params = dict(equation.params)
    if name == "gather":
        # What a gather fills in for an index out of range comes from no element, so it gets no mark.
        params["fill_value"] = 0
    moved = equation.primitive.bind(*operands, **params)
    return [np.asarray(x) for x in (moved if equation.primitive.multiple_results else [moved])]


def merge(equation: JaxprEqn, inputs: Sequence[Value], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """The marks that may reach each element of an output: those in its place, or all of them."""
    marks = np.zeros(shape, np.uint32)
    in_place = is_elementwise(equation)
    for value in inputs:
        if value.marks is not None:
            marks |= value.marks if in_place else np.uint32(bits(value.marks))
    return marks


def is_elementwise(equation: JaxprEqn) -> bool:
    """Does each element of the output depend on those in its place only?"""
    return equation.primitive.name in _ELEMENTWISE


def _marks(value: Value) -> np.ndarray[Any, Any]:
    return np.zeros(np.shape(value.data), np.uint32) if value.marks is None else value.marks
