# SPDX-License-Identifier: Apache-2.0
"""The common base of `custom_jvp`, `custom_vjp` and Equinox's versions of them."""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from graftax._jax.error_texts import ClosedOver
from graftax._jax.tracebacks import caller_level
from graftax.transforms._engine.custom_derivative_call import CustomCall
from graftax.transforms._engine.lift import MISSING, name_of
from graftax.transforms._engine.loop_state import type_text
from graftax.transforms._engine.program import NO_SUCH_OPERAND, NOT_CALLABLE, Program
from graftax.transforms._engine.tangents import is_inexact

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")

NO_RULE = "{name} has no rule: give it one with {how}, or call the function without the decorator."
NO_SUCH_NONDIFF = "{name}: nondiff_argnums has {which}, and the call has {count} arguments. Positions begin at 0."
RULE_PAIR = "{name}: its {rule} has to return a pair {pair}; it returned {actual}."
OLD_RULE = (
    "{title}.{old} is the old form of {new}, in which None stands for a {of} that is not there; with {old} arrays of "
    "zeros are made for it."
)
KEYWORD_ONLY = "{name}: keyword-only arguments have no position that a rule could be given: {error}"


class _BindsAsMethod(Generic[P, R]):
    """A callable around a function, which acts as a method if it is defined in the body of a class."""

    _title = ""
    _error_without_rule: type[Exception]

    def __init__(self, fun: Callable[P, R]) -> None:
        if not callable(fun):
            raise TypeError(NOT_CALLABLE.format(name=f"graftax.{self._title}", actual=fun))
        # The attributes of a callable object are its state, and would hide those of this object.
        functools.update_wrapper(cast(Any, self), fun, updated=())
        self.__wrapped__ = fun

    def _name(self) -> str:
        return name_of(self.__wrapped__, self._title)

    def _no_rule(self, remedy: str) -> Exception:
        return self._error_without_rule(NO_RULE.format(name=self._name(), how=remedy))

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(
        self: _BindsAsMethod[Concatenate[Any, Q], R], instance: object, owner: type | None = None
    ) -> Callable[Q, R]: ...
    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(cast(Any, self), instance)


class CustomRule(_BindsAsMethod[P, R]):
    """A function with a derivative rule. In a class body it is a method: the instance is its first argument."""

    # As in JAX; Equinox raises another one.
    _error_without_rule = AttributeError

    @classmethod
    def _create(cls, fun: object, nondiff_argnums: int | Sequence[int], nondiff_argnames: str | Sequence[str]) -> Any:
        """`__new__` of the subclasses: without a function, but with options, the result is a decorator."""
        if fun is MISSING and (nondiff_argnums != () or nondiff_argnames != ()):
            return functools.partial(cls, nondiff_argnums=nondiff_argnums, nondiff_argnames=nondiff_argnames)
        return super().__new__(cls)

    def __init__(
        self,
        fun: Callable[P, R] = MISSING,
        nondiff_argnums: int | Sequence[int] = (),
        nondiff_argnames: str | Sequence[str] = (),
    ) -> None:
        super().__init__(fun)
        numbers = (nondiff_argnums,) if isinstance(nondiff_argnums, int) else tuple(nondiff_argnums)
        names = (nondiff_argnames,) if isinstance(nondiff_argnames, str) else tuple(nondiff_argnames)
        self._nondiff = (*numbers, *map(self._position, names))

    def _position(self, argument: str) -> int:
        parameters = list(inspect.signature(self.__wrapped__).parameters)
        if argument not in parameters:
            operands = ", ".join(parameters)
            raise ValueError(NO_SUCH_OPERAND.format(name=self._name(), which=argument, operands=operands))
        return parameters.index(argument)

    def __repr__(self) -> str:
        return f"<graftax.{self._title} of {self.__wrapped__!r}>"

    def _call(self, args: tuple[object, ...], kwargs: dict[str, Any]) -> CustomCall:
        """Binds all arguments by position, because a rule receives its arguments by position."""
        name = self._name()
        bound = inspect.signature(self.__wrapped__).bind(*args, **kwargs)
        # As in JAX, a rule receives defaults as well.
        bound.apply_defaults()
        if bound.kwargs:
            raise TypeError(KEYWORD_ONLY.format(name=name, error=", ".join(bound.kwargs)))
        operands = bound.args
        count = len(operands)
        for i in self._nondiff:
            if not -count <= i < count:
                raise IndexError(NO_SUCH_NONDIFF.format(name=name, which=i, count=count))
        # Negative positions count from the end of the arguments of this call, defaults included.
        nondiff = {i % count for i in self._nondiff}
        return CustomCall(Program(name, [self.__wrapped__], operands), nondiff)


def require_pair(name: str, rule: str, expected: str, result: object) -> tuple[Any, Any]:
    if not isinstance(result, (tuple, list)) or len(cast("Sequence[Any]", result)) != 2:
        raise TypeError(RULE_PAIR.format(name=name, rule=rule, pair=expected, actual=type_text(result)))
    value, second = cast("Sequence[Any]", result)
    return value, second


class NotDifferentiated(RuntimeError, TypeError, ClosedOver):
    """Something is differentiated that the rule has no argument for. Its bases are what Equinox and JAX raise."""

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)  # JAX's own exception takes no message


class FilteredRule(_BindsAsMethod[P, R]):
    """The common base of `filter_custom_jvp` and `filter_custom_vjp`."""

    _error_without_rule = RuntimeError

    # Equinox calls the parameter `fn`.
    def __init__(self, fn: Callable[P, R]) -> None:
        super().__init__(fn)

    def _warn_old(self, old_name: str, new_name: str, noun: str) -> None:
        warnings.warn(
            OLD_RULE.format(title=self._title, old=old_name, new=new_name, of=noun), DeprecationWarning, caller_level()
        )


def none_for_zero(tree: object) -> Any:
    """The tree of tangents with None in place of symbolic zeros, as Equinox passes it to rules."""

    def shown(x: object) -> Any:
        return x if isinstance(x, (jax.Array, np.ndarray, np.generic, float, complex)) else None

    return jax.tree.map(shown, tree, is_leaf=lambda x: isinstance(x, SymbolicZero))


def with_zeros(like: object, tree: object) -> Any:
    """The tree of tangents with zeros in place of None, if `like` has a floating array there."""

    def filled(x: Any, tangent: Any) -> Any:
        is_array = isinstance(x, (jax.Array, np.ndarray)) and is_inexact(x)
        return jnp.zeros_like(x) if tangent is None and is_array else tangent

    return jax.tree.map(filled, like, tree)
