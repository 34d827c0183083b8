# SPDX-License-Identifier: Apache-2.0
"""Equinox's filtered derivative rules, with its signatures: by value, the caller's objects are never touched."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any, NoReturn, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from .._advice import caller_level
from .._errors import NO_RULE, NOT_CALLABLE, OLD_RULE
from ._program import by_value, name_of
from ._rules import Call, Kept
from ._tangents import is_inexact
from .custom import pair


class _Filtered:
    """What both have in common."""

    _title = ""

    def __init__(self, fn: Callable[..., Any]) -> None:
        if not callable(fn):
            raise TypeError(NOT_CALLABLE.format(name=f"graftax.{self._title}", given=fn))
        functools.update_wrapper(cast(Any, self), fn, updated=())
        self.__wrapped__ = fn

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(cast(Any, self), instance)

    def _name(self) -> str:
        return name_of(self.__wrapped__, self._title)

    def _warn_old(self, old: str, new: str, of: str) -> None:
        warnings.warn(OLD_RULE.format(title=self._title, old=old, new=new, of=of), DeprecationWarning, caller_level())

    def _missing(self, how: str) -> RuntimeError:
        return RuntimeError(NO_RULE.format(name=self._name(), how=how))


class filter_custom_jvp(_Filtered):
    """As `equinox.filter_custom_jvp`: a derivative rule in which what is not differentiated has the tangent None.

    Positional arguments are differentiated where they hold floating arrays, keyword arguments are not.

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

    def def_jvp(self, fn_jvp: Callable[..., Any]) -> Callable[..., Any]:
        """Sets the rule: `fn_jvp(primals, tangents, **kwargs)` returns (value, tangent of the value)."""
        self._rule = fn_jvp
        return fn_jvp

    def defjvp(self, fn_jvp: Callable[..., Any]) -> None:
        """The old form: zeros, not None, are given for floating arrays that are not differentiated."""
        self._warn_old("defjvp", "def_jvp", "tangent")

        def rule(primals: Any, tangents: Any, **kwargs: Any) -> Any:
            return fn_jvp(primals, _with_zeros(primals, tangents), **kwargs)

        self.def_jvp(rule)

    def defjvps(self, *rules: Any) -> NoReturn:
        raise NotImplementedError("filter_custom_jvp has no defjvps: use def_jvp")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._rule is None:
            raise self._missing("def_jvp")
        fn_jvp, count = self._rule, len(args)
        call = Call(by_value(self._name(), [self.__wrapped__], args, kwargs), set(range(count, count + len(kwargs))))

        def rule(operands: list[Any], tangents: tuple[Any, ...]) -> Any:
            keywords = dict(zip(kwargs, operands[count:], strict=True))
            result = fn_jvp(tuple(operands[:count]), tuple(map(_none_for_zero, tangents)), **keywords)
            return pair(call.name, "rule", "(value, tangent)", result)

        return call.with_tangents(rule, True)


class filter_custom_vjp(_Filtered):
    """As `equinox.filter_custom_vjp`: a derivative rule by the first argument, whose parts are given all arguments.

    Example:
        >>> @graftax.filter_custom_vjp
        ... def scaled(x, scale):
        ...     return x
        >>> @scaled.def_fwd
        ... def scaled_fwd(perturbed, x, scale):
        ...     return x, None
        >>> @scaled.def_bwd
        ... def scaled_bwd(residuals, grad, perturbed, x, scale):
        ...     return grad * scale
        >>> graftax.filter_grad(lambda x: scaled(x, 3))(jnp.array(2.0))
        Array(3., dtype=float32, weak_type=True)
    """

    _title = "filter_custom_vjp"
    _fwd: Callable[..., Any] | None = None
    _bwd: Callable[..., Any] | None = None

    def def_fwd(self, fn_fwd: Callable[..., Any]) -> Callable[..., Any]:
        """Sets the forward rule: `fn_fwd(perturbed, vjp_arg, *args, **kwargs)` returns (value, residuals).

        `perturbed` is a tree like `vjp_arg`: is this leaf differentiated? Residuals are any objects.
        """
        self._fwd = fn_fwd
        return fn_fwd

    def def_bwd(self, fn_bwd: Callable[..., Any]) -> Callable[..., Any]:
        """Sets the backward rule: `fn_bwd(residuals, grad, perturbed, vjp_arg, *args, **kwargs)`.

        `grad` is a tree like the value, with None where there is no gradient. It returns the gradient of `vjp_arg`, a
        tree like it, in which None is zero.
        """
        self._bwd = fn_bwd
        return fn_bwd

    def defvjp(self, fn_fwd: Callable[..., Any], fn_bwd: Callable[..., Any]) -> None:
        """The old form: without `perturbed`, and with zeros for floating arrays that have no gradient."""
        self._warn_old("defvjp", "def_fwd and def_bwd", "gradient")

        def fwd(perturbed: Any, vjp_arg: Any, *args: Any, **kwargs: Any) -> Any:
            out, residuals = fn_fwd(vjp_arg, *args, **kwargs)
            return out, (out, residuals)

        def bwd(residuals: Any, grad: Any, perturbed: Any, vjp_arg: Any, *args: Any, **kwargs: Any) -> Any:
            out, rest = residuals
            return fn_bwd(rest, _with_zeros(out, grad), vjp_arg, *args, **kwargs)

        self.def_fwd(fwd)
        self.def_bwd(bwd)

    def __call__(self, vjp_arg: Any, /, *args: Any, **kwargs: Any) -> Any:
        if self._fwd is None or self._bwd is None:
            raise self._missing("def_fwd and def_bwd")
        fn_fwd, fn_bwd, count = self._fwd, self._bwd, 1 + len(args)
        program = by_value(self._name(), [self.__wrapped__], (vjp_arg, *args), kwargs)
        call = Call(program, set(range(1, count + len(kwargs))))

        def given(operands: list[Any]) -> tuple[list[Any], dict[str, Any]]:
            return operands[:count], dict(zip(kwargs, operands[count:], strict=True))

        def forward(operands: list[Any], perturbed: list[bool]) -> Any:
            positional, keywords = given(operands)
            result = fn_fwd(call.marked(positional[0], perturbed), *positional, **keywords)
            return pair(call.name, "fwd", "(value, residuals)", result)

        def backward(kept: Kept, cotangent: Any) -> tuple[Any, ...]:
            positional, keywords = given(kept.operands)
            marked = call.marked(positional[0], kept.perturbed)
            return (fn_bwd(kept.residuals, _none_for_zero(cotangent), marked, *positional, **keywords),)

        return call.with_cotangents(forward, backward, range(len(program.leaves)), True, False)


def _none_for_zero(tree: Any) -> Any:
    def shown(x: Any) -> Any:
        return x if isinstance(x, (jax.Array, np.ndarray)) else None

    return jax.tree.map(shown, tree, is_leaf=lambda x: isinstance(x, SymbolicZero))


def _with_zeros(like: Any, tree: Any) -> Any:
    def filled(x: Any, tangent: Any) -> Any:
        is_array = isinstance(x, (jax.Array, np.ndarray)) and is_inexact(x)
        return jnp.zeros_like(x) if tangent is None and is_array else tangent

    return jax.tree.map(filled, like, tree)
