# SPDX-License-Identifier: Apache-2.0
"""Gradients: `grad`, `value_and_grad`, and Equinox's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, Unpack, overload

import jax

from graftax._jax.tracebacks import boundary
from graftax._jit.pytree_callable import preserves_pytree
from graftax.transforms._engine.derivative import (
    First,
    ForwardHook,
    N,
    ReverseOptions,
    W,
    arrays_only,
    explaining_reverse_errors,
    split_aux,
    with_own_first,
)
from graftax.transforms._engine.lift import MISSING, Make, by_value, decorator, memoize_wrapper, named, wraps
from graftax.transforms._engine.program import Program
from graftax.transforms._engine.wrt import OfArrays, Wrt, differentiated_program

P = ParamSpec("P")
T = TypeVar("T")
V = TypeVar("V")
A = TypeVar("A")


class GradOptions(ReverseOptions[N, W], total=False):
    """The keyword arguments of `grad` and `value_and_grad`."""

    reduce_axes: Sequence[Any]


ByFirst = GradOptions[Literal[0], OfArrays]
ByArguments = GradOptions[int | Sequence[int], Wrt]

NOT_SCALAR = (
    "{name}: the function has to return a scalar array, and returned {actual}. Return (value, aux) with has_aux=True "
    "for what else there is, or use jacrev for the derivative of more than one number."
)


@overload
def grad(fun: First[T, P, Any], *, has_aux: Literal[False] = False, **options: Unpack[ByFirst]) -> First[T, P, T]: ...
@overload
def grad(
    fun: First[T, P, tuple[Any, A]], *, has_aux: Literal[True], **options: Unpack[ByFirst]
) -> First[T, P, tuple[T, A]]: ...
@overload
def grad(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: Sequence[Any] = (),
    *,
    wrt: Wrt = None,
) -> Callable[P, Any]: ...
@overload
def grad(  # pyright: ignore[reportOverlappingOverload]  # more is known of the first argument
    *, has_aux: Literal[False] = False, **options: Unpack[ByFirst]
) -> Callable[[First[T, P, Any]], First[T, P, T]]: ...
@overload
def grad(
    *, has_aux: Literal[True], **options: Unpack[ByFirst]
) -> Callable[[First[T, P, tuple[Any, A]]], First[T, P, tuple[T, A]]]: ...
@overload
def grad(
    *, has_aux: bool = False, **options: Unpack[ByArguments]
) -> Callable[[Callable[P, Any]], Callable[P, Any]]: ...
@boundary
@decorator
def grad(
    fun: Callable[..., Any] = MISSING,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: Sequence[Any] = (),
    *,
    wrt: Wrt = None,
) -> Callable[..., Any]:
    """The gradient of a function of any objects; as `value_and_grad`, without the value.

    Args:
        fun, argnums, has_aux, holomorphic, allow_int, reduce_axes, wrt: as in `value_and_grad`.

    Returns:
        a function of the same arguments that returns the gradient, or (gradient, aux) with `has_aux`.

    Raises:
        TypeError: if the value is not a scalar, or if there is nothing to differentiate.

    Example:
        >>> graftax.grad(lambda model, x: (model["w"] @ x).sum())({"w": jnp.ones(2), "name": "net"}, jnp.ones(2))
        {'w': Array([1., 1.], dtype=float32), 'name': None}
    """
    options = grad_options(holomorphic, allow_int, reduce_axes)
    return _without_value(with_gradient(Program, fun, "grad", argnums, has_aux, wrt, options), fun, "grad", has_aux)


@overload
def value_and_grad(
    fun: First[T, P, V], *, has_aux: Literal[False] = False, **options: Unpack[ByFirst]
) -> First[T, P, tuple[V, T]]: ...
@overload
def value_and_grad(
    fun: First[T, P, tuple[V, A]], *, has_aux: Literal[True], **options: Unpack[ByFirst]
) -> First[T, P, tuple[tuple[V, A], T]]: ...
@overload
def value_and_grad(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: Sequence[Any] = (),
    *,
    wrt: Wrt = None,
) -> Callable[P, tuple[Any, Any]]: ...
@overload
def value_and_grad(  # pyright: ignore[reportOverlappingOverload]  # more is known of the first argument
    *, has_aux: Literal[False] = False, **options: Unpack[ByFirst]
) -> Callable[[First[T, P, V]], First[T, P, tuple[V, T]]]: ...
@overload
def value_and_grad(
    *, has_aux: Literal[True], **options: Unpack[ByFirst]
) -> Callable[[First[T, P, tuple[V, A]]], First[T, P, tuple[tuple[V, A], T]]]: ...
@overload
def value_and_grad(
    *, has_aux: bool = False, **options: Unpack[ByArguments]
) -> Callable[[Callable[P, Any]], Callable[P, tuple[Any, Any]]]: ...
@boundary
@decorator
def value_and_grad(
    fun: Callable[..., Any] = MISSING,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: Sequence[Any] = (),
    *,
    wrt: Wrt = None,
) -> Callable[..., Any]:
    """A function's value together with its gradient with respect to the arrays in its arguments.

    The gradient is a graph like the argument, with the same sharing: each inexact array is replaced by its gradient
    (same shape and dtype), every other array by None. A mutable object in two places is one object in the gradient,
    too, and its arrays get one gradient for all their uses. That includes uses through a captured variable or through
    another argument. An array in two places of immutable objects gets one gradient for each place.
    Changes made by the function are applied to the caller's objects, as in plain Python.

    Args:
        fun: returns a scalar of a floating (with `holomorphic`, complex) dtype, or (scalar, aux) with `has_aux`.
        argnums: the positional arguments to differentiate: a number gives one gradient graph, several a tuple of them.
        has_aux: the function returns a pair. Its second part, which may be any objects, is returned with the value.
        holomorphic, allow_int, reduce_axes: as in `jax.value_and_grad`.
        wrt: instead of `argnums`: names or positions of arguments; patterns of key paths (`"model.head"`, `"**.bias"`):
            the gradient is that of the arguments in which they match; or a type (`nnx.Param`), a filter of Flax NNX, or
            a predicate of arrays, which select within the arguments of `argnums`.

    Returns:
        a function of the same arguments that returns (value, gradient), or ((value, aux), gradient).

    Raises:
        TypeError: if the value is not a scalar, or if there is nothing to differentiate.

    Example:
        >>> def loss(model, x):
        ...     return (model["w"] @ x).sum()
        >>> graftax.value_and_grad(loss)({"w": jnp.ones(2), "name": "net"}, jnp.ones(2))
        (Array(2., dtype=float32), {'w': Array([1., 1.], dtype=float32), 'name': None})
    """
    return with_gradient(
        Program, fun, "value_and_grad", argnums, has_aux, wrt, grad_options(holomorphic, allow_int, reduce_axes)
    )


def _without_value(
    value_and_gradient: Callable[..., Any], fun: Callable[..., object], title: str, has_aux: bool
) -> Callable[..., Any]:
    @wraps(fun, title)
    def gradient(*args: object, **kwargs: object) -> Any:
        value, grads = value_and_gradient(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return gradient


def grad_options(holomorphic: bool, allow_int: bool, reduce_axes: Sequence[Any]) -> dict[str, Any]:
    """The options of `jax.value_and_grad` that are passed on."""
    options: dict[str, Any] = {"holomorphic": holomorphic, "allow_int": allow_int}
    return {**options, "reduce_axes": reduce_axes} if reduce_axes else options


def with_gradient(
    make: Make,
    fun: Callable[..., Any],
    title: str,
    argnums: int | Sequence[int],
    has_aux: bool,
    wrt: Wrt,
    options: dict[str, Any],
) -> Callable[..., Any]:
    """`value_and_grad` with its programs made by `make`, for `value_and_grad` and `filter_value_and_grad`."""

    @wraps(fun, title)
    def value_and_gradient(*args: object, **kwargs: object) -> Any:
        allow_int = options.get("allow_int", False)
        program, chosen = differentiated_program(make, fun, title, args, kwargs, argnums, wrt, allow_int)

        # `ForwardHook` calls it before the backward pass, whose rules find the caller's objects updated.
        def finish(outputs: list[Any]) -> Any:
            return program.finish(program.tied(outputs), untouched=program.untouched)

        def flat(diff_leaves: tuple[Any, ...]) -> tuple[Any, ForwardHook]:
            value: list[Any] = []

            def body(functions: list[Callable[..., Any]], operands: list[Any]) -> Any:
                result = functions[0](*operands)
                # As in JAX, the pair may be a list.
                if has_aux:
                    result = split_aux(result, program.name)
                value.append(as_scalar(result[0] if has_aux else result, program.name))
                return result

            # The output leaves travel as auxiliary output, so what the function changed comes back with its value.
            _, outputs = program.trace(program.with_leaves(chosen.leaves, diff_leaves), body)
            return value[0], ForwardHook(outputs, finish)

        run = jax.value_and_grad(named(flat, program), has_aux=True, **options)
        with explaining_reverse_errors():
            (_, result), gradients = run(tuple(program.leaves[i] for i in chosen.leaves))
        return result, chosen.graphs(gradients)

    return value_and_gradient


def as_scalar(value: object, name: str) -> Any:
    """The value. Raises TypeError if it is not a scalar, and says what to do, which JAX's error does not."""
    # A Python number is a scalar, too: JAX makes an array of it.
    shape = getattr(value, "shape", () if isinstance(value, (int, float, complex)) else None)
    if shape != ():
        returned = f"an array of shape {shape}" if shape is not None else type(value).__qualname__
        raise TypeError(NOT_SCALAR.format(name=name, actual=returned))
    return value


@overload
def filter_value_and_grad(
    fun: First[T, P, V], *, has_aux: Literal[False] = False, **options: Any
) -> First[T, P, tuple[V, T]]: ...
@overload
def filter_value_and_grad(
    fun: First[T, P, tuple[V, A]], *, has_aux: Literal[True], **options: Any
) -> First[T, P, tuple[tuple[V, A], T]]: ...
@overload
def filter_value_and_grad(
    *, has_aux: Literal[False] = False, **options: Any
) -> Callable[[First[T, P, V]], First[T, P, tuple[V, T]]]: ...
@overload
def filter_value_and_grad(
    *, has_aux: Literal[True], **options: Any
) -> Callable[[First[T, P, tuple[V, A]]], First[T, P, tuple[tuple[V, A], T]]]: ...
@preserves_pytree
@boundary
def filter_value_and_grad(fun: Callable[..., Any] | None = None, *, has_aux: bool = False, **options: Any) -> Any:
    """As `equinox.filter_value_and_grad`: the value, and the gradient for the floating arrays of the first argument.

    The gradient is a tree like the argument, with None for every other leaf. The caller's objects are not changed, and
    a change that is lost gives a `LostChangeWarning`. `graftax.value_and_grad` applies changes.

    Args:
        fun: returns a scalar, or (scalar, aux) with `has_aux`. Without it, a decorator is returned.
        has_aux: the function returns a pair.
        **options: `holomorphic`, `allow_int`, as in `jax.value_and_grad`.

    Returns:
        a function of the same arguments that returns (value, gradient), or ((value, aux), gradient).

    Raises:
        TypeError: if the value is not a real scalar, or if the first argument is not given by position.

    Example:
        >>> loss = graftax.filter_value_and_grad(lambda model: (model["w"] ** 2).sum())
        >>> loss({"w": jnp.ones(2), "name": "net"})
        (Array(2., dtype=float32), {'w': Array([2., 2.], dtype=float32), 'name': None})
    """
    if fun is None:
        return functools.partial(filter_value_and_grad, has_aux=has_aux, **options)
    value_and_gradient = _filtered_gradient("filter_value_and_grad", fun, has_aux, options)
    return memoize_wrapper(value_and_gradient, fun, "filter_value_and_grad", has_aux, *options.items())


@overload
def filter_grad(fun: First[T, P, Any], *, has_aux: Literal[False] = False, **options: Any) -> First[T, P, T]: ...
@overload
def filter_grad(
    fun: First[T, P, tuple[Any, A]], *, has_aux: Literal[True], **options: Any
) -> First[T, P, tuple[T, A]]: ...
@overload
def filter_grad(*, has_aux: Literal[False] = False, **options: Any) -> Callable[[First[T, P, Any]], First[T, P, T]]: ...
@overload
def filter_grad(
    *, has_aux: Literal[True], **options: Any
) -> Callable[[First[T, P, tuple[Any, A]]], First[T, P, tuple[T, A]]]: ...
@preserves_pytree
@boundary
def filter_grad(fun: Callable[..., Any] | None = None, *, has_aux: bool = False, **options: Any) -> Any:
    """As `equinox.filter_grad`: `filter_value_and_grad` without the value.

    Args:
        fun, has_aux, **options: as in `filter_value_and_grad`.

    Returns:
        a function of the same arguments that returns the gradient, or (gradient, aux) with `has_aux`.

    Raises:
        TypeError: if the value is not a real scalar, or if the first argument is not given by position.

    Example:
        >>> graftax.filter_grad(lambda model: (model["w"] ** 2).sum())({"w": jnp.ones(2), "name": "net"})
        {'w': Array([2., 2.], dtype=float32), 'name': None}
    """
    if fun is None:
        return functools.partial(filter_grad, has_aux=has_aux, **options)
    gradient = _without_value(_filtered_gradient("filter_grad", fun, has_aux, options), fun, "filter_grad", has_aux)
    return memoize_wrapper(gradient, fun, "filter_grad", has_aux, *options.items())


def _filtered_gradient(title: str, fun: Callable[..., object], has_aux: bool, options: dict[str, Any]) -> Any:
    # The options go to JAX, where `argnums` would count the arguments of the flat function.
    if "argnums" in options:
        raise ValueError(
            f"{title} differentiates by the first argument: put several objects into a tuple and pass that first, or "
            "use graftax.value_and_grad(argnums=...)"
        )
    run = with_gradient(by_value, fun, title, 0, has_aux, None, options)

    @wraps(fun, title)
    def value_and_gradient(*args: object, **kwargs: object) -> Any:
        value, gradient = run(*with_own_first(fun, args), **kwargs)
        return value, arrays_only(gradient)

    return value_and_gradient
