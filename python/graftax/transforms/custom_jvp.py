# SPDX-License-Identifier: Apache-2.0
"""A function with a rule for tangents: `custom_jvp`, and Equinox's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar, cast, overload

from graftax._jax.tracebacks import boundary
from graftax.transforms._engine.custom_derivative import (
    CustomRule,
    FilteredRule,
    NotDifferentiated,
    none_for_zero,
    require_pair,
    with_zeros,
)
from graftax.transforms._engine.custom_derivative_call import CustomCall, TangentParts
from graftax.transforms._engine.lift import MISSING, by_value

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")
F = TypeVar("F", bound=Callable[..., Any])


class custom_jvp(CustomRule[P, R]):
    """A function of any objects whose derivative is given by a rule for tangents, as in `jax.custom_jvp`.

    Changes made by the function are applied to the caller's objects and differentiated as in any function; the rule is
    for the result only. A derivative with respect to a captured variable is an error.

    Args:
        fun: the function.
        nondiff_argnums, nondiff_argnames: arguments that are not differentiated; the rule receives them first.

    Raises:
        AttributeError: when the function is differentiated without a rule.
        TypeError: when it is differentiated with respect to an array that it captures.

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

    @overload
    def __new__(
        cls,
        fun: Callable[P, R],
        nondiff_argnums: int | Sequence[int] = (),
        nondiff_argnames: str | Sequence[str] = (),
    ) -> custom_jvp[P, R]: ...
    @overload
    def __new__(
        cls, *, nondiff_argnums: int | Sequence[int] = (), nondiff_argnames: str | Sequence[str] = ()
    ) -> Callable[[Callable[Q, S]], custom_jvp[Q, S]]: ...
    def __new__(
        cls,
        fun: Any = MISSING,
        nondiff_argnums: int | Sequence[int] = (),
        nondiff_argnames: str | Sequence[str] = (),
    ) -> Any:
        return cls._create(fun, nondiff_argnums, nondiff_argnames)

    _title = "custom_jvp"
    _rule: Callable[..., Any] | None = None
    _symbolic = False

    def defjvp(self, rule: F, symbolic_zeros: bool = False) -> F:
        """Sets the rule: `rule(primals, tangents)` returns (value, tangent of the value). Returns it, for a decorator.

        Both arguments are tuples of graphs like the arguments of the function. The first holds these as they are. The
        second has a tangent in place of each floating array or number, zeros where it is not differentiated, and None
        for all else. The tangent of the value is a graph like the value; None in it is zero. Arguments named by
        `nondiff_argnums` come first, one by one.

        Args:
            rule: the rule. It must not change its arguments; a change that `fun` makes as well is ignored, so that it
                may call `fun`.
            symbolic_zeros: the rule receives `jax.custom_derivatives.SymbolicZero` where nothing is differentiated.
        """
        self._rule, self._symbolic = rule, symbolic_zeros
        return rule

    def defjvps(self, *rules: Callable[..., Any] | None) -> None:
        """Sets a rule for each argument: `rule(tangent, value, *arguments)` returns its part of the tangent."""
        if self._nondiff:
            raise TypeError("defjvps has no place for arguments of nondiff_argnums; use defjvp")

        def total(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
            value = cast(Any, self)(*primals)
            # The parts are added when they are flat: graphs of the user's classes have no addition.
            pairs = zip(tangents, rules, strict=True)
            return value, TangentParts([rule(tangent, value, *primals) for tangent, rule in pairs if rule is not None])

        self.defjvp(total)

    @boundary
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._rule is None:
            raise self._no_rule("defjvp")
        call, rule = self._call(args, kwargs), self._rule

        def tangent_rule(operands: list[Any], tangents: tuple[Any, ...]) -> Any:
            nondiff, primals = call.split(operands)
            return require_pair(call.name, "rule", "(value, tangent)", rule(*nondiff, tuple(primals), tangents))

        return call.with_tangents(tangent_rule, self._symbolic)


class filter_custom_jvp(FilteredRule[P, R]):
    """As `equinox.filter_custom_jvp`: a function whose derivative is given by a rule for tangents.

    The floating arrays of positional arguments are differentiated, keyword arguments are not. The rule receives None
    as the tangent of everything that is not differentiated.

    Args:
        fn: the function. `def_jvp` sets its rule.

    Raises:
        RuntimeError: when the function is called without a rule.
        TypeError: when it is differentiated with respect to a keyword argument or an array that it captures.

    Example:
        >>> @graftax.filter_custom_jvp
        ... def call(x, y, *, fn):
        ...     return fn(x, y)
        >>> @call.def_jvp
        ... def call_jvp(primals, tangents, *, fn):
        ...     return call(*primals, fn=fn), 2 * tangents[0]
        >>> graftax.filter_grad(call)(jnp.array(2.0), jnp.array(2.0), fn=lambda a, b: a * b)
        Array(2., dtype=float32, weak_type=True)
    """

    _title = "filter_custom_jvp"
    _rule: Callable[..., Any] | None = None

    def def_jvp(self, fn_jvp: F) -> F:
        """Sets the rule: `fn_jvp(primals, tangents, **kwargs)` returns (value, tangent of the value)."""
        self._rule = fn_jvp
        return fn_jvp

    def defjvp(self, fn_jvp: Callable[..., Any]) -> None:
        """The older form: the rule receives zeros, not None, for floating arrays that are not differentiated."""
        self._warn_old("defjvp", "def_jvp", "tangent")

        def rule(primals: object, tangents: object, **kwargs: object) -> Any:
            return fn_jvp(primals, with_zeros(primals, tangents), **kwargs)

        self.def_jvp(rule)

    def defjvps(self, *rules: Any) -> NoReturn:
        """Not available, as in Equinox."""
        raise NotImplementedError("filter_custom_jvp has no defjvps: use def_jvp")

    @boundary
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._rule is None:
            raise self._no_rule("def_jvp")
        fn_jvp, count = self._rule, len(args)
        program = by_value(self._name(), [self.__wrapped__], args, kwargs)
        # As in Equinox, keyword arguments are not differentiated.
        call = CustomCall(program, set(range(count, count + len(kwargs))), NotDifferentiated, filtered=True)

        def rule(operands: list[Any], tangents: tuple[Any, ...]) -> Any:
            keywords = dict(zip(kwargs, operands[count:], strict=True))
            result = fn_jvp(tuple(operands[:count]), tuple(map(none_for_zero, tangents)), **keywords)
            return require_pair(call.name, "rule", "(value, tangent)", result)

        return call.with_tangents(rule, True)
