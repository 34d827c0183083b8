# SPDX-License-Identifier: Apache-2.0
"""Jacobians and Hessians: `jacfwd`, `jacrev`, `hessian`, and Equinox's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, Unpack, overload

import jax

from graftax._jax.tracebacks import boundary
from graftax._jit.pytree_callable import preserves_pytree
from graftax.transforms._engine.derivative import (
    DerivativeOptions,
    First,
    ForwardHook,
    ReverseOptions,
    arrays_only,
    explaining_reverse_errors,
    traced_value,
    with_own_first,
)
from graftax.transforms._engine.lift import (
    MISSING,
    Make,
    Output,
    by_value,
    decorator,
    memoize_wrapper,
    named,
    wraps,
)
from graftax.transforms._engine.program import Program
from graftax.transforms._engine.wrt import OfArrays, Wrt, differentiated_program

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")

ByFirst = DerivativeOptions[Literal[0], OfArrays]
ByArguments = DerivativeOptions[int | Sequence[int], Wrt]
ReverseByFirst = ReverseOptions[Literal[0], OfArrays]
ReverseByArguments = ReverseOptions[int | Sequence[int], Wrt]


@overload
def jacfwd(
    fun: First[T, P, jax.Array], *, has_aux: Literal[False] = False, **options: Unpack[ByFirst]
) -> First[T, P, T]: ...
@overload
def jacfwd(
    fun: First[T, P, tuple[jax.Array, A]], *, has_aux: Literal[True], **options: Unpack[ByFirst]
) -> First[T, P, tuple[T, A]]: ...
@overload
def jacfwd(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    *,
    wrt: Wrt = None,
) -> Callable[P, Any]: ...
@overload
def jacfwd(
    *, has_aux: bool = False, **options: Unpack[ByArguments]
) -> Callable[[Callable[P, Any]], Callable[P, Any]]: ...
@boundary
@decorator
def jacfwd(
    fun: Callable[..., Any] = MISSING,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    *,
    wrt: Wrt = None,
) -> Callable[..., Any]:
    """The Jacobian in forward mode: a graph like the result, with a graph like the argument in place of each array.

    The arguments are those of `value_and_grad`. An array of the innermost graph has the shape of the result's array
    followed by that of the argument's.

    Args:
        fun, argnums, has_aux, holomorphic, wrt: as in `value_and_grad`, but `fun` may return any graph of arrays.

    Returns:
        a function of the same arguments that returns the Jacobian, or (Jacobian, aux) with `has_aux`.

    Raises:
        TypeError: if there is nothing to differentiate.

    Example:
        >>> graftax.jacfwd(lambda model: model["w"] ** 2)({"w": jnp.arange(2.0), "name": "net"})
        {'w': Array([[0., 0.],
               [0., 2.]], dtype=float32), 'name': None}
    """
    return jacobian_by(Program, jax.jacfwd, "jacfwd", fun, argnums, has_aux, wrt, {"holomorphic": holomorphic})


@overload
def jacrev(
    fun: First[T, P, jax.Array], *, has_aux: Literal[False] = False, **options: Unpack[ReverseByFirst]
) -> First[T, P, T]: ...
@overload
def jacrev(
    fun: First[T, P, tuple[jax.Array, A]], *, has_aux: Literal[True], **options: Unpack[ReverseByFirst]
) -> First[T, P, tuple[T, A]]: ...
@overload
def jacrev(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    wrt: Wrt = None,
) -> Callable[P, Any]: ...
@overload
def jacrev(
    *, has_aux: bool = False, **options: Unpack[ReverseByArguments]
) -> Callable[[Callable[P, Any]], Callable[P, Any]]: ...
@boundary
@decorator
def jacrev(
    fun: Callable[..., Any] = MISSING,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    wrt: Wrt = None,
) -> Callable[..., Any]:
    """The Jacobian in reverse mode; otherwise as `jacfwd`.

    Args:
        fun, argnums, has_aux, holomorphic, allow_int, wrt: as in `jacfwd` and `value_and_grad`.

    Returns:
        a function of the same arguments that returns the Jacobian, or (Jacobian, aux) with `has_aux`.

    Raises:
        TypeError: if there is nothing to differentiate.

    Example:
        >>> graftax.jacrev(lambda model: {"y": model["w"] * 2})({"w": jnp.asarray(1.0)})
        {'y': {'w': Array(2., dtype=float32, weak_type=True)}}
    """
    options = {"holomorphic": holomorphic, "allow_int": allow_int}
    return jacobian_by(Program, jax.jacrev, "jacrev", fun, argnums, has_aux, wrt, options)


@overload
def hessian(
    fun: First[jax.Array, P, jax.Array], *, has_aux: Literal[False] = False, **options: Unpack[ByFirst]
) -> First[jax.Array, P, jax.Array]: ...
@overload
def hessian(
    fun: First[jax.Array, P, tuple[jax.Array, A]], *, has_aux: Literal[True], **options: Unpack[ByFirst]
) -> First[jax.Array, P, tuple[jax.Array, A]]: ...
@overload
def hessian(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    *,
    wrt: Wrt = None,
) -> Callable[P, Any]: ...
@overload
def hessian(
    *, has_aux: bool = False, **options: Unpack[ByArguments]
) -> Callable[[Callable[P, Any]], Callable[P, Any]]: ...
@boundary
@decorator
def hessian(
    fun: Callable[..., Any] = MISSING,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    *,
    wrt: Wrt = None,
) -> Callable[..., Any]:
    """The Hessian: as `jacfwd`, with a graph like the argument in place of each array of its inner graphs.

    Args:
        fun, argnums, has_aux, holomorphic, wrt: as in `jacfwd`.

    Returns:
        a function of the same arguments that returns the Hessian, or (Hessian, aux) with `has_aux`.

    Raises:
        TypeError: if there is nothing to differentiate.

    Example:
        >>> graftax.hessian(lambda model: model["w"] ** 3)({"w": jnp.asarray(2.0)})["w"]["w"].item()
        12.0
    """
    return jacobian_by(Program, jax.hessian, "hessian", fun, argnums, has_aux, wrt, {"holomorphic": holomorphic}, 2)


def jacobian_by(
    make: Make,
    transform: Callable[..., Any],
    title: str,
    fun: Callable[..., Any],
    argnums: int | Sequence[int],
    has_aux: bool,
    wrt: Wrt,
    options: dict[str, Any],
    order: int = 1,
) -> Callable[..., Any]:
    """`jacfwd`, `jacrev` and `hessian` with their programs made by `make`."""

    @wraps(fun, title)
    def jacobian(*args: Any, **kwargs: Any) -> Any:
        allow_int = options.get("allow_int", False)
        program, chosen = differentiated_program(make, fun, title, args, kwargs, argnums, wrt, allow_int)
        traced: list[Output] = []

        def finish(outputs: list[Any]) -> Any:
            return program.finish(outputs, untouched=program.untouched)

        def flat(diff_leaves: tuple[Any, ...]) -> tuple[Any, Any]:
            output, outputs = traced_value(program, program.with_leaves(chosen.leaves, diff_leaves), has_aux)
            traced.append(output)
            # Only reverse mode has a backward pass, whose rules have to find the caller's objects updated.
            return tuple(output.leaves), ForwardHook(outputs, finish) if transform is jax.jacrev else outputs

        run = transform(named(flat, program), has_aux=True, **options)
        with explaining_reverse_errors():
            by_output, result = run(tuple(program.leaves[i] for i in chosen.leaves))

        # JAX returns a row for each output array, nested as deep as the order of the derivative: the entries become
        # graphs like the arguments, from the innermost out.
        def nested(values: Any, depth: int) -> Any:
            inner = [nested(v, depth - 1) for v in values] if depth > 1 else values
            return chosen.graphs(inner)

        jacobian_graph = traced[-1].rebuilt([nested(row, order) for row in by_output])
        # In reverse mode, the ForwardHook has called `finish` already.
        if transform is not jax.jacrev:
            result = finish(result)
        return (jacobian_graph, result[1]) if has_aux else jacobian_graph

    return jacobian


@overload
def filter_jacfwd(fun: First[T, P, jax.Array], has_aux: Literal[False] = False) -> First[T, P, T]: ...
@overload
def filter_jacfwd(fun: First[T, P, tuple[jax.Array, A]], has_aux: Literal[True]) -> First[T, P, tuple[T, A]]: ...
@overload
def filter_jacfwd(fun: Callable[P, Any], has_aux: bool = False) -> Callable[P, Any]: ...
@preserves_pytree
@boundary
def filter_jacfwd(fun: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
    """As `equinox.filter_jacfwd`: the Jacobian in forward mode, with respect to the first argument's floating arrays.

    Args:
        fun: returns any tree of arrays, or (tree, aux) with `has_aux`.
        has_aux: the function returns a pair.

    Returns:
        a function of the same arguments that returns the Jacobian, or (Jacobian, aux) with `has_aux`. It is a tree
        like the result, with a tree like the first argument in place of each array.

    Raises:
        TypeError: if the first argument is not given by position, or if `has_aux` is set and `fun` returns no pair.

    Example:
        >>> graftax.filter_jacfwd(lambda x: x**2)(jnp.arange(2.0)).tolist()
        [[0.0, 0.0], [0.0, 2.0]]
    """
    return _filtered_jacobian(jax.jacfwd, "filter_jacfwd", fun, has_aux)


@overload
def filter_jacrev(fun: First[T, P, jax.Array], has_aux: Literal[False] = False) -> First[T, P, T]: ...
@overload
def filter_jacrev(fun: First[T, P, tuple[jax.Array, A]], has_aux: Literal[True]) -> First[T, P, tuple[T, A]]: ...
@overload
def filter_jacrev(fun: Callable[P, Any], has_aux: bool = False) -> Callable[P, Any]: ...
@preserves_pytree
@boundary
def filter_jacrev(fun: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
    """As `equinox.filter_jacrev`: the Jacobian in reverse mode, with respect to the first argument's floating arrays.

    Args:
        fun, has_aux: as in `filter_jacfwd`.

    Returns:
        a function of the same arguments that returns the Jacobian, or (Jacobian, aux) with `has_aux`.

    Raises:
        TypeError: if the first argument is not given by position, or if `has_aux` is set and `fun` returns no pair.

    Example:
        >>> graftax.filter_jacrev(lambda x: x**2)(jnp.arange(2.0)).tolist()
        [[0.0, 0.0], [0.0, 2.0]]
    """
    return _filtered_jacobian(jax.jacrev, "filter_jacrev", fun, has_aux)


@overload
def filter_hessian(
    fun: First[jax.Array, P, jax.Array], has_aux: Literal[False] = False
) -> First[jax.Array, P, jax.Array]: ...
@overload
def filter_hessian(
    fun: First[jax.Array, P, tuple[jax.Array, A]], has_aux: Literal[True]
) -> First[jax.Array, P, tuple[jax.Array, A]]: ...
@overload
def filter_hessian(fun: Callable[P, Any], has_aux: bool = False) -> Callable[P, Any]: ...
@preserves_pytree
@boundary
def filter_hessian(fun: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
    """As `equinox.filter_hessian`: the Hessian with respect to the floating arrays of the first argument.

    Args:
        fun, has_aux: as in `filter_jacfwd`.

    Returns:
        a function of the same arguments that returns the Hessian, or (Hessian, aux) with `has_aux`.

    Raises:
        TypeError: if the first argument is not given by position, or if `has_aux` is set and `fun` returns no pair.

    Example:
        >>> graftax.filter_hessian(lambda x: (x**3).sum())(jnp.ones(2)).tolist()
        [[6.0, 0.0], [0.0, 6.0]]
    """
    return _filtered_jacobian(jax.hessian, "filter_hessian", fun, has_aux, 2)


def _filtered_jacobian(
    transform: Callable[..., object], title: str, fun: Callable[..., object], has_aux: bool, order: int = 1
) -> Callable[..., Any]:
    run = jacobian_by(by_value, transform, title, fun, 0, has_aux, None, {}, order)

    @wraps(fun, title)
    def jacobian(*args: object, **kwargs: object) -> Any:
        result = run(*with_own_first(fun, args), **kwargs)
        return (arrays_only(result[0]), result[1]) if has_aux else arrays_only(result)

    return memoize_wrapper(jacobian, fun, title, has_aux)
