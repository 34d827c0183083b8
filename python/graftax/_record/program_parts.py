# SPDX-License-Identifier: Apache-2.0
"""Parts of a program that ran: some of its equations, with the values that they take from the rest of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from graftax._jax.arrays import new_ref, ref_types
from graftax._jax.compilation import own_jit
from graftax._jax.equations import closed, run_equation, scan_parts
from graftax._jax.tracers import is_literal
from graftax._record.nonfinite_search import branch_number, called_program

Jaxpr = Any
RunEquation = Callable[[JaxprEqn, list[Any]], list[Any]]


class CannotRun(Exception):
    """An equation fails when it runs alone, so that nothing after it has values."""


class Step(NamedTuple):
    """An equation with the numbers of its operands and outputs. A literal is an operand with a value of its own."""

    equation: JaxprEqn
    operands: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Part:
    """Some equations of a program, with the values that they take from the rest of it.

    Attributes:
        steps: the equations, in order.
        values: by the number of a value, what it was when the program ran.
    """

    steps: tuple[Step, ...]
    values: dict[int, Any]

    @property
    def inputs(self) -> list[int]:
        computed = {number for step in self.steps for number in step.outputs}
        used = (number for step in self.steps for number in step.operands)
        return list(dict.fromkeys(number for number in used if number not in computed))

    @property
    def outputs(self) -> list[int]:
        """What no equation of the part uses."""
        used = {number for step in self.steps for number in step.operands}
        return [number for step in self.steps for number in step.outputs if number not in used]

    @property
    def operations(self) -> list[str]:
        return [step.equation.primitive.name for step in self.steps]

    def function(self, run: RunEquation = run_equation) -> Callable[..., list[Any]]:
        """The part as a function of its inputs."""
        inputs, outputs = self.inputs, self.outputs

        def part(*arguments: Any) -> list[Any]:
            values = dict(zip(inputs, arguments, strict=True))
            for step in self.steps:
                results = run(step.equation, [values[number] for number in step.operands])
                values.update(zip(step.outputs, results, strict=True))
            return [values[number] for number in outputs]

        return part

    def arguments(self) -> list[Any]:
        """The values of the inputs. A Ref is a copy, which the part may write to."""
        values = [self.values[number] for number in self.inputs]
        return [new_ref(x[...]) if isinstance(x, ref_types) else x for x in values]


class _Collector:
    """Runs a program equation by equation, and keeps them with their values."""

    def __init__(self, run: RunEquation, values: dict[int, Any]) -> None:
        self.run, self.values = run, values
        self.steps: list[Step] = []
        self.is_whole = True  # otherwise the last equation could not run

    def add(self, value: Any) -> int:
        self.values[len(self.values)] = value
        return len(self.values) - 1

    def collect(self, program: Jaxpr, inputs: Sequence[int]) -> list[int]:
        """The numbers of the outputs of a closed Jaxpr, given those of its inputs."""
        jaxpr = program.jaxpr
        numbers: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))
        numbers |= {variable: self.add(value) for variable, value in zip(jaxpr.constvars, program.consts, strict=True)}
        for equation in jaxpr.eqns:
            # Prints have no outputs, and would be printed again for each part that is tried.
            if equation.primitive.name in ("debug_callback", "debug_print"):
                continue
            operands = [self.add(literal_value(v)) if is_literal(v) else numbers[v] for v in equation.invars]
            try:
                results = self.run(equation, [self.values[number] for number in operands])
            # Kept as the last step, since it may be the one that fails.
            except CannotRun:
                self.is_whole = False
                results = [None] * len(equation.outvars)
            outputs = [self.add(value) for value in results]
            self.steps.append(Step(equation, tuple(operands), tuple(outputs)))
            if not self.is_whole:
                return []
            numbers.update(zip(equation.outvars, outputs, strict=True))
        return [self.add(literal_value(v)) if is_literal(v) else numbers[v] for v in jaxpr.outvars]


def literal_value(v: Any) -> Any:
    return np.asarray(v.val, v.aval.dtype)


def part_of(program: Jaxpr, arguments: Sequence[Any], run: RunEquation = run_equation) -> Part:
    """All equations of a closed Jaxpr, but not those of the functions that it calls.

    Args:
        arguments: of the program.
        run: gives the values of an equation's outputs. If it raises `CannotRun`, this equation is the last one.
    """
    collector = _Collector(run, {})
    # The run writes to the Refs, and the part begins with what was in them before.
    refs_before = {i: new_ref(x[...]) for i, x in enumerate(arguments) if isinstance(x, ref_types)}
    collector.collect(program, [collector.add(x) for x in arguments])
    return Part(tuple(collector.steps), collector.values | refs_before)


# ---- what an equation has inside


def inner_programs(equation: JaxprEqn, operands: Sequence[Any]) -> list[Jaxpr]:
    """The closed Jaxprs that an equation calls once, with its last operands. Of a `cond`, the branch taken is first."""
    if equation.primitive.name == "cond":
        branches = list(equation.params["branches"])
        taken = branches.pop(branch_number(equation, operands[0]))
        return [taken, *branches]
    inner = called_program(equation)
    if inner is None:
        return []
    return [inner if hasattr(inner, "jaxpr") else closed(inner)]


def operands_of(program: Jaxpr, operands: Sequence[Any]) -> Sequence[Any]:
    """Those of an equation that its inner program takes: a `cond` has the number of the branch before them."""
    return operands[len(operands) - len(program.jaxpr.invars) :]


class Iteration:
    """One iteration of a loop: the closed Jaxpr of the body, its inputs, and its outputs once they are asked for."""

    def __init__(self, body: Jaxpr, inputs: list[Any], run: Callable[..., list[Any]]) -> None:
        self.body, self.inputs, self._run = body, inputs, run

    @functools.cached_property
    def outputs(self) -> list[Any]:
        return self._run(*self.inputs)


def iterations(equation: JaxprEqn, operands: Sequence[Any], run: RunEquation | None = None) -> Iterator[Iteration]:
    """The iterations of a loop, each run before the next one is given; none for other equations.

    Args:
        run: gives the values of the body's equations. Without it, the body is compiled.
    """
    params = equation.params
    if equation.primitive.name == "scan":
        constants, carried = scan_parts(params, len(operands))
        fixed, carry = list(operands[:constants]), list(operands[constants : constants + carried])
        columns, body, order = operands[constants + carried :], params["jaxpr"], range(params["length"])
        run_body = _runner(body, run)
        for i in reversed(order) if params["reverse"] else order:
            yield (iteration := Iteration(body, [*fixed, *carry, *(column[i] for column in columns)], run_body))
            carry = iteration.outputs[:carried]
    elif equation.primitive.name == "while":
        of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
        fixed, carry = list(operands[of_condition : of_condition + of_body]), list(operands[of_condition + of_body :])
        body = params["body_jaxpr"]
        test, run_body = _runner(params["cond_jaxpr"]), _runner(body, run)
        while bool(test(*operands[:of_condition], *carry)[0]):
            yield (iteration := Iteration(body, [*fixed, *carry], run_body))
            carry = iteration.outputs


def _runner(program: Jaxpr, run: RunEquation | None = None) -> Callable[..., list[Any]]:
    if run is None:
        return own_jit(jax.extend.core.jaxpr_as_fun(program))
    return lambda *inputs: _evaluated(program, inputs, run)


def _evaluated(program: Jaxpr, inputs: Sequence[Any], run: RunEquation) -> list[Any]:
    collector = _Collector(run, {})
    outputs = collector.collect(program, [collector.add(x) for x in inputs])
    return [collector.values[number] for number in outputs]


def run_one_by_one(equation: JaxprEqn, operands: list[Any]) -> list[Any]:
    """The outputs of an equation, for which those inside it run one after the other: in calls, branches and loops."""
    for program in inner_programs(equation, operands)[:1]:
        return _evaluated(program, operands_of(program, operands), run_one_by_one)
    has_refs = any(isinstance(x, ref_types) for x in operands)
    outputs = [] if has_refs else [i.outputs for i in iterations(equation, operands, run_one_by_one)]
    # No loop, a loop over a Ref, which the second run would write to again, or one without iterations.
    if not outputs:
        return run_equation(equation, operands)
    is_scan = equation.primitive.name == "scan"
    carried = scan_parts(equation.params, len(operands))[1] if is_scan else len(equation.outvars)
    in_order = reversed(outputs) if equation.params.get("reverse") else outputs
    rows = [row[carried:] for row in in_order]
    return [*outputs[-1][:carried], *map(jnp.stack, zip(*rows, strict=True))]


def inlined(part: Part, position: int, program: Jaxpr, run: RunEquation) -> Part:
    """A part with the equations of an inner program in the place of the one that calls it."""
    step, collector = part.steps[position], _Collector(run, dict(part.values))
    outputs = collector.collect(program, operands_of(program, step.operands))
    # The steps behind it take the outputs of the inner program, and there are none if that did not come to its end.
    new_number = dict(zip(step.outputs, outputs, strict=False))
    following = [
        s._replace(operands=tuple(new_number.get(n, n) for n in s.operands)) for s in part.steps[position + 1 :]
    ]
    steps = (*part.steps[:position], *collector.steps, *(following if collector.is_whole else ()))
    return Part(steps, collector.values)
