# SPDX-License-Identifier: Apache-2.0
"""Did two arrays become two others in the same way? The equations of a trace tell, those inside of loops too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from graftax._jax.tracers import Made, carry_of_scan, is_literal, made_by

_DEEP = 12  # equations between an array and what it became
_ADDS = ("add", "sub", "add_any")
_AS_IT_IS = ("convert_element_type", "copy", "copy_p", "reshape", "broadcast_in_dim", "optimization_barrier")


def same_step(one: Any, other: Any, first: Any, second: Any) -> bool:
    """Did the arrays `first` and `second` become `one` and `other` in the same way?

    So they do in a tree function, by a step of gradients (what is added differs), or by a function of each array alone.
    A moving average beside its model does not, though both may begin with the same arrays.
    """
    return _Program({}).same_step(one, other, first, second)


class _Program:
    """That of the trace, whose tracers know their equations, or one inside of it.

    Args:
        equations: those of a program inside, by the variables that they set.
    """

    def __init__(self, equations: dict[Any, Any]) -> None:
        self._equations = equations

    def same_step(self, one: Any, other: Any, first: Any, second: Any) -> bool:
        """As the function."""
        return self._is_moved(one, other, first, second) or self._is_function_of(one, other, first, second, _DEEP)

    def _is_moved(self, one: Any, other: Any, first: Any, second: Any) -> bool:
        for _ in range(_DEEP):
            if one is first and other is second:
                return True
            made = self._alike(one, other)
            if made is None:
                return False
            left, right = made
            if left.name not in (*_ADDS, *_AS_IT_IS):
                return left.equation is right.equation and self._is_moved_inside(left, right, first, second)
            if left.name in _ADDS and left.operands[1] is first and right.operands[1] is second:
                return True
            one, other = left.operands[0], right.operands[0]
        return False

    def _is_moved_inside(self, left: Made, right: Made, first: Any, second: Any) -> bool:
        """Of two results of one equation: a loop whose steps do so, or a call or each branch of a choice."""
        changed = False
        for jaxpr, operands, carry in _inside(left):
            inside = _Program({var: equation for equation in jaxpr.eqns for var in equation.outvars})
            if carry is None:
                at, beside = _place(operands, first), _place(operands, second)
                if at is None or beside is None:
                    return False
            else:
                at, beside = carry + left.result, carry + right.result
                if max(at, beside) >= len(operands):  # a row of each step
                    return False
                if not self.same_step(operands[at], operands[beside], first, second):
                    return False
            before, after = (
                (jaxpr.invars[at], jaxpr.invars[beside]),
                (jaxpr.outvars[left.result], jaxpr.outvars[right.result]),
            )
            if not inside.same_step(*after, *before):
                return False
            changed = changed or after[0] is not before[0]
        return changed

    def _is_function_of(self, one: Any, other: Any, first: Any, second: Any, deep: int) -> bool:
        if one is first and other is second:
            return True
        made = self._alike(one, other) if deep else None
        if made is None:
            return False
        pairs = zip(made[0].operands, made[1].operands, strict=True)
        pairs = [(x, y) for x, y in pairs if not (is_literal(x) and is_literal(y))]
        return bool(pairs) and all(self._is_function_of(x, y, first, second, deep - 1) for x, y in pairs)

    def _alike(self, one: Any, other: Any) -> tuple[Made, Made] | None:
        """What made the one and the other, where that is the same operation."""
        made, beside = made_by(one, self._equations), made_by(other, self._equations)
        if made is None or beside is None or made.name != beside.name or len(made.operands) != len(beside.operands):
            return None
        return made, beside


def _inside(made: Made) -> Iterator[tuple[Any, list[Any], int | None]]:
    """(program, the operands that it is given, the first that a step passes on to the next) for each inside of one."""
    params, operands = made.params, made.operands
    carry: int | None = None
    if made.name == "scan":
        carry, count = carry_of_scan(params)
        programs, operands = [params["jaxpr"]], operands[: carry + count]
    elif made.name == "while":
        programs, carry = [params["body_jaxpr"]], params["body_nconsts"]
        operands = operands[params["cond_nconsts"] :]
    elif made.name == "cond":
        programs, operands = list(params["branches"]), operands[1:]
    else:
        programs = [params[name] for name in ("jaxpr", "call_jaxpr") if name in params]
    for program in programs:
        yield getattr(program, "jaxpr", program), operands, carry


def _place(values: list[Any], value: Any) -> int | None:
    return next((i for i, each in enumerate(values) if each is value), None)
