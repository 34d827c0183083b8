# SPDX-License-Identifier: Apache-2.0
"""Were two arrays updated in the same way? Compares the equations of a trace, also those inside of loops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from graftax._jax.equations import scan_parts
from graftax._jax.tracers import Producer, is_literal, producer_of

_MAX_DEPTH = 12  # equations between an array and what it became
_ADDS = ("add", "sub", "add_any")
_IDENTITIES = ("convert_element_type", "copy", "copy_p", "reshape", "broadcast_in_dim", "optimization_barrier")


def same_step(new_x: object, new_y: object, x: object, y: object) -> bool:
    """Were the tracers `x` and `y` updated to `new_x` and `new_y` in the same way?"""
    # True for a step of gradients (whatever is added) and for one function applied to each array, as tree functions do.
    # False for a moving average beside its model, although both may start from the same arrays.
    return _Program({}).same_step(new_x, new_y, x, y)


class _Program:
    """The traced program, whose tracers know their equations, or a program inside it.

    Args:
        equations: of an inner program, by the variables that they set.
    """

    def __init__(self, equations: dict[Any, JaxprEqn]) -> None:
        self._equations = equations

    def same_step(self, new_x: object, new_y: object, x: object, y: object) -> bool:
        return self._is_updated(new_x, new_y, x, y) or self._is_function_of(new_x, new_y, x, y, _MAX_DEPTH)

    def _is_updated(self, new_x: object, new_y: object, x: object, y: object) -> bool:
        # Backwards from the new arrays. What is added to them may differ: these are two gradients, say.
        for _ in range(_MAX_DEPTH):
            if new_x is x and new_y is y:
                return True
            producers = self._same_producers(new_x, new_y)
            if producers is None:
                return False
            of_x, of_y = producers
            # Two results of one equation, such as a loop, that updates both.
            if of_x.name not in (*_ADDS, *_IDENTITIES):
                return of_x.equation is of_y.equation and self._is_updated_inside(of_x, of_y, x, y)
            # `update + x`: the walk below follows first operands only.
            if of_x.name in _ADDS and of_x.operands[1] is x and of_y.operands[1] is y:
                return True
            new_x, new_y = of_x.operands[0], of_y.operands[0]
        return False

    def _is_updated_inside(self, of_x: Producer, of_y: Producer, x: object, y: object) -> bool:
        """For two results of one equation: does each loop step, each branch, or a called function update them so?"""
        changed = False
        for jaxpr, operands, carry in _inner_programs(of_x):
            # Variables of an inner program do not know their equations, as tracers do.
            program = _Program({var: equation for equation in jaxpr.eqns for var in equation.outvars})
            # A branch or a called function has the old arrays among its operands, a loop in its carry.
            if carry is None:
                i, j = _index_of(operands, x), _index_of(operands, y)
                if i is None or j is None:
                    return False
            else:
                i, j = carry + of_x.result, carry + of_y.result
                if max(i, j) >= len(operands):  # stacked outputs, not a carry
                    return False
                if not self.same_step(operands[i], operands[j], x, y):
                    return False
            inputs = jaxpr.invars[i], jaxpr.invars[j]
            outputs = jaxpr.outvars[of_x.result], jaxpr.outvars[of_y.result]
            if not program.same_step(*outputs, *inputs):
                return False
            changed = changed or outputs[0] is not inputs[0]
        return changed

    def _is_function_of(self, new_x: object, new_y: object, x: object, y: object, depth: int) -> bool:
        if new_x is x and new_y is y:
            return True
        producers = self._same_producers(new_x, new_y) if depth else None
        if producers is None:
            return False
        pairs = zip(producers[0].operands, producers[1].operands, strict=True)
        # A literal is a number in the code, so it says nothing of where the two come from.
        pairs = [(a, b) for a, b in pairs if not (is_literal(a) and is_literal(b))]
        return bool(pairs) and all(self._is_function_of(a, b, x, y, depth - 1) for a, b in pairs)

    def _same_producers(self, new_x: object, new_y: object) -> tuple[Producer, Producer] | None:
        """The producers of both, if they are the same operation."""
        of_x, of_y = producer_of(new_x, self._equations), producer_of(new_y, self._equations)
        if of_x is None or of_y is None or of_x.name != of_y.name or len(of_x.operands) != len(of_y.operands):
            return None
        return of_x, of_y


def _inner_programs(producer: Producer) -> Iterator[tuple[Any, list[Any], int | None]]:
    """(inner program, its operands, index of the first carry or None) for each program inside an equation."""
    params, operands = producer.params, producer.operands
    carry: int | None = None
    if producer.name == "scan":
        try:
            carry, count = scan_parts(params, len(operands))
        except (KeyError, AttributeError):  # another JAX: nothing is known of what the loop does
            return
        programs, operands = [params["jaxpr"]], operands[: carry + count]
    elif producer.name == "while":
        programs, carry = [params["body_jaxpr"]], params["body_nconsts"]
        operands = operands[params["cond_nconsts"] :]
    elif producer.name == "cond":
        programs, operands = list(params["branches"]), operands[1:]
    else:
        programs = [params[name] for name in ("jaxpr", "call_jaxpr") if name in params]
    for program in programs:
        yield getattr(program, "jaxpr", program), operands, carry


def _index_of(values: Sequence[object], value: object) -> int | None:
    return next((i for i, candidate in enumerate(values) if candidate is value), None)
