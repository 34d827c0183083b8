# SPDX-License-Identifier: Apache-2.0
"""Derivative rules by hand, for functions of any objects: `custom_jvp`, `custom_vjp`."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any, cast

from .._errors import (
    KEYWORD_ONLY,
    NO_RULE,
    NO_SUCH_NONDIFF,
    NO_SUCH_OPERAND,
    NOT_CALLABLE,
    RULE_CHANGES_COPY,
    RULE_PAIR,
    RULE_TUPLE,
    MutationError,
)
from ._program import Program, State, name_of
from ._rules import Call, Kept, Total
from ._state import type_text
from .autodiff import Make


class CustomRule:
    """A function with a derivative rule. In a class body it is a method: the instance is its first argument."""

    _make: Make = Program
    _title = ""

    def __init__(
        self,
        fun: Callable[..., Any],
        nondiff_argnums: int | Sequence[int] = (),
        nondiff_argnames: str | Sequence[str] = (),
    ) -> None:
        if not callable(fun):
            raise TypeError(NOT_CALLABLE.format(name=f"graftax.{self._title}", given=fun))
        functools.update_wrapper(cast(Any, self), fun, updated=())
        self.__wrapped__ = fun
        numbers = (nondiff_argnums,) if isinstance(nondiff_argnums, int) else tuple(nondiff_argnums)
        names = (nondiff_argnames,) if isinstance(nondiff_argnames, str) else tuple(nondiff_argnames)
        self._nondiff = (*numbers, *map(self._position, names))

    def _position(self, argument: str) -> int:
        known = list(inspect.signature(self.__wrapped__).parameters)
        if argument not in known:
            name, operands = name_of(self.__wrapped__, self._title), ", ".join(known)
            raise ValueError(NO_SUCH_OPERAND.format(name=name, which=argument, operands=operands))
        return known.index(argument)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(cast(Any, self), instance)

    def __repr__(self) -> str:
        return f"<graftax.{self._title} of {self.__wrapped__!r}>"

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call by positional arguments: a rule knows its arguments by position."""
        name = name_of(self.__wrapped__, self._title)
        bound = inspect.signature(self.__wrapped__).bind(*args, **kwargs)
        bound.apply_defaults()
        if bound.kwargs:
            raise TypeError(KEYWORD_ONLY.format(name=name, error=", ".join(bound.kwargs)))
        operands = bound.args
        count = len(operands)
        for i in self._nondiff:
            if not -count <= i < count:
                raise IndexError(NO_SUCH_NONDIFF.format(name=name, which=i, count=count))
        nondiff = {i % count for i in self._nondiff}
        return Call(type(self)._make(name, [self.__wrapped__], operands), nondiff)

    def _no_rule(self, how: str) -> AttributeError:
        return AttributeError(NO_RULE.format(name=name_of(self.__wrapped__, self._title), how=how))


class custom_jvp(CustomRule):
    """A function of any objects whose derivative is given by a rule for tangents, as in `jax.custom_jvp`.

    What the function changes comes back to the caller, and is differentiated as in any function; the rule speaks of
    the result alone. What the function captures is not differentiated: a derivative by it is an error.

    Args:
        fun: the function.
        nondiff_argnums, nondiff_argnames: arguments that are not differentiated; the rule is given them first.

    Example:
        >>> @graftax.custom_jvp
        ... def norm(params):
        ...     return {"value": jnp.sqrt((params["w"] ** 2).sum()), "of": params["name"]}
        >>> @norm.defjvp
        ... def norm_jvp(primals, tangents):
        ...     (params,), (rate,) = primals, tangents
        ...     out = norm(params)
        ...     safe = jnp.where(out["value"] == 0, 1, out["value"])
        ...     return out, {"value": (params["w"] * rate["w"]).sum() / safe}
        >>> graftax.grad(lambda params: norm(params)["value"])({"w": jnp.zeros(2), "name": "w"})
        {'w': Array([0., 0.], dtype=float32), 'name': None}
    """

    _title = "custom_jvp"
    _rule: Callable[..., Any] | None = None
    _symbolic = False

    def defjvp(self, rule: Callable[..., Any], symbolic_zeros: bool = False) -> Callable[..., Any]:
        """Sets the rule: `rule(primals, tangents)` returns (value, tangent of the value). Returns it, for a decorator.

        Both arguments are tuples of graphs like the arguments of the function: the first as they are, the second with
        a tangent in place of each floating array or number (zeros where it is not differentiated), None for all
        else. The tangent of the value is a graph like the value; None in it is zero. Arguments named by
        `nondiff_argnums` come first, one by one.

        Args:
            rule: the rule. It must not change its arguments; a change that `fun` makes as well is ignored, so that it
                may call `fun`.
            symbolic_zeros: it is given `jax.custom_derivatives.SymbolicZero` where nothing is differentiated.
        """
        self._rule, self._symbolic = rule, symbolic_zeros
        return rule

    def defjvps(self, *rules: Callable[..., Any] | None) -> None:
        """Sets a rule for each argument: `rule(tangent, value, *arguments)` returns its part of the tangent."""
        if self._nondiff:
            raise TypeError("defjvps has no place for arguments of nondiff_argnums; use defjvp")

        def total(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
            value = self(*primals)
            pairs = zip(tangents, rules, strict=True)
            return value, Total([rule(tangent, value, *primals) for tangent, rule in pairs if rule is not None])

        self.defjvp(total)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._rule is None:
            raise self._no_rule("defjvp")
        call, rule = self._call(args, kwargs), self._rule

        def tangent_rule(operands: list[Any], tangents: tuple[Any, ...]) -> Any:
            nondiff, primals = call.split(operands)
            return pair(call.name, "rule", "(value, tangent)", rule(*nondiff, tuple(primals), tangents))

        return call.with_tangents(tangent_rule, self._symbolic)


class custom_vjp(CustomRule):
    """A function of any objects whose derivative is given by a rule for cotangents, as in `jax.custom_vjp`.

    What the function changes comes back to the caller, and is differentiated as in any function; the rule speaks of
    the result alone. What the function captures is not differentiated: a derivative by it is an error.

    Args:
        fun: the function.
        nondiff_argnums, nondiff_argnames: arguments that are not differentiated; `bwd` is given them first.

    Example:
        >>> @graftax.custom_vjp
        ... def clipped(x, limits):
        ...     return x
        >>> clipped.defvjp(
        ...     lambda x, limits: (x, limits),
        ...     lambda limits, cotangent: (jnp.clip(cotangent, limits["low"], limits["high"]), None),
        ... )
        >>> graftax.grad(lambda x: 5 * clipped(x, {"low": -1, "high": 1}))(jnp.ones(()))
        Array(1., dtype=float32)
    """

    _title = "custom_vjp"
    _rules: tuple[Callable[..., Any], Callable[..., Any]] | None = None
    _symbolic = False

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any], symbolic_zeros: bool = False) -> None:
        """Sets the rule.

        Args:
            fwd: takes the arguments of the function and returns (value, residuals). It must not change its arguments; a
                change that `fun` makes as well is ignored, so that it may call `fun`.
            bwd: takes the residuals, which may be any objects, and the cotangent of the value: a graph like the value
                with a cotangent in place of each floating array or number, and None for all else. Returns a tuple of
                graphs like the arguments; None is zero. Arguments named by `nondiff_argnums` come first, one by one.
            symbolic_zeros: as in `jax.custom_vjp`, `fwd` is given arrays as `CustomVJPPrimal`, and `bwd` what has no
                cotangent as `SymbolicZero` (both of `jax.custom_derivatives`).
        """
        self._rules, self._symbolic = (fwd, bwd), symbolic_zeros

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._rules is None:
            raise self._no_rule("defvjp")
        call, (fwd, bwd), symbolic = self._call(args, kwargs), self._rules, self._symbolic

        def forward(operands: list[Any], perturbed: list[bool]) -> Any:
            value, residuals = pair(call.name, "fwd", "(value, residuals)", fwd(*operands))
            return value, residuals

        def backward(kept: Kept, cotangent: Any) -> tuple[Any, ...]:
            nondiff, diff = call.split(kept.operands)
            given = (*nondiff, kept.residuals, cotangent)
            before = State.of(given, tuple(f"argument {i} of bwd" for i in range(len(given))))
            cotangents = bwd(*given)
            unchanged(call.name, before)
            if not isinstance(cotangents, (tuple, list)) or len(cast("Sequence[Any]", cotangents)) != len(diff):
                found = f"{len(cotangents)} of them" if isinstance(cotangents, tuple) else type_text(cotangents)
                raise TypeError(RULE_TUPLE.format(name=call.name, count=len(diff), found=found))
            return tuple(cast("Sequence[Any]", cotangents))

        return call.with_cotangents(forward, backward, call.nondiff_leaves(), symbolic, symbolic)


def pair(name: str, rule: str, what: str, result: Any) -> tuple[Any, Any]:
    if not isinstance(result, (tuple, list)) or len(cast("Sequence[Any]", result)) != 2:
        raise TypeError(RULE_PAIR.format(name=name, rule=rule, pair=what, found=type_text(result)))
    one, other = cast("Sequence[Any]", result)
    return one, other


def unchanged(name: str, before: State) -> None:
    text = before.changes()
    if text:
        raise MutationError(RULE_CHANGES_COPY.format(name=name, differences=text))
