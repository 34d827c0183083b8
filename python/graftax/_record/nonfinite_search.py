# SPDX-License-Identifier: Apache-2.0
"""Runs a program one equation after the other, and notes each that makes a non-finite value out of finite ones."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core
import numpy as np
from jax.extend.core import JaxprEqn

from graftax._jax.arrays import ref_types
from graftax._jax.compilation import own_jit
from graftax._jax.equations import run_equation, scan_parts
from graftax._jax.tracers import is_literal
from graftax._record.derivative_equations import is_of_derivative
from graftax._record.nonfinite_report import Enclosing, Origin, origin_of_constant, origin_of_equation
from graftax._record.origin_marks import MOST_BITS, Value, are_finite, bits, is_floating, merge, move

# Calls, also those with a rule for their derivative: the rule is used when JAX differentiates, and not when it runs.
_CALLS = frozenset(
    ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2")
    + ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
)
# Iterations of one loop that are opened. For later ones the marks of the inputs say enough.
_DETAILED = 8

Jaxpr = Any


class Interpreter:
    """Collects the origins of one run."""

    def __init__(self) -> None:
        self.origins: list[Origin] = []
        self.causes: list[int] = []  # for each origin the bits of the infinities that it was computed from
        self.in_refs: dict[int, int] = {}  # id of a Ref -> the bits of what was written into it
        self._numbers: dict[Any, int] = {}  # what an origin is known by -> its number
        self._levels: list[tuple[Jaxpr, Enclosing | None]] = []

    def run(self, jaxpr: Jaxpr, constants: Sequence[Any], inputs: Sequence[Value]) -> list[Value]:
        """The outputs of an open Jaxpr."""
        values: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        for variable, constant in zip(jaxpr.constvars, constants, strict=True):
            values[variable] = Value(constant)
        nonfinite_constants = {variable for variable in jaxpr.constvars if not are_finite(values[variable].data)}
        last_use = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if not is_literal(v)}
        results = {v for v in jaxpr.outvars if not is_literal(v)}
        for i, equation in enumerate(jaxpr.eqns):
            operands = [self._read(equation, jaxpr, values, nonfinite_constants, v) for v in equation.invars]
            outputs = self._equation(jaxpr, equation, operands)
            values.update(zip(equation.outvars, outputs, strict=True))
            # A value lives until its last use, as in the compiled program: intermediate arrays do not pile up.
            for v in equation.invars:
                if not is_literal(v) and last_use.get(v) == i and v not in results:
                    values.pop(v, None)
        return [Value(v.val) if is_literal(v) else values[v] for v in jaxpr.outvars]

    def _read(self, equation: JaxprEqn, jaxpr: Jaxpr, values: dict[Any, Value], nonfinite: set[Any], v: Any) -> Value:
        if not is_literal(v) and v not in nonfinite:
            return values[v]
        data = v.val if is_literal(v) else values[v].data
        if not _is_floating_number(data) or np.isfinite(np.asarray(data)).all():
            return Value(data)
        # A constant becomes an origin when an equation reads it, and gets the line of that equation.
        key = ("constant", id(equation) if is_literal(v) else id(v))
        bit = self._bit(key, lambda: origin_of_constant(equation, self._enclosing(), data))
        return Value(data, np.where(np.isfinite(np.asarray(data)), 0, bit).astype(np.uint32))

    def argument(self, name: str, data: Any) -> Value:
        """An argument of the program; one that is not finite is an origin."""
        content = data[...] if isinstance(data, ref_types) else data
        if are_finite(content):
            return Value(data)
        host = np.asarray(content)
        kind = "nan" if np.isnan(host).any() else "inf"
        bit = self._bit(("argument", name), lambda: Origin("argument", kind, path=name))
        if content is not data:
            self.in_refs[id(data)] = bit
            return Value(data)
        return Value(data, np.where(np.isfinite(host), 0, bit).astype(np.uint32))

    def place_of(self, origin: Origin) -> tuple[int, ...]:
        """The ids of the equations that an origin is in, outermost first, and its own; empty for an argument."""
        number = self.origins.index(origin)
        kind, *ids = next(key for key, value in self._numbers.items() if value == number)
        return (*ids[1:], ids[0]) if kind == "equation" else ()

    def _bit(self, key: Any, describe: Callable[[], Origin], causes: int = 0) -> int:
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.origins)
            self.origins.append(describe())
            self.causes.append(causes)
        else:
            self.origins[number].times += 1
            self.causes[number] |= causes
        return 1 << min(number, MOST_BITS - 1)

    def _enclosing(self) -> list[Enclosing]:
        return [enclosing for _, enclosing in self._levels if enclosing is not None]

    def _inside(self, jaxpr: Jaxpr, enclosing: Enclosing, run: Callable[[], list[Value]]) -> list[Value]:
        self._levels.append((jaxpr, enclosing))
        try:
            return run()
        finally:
            self._levels.pop()

    # ---- one equation

    def _equation(self, jaxpr: Jaxpr, equation: JaxprEqn, inputs: list[Value]) -> list[Value]:
        name = equation.primitive.name
        # It has printed when the call was made, and has no outputs.
        if name in ("debug_callback", "debug_print"):
            return []
        if (inner := called_program(equation)) is not None:
            return self._inside(jaxpr, Enclosing(equation), lambda: self._closed(inner, inputs))
        if name == "cond":
            number = branch_number(equation, inputs[0].data)
            branch = equation.params["branches"][number]
            return self._inside(jaxpr, Enclosing(equation, number), lambda: self._closed(branch, inputs[1:]))
        has_refs = any(isinstance(x.data, ref_types) for x in inputs)
        if has_refs:
            inputs = self._with_refs(inputs)
        outputs = run_equation(equation, [x.data for x in inputs])
        if all(map(are_finite, outputs)):
            return [Value(x) for x in outputs]
        # A loop is opened only when its results are not finite. With a Ref the second run would write again.
        if name in ("scan", "while") and not has_refs:
            loop = self._scan if name == "scan" else self._while
            marked = loop(jaxpr, equation, inputs)
            outputs = [Value(x, _only_non_finite(x, y.marks)) for x, y in zip(outputs, marked, strict=True)]
            return [self._marked(jaxpr, equation, inputs, x.data, x.marks) for x in outputs]
        moved = move(equation, inputs) if any(x.marks is not None for x in inputs) else None
        if moved is None:
            moved = [merge(equation, inputs, np.shape(x)) for x in outputs]
        return [self._marked(jaxpr, equation, inputs, x, m) for x, m in zip(outputs, moved, strict=True)]

    def _with_refs(self, inputs: Sequence[Value]) -> list[Value]:
        """The inputs, with marks for each Ref, which may take in those of the other inputs."""
        written = _all_bits(inputs)
        values: list[Value] = []
        for x in inputs:
            if isinstance(x.data, ref_types):
                marks = self.in_refs.get(id(x.data), 0)
                self.in_refs[id(x.data)] = marks | written
                x = Value(x.data, np.asarray(marks, np.uint32))
            values.append(x)
        return values

    def _closed(self, closed: Jaxpr, inputs: Sequence[Value]) -> list[Value]:
        return self.run(getattr(closed, "jaxpr", closed), getattr(closed, "consts", ()), inputs)

    def _marked(
        self, jaxpr: Jaxpr, equation: JaxprEqn, inputs: Sequence[Value], output: Any, marks: np.ndarray[Any, Any] | None
    ) -> Value:
        """An output with its marks: what has none was made by this equation, as is a nan out of infinities alone."""
        if are_finite(output):
            return Value(output)
        host = np.asarray(output)
        marks = np.zeros(host.shape, np.uint32) if marks is None else np.where(np.isfinite(host), 0, marks)
        is_made = ~np.isfinite(host) & (marks == 0)
        # inf - inf: the infinities have marks, but the nan begins here.
        if not any(_has_nan(x.data) for x in inputs) and equation.primitive.name not in ("scan", "while"):
            is_made |= np.isnan(host)
        if is_made.any():

            def describe() -> Origin:
                origin = origin_of_equation(equation, self._enclosing(), inputs, output, is_made)
                levels = [*self._levels, (jaxpr, None)]
                origin.is_backward = origin.is_backward or is_of_derivative(equation, levels)
                return origin

            causes = int(np.bitwise_or.reduce(marks[is_made], axis=None)) if is_made.ndim else int(marks)
            key = ("equation", id(equation), *(id(e.equation) for e in self._enclosing()))
            marks = np.where(is_made, marks | np.uint32(self._bit(key, describe, causes)), marks)
        return Value(output, np.asarray(marks, np.uint32))

    # ---- loops

    def _scan(self, jaxpr: Jaxpr, equation: JaxprEqn, inputs: list[Value]) -> list[Value]:
        params = equation.params
        constants, carried = scan_parts(params, len(inputs))
        fixed, carry = inputs[:constants], inputs[constants : constants + carried]
        columns = inputs[constants + carried :]
        iteration = self._iteration(jaxpr, equation, params["jaxpr"])
        rows: list[list[Value]] = []
        order = range(params["length"])
        for i in reversed(order) if params["reverse"] else order:
            row = [Value(x.data[i], None if x.marks is None or not x.marks[i].any() else x.marks[i]) for x in columns]
            outputs = iteration(i, [*fixed, *carry, *row])
            carry = outputs[:carried]
            rows.append(outputs[carried:])
        if params["reverse"]:
            rows.reverse()
        return [*carry, *(_stacked([row[k] for row in rows]) for k in range(len(rows[0]) if rows else 0))]

    def _while(self, jaxpr: Jaxpr, equation: JaxprEqn, inputs: list[Value]) -> list[Value]:
        params = equation.params
        of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
        test = own_jit(jax.extend.core.jaxpr_as_fun(params["cond_jaxpr"]))
        fixed, carry = inputs[of_condition : of_condition + of_body], inputs[of_condition + of_body :]
        iteration, i = self._iteration(jaxpr, equation, params["body_jaxpr"]), 0
        while bool(test(*(x.data for x in (*inputs[:of_condition], *carry)))[0]):
            carry, i = iteration(i, [*fixed, *carry]), i + 1
        return carry

    def _iteration(self, jaxpr: Jaxpr, equation: JaxprEqn, body: Jaxpr) -> Callable[[int, list[Value]], list[Value]]:
        """One iteration: compiled where its results are finite, otherwise one equation after the other."""
        compiled = own_jit(jax.extend.core.jaxpr_as_fun(body))
        opened = 0

        def run(i: int, inputs: list[Value]) -> list[Value]:
            nonlocal opened
            outputs = compiled(*(x.data for x in inputs))
            if all(map(are_finite, outputs)):
                return [Value(x) for x in outputs]
            marks = _all_bits(inputs)
            # Without marks in the inputs this iteration has an origin of its own, so it is always opened.
            if marks == 0 or opened < _DETAILED:
                opened += 1
                return self._inside(jaxpr, Enclosing(equation, i), lambda: self._closed(body, inputs))
            return [Value(x, _only_non_finite(x, np.full(np.shape(x), marks, np.uint32))) for x in outputs]

        return run


def _all_bits(values: Sequence[Value]) -> int:
    return functools.reduce(operator.or_, (bits(x.marks) for x in values), 0)


def _is_floating_number(x: object) -> bool:
    return isinstance(x, float | complex) or is_floating(x)


def _has_nan(x: object) -> bool:
    return _is_floating_number(x) and bool(np.isnan(np.asarray(x)).any())


def called_program(equation: JaxprEqn) -> Jaxpr | None:
    """The Jaxpr that an equation calls once with its operands, closed or not; None for other equations."""
    params = equation.params if equation.primitive.name in _CALLS else {}
    return next((params[name] for name in ("jaxpr", "call_jaxpr", "fun_jaxpr") if name in params), None)


def branch_number(equation: JaxprEqn, index: Any) -> int:
    """The branch that a `cond` takes. An index out of range takes the first or the last one, as in JAX."""
    return int(np.clip(int(index), 0, len(equation.params["branches"]) - 1))


def _only_non_finite(x: Any, marks: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any] | None:
    if marks is None or are_finite(x):
        return None
    return np.where(np.isfinite(np.asarray(x)), 0, marks).astype(np.uint32)


def _stacked(values: list[Value]) -> Value:
    if all(x.marks is None for x in values):
        return Value(None)
    shape = next(x.marks.shape for x in values if x.marks is not None)
    return Value(None, np.stack([np.zeros(shape, np.uint32) if x.marks is None else x.marks for x in values]))
