# SPDX-License-Identifier: Apache-2.0
"""The smallest part of a program that still fails: fewer equations first, then smaller arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

from graftax._jax.arrays import ref_types
from graftax._jax.compilation import own_jit
from graftax._jax.equations import closed, run_equation, scan_parts
from graftax._jax.tracers import is_literal
from graftax._record.interpreter import CALLS, WITH_RULES, first_param
from graftax._record.origin_marks import are_finite, is_elementwise

# These take arrays of any size: none of their parameters is a shape.
_ANY_SIZE = frozenset(
    ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "dot_general", "cumsum", "cumprod", "cummax", "select_n")
    + ("cumlogsumexp", "stop_gradient", "copy", "erf_inv", "is_finite", "eq", "lt", "gt", "le", "ge", "ne")
)


class Step(NamedTuple):
    """An equation with the numbers of its operands and outputs. A literal is an operand with a value of its own."""

    equation: Any
    operands: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Part:
    """Some equations of a program, with the values of what they take from the others.

    Attributes:
        steps: the equations, in order.
        values: by the number of a value, what it was when the program ran.
    """

    steps: tuple[Step, ...]
    values: dict[int, Any]

    @property
    def inputs(self) -> list[int]:
        made = {number for step in self.steps for number in step.outputs}
        used = (number for step in self.steps for number in step.operands)
        return list(dict.fromkeys(number for number in used if number not in made))

    @property
    def outputs(self) -> list[int]:
        """What no equation of the part uses."""
        used = {number for step in self.steps for number in step.operands}
        return [number for step in self.steps for number in step.outputs if number not in used]

    def function(self) -> Callable[..., list[Any]]:
        """The part as a function of its inputs."""
        inputs, outputs = self.inputs, self.outputs

        def part(*arguments: Any) -> list[Any]:
            values = dict(zip(inputs, arguments, strict=True))
            for step in self.steps:
                made = run_equation(step.equation, [values[number] for number in step.operands])
                values.update(zip(step.outputs, made, strict=True))
            return [values[number] for number in outputs]

        return part

    def arguments(self) -> list[Any]:
        return [self.values[number] for number in self.inputs]

    def fails(self) -> bool:
        """Does it make something that is not finite, compiled and out of finite inputs?"""
        arguments = self.arguments()
        if not all(map(are_finite, arguments)):
            return False
        try:
            return not all(map(are_finite, own_jit(self.function())(*arguments)))
        except Exception:  # it is no program of its own, or not for arrays of these shapes
            return False


# ---- from a program to its equations


class Flattening:
    """Runs a program, and collects its equations with those of the functions that it calls."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.values: dict[int, Any] = {}

    def add(self, value: Any) -> int:
        self.values[len(self.values)] = value
        return len(self.values) - 1

    def run(self, jaxpr: Any, constants: Sequence[Any], inputs: Sequence[int]) -> list[int]:
        """The numbers of the outputs of an open Jaxpr, given those of its inputs."""
        numbers: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))
        numbers |= {variable: self.add(value) for variable, value in zip(jaxpr.constvars, constants, strict=True)}
        for equation in jaxpr.eqns:
            operands = [self.add(_literal(v)) if is_literal(v) else numbers[v] for v in equation.invars]
            numbers.update(zip(equation.outvars, self._equation(equation, operands), strict=True))
        return [self.add(_literal(v)) if is_literal(v) else numbers[v] for v in jaxpr.outvars]

    def _equation(self, equation: Any, operands: list[int]) -> list[int]:
        data = [self.values[number] for number in operands]
        inner = inner_program(equation, data)
        if inner is not None:
            program, taken = inner
            return self.run(program.jaxpr, program.consts, operands[len(operands) - len(taken) :])
        if equation.primitive.name in ("debug_callback", "debug_print"):
            return []
        outputs = [self.add(value) for value in run_equation(equation, data)]
        self.steps.append(Step(equation, tuple(operands), tuple(outputs)))
        return outputs


def _literal(v: Any) -> Any:
    return np.asarray(v.val, v.aval.dtype)


def inner_program(equation: Any, operands: Sequence[Any]) -> tuple[Any, Sequence[Any]] | None:
    """(the closed Jaxpr that an equation calls once, its operands); None for loops and all others."""
    name, params = equation.primitive.name, equation.params
    if name == "cond":
        number = int(np.clip(int(operands[0]), 0, len(params["branches"]) - 1))
        return params["branches"][number], operands[1:]
    inner = first_param(params, "jaxpr", "call_jaxpr", "fun_jaxpr") if name in CALLS | WITH_RULES else None
    if inner is None:
        return None
    return (inner if hasattr(inner, "jaxpr") else closed(inner)), operands


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
        operands = [_literal(v) if is_literal(v) else values[v] for v in equation.invars]
        if id(equation) == place[0]:
            if len(place) == 1:
                flattening = Flattening()
                numbers = [flattening.add(operand) for operand in operands]
                outputs = tuple(range(len(numbers), len(numbers) + len(equation.outvars)))
                return Part((Step(equation, tuple(numbers), outputs),), flattening.values)
            return _equation_inside(equation, operands, place[1:])
        values.update(zip(equation.outvars, run_equation(equation, operands), strict=True))
    return None


def _equation_inside(equation: Any, operands: list[Any], place: Sequence[int]) -> Part | None:
    inner = inner_program(equation, operands)
    if inner is not None:
        return equation_at(*inner, place)
    params = equation.params
    if equation.primitive.name == "scan":
        constants, carried = scan_parts(equation)
        carry, columns = operands[constants : constants + carried], operands[constants + carried :]
        order = range(params["length"])
        for i in reversed(order) if params["reverse"] else order:
            inputs = [*operands[:constants], *carry, *(column[i] for column in columns)]
            outputs = own_jit(jax.extend.core.jaxpr_as_fun(params["jaxpr"]))(*inputs)
            if not all(map(are_finite, outputs)):
                return equation_at(params["jaxpr"], inputs, place)
            carry = outputs[:carried]
    elif equation.primitive.name == "while":
        of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
        fixed, carry = operands[of_condition : of_condition + of_body], operands[of_condition + of_body :]
        test = jax.extend.core.jaxpr_as_fun(params["cond_jaxpr"])
        while bool(test(*operands[:of_condition], *carry)[0]):
            inputs = [*fixed, *carry]
            carry = own_jit(jax.extend.core.jaxpr_as_fun(params["body_jaxpr"]))(*inputs)
            if not all(map(are_finite, carry)):
                return equation_at(params["body_jaxpr"], inputs, place)
    return None


# ---- less of it


def with_fewer_equations(part: Part) -> Part:
    """Removes equations as long as the rest fails (delta debugging): what they made becomes an input."""
    steps, count = list(part.steps), 2
    while len(steps) > 1:
        size = max(len(steps) // count, 1)
        for begin in range(0, len(steps), size):
            rest = dataclasses.replace(part, steps=(*steps[:begin], *steps[begin + size :]))
            if rest.steps and rest.fails():
                steps, count = list(rest.steps), max(count - 1, 2)
                break
        else:
            if size == 1:
                break
            count = min(count * 2, len(steps))
    return dataclasses.replace(part, steps=tuple(steps))


def with_smaller_arrays(part: Part) -> Part:
    """Takes halves of the arrays along all axes of one size, as long as they fail."""
    equations = [step.equation for step in part.steps]
    if not all(is_elementwise(equation) or equation.primitive.name in _ANY_SIZE for equation in equations):
        return part
    smaller: Part | None = part
    while smaller is not None:
        part, smaller = smaller, _first_failing_half(smaller)
    return part


def _first_failing_half(part: Part) -> Part | None:
    arrays = {number: part.values[number] for number in part.inputs}
    sizes = {size for array in arrays.values() if not isinstance(array, ref_types) for size in np.shape(array)}
    for size in sorted(sizes - {0, 1}, reverse=True):
        for piece in (slice(0, (size + 1) // 2), slice(size // 2, size)):
            cut = {number: _cut(array, size, piece) for number, array in arrays.items()}
            half = dataclasses.replace(part, values={**part.values, **cut})
            if half.fails():
                return half
    return None


def _cut(array: Any, size: int, piece: slice) -> Any:
    if isinstance(array, ref_types):
        return array
    return jnp.asarray(array)[tuple(piece if n == size else slice(None) for n in np.shape(array))]
