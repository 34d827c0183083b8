# SPDX-License-Identifier: Apache-2.0
"""What a function would do, without running it: `eval_shape`, `make_jaxpr`, and Equinox's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import jax
import jax.extend

from graftax import _core
from graftax._jax.tracebacks import boundary
from graftax._jit.jitted import Jitted
from graftax._jit.options import Options
from graftax._jit.pytree_callable import preserves_pytree
from graftax.transforms._engine.lift import by_value, flat_function, name_of, named, wraps
from graftax.transforms._engine.program import Program


@boundary
def eval_shape(fun: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The result of a function of any objects, with `jax.ShapeDtypeStruct` in place of every array.

    Nothing is computed, and nothing is changed: it is `graftax.jit(fun).eval_shape(*args, **kwargs)`.

    Args:
        fun: any callable.
        *args, **kwargs: its arguments. `jax.ShapeDtypeStruct` may stand in place of arrays.

    Returns:
        the result, as a new graph.

    Raises:
        UnsupportedValueError: if the function uses a value with hidden state, such as an iterator; names its path.

    Example:
        >>> graftax.eval_shape(lambda m: {"out": m["w"].sum(), "name": m["name"]}, {"w": jnp.ones(3), "name": "net"})
        {'out': ShapeDtypeStruct(shape=(), dtype=float32), 'name': 'net'}
    """
    jitted = fun if isinstance(fun, Jitted) else Jitted(fun, Options())
    return jitted.eval_shape(*args, **kwargs)


@overload
def make_jaxpr(
    fun: Callable[..., Any],
    static_argnums: int | Sequence[int] = (),
    axis_env: Sequence[tuple[Any, int]] | None = None,
    return_shape: Literal[False] = False,
) -> Callable[..., jax.extend.core.ClosedJaxpr]: ...  # pyright: ignore[reportPrivateImportUsage]
@overload
def make_jaxpr(
    fun: Callable[..., Any],
    static_argnums: int | Sequence[int] = (),
    axis_env: Sequence[tuple[Any, int]] | None = None,
    *,
    return_shape: Literal[True],
) -> Callable[..., tuple[jax.extend.core.ClosedJaxpr, Any]]: ...  # pyright: ignore[reportPrivateImportUsage]
@overload
def make_jaxpr(
    fun: Callable[..., Any],
    static_argnums: int | Sequence[int] = (),
    axis_env: Sequence[tuple[Any, int]] | None = None,
    return_shape: bool = False,
) -> Callable[..., Any]: ...
@boundary
def make_jaxpr(
    fun: Callable[..., Any],
    static_argnums: int | Sequence[int] = (),
    axis_env: Sequence[tuple[Any, int]] | None = None,
    return_shape: bool = False,
) -> Callable[..., Any]:
    """A function that shows what JAX sees of `fun`: the jaxpr of its arrays.

    The inputs of the jaxpr are the arrays of the arguments and of what the function captures, in the order of the walk.
    Its outputs are the arrays of the result, then those that the function puts into objects of the caller. Nothing is
    changed.

    Args:
        fun: any callable.
        static_argnums: arguments that must not hold arrays. Other values are static anyway.
        axis_env: as in `jax.make_jaxpr`.
        return_shape: returns (jaxpr, the result as `eval_shape` gives it).

    Returns:
        a function of the same arguments that returns the jaxpr.

    Raises:
        UnsupportedValueError: if the function uses a value with hidden state, such as an iterator; names its path.

    Example:
        >>> graftax.make_jaxpr(lambda m: m["w"] * m["n"])({"w": jnp.ones(3), "n": 2})
        { lambda ; a:f32[3]. let b:f32[3] = mul a 2.0:f32[] in (b,) }
    """
    static = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)

    @wraps(fun, "make_jaxpr")
    def show(*args: object, **kwargs: object) -> Any:
        program = Program(name_of(fun, "make_jaxpr"), [fun], args, kwargs, static=static, shapes=True)
        jaxpr = jax.make_jaxpr(flat_function(program), axis_env=axis_env)(*program.leaves)
        return (jaxpr, eval_shape(fun, *args, **kwargs)) if return_shape else jaxpr

    return show


@boundary
def filter_eval_shape(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As `equinox.filter_eval_shape`: the result, with `jax.ShapeDtypeStruct` in place of arrays.

    Args:
        fun: any callable.
        *args, **kwargs: its arguments. `jax.ShapeDtypeStruct` may stand in place of arrays.

    Returns:
        the result, as a new graph.

    Raises:
        UnsupportedValueError: if the function uses a value with hidden state, such as an iterator; names its path.

    Example:
        >>> graftax.filter_eval_shape(lambda m: (m["w"].sum(), m["name"]), {"w": jnp.ones(3), "name": "net"})
        (ShapeDtypeStruct(shape=(), dtype=float32), 'net')
    """
    return Jitted(fun, Options(mutation="discard", warn_lost=True, captured=False)).eval_shape(*args, **kwargs)


@preserves_pytree
@boundary
def filter_make_jaxpr(fun: Callable[..., Any]) -> Callable[..., tuple[Any, Any, Any]]:
    """As `equinox.filter_make_jaxpr`: a function that shows the jaxpr of `fun`.

    Args:
        fun: any callable.

    Returns:
        a function of the same arguments that returns three things: the jaxpr, whose inputs and outputs are the arrays
        of the arguments and of the result; the result with `jax.ShapeDtypeStruct` for each array and None for all
        other values; and the result with None for each array.

    Raises:
        UnsupportedValueError: if an argument contains a value with hidden state; names its path.

    Example:
        >>> graftax.filter_make_jaxpr(lambda m: m["w"] * m["n"])({"w": jnp.ones(3), "n": 2})[0]
        { lambda ; a:f32[3]. let b:f32[3] = mul a 2.0:f32[] in (b,) }
    """

    @wraps(fun, "filter_make_jaxpr")
    def show(*args: object, **kwargs: object) -> tuple[Any, Any, Any]:
        program = by_value(name_of(fun, "filter_make_jaxpr"), [fun], args, kwargs, shapes=True)
        # As in Equinox, captured arrays are constants of the jaxpr.
        operand_leaves = sorted(program.leaves_below(range(program.operands)))
        flat = flat_function(program, arrays=True)

        def of_arguments(*leaves: object) -> tuple[Any, ...]:
            return flat(*program.with_leaves(operand_leaves, leaves))

        run = jax.make_jaxpr(named(of_arguments, program), return_shape=True)
        jaxpr, shapes = run(*(program.leaves[i] for i in operand_leaves))
        # The result is built around the shapes, and split in two: shapes of computed arrays, and all other leaves.
        result_leaves, graphdef = _core.record((program.finish(shapes),), shapes=True)
        shape_ids = set(map(id, shapes))
        dynamic = [x if id(x) in shape_ids else None for x in result_leaves]
        static = [None if d is not None else x for x, d in zip(result_leaves, dynamic, strict=True)]
        return jaxpr, _core.unflatten(graphdef, dynamic, True), _core.unflatten(graphdef, static)

    return show
