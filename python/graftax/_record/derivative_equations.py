# SPDX-License-Identifier: Apache-2.0
"""Does an equation belong to the function itself, or to its derivative alone?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from graftax._jax.equations import name_scopes
from graftax._record.nonfinite_report import Enclosing


def is_of_derivative(equation: JaxprEqn, levels: Sequence[tuple[Any, Enclosing | None]]) -> bool:
    """Do the outputs of an equation reach transposed equations alone?

    A linearization computes its factors, such as 1 / (2 sqrt(x)), beside the function; only transposed code uses them.

    Args:
        levels: the programs around the equation, outermost first, each with the equation in it that is run.
    """
    outvars: Sequence[Any] = equation.outvars
    is_transposed = False
    # From the innermost program outwards: the outputs that are reached are then those of the enclosing equation.
    for index in reversed(range(len(levels))):
        jaxpr = levels[index][0]
        reached, has_transposed, has_dead_end = _reach(jaxpr, outvars)
        is_transposed |= has_transposed
        # It reaches an equation whose outputs nobody uses, such as a callback: that belongs to the function.
        if has_dead_end:
            return False
        enclosing = levels[index - 1][1] if index else None
        if enclosing is None:
            return is_transposed and not reached
        if not reached:
            return is_transposed
        outvars = [enclosing.equation.outvars[i] for i in reached if i < len(enclosing.equation.outvars)]
    return False


def _reach(jaxpr: Any, outvars: Sequence[Any]) -> tuple[list[int], bool, bool]:
    """(outputs that are reached without transposed equations, is one of these met, does a path end nowhere).

    Args:
        outvars: where the paths begin.
    """
    todo = {id(v) for v in outvars}
    outputs = {id(v) for v in jaxpr.outvars}
    has_transposed = has_dead_end = False
    used: set[int] = set()
    steps = [outvars]
    for consumer in jaxpr.eqns:
        operands = {id(v) for v in consumer.invars} & todo
        if not operands:
            continue
        used |= operands
        if "transpose" in name_scopes(consumer)[0]:
            has_transposed = True
        else:
            todo |= {id(v) for v in consumer.outvars}
            steps.append(consumer.outvars)
    for step in steps:
        has_dead_end |= not any(id(v) in used or id(v) in outputs for v in step)
    return [i for i, v in enumerate(jaxpr.outvars) if id(v) in todo], has_transposed, has_dead_end
