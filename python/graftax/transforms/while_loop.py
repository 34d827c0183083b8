# SPDX-License-Identifier: Apache-2.0
"""Loops with a condition, or a range: `while_loop`, `fori_loop`."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer

from graftax._base.handles import is_handle, run_inside
from graftax._jax.tracebacks import boundary
from graftax.transforms._engine.carry import Loop, LoopAttempt, carry_signature, index_signature
from graftax.transforms._engine.eager_compile import run_compiled
from graftax.transforms._engine.lift import name_of
from graftax.transforms._engine.loop_state import type_of, with_arrays

WRONG_MAX_STEPS = "{name}: max_steps={value!r}: expected a whole number of steps that is known now, 0 or more, or None."


T = TypeVar("T")


@boundary
def while_loop(
    cond_fun: Callable[[T], Any],
    body_fun: Callable[[T], T],
    init_val: T,
    *,
    max_steps: int | None = None,
) -> T:
    """`jax.lax.while_loop` for functions of any objects: `while cond_fun(val): val = body_fun(val)`.

    The state of the loop is `val` together with what both functions capture, as in `scan`; `cond_fun` must not change
    any of it.

    Args:
        cond_fun: from the value to a scalar boolean array.
        body_fun: from the value to the next one.
        init_val: the first value. A Python number in it that the steps change is traced.
        max_steps: at most so many steps are made, whatever `cond_fun` says; this makes the loop differentiable in
            reverse mode. The memory for that grows with the square root of `max_steps`, and steps are computed twice.

    Returns:
        the last value.

    Raises:
        StructureError: if a step changes the structure of the state, or the shape or dtype of an array; names the path.
        MutationError: if `cond_fun` changes something.
        TypeError: if `cond_fun` does not return a scalar boolean.

    Example:
        >>> def improve(state):
        ...     new = (state["x"] + 2 / state["x"]) / 2
        ...     return {"x": new, "error": jnp.abs(new - state["x"]), "name": state["name"]}
        >>> graftax.while_loop(lambda s: s["error"] > 1e-3, improve, {"x": 1.0, "error": jnp.inf, "name": "root"})["x"]
        Array(1.4142135, dtype=float32...)
    """
    name = name_of(body_fun, "while_loop")
    # A NumPy integer is one, too; a tracer has no value that the scan could be made for.
    if max_steps is not None and (
        not hasattr(max_steps, "__index__") or isinstance(max_steps, Tracer) or max_steps < 0
    ):
        raise TypeError(WRONG_MAX_STEPS.format(name=name, value=max_steps))
    if is_handle(init_val):
        return run_inside(name, init_val, lambda m: while_loop(cond_fun, body_fun, m, max_steps=max_steps))
    return run_compiled("while_loop", [cond_fun, body_fun], [with_arrays(init_val)], [max_steps], _while_loop)


def _while_loop(functions: Sequence[Callable[..., Any]], operands: Sequence[Any], extra: Sequence[Any]) -> Any:
    (cond_fun, body_fun), init_val, max_steps = functions, operands[0], extra[0]
    # In plain Python, unless the condition is a tracer, which has no value yet.
    if jax.config.jax_disable_jit and max_steps is None:
        test = with_arrays(cond_fun(init_val))
        if not isinstance(test, Tracer):
            while bool(test):
                init_val = body_fun(init_val)
                test = cond_fun(init_val)
            return init_val

    def attempt(loop_attempt: LoopAttempt) -> None:
        def test(carry: list[Any]) -> Any:
            return loop_attempt.trace_condition(carry, lambda functions, operands: functions[0](operands[0]))

        def body(carry: list[Any]) -> list[Any]:
            return loop_attempt.trace_step(carry, lambda functions, operands: functions[1](operands[0]))

        if max_steps is None:
            final = jax.lax.while_loop(
                loop_attempt.with_signature(test, carry_signature),
                loop_attempt.with_signature(body, carry_signature),
                loop_attempt.init,
            )
        else:
            final = _bounded(test, body, loop_attempt.init, operator.index(max_steps))
        # The condition may be false from the start, so that no step has run.
        loop_attempt.set_final(final, False)

    return Loop(name_of(body_fun, "while_loop"), functions, operands).run(attempt)[0]


@boundary
def fori_loop(
    lower: Any, upper: Any, body_fun: Callable[[Any, T], T], init_val: T, *, unroll: int | bool | None = None
) -> T:
    """`jax.lax.fori_loop` for functions of any objects: `for i in range(lower, upper): val = body_fun(i, val)`.

    The state of the loop is `val` together with what `body_fun` captures, as in `scan`. With Python numbers as bounds
    the loop is differentiable in reverse mode.

    Args:
        lower, upper: scalar integers, the first number and the one after the last.
        body_fun: from (number, value) to the next value.
        init_val: the first value. A Python number in it that the steps change is traced.
        unroll: as in `jax.lax.fori_loop`.

    Returns:
        the last value.

    Raises:
        StructureError: if a step changes the structure of the state, or the shape or dtype of an array; names the path.

    Example:
        >>> start = {"x": jnp.zeros(2), "name": "net"}
        >>> graftax.fori_loop(0, 3, lambda i, d: {"x": d["x"] + i, "name": d["name"]}, start)
        {'x': Array([3., 3.], dtype=float32), 'name': 'net'}
    """
    if is_handle(init_val):
        run = functools.partial(fori_loop, lower, upper, body_fun, unroll=unroll)
        return run_inside(name_of(body_fun, "fori_loop"), init_val, run)
    return run_compiled("fori_loop", [body_fun], [None, with_arrays(init_val)], [lower, upper, unroll], _fori_loop)


def _fori_loop(functions: Sequence[Callable[..., Any]], operands: Sequence[Any], extra: Sequence[Any]) -> Any:
    body_fun, init_val, (lower, upper, unroll) = functions[0], operands[1], extra
    if jax.config.jax_disable_jit and not any(isinstance(x, Tracer) for x in (lower, upper)):
        for i in range(int(lower), int(upper)):
            # As an array, since that is what the function is given in a compiled loop.
            init_val = body_fun(jnp.asarray(i), init_val)
        return init_val

    def attempt(loop_attempt: LoopAttempt) -> None:
        def flat(i: jax.Array, carry: list[Any]) -> list[Any]:
            return loop_attempt.trace_step(carry, lambda functions, operands: functions[0](i, operands[1]))

        final = jax.lax.fori_loop(
            lower, upper, loop_attempt.with_signature(flat, index_signature), loop_attempt.init, unroll=unroll
        )
        loop_attempt.set_final(final, all(isinstance(x, int) for x in (lower, upper)) and lower < upper)

    return Loop(name_of(body_fun, "fori_loop"), functions, operands, carry=1).run(attempt)[0]


def _bounded(
    test: Callable[[list[Any]], Any], body: Callable[[list[Any]], list[Any]], init: list[Any], max_steps: int
) -> list[Any]:
    """A loop of at most `max_steps` steps that is differentiable in reverse mode."""
    # It is a scan of rematerialised scans of about sqrt(max_steps) steps each, so only the carries between the inner
    # scans are saved for the backward pass.
    if max_steps < 1:
        # The step is traced for its errors only.
        body(init)
        return init
    inner = math.isqrt(max_steps - 1) + 1  # the square root, rounded up
    outer = -(-max_steps // inner)

    dtypes: list[Any] = []

    def run_body(carry: list[Any]) -> list[Any]:
        carry_after = body(carry)
        dtypes[:] = [type_of(x).dtype for x in carry_after]
        return carry_after

    def keep(carry: list[Any]) -> list[Any]:
        # JAX has traced `run_body` before: as in `while_loop`, the carry has the dtypes of a step's result.
        return [x if type_of(x).dtype == d else x.astype(d) for x, d in zip(carry, dtypes, strict=True)]

    def inner_step(carry: list[Any], allowed: jax.Array) -> tuple[list[Any], None]:
        return jax.lax.cond(allowed & test(carry), run_body, keep, carry), None

    # In the backward pass, the steps of an inner scan are computed again from its first carry.
    @jax.checkpoint
    def inner_scan(carry: list[Any], allowed: jax.Array) -> tuple[list[Any], None]:
        return jax.lax.scan(inner_step, carry, allowed)

    # The last of `inner * outer` steps may be more than `max_steps`: the carry passes through these as it is.
    allowed = (jnp.arange(inner * outer) < max_steps).reshape(outer, inner)
    return jax.lax.scan(inner_scan, init, allowed)[0]
