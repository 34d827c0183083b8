# SPDX-License-Identifier: Apache-2.0
"""The program of one part of a trace, which the trace calls several times."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax

from graftax._jax.compilation import own_jit
from graftax._jax.equations import all_equations, is_jaxpr

_LIBRARIES = ("jax.", "jaxlib.", "numpy.", "builtins")
_HELD = ("f", "f_transformed", "transforms")  # attributes of the objects in which JAX wraps functions


# XLA optimizes the program of a part once for all calls, and puts it in their place at the end. On CPUs it does not
# come to an end with this where such a program has small loops, as that of random numbers has. So it is asked for
# where no equation is a loop, nor its derivative, nor what XLA makes of it.
_INLINE: Any = getattr(getattr(jax, "Inline", None), "XLA_LATE", False)
_NAMES_WITHOUT_LOOPS = """
    abs acos add add_any and argmax argmin asin atan atan2 broadcast_in_dim cbrt ceil checkpoint clamp concatenate
    conv_general_dilated convert_element_type copy copy_p cos cosh custom_jvp_call custom_vjp_call div dot_general eq
    erf erfc exp exp2 expand_dims expm1 floor ge gt imag integer_pow iota is_finite jit le log log1p logistic lt max
    min mul name ne neg not optimization_barrier or pad pjit pow real reduce_and reduce_max reduce_min reduce_or
    reduce_precision reduce_prod reduce_sum rem remat2 reshape rev round rsqrt select_n sharding_constraint sign sin
    sinh slice split sqrt square squeeze stop_gradient sub tan tanh transpose xor
"""
_WITHOUT_LOOPS = frozenset(_NAMES_WITHOUT_LOOPS.split())


def jit_of_calls(flat: Callable[..., Any], jaxpr: Any) -> Any:
    """The jitted function that a trace calls for each of the parts that repeat. `jaxpr`: what a trace of it gave."""
    is_loop_free = all(equation.primitive.name in _WITHOUT_LOOPS for equation in all_equations(jaxpr))
    return own_jit(flat, inline=_INLINE if is_loop_free else False)


def runs_foreign_code(jaxpr: Any) -> bool:
    """Does it have effects, or may code that is not JAX's run where it is transformed or executed?"""
    # The rule of a derivative or a function on the host may have closed over the objects of one call.
    return bool(jaxpr.effects) or any(map(_is_foreign, _callables(jaxpr)))


def _callables(jaxpr: Any) -> Iterator[Any]:
    """What can be called among the parameters of its equations, and of the jaxprs in it."""
    todo: list[Any] = [jaxpr]
    visited = set[int]()
    while todo:
        value = todo.pop()
        if id(value) in visited or isinstance(value, (str, int, float, type, jax.Array)):
            continue
        visited.add(id(value))
        if is_jaxpr(value):
            # The policy of a checkpoint decides what is kept for the derivative, and not what is computed.
            todo += [x for equation in value.eqns for name, x in equation.params.items() if name != "policy"]
        elif isinstance(value, (list, tuple)):
            todo += value
        elif isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, functools.partial):
            todo += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, types.FunctionType):
            yield value
            # A cell that is empty has no contents to look at: `cell_contents` would raise.
            todo += [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        elif callable(value):
            yield value
        else:
            todo += [getattr(value, name) for name in _HELD if hasattr(value, name)]


def _is_foreign(value: object) -> bool:
    module = getattr(value if isinstance(value, types.FunctionType) else type(value), "__module__", None) or ""
    return not f"{module}.".startswith(_LIBRARIES)
