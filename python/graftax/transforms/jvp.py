# SPDX-License-Identifier: Apache-2.0
"""Derivatives in forward mode: `jvp`, `linearize`, and Equinox's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, TypeVarTuple, overload

import jax
import jax.numpy as jnp

from graftax import _core
from graftax._jax.tracebacks import boundary
from graftax._jax.traces import in_same_trace
from graftax.transforms._engine.derivative import Differentiated, arrays_only
from graftax.transforms._engine.lift import MISSING, Output, by_value, name_of, named, traced_output
from graftax.transforms._engine.program import Program
from graftax.transforms._engine.tangents import is_inexact

Ts = TypeVarTuple("Ts")
R = TypeVar("R")
A = TypeVar("A")

NOT_PRIMALS = (
    "{name}: {option} is {actual}. Both are tuples with one element for each positional argument: "
    "jvp(f, (x, y), (tangent_of_x, tangent_of_y))."
)
OTHER_TREE = (
    "{name}: the tangents have to be a tree like the primals, with None for no tangent: {expected}, not {actual}."
)


@overload
def jvp(
    fun: Callable[[*Ts], R], primals: tuple[*Ts], tangents: Sequence[Any], has_aux: Literal[False] = False
) -> tuple[R, R]: ...
@overload
def jvp(
    fun: Callable[[*Ts], tuple[R, A]], primals: tuple[*Ts], tangents: Sequence[Any], has_aux: Literal[True]
) -> tuple[R, R, A]: ...
@overload
def jvp(
    fun: Callable[..., R], primals: list[Any], tangents: Sequence[Any], has_aux: Literal[False] = False
) -> tuple[R, R]: ...
@overload
def jvp(fun: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], has_aux: bool) -> tuple[Any, ...]: ...
@overload
def jvp(*, has_aux: bool = False) -> Callable[[Callable[..., Any]], Callable[..., tuple[Any, ...]]]: ...
@boundary
def jvp(
    fun: Callable[..., Any] = MISSING,
    primals: Sequence[Any] = MISSING,
    tangents: Sequence[Any] = MISSING,
    has_aux: bool = False,
) -> Any:
    """The value of a function of any objects, and its directional derivative.

    Args:
        fun: the function; its changes are applied to the caller's objects. Without it, a decorator is returned.
        primals: its positional arguments.
        tangents: one graph like each of them, with a tangent (same shape and dtype) for each inexact array. None or a
            static value in its place stands for a zero tangent.
        has_aux: the function returns a pair, of which the first part is differentiated.

    Returns:
        (value, tangent of the value), and with `has_aux` the second part. The tangent is a graph like the value, with
        None for arrays that are not inexact.

    Raises:
        StructureError: if the tangents do not fit; names the path.

    Example:
        >>> value, rate = graftax.jvp(lambda model: model["w"] ** 2, [{"w": jnp.ones(2)}], [{"w": jnp.ones(2)}])
        >>> rate
        Array([2., 2.], dtype=float32)
    """
    if fun is MISSING:
        # A decorator: `partial(partial, jvp, has_aux=...)(fun)` is `partial(jvp, fun, has_aux=...)`.
        return functools.partial(functools.partial, jvp, has_aux=has_aux)
    for option, value in (("primals", primals), ("tangents", tangents)):
        is_sequence = isinstance(value, (tuple, list))
        if not is_sequence or len(value) != len(primals):
            text = f"a {type(value).__name__}" + (f" of {len(value)}" if is_sequence else "")
            raise TypeError(NOT_PRIMALS.format(name=name_of(fun, "jvp"), option=option, actual=text))
    differentiated = Differentiated(Program, fun, "jvp", primals, has_aux)
    tangent_leaves = differentiated.tangents(tangents)
    # The output leaves are auxiliary output: what the function changed comes back with its value.
    _, rates, outputs = jax.jvp(differentiated.flat, (differentiated.primals,), (tangent_leaves,), has_aux=True)
    return differentiated.results(differentiated.linear_map().output_graph(rates), outputs)


@overload
def linearize(
    fun: Callable[[*Ts], R], *primals: *Ts, has_aux: Literal[False] = False
) -> tuple[R, Callable[..., R]]: ...
@overload
def linearize(
    fun: Callable[[*Ts], tuple[R, A]], *primals: *Ts, has_aux: Literal[True]
) -> tuple[R, Callable[..., R], A]: ...
@overload
def linearize(fun: Callable[..., Any], *primals: Any, has_aux: bool) -> tuple[Any, ...]: ...
@boundary
def linearize(fun: Callable[..., Any], *primals: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """The value of a function of any objects, and its derivative there as a function of tangents.

    Args:
        fun: any callable.
        *primals: its positional arguments.
        has_aux: the function returns a pair, of which the first part is differentiated.

    Returns:
        (value, rate), and with `has_aux` the second part. `rate(*tangents)` takes and gives what `jvp` takes and gives,
        without running the function again.

    Raises:
        StructureError: by `rate`, if the tangents do not fit; names the path.
        TypeError: if there is nothing to differentiate.

    Example:
        >>> value, rate = graftax.linearize(lambda model: model["w"] ** 2, {"w": jnp.ones(2)})
        >>> rate({"w": jnp.ones(2)})
        Array([2., 2.], dtype=float32)
    """
    differentiated = Differentiated(Program, fun, "linearize", primals, has_aux)
    _, push, outputs = jax.linearize(differentiated.flat, differentiated.primals, has_aux=True)
    linear_map = differentiated.linear_map()

    @boundary
    def rate(*tangents: Any) -> Any:
        return linear_map.output_graph(push(linear_map.tangents(tangents)))

    return differentiated.results(rate, outputs)


@boundary
def filter_jvp(fn: Callable[..., R], primals: Sequence[Any], tangents: Sequence[Any], **kwargs: Any) -> tuple[R, R]:
    """As `equinox.filter_jvp`: the value of a function, and its directional derivative.

    Args:
        fn: any callable.
        primals: its positional arguments. Python floats that have a tangent are traced.
        tangents: a tree like `primals`, with None for what is not differentiated.
        **kwargs: keyword arguments, which are not differentiated.

    Returns:
        (value, tangent of the value). The tangent has None for each part that does not depend on a tangent.

    Raises:
        ValueError: if the tangents are not a tree like `primals`, or if a tangent has another shape than its primal.

    Example:
        >>> graftax.filter_jvp(lambda x, n: x**n, (jnp.asarray(3.0), 2), (jnp.asarray(1.0), None))[1].item()
        6.0
    """
    name = name_of(fn, "filter_jvp")
    structures = [jax.tree.structure(tuple(x), is_leaf=_is_none) for x in (primals, tangents)]
    if structures[0] != structures[1]:
        raise ValueError(OTHER_TREE.format(name=name, expected=structures[0], actual=structures[1]))

    # A Python float that has a tangent becomes an array, which makes it a leaf of the program.
    def as_array(tangent: object, primal: object) -> Any:
        return primal if tangent is None or not isinstance(primal, (float, complex)) else jnp.asarray(primal)

    operands: tuple[Any, ...] = jax.tree.map(as_array, tuple(tangents), tuple(primals), is_leaf=_is_none)
    program = by_value(name, [fn], operands, kwargs)
    graphdef = _core.record(operands)[1]
    tangent_arrays: tuple[Any, ...] = jax.tree.map(jnp.asarray, tuple(tangents))
    tangent_leaves, tangents_graphdef = _core.record(tangent_arrays)
    # The two trees have one structure: a tangent is at the key path of its primal.
    leaf_index = {key_path: i for i, key_path in enumerate(graphdef.leaf_places())}
    chosen = [leaf_index[key_path] for key_path in tangents_graphdef.leaf_places()]
    depends: list[bool] = []
    outputs: list[Output] = []

    def flat(diff_leaves: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Any]]:
        output, _, output_leaves = traced_output(program, program.with_leaves(chosen, diff_leaves))
        outputs.append(output)
        # Equinox returns None, not zeros, as the tangent of what does not depend on a primal with one.
        depends[:] = [bool(diff_leaves) and in_same_trace(x, diff_leaves[0]) and is_inexact(x) for x in output.leaves]
        return tuple(x for x, d in zip(output.leaves, depends, strict=True) if d), output_leaves

    diff_leaves = tuple(program.leaves[i] for i in chosen)
    # Tangents of other dtypes, such as integers, are passed on: JAX raises for them.
    cast_tangents = tuple(
        jnp.asarray(t, jnp.result_type(x)) if is_inexact(t) else t
        for t, x in zip(tangent_leaves, diff_leaves, strict=True)
    )
    _, output_tangents, output_leaves = jax.jvp(named(flat, program), (diff_leaves,), (cast_tangents,), has_aux=True)
    tangents_left = iter(output_tangents)
    tangent = outputs[-1].rebuilt([next(tangents_left) if d else None for d in depends])
    return program.finish(output_leaves), arrays_only(tangent)


def _is_none(x: object) -> bool:
    return x is None
