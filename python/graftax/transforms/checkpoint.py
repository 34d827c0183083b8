# SPDX-License-Identifier: Apache-2.0
"""`checkpoint`, also called `remat`, which trades computation for memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import jax

from graftax._jax.tracebacks import boundary
from graftax._jit.pytree_callable import preserves_pytree
from graftax.transforms._engine.lift import (
    MISSING,
    Make,
    by_value,
    decorator,
    flat_function,
    memoize_wrapper,
    name_of,
    wraps,
)
from graftax.transforms._engine.program import Program

P = ParamSpec("P")
R = TypeVar("R")


@overload
def checkpoint(
    fun: Callable[P, R],
    *,
    prevent_cse: bool = True,
    policy: Callable[..., bool] | None = None,
    static_argnums: int | Sequence[int] = (),
) -> Callable[P, R]: ...
@overload
def checkpoint(
    *,
    prevent_cse: bool = True,
    policy: Callable[..., bool] | None = None,
    static_argnums: int | Sequence[int] = (),
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
@boundary
@decorator
def checkpoint(
    fun: Callable[..., Any] = MISSING,
    *,
    prevent_cse: bool = True,
    policy: Callable[..., bool] | None = None,
    static_argnums: int | Sequence[int] = (),
) -> Callable[..., Any]:
    """`jax.checkpoint` for functions of any objects: intermediate values are recomputed when a derivative needs them.

    Changes made by the function are applied to the caller's objects, once.

    Args:
        fun: any callable.
        prevent_cse: as in `jax.checkpoint`: False if the function runs inside of `scan`.
        policy: which intermediate values are kept nevertheless: one of `jax.checkpoint_policies`.
        static_argnums: arguments that must not hold arrays. Other values are static anyway.

    Returns:
        a function of the same arguments.

    Raises:
        UnsupportedValueError: if an argument contains a value with hidden state; names its path.

    Example:
        >>> @graftax.checkpoint
        ... def layer(params, x):
        ...     params["calls"] += 1
        ...     return jnp.tanh(params["w"] @ x)
        >>> params = {"w": jnp.eye(2), "calls": 0}
        >>> _ = graftax.grad(lambda params, x: layer(params, x).sum())(params, jnp.ones(2))
        >>> params["calls"]
        1
    """
    static = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    make = functools.partial(Program, static=static)
    return checkpointed(make, fun, {"prevent_cse": prevent_cse, "policy": policy})


def checkpointed(make: Make, fun: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """`checkpoint` with its programs made by `make`, for `checkpoint` and `filter_checkpoint`."""

    @wraps(fun, "checkpoint")
    def run(*args: object, **kwargs: object) -> Any:
        program = make(name_of(fun, "checkpoint"), [fun], args, kwargs)
        outputs = jax.checkpoint(flat_function(program), **options)(*program.leaves)
        # The changes of the first run are written; JAX repeats equations in the backward pass, not the function.
        return program.finish(program.tied(outputs))

    return run


remat = checkpoint


@overload
def filter_checkpoint(
    fun: Callable[P, R], *, prevent_cse: bool = True, policy: Callable[..., bool] | None = None
) -> Callable[P, R]: ...
@overload
def filter_checkpoint(
    *, prevent_cse: bool = True, policy: Callable[..., bool] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
@preserves_pytree
@boundary
def filter_checkpoint(
    fun: Callable[..., Any] | None = None,
    *,
    prevent_cse: bool = True,
    policy: Callable[..., bool] | None = None,
) -> Any:
    """As `equinox.filter_checkpoint`: `graftax.checkpoint` by value.

    Args:
        fun, prevent_cse, policy: as in `checkpoint`. Without `fun`, a decorator is returned.

    Returns:
        a function of the same arguments. It never changes the caller's objects.

    Raises:
        UnsupportedValueError: if an argument contains a value with hidden state; names its path.

    Example:
        >>> graftax.filter_grad(graftax.filter_checkpoint(lambda x: jnp.sin(x) ** 2))(jnp.asarray(0.0)).item()
        0.0
    """
    if fun is None:
        return functools.partial(filter_checkpoint, prevent_cse=prevent_cse, policy=policy)
    run = checkpointed(by_value, fun, {"prevent_cse": prevent_cse, "policy": policy})
    return memoize_wrapper(run, fun, "filter_checkpoint", prevent_cse, policy)
