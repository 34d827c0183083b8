# SPDX-License-Identifier: Apache-2.0
"""A function with a rule for cotangents: `custom_vjp`, and Equinox's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, cast, overload

from graftax import interop
from graftax._base.errors import MutationError
from graftax._jax.tracebacks import boundary
from graftax.transforms._engine.custom_derivative import (
    CustomRule,
    FilteredRule,
    NotDifferentiated,
    none_for_zero,
    require_pair,
    with_zeros,
)
from graftax.transforms._engine.custom_derivative_call import CustomCall, Saved
from graftax.transforms._engine.deferred_rules import DeferredRule
from graftax.transforms._engine.lift import MISSING, by_value
from graftax.transforms._engine.loop_state import type_text
from graftax.transforms._engine.snapshot import Snapshot

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")
F = TypeVar("F", bound=Callable[..., Any])

NO_FIRST = "{name}: pass its first argument by position: it is the one that is differentiated."
RULE_CHANGES_COPY = (
    "the bwd of {name} changed what it is given, which are copies: the change would be lost.\n{differences}\n(expected "
    "is what it was given.) Return the new value as a cotangent, or do the change in the function itself."
)
RULE_TUPLE = "{name}: its bwd has to return a tuple of {count} cotangents, one for each argument; it returned {actual}."


class custom_vjp(CustomRule[P, R]):
    """A function of any objects whose derivative is given by a rule for cotangents, as in `jax.custom_vjp`.

    Changes made by the function are applied to the caller's objects and differentiated as in any function; the rule is
    for the result only. A derivative with respect to a captured variable is an error.

    Args:
        fun: the function.
        nondiff_argnums, nondiff_argnames: arguments that are not differentiated; `bwd` receives them first.

    Raises:
        AttributeError: when the function is differentiated without a rule.
        TypeError: when it is differentiated with respect to an array that it captures.

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

    @overload
    def __new__(
        cls,
        fun: Callable[P, R],
        nondiff_argnums: int | Sequence[int] = (),
        nondiff_argnames: str | Sequence[str] = (),
    ) -> custom_vjp[P, R]: ...
    @overload
    def __new__(
        cls, *, nondiff_argnums: int | Sequence[int] = (), nondiff_argnames: str | Sequence[str] = ()
    ) -> Callable[[Callable[Q, S]], custom_vjp[Q, S]]: ...
    def __new__(
        cls,
        fun: Any = MISSING,
        nondiff_argnums: int | Sequence[int] = (),
        nondiff_argnames: str | Sequence[str] = (),
    ) -> Any:
        return cls._create(fun, nondiff_argnums, nondiff_argnames)

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
                If it has a parameter `updates_g`, as in `nnx.custom_vjp`, that receives the cotangents of what `fun`
                changes, in graphs like the arguments. The rule then covers the changes, too.
            symbolic_zeros: as in `jax.custom_vjp`: `fwd` receives arrays as `CustomVJPPrimal`, and `bwd` receives
                `SymbolicZero` where there is no cotangent (both of `jax.custom_derivatives`).
        """
        self._rules, self._symbolic = (fwd, bwd), symbolic_zeros

    @boundary
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._rules is None:
            raise self._no_rule("defvjp")
        call, symbolic = self._call(args, kwargs), self._symbolic
        # JAX may run the rule when the trace of this call has ended: what it captures is the caller's own by then.
        fwd, bwd = map(DeferredRule, self._rules)
        updates = _takes_updates(self._rules[1])

        def forward(operands: list[Any], perturbed: list[bool]) -> Any:
            return require_pair(call.name, "fwd", "(value, residuals)", fwd.current(*operands))

        def backward(saved: Saved, cotangent: object) -> tuple[Any, ...]:
            nondiff, diff = call.split(saved.operands)
            arguments = (*nondiff, saved.residuals, cotangent)
            # All of these are copies, so a change to them would be lost.
            snapshot = Snapshot.take(arguments, tuple(f"argument {i} of bwd" for i in range(len(arguments))))
            cotangents = bwd.current(
                *arguments, **({"updates_g": interop.none_for_empty(saved.updates)} if updates else {})
            )
            if text := snapshot.changes():
                raise MutationError(RULE_CHANGES_COPY.format(name=call.name, differences=text))
            if not isinstance(cotangents, (tuple, list)) or len(cast("Sequence[Any]", cotangents)) != len(diff):
                returned = f"{len(cotangents)} of them" if isinstance(cotangents, tuple) else type_text(cotangents)
                raise TypeError(RULE_TUPLE.format(name=call.name, count=len(diff), actual=returned))
            return tuple(cast("Sequence[Any]", cotangents))

        return call.with_cotangents(forward, backward, call.nondiff_leaves(), symbolic, symbolic, updates)


def _takes_updates(bwd: Callable[..., object]) -> bool:
    try:
        return "updates_g" in inspect.signature(bwd).parameters
    # Some builtins have no signature.
    except (TypeError, ValueError):
        return False


class filter_custom_vjp(FilteredRule[P, R]):
    """As `equinox.filter_custom_vjp`: a function whose derivative is given by a rule for cotangents.

    The floating arrays of the first argument are differentiated. Both parts of the rule receive all arguments.

    Args:
        fn: the function. `def_fwd` and `def_bwd` set the two parts of its rule.

    Raises:
        RuntimeError: when the function is called without a rule.
        TypeError: when it is called without a positional argument, or differentiated with respect to an argument
            other than the first or an array that it captures.

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

    def def_fwd(self, fn_fwd: F) -> F:
        """Sets the forward rule: `fn_fwd(perturbed, vjp_arg, *args, **kwargs)` returns (value, residuals).

        `perturbed` is a tree like `vjp_arg` of bools: whether the leaf is differentiated. Residuals may be any objects.
        """
        self._fwd = fn_fwd
        return fn_fwd

    def def_bwd(self, fn_bwd: F) -> F:
        """Sets the backward rule: `fn_bwd(residuals, grad, perturbed, vjp_arg, *args, **kwargs)`.

        `grad` is a tree like the value, with None where there is no gradient. It returns the gradient of `vjp_arg`, a
        tree like it, in which None is zero.
        """
        self._bwd = fn_bwd
        return fn_bwd

    def defvjp(self, fn_fwd: Callable[..., Any], fn_bwd: Callable[..., Any]) -> None:
        """The older form: without `perturbed`, and with zeros for floating arrays that have no gradient."""
        self._warn_old("defvjp", "def_fwd and def_bwd", "gradient")

        def fwd(perturbed: object, vjp_arg: object, *args: object, **kwargs: object) -> Any:
            value, residuals = fn_fwd(vjp_arg, *args, **kwargs)
            return value, (value, residuals)

        def bwd(residuals: Any, grad: Any, perturbed: Any, vjp_arg: Any, *args: Any, **kwargs: Any) -> Any:
            value, saved = residuals
            return fn_bwd(saved, with_zeros(value, grad), vjp_arg, *args, **kwargs)

        self.def_fwd(fwd)
        self.def_bwd(bwd)

    @boundary
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._fwd is None or self._bwd is None:
            raise self._no_rule("def_fwd and def_bwd")
        if not args:
            raise TypeError(NO_FIRST.format(name=self._name()))
        fn_fwd, fn_bwd, count = self._fwd, self._bwd, len(args)
        program = by_value(self._name(), [self.__wrapped__], args, kwargs)
        # As in Equinox, only the first argument is differentiated.
        call = CustomCall(program, set(range(1, count + len(kwargs))), NotDifferentiated, filtered=True)

        def split(operands: list[Any]) -> tuple[list[Any], dict[str, Any]]:
            return operands[:count], dict(zip(kwargs, operands[count:], strict=True))

        def forward(operands: list[Any], perturbed: list[bool]) -> Any:
            positional, keywords = split(operands)
            result = fn_fwd(call.perturbed_tree(positional[0], perturbed), *positional, **keywords)
            return require_pair(call.name, "fwd", "(value, residuals)", result)

        def backward(saved: Saved, cotangent: object) -> tuple[Any, ...]:
            positional, keywords = split(saved.operands)
            perturbed = call.perturbed_tree(positional[0], saved.perturbed)
            return (fn_bwd(saved.residuals, none_for_zero(cotangent), perturbed, *positional, **keywords),)

        return call.with_cotangents(forward, backward, range(len(program.leaves)), True, False)
