# SPDX-License-Identifier: Apache-2.0
"""Derivatives in reverse mode: `vjp`, and Equinox's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, TypeVarTuple, overload

import jax

from graftax._jax.tracebacks import boundary
from graftax.transforms._engine.derivative import Differentiated, arrays_only, explaining_reverse_errors
from graftax.transforms._engine.lift import MISSING, Make, by_value
from graftax.transforms._engine.program import Program

Ts = TypeVarTuple("Ts")
P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")


@overload
def vjp(
    fun: Callable[[*Ts], R], *primals: *Ts, has_aux: Literal[False] = False, reduce_axes: Sequence[Any] = ()
) -> tuple[R, Callable[[Any], tuple[*Ts]]]: ...
@overload
def vjp(
    fun: Callable[[*Ts], tuple[R, A]], *primals: *Ts, has_aux: Literal[True], reduce_axes: Sequence[Any] = ()
) -> tuple[R, Callable[[Any], tuple[*Ts]], A]: ...
@overload
def vjp(fun: Callable[..., Any], *primals: Any, has_aux: bool, reduce_axes: Sequence[Any] = ()) -> tuple[Any, ...]: ...
@overload
def vjp(
    *, has_aux: bool = False, reduce_axes: Sequence[Any] = ()
) -> Callable[[Callable[P, Any]], Callable[P, tuple[Any, ...]]]: ...
@boundary
def vjp(
    fun: Callable[..., Any] = MISSING, *primals: Any, has_aux: bool = False, reduce_axes: Sequence[Any] = ()
) -> Any:
    """The value of a function of any objects, and the function that pulls cotangents back.

    Args:
        fun: the function; its changes are applied to the caller's objects. Without it, a decorator is returned.
        primals: its positional arguments.
        has_aux: the function returns a pair, of which the first part is differentiated.
        reduce_axes: as in `jax.vjp`.

    Returns:
        (value, pull back), and with `has_aux` the second part. `pull back` takes a graph like the value, with a
        cotangent for each array; None is zero. It returns a tuple of graphs like the primals, as `value_and_grad` gives
        them.

    Raises:
        StructureError: by `pull back`, if the cotangents do not fit; names the path.

    Example:
        >>> value, pull = graftax.vjp(lambda model: model["w"] * 2, {"w": jnp.ones(2), "name": "net"})
        >>> pull(jnp.ones(2))
        ({'w': Array([2., 2.], dtype=float32), 'name': None},)
    """
    if fun is MISSING:  # a decorator, as in `jvp`
        return functools.partial(functools.partial, vjp, has_aux=has_aux, reduce_axes=reduce_axes)
    return pulled_back(Program, fun, primals, has_aux, {"reduce_axes": reduce_axes} if reduce_axes else {})


def pulled_back(
    make: Make, fun: Callable[..., Any], primals: Sequence[Any], has_aux: bool, options: dict[str, Any]
) -> tuple[Any, ...]:
    """`vjp` with its program made by `make`, for `vjp` and `filter_vjp`."""
    differentiated = Differentiated(make, fun, "vjp", primals, has_aux)
    _, pull, outputs = jax.vjp(differentiated.flat, differentiated.primals, has_aux=True, **options)
    linear_map = differentiated.linear_map()

    @boundary
    def pull_back(cotangent: object) -> tuple[Any, ...]:
        cotangent_leaves = linear_map.cotangents(cotangent)
        with explaining_reverse_errors():
            (gradients,) = pull(cotangent_leaves)
        return linear_map.chosen.graphs(gradients)

    return differentiated.results(pull_back, outputs)


@overload
def filter_vjp(
    fun: Callable[[*Ts], R], *primals: *Ts, has_aux: Literal[False] = False
) -> tuple[R, Callable[[Any], tuple[*Ts]]]: ...
@overload
def filter_vjp(
    fun: Callable[[*Ts], tuple[R, A]], *primals: *Ts, has_aux: Literal[True]
) -> tuple[R, Callable[[Any], tuple[*Ts]], A]: ...
@overload
def filter_vjp(fun: Callable[..., Any], *primals: Any, has_aux: bool) -> tuple[Any, ...]: ...
@boundary
def filter_vjp(fun: Callable[..., Any], *primals: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """As `equinox.filter_vjp`: the value of a function, and the function that pulls cotangents back.

    Args:
        fun: any callable.
        *primals: its positional arguments.
        has_aux: the function returns a pair, of which the first part is differentiated.

    Returns:
        (value, pull back), and with `has_aux` the second part. `pull back` takes a tree like the value, with a
        cotangent for each floating array and None for everything else. It returns a tuple of trees like the primals.

    Raises:
        StructureError: by `pull back`, if the cotangents do not fit; names the path.

    Example:
        >>> value, pull = graftax.filter_vjp(lambda m: m["w"] * 2, {"w": jnp.ones(2), "name": "net"})
        >>> pull(jnp.ones(2))
        ({'w': Array([2., 2.], dtype=float32), 'name': None},)
    """
    value, pull, *aux = pulled_back(by_value, fun, primals, has_aux, {})

    @boundary
    def pull_back(cotangent: object) -> tuple[Any, ...]:
        return tuple(arrays_only(x) for x in pull(cotangent))

    return (value, pull_back, *aux)
