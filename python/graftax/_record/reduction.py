# SPDX-License-Identifier: Apache-2.0
"""The smallest part of a program that still fails: fewer equations, those inside of what is left, smaller arrays."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from graftax._jax.arrays import ref_types
from graftax._jax.equations import run_equation
from graftax._jax.tracers import is_literal
from graftax._record.failures import Failure
from graftax._record.origin_marks import are_finite, is_elementwise
from graftax._record.program_parts import (
    CannotRun,
    Part,
    Step,
    inlined,
    inner_programs,
    iterations,
    literal_value,
    operands_of,
    part_of,
)

Fails = Callable[[Part], bool]

# These take arrays of any size: none of their parameters is a shape.
_ANY_SIZE = frozenset(
    ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "dot_general", "cumsum", "cumprod", "cummax", "select_n")
    + ("cumlogsumexp", "stop_gradient", "copy", "erf_inv", "is_finite", "eq", "lt", "gt", "le", "ge", "ne")
)


def reduced(part: Part, failure: Failure) -> Part:
    """The smallest part of one that fails."""
    part = with_fewer_equations(part, failure.shows)
    # Opening a call or a loop adds equations, so fewer of them are looked for after each.
    while (opened := next(filter(failure.shows, _opened(part, failure)), None)) is not None:
        part = with_fewer_equations(opened, failure.shows)
    return with_smaller_arrays(part, failure.shows)


def with_fewer_equations(part: Part, fails: Fails) -> Part:
    """Removes equations as long as the rest fails (delta debugging): what they made becomes an input."""
    steps, count = list(part.steps), 2
    while len(steps) > 1:
        size = max(len(steps) // count, 1)
        for begin in range(0, len(steps), size):
            remainder = dataclasses.replace(part, steps=(*steps[:begin], *steps[begin + size :]))
            if remainder.steps and fails(remainder):
                # Slices of the same size, of what is left.
                steps, count = list(remainder.steps), max(count - 1, 2)
                break
        else:  # every slice is needed: halve them
            if size == 1:
                break
            count = min(count * 2, len(steps))
    return dataclasses.replace(part, steps=tuple(steps))


def _opened(part: Part, failure: Failure) -> Iterator[Part]:
    """The part with the equations inside of one that calls them; if it is a loop alone, each of its iterations."""
    for position, step in enumerate(part.steps):
        operands = [part.values.get(number) for number in step.operands]
        # An equation before it could not run, so these operands have no values.
        if any(operand is None for operand in operands):
            continue
        programs = inner_programs(step.equation, operands)
        for program in programs if failure.in_any_branch else programs[:1]:
            yield inlined(part, position, program, failure.run_equation)
        if len(part.steps) == 1 and not any(isinstance(operand, ref_types) for operand in operands):
            # Where an iteration cannot run, the parts until then have not failed.
            with contextlib.suppress(CannotRun):
                for iteration in iterations(step.equation, operands, failure.run_equation):
                    yield part_of(iteration.body, iteration.inputs, failure.run_equation)


def with_smaller_arrays(part: Part, fails: Fails) -> Part:
    """Takes halves of the arrays along all axes of one size, as long as they fail."""
    equations = [step.equation for step in part.steps]
    if not all(is_elementwise(e) or e.primitive.name in _ANY_SIZE or not e.params for e in equations):
        return part
    while (half := next(filter(fails, _halves(part)), None)) is not None:
        part = half
    return part


def _halves(part: Part) -> Iterator[Part]:
    inputs = {number: part.values[number] for number in part.inputs}
    arrays = {number: array for number, array in inputs.items() if not isinstance(array, ref_types)}
    # Axes of one size may be the same dimension, so all of them are cut alike.
    sizes = {size for array in arrays.values() for size in np.shape(array)}
    for size in sorted(sizes - {0, 1}, reverse=True):
        for piece in (slice(0, (size + 1) // 2), slice(size // 2, size)):
            cut: dict[int, Any] = {}
            for number, array in arrays.items():
                cut[number] = jnp.asarray(array)[tuple(piece if n == size else slice(None) for n in np.shape(array))]
            yield dataclasses.replace(part, values={**part.values, **cut})


# ---- one equation, found by where it is


def equation_at(program: Any, inputs: Sequence[Any], place: Sequence[int]) -> Part | None:
    """The equation that is found by the ids of those around it, outermost first, and its own; None if it is not met.

    Args:
        program: a closed Jaxpr.
        inputs: its arguments.
        place: the ids.
    """
    values: dict[Any, Any] = dict(zip(program.jaxpr.invars, inputs, strict=True))
    values.update(zip(program.jaxpr.constvars, program.consts, strict=True))
    for equation in program.jaxpr.eqns:
        operands = [literal_value(v) if is_literal(v) else values[v] for v in equation.invars]
        if id(equation) == place[0]:
            if len(place) == 1:
                count = len(operands)
                outputs = tuple(range(count, count + len(equation.outvars)))
                return Part((Step(equation, tuple(range(count)), outputs),), dict(enumerate(operands)))
            return _equation_inside(equation, operands, place[1:])
        values.update(zip(equation.outvars, run_equation(equation, operands), strict=True))
    return None


def _equation_inside(equation: JaxprEqn, operands: list[Any], place: Sequence[int]) -> Part | None:
    for program in inner_programs(equation, operands)[:1]:
        return equation_at(program, operands_of(program, operands), place)
    for iteration in iterations(equation, operands):
        if not all(map(are_finite, iteration.outputs)):
            return equation_at(iteration.body, iteration.inputs, place)
    return None
