# SPDX-License-Identifier: Apache-2.0
"""Loops over any objects: `scan`, `while_loop`, `fori_loop`, `map`, `associative_scan`."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .. import _core
from .._compat import is_dimension
from .._difference import describe, differences, place_name
from .._errors import (
    NO_AXIS,
    NO_LENGTH,
    NOT_A_PAIR,
    NOT_SLICED,
    OTHER_ELEMENTS,
    OTHER_LENGTH,
    RAGGED,
    WRONG_LENGTH,
    WRONG_MAX_STEPS,
    StructureError,
)
from ..packed import Packed
from ._loop import Loop, Steps, of_carried, of_index, of_rows, unchanged
from ._program import Program
from ._progress import Progress, reporter
from ._state import inside, type_of, type_text, with_arrays
from .autodiff import name_of, named


def scan(
    f: Callable[..., Any],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    progress: Progress = None,
) -> tuple[Any, Any]:
    """`jax.lax.scan` for functions of any objects: `carry, y = f(carry, x)` for each `x`, compiled once.

    The state of the loop is the carry together with everything that `f` captures. A step may change arrays anywhere
    in it, in place or by returning new objects: the next step sees the change, and so do the caller's objects at
    the end. Everything else has to be the same after a step as before: which objects there are, what is shared, what
    is no array, and each array's shape and dtype.

    Args:
        f: from (carry, x) to (carry, y).
        init: the first carry. A Python number in it that the steps change is traced.
        xs: any graph: `x` is a new one like it in each step, with the array's rows `array[i]` in place of arrays.
        length: how many steps; needed where `xs` holds no array.
        reverse, unroll: as in `jax.lax.scan`.
        progress: True or a title shows a bar (with the `rich` package); a function is called with (steps done, all
            steps). At most a hundred times.

    Returns:
        (the last carry, a graph like `y` with all steps' arrays stacked). What is no array is the same in each `y`
        and is kept once; a number that stands by itself or in a tuple counts as an array.

    Raises:
        StructureError: where a step leaves another structure than it found, with the places.

    Example:
        >>> def step(cell, x):
        ...     cell["hidden"] = cell["w"] * cell["hidden"] + x["x"]
        ...     return cell, {"hidden": cell["hidden"], "name": x["name"]}
        >>> cell = {"w": jnp.array(2.0), "hidden": jnp.array(0.0)}
        >>> graftax.scan(step, cell, {"x": jnp.ones(3), "name": "ones"})[1]
        {'hidden': Array([1., 3., 7.], dtype=float32), 'name': 'ones'}
        >>> cell["hidden"]
        Array(7., dtype=float32)
    """
    if type(init) is Packed:
        return inside(name_of(f, "scan"), init, lambda m: scan(f, m, xs, length, reverse, unroll, progress=progress))
    name, init = name_of(f, "scan"), with_arrays(init)
    slices = _Slices.of(name, xs, length)
    if jax.config.jax_disable_jit and slices.length:
        return _plain_scan(name, f, init, slices, reverse)
    report = reporter(progress, name, slices.length)

    def attempt(steps: Steps) -> tuple[Any, Any]:
        stacked: list[_core.GraphDef] = []

        def flat(carry: Any, x: Any) -> Any:
            row, index = x

            def body(functions: list[Callable[..., Any]], operands: list[Any]) -> Any:
                result = functions[0](operands[0], slices.rebuilt(row))
                carried, y = _pair(name, result)
                leaves, graphdef = _core.flatten(with_arrays(y))
                stacked[:] = [graphdef]
                ys.append(leaves)
                return carried

            ys: list[list[Any]] = []
            carry = steps.step(carry, body)
            if report is not None:
                report(index)
            return carry, ys[-1]

        indices = None if report is None else jnp.arange(slices.length)
        steps.last, out = jax.lax.scan(
            steps.named(flat, of_rows),
            steps.first,
            (slices.leaves, indices),
            length=slices.asked,
            reverse=reverse,
            unroll=unroll,
        )
        return _core.unflatten(stacked[-1], out)

    return Loop(name, [f], [init, None], rows=slices.names).run(attempt)


def while_loop(
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[[Any], Any],
    init_val: Any,
    *,
    max_steps: int | None = None,
) -> Any:
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

    Example:
        >>> def improve(state):
        ...     new = (state["x"] + 2 / state["x"]) / 2
        ...     return {"x": new, "error": jnp.abs(new - state["x"]), "name": state["name"]}
        >>> graftax.while_loop(lambda s: s["error"] > 1e-3, improve, {"x": 1.0, "error": jnp.inf, "name": "root"})["x"]
        Array(1.4142135, dtype=float32...)
    """
    name = name_of(body_fun, "while_loop")
    if max_steps is not None and (
        not hasattr(max_steps, "__index__") or isinstance(max_steps, Tracer) or max_steps < 0
    ):
        raise TypeError(WRONG_MAX_STEPS.format(name=name, given=max_steps))
    if type(init_val) is Packed:
        return inside(name, init_val, lambda m: while_loop(cond_fun, body_fun, m, max_steps=max_steps))
    init_val = with_arrays(init_val)
    if jax.config.jax_disable_jit and max_steps is None:
        test = with_arrays(cond_fun(init_val))
        if not isinstance(test, Tracer):
            while bool(test):
                init_val = body_fun(init_val)
                test = cond_fun(init_val)
            return init_val

    def attempt(steps: Steps) -> None:
        def test(carry: Any) -> Any:
            return steps.test(carry, lambda functions, operands: functions[0](operands[0]))

        def step(carry: Any) -> Any:
            return steps.step(carry, lambda functions, operands: functions[1](operands[0]))

        if max_steps is None:
            steps.last = jax.lax.while_loop(steps.named(test, of_carried), steps.named(step, of_carried), steps.first)
        else:
            steps.last = _bounded(test, step, steps.first, operator.index(max_steps))

    return Loop(name, [cond_fun, body_fun], [init_val]).run(attempt)[0]


def fori_loop(
    lower: Any, upper: Any, body_fun: Callable[[Any, Any], Any], init_val: Any, *, unroll: int | bool | None = None
) -> Any:
    """`jax.lax.fori_loop` for functions of any objects: `for i in range(lower, upper): val = body_fun(i, val)`.

    The state of the loop is `val` together with what `body_fun` captures, as in `scan`. With Python numbers as bounds
    the loop is differentiable in reverse mode.

    Returns:
        the last value.
    """
    if type(init_val) is Packed:
        again = functools.partial(fori_loop, lower, upper, body_fun, unroll=unroll)
        return inside(name_of(body_fun, "fori_loop"), init_val, again)
    init_val = with_arrays(init_val)
    if jax.config.jax_disable_jit and not any(isinstance(x, Tracer) for x in (lower, upper)):
        for i in range(int(lower), int(upper)):
            init_val = body_fun(jnp.asarray(i), init_val)
        return init_val

    def attempt(steps: Steps) -> None:
        def flat(i: Any, carry: Any) -> Any:
            return steps.step(carry, lambda functions, operands: functions[0](i, operands[1]))

        steps.last = jax.lax.fori_loop(lower, upper, steps.named(flat, of_index), steps.first, unroll=unroll)

    return Loop(name_of(body_fun, "fori_loop"), [body_fun], [None, init_val], carry=1).run(attempt)[0]


def map(f: Callable[..., Any], xs: Any, *, batch_size: int | None = None) -> Any:
    """`jax.lax.map` for functions of any objects: the results of `f(x)` for each `x` of `xs`, stacked, step by step.

    Args:
        f: a function of one argument. What it captures and changes is seen by the next step and comes back to the
            caller, as in `scan`.
        xs: as in `scan`.
        batch_size: so many steps are computed at once, as by `vmap`; then `f` must not change what it captures.

    Returns:
        a graph like the result of `f`, as the second result of `scan`.
    """
    name = name_of(f, "map")
    slices = _Slices.of(name, xs, None)
    if batch_size is not None:
        return _batched_map(name, f, slices, batch_size)

    def without_carry(carry: None, x: Any) -> tuple[None, Any]:
        return carry, f(x)

    if jax.config.jax_disable_jit and slices.length:
        return _plain_scan(name, without_carry, None, slices, False)[1]

    def attempt(steps: Steps) -> Any:
        structure: list[_core.GraphDef] = []

        def flat(carry: Any, rows: Any) -> Any:
            found: list[list[Any]] = []

            def body(functions: list[Callable[..., Any]], _: list[Any]) -> None:
                leaves, graphdef = _core.flatten(with_arrays(functions[0](slices.rebuilt(rows))))
                structure[:] = [graphdef]
                found.append(leaves)

            return steps.step(carry, body), found[-1]

        flat = steps.named(flat, of_rows)
        steps.last, out = jax.lax.scan(flat, steps.first, slices.leaves)
        return _core.unflatten(structure[-1], out)

    return Loop(name, [f], [None], carry=None, rows=slices.names).run(attempt)[1]


def associative_scan(fn: Callable[[Any, Any], Any], elems: Any, reverse: bool = False, axis: int = 0) -> Any:
    """`jax.lax.associative_scan` for functions of any objects: all prefix "sums" of `elems` under `fn`, in parallel.

    Args:
        fn: an associative function of two graphs like `elems`, whose arrays have any number of rows along `axis`. It
            returns a third, and must not change anything.
        elems: any graph of arrays that are as long along `axis`.
        reverse, axis: as in `jax.lax.associative_scan`.

    Returns:
        a graph like `elems`.
    """
    name = name_of(fn, "associative_scan")
    leaves, graphdef = _core.flatten(elems)
    program = Program(name, [fn], [None, None])
    _refuse_ragged(name, leaves, graphdef, axis)

    def flat(one: Any, other: Any) -> Any:
        def body(functions: list[Callable[..., Any]], _: list[Any]) -> Any:
            result = functions[0](_core.unflatten(graphdef, one), _core.unflatten(graphdef, other))
            found.append(_core.flatten(result))

        found: list[tuple[list[Any], _core.GraphDef]] = []
        unchanged(program, program.leaves, body, "fn")
        out, structure = found[-1]
        if structure != graphdef:
            text = describe(graphdef, structure, ("elems",))
            raise StructureError(OTHER_ELEMENTS.format(name=name, differences=text))
        return out

    return _core.unflatten(graphdef, jax.lax.associative_scan(flat, leaves, reverse=reverse, axis=axis))


# ---- steps that are bounded, slices and stacks


def _bounded(
    test: Callable[[Any], Any], step: Callable[[Any], Any], first: Sequence[Any], max_steps: int
) -> Sequence[Any]:
    """At most so many steps, as a scan of rematerialised scans: differentiable in reverse mode."""
    if max_steps < 1:
        step(first)  # its errors
        return first
    inner = math.isqrt(max_steps - 1) + 1
    outer = -(-max_steps // inner)

    dtypes: list[Any] = []

    def stepped(carry: Any) -> Any:
        after = step(carry)
        dtypes[:] = [type_of(x).dtype for x in after]
        return after

    def kept(carry: Any) -> Any:
        # A weak type is that of the first step's result, as in `while_loop`. JAX traces the branches in order.
        return [x if type_of(x).dtype == d else x.astype(d) for x, d in zip(carry, dtypes, strict=True)]

    def one(carry: Any, allowed: Any) -> Any:
        return jax.lax.cond(allowed & test(carry), stepped, kept, carry), None

    @jax.checkpoint
    def some(carry: Any, allowed: Any) -> Any:
        return jax.lax.scan(one, carry, allowed)

    allowed = (jnp.arange(inner * outer) < max_steps).reshape(outer, inner)
    return jax.lax.scan(some, list(first), allowed)[0]


def _refuse_ragged(name: str, leaves: Sequence[Any], graphdef: _core.GraphDef, axis: int) -> None:
    """All arrays have to be as long along the axis; JAX does not say which is not."""
    first = ("", None)
    for leaf, path in zip(leaves, graphdef.leaf_paths(), strict=True):
        shape, place = np.shape(leaf), place_name(path, ("elems",))
        if not -len(shape) <= axis < len(shape):
            raise ValueError(NO_AXIS.format(name=name, path=place, axis=axis, shape=shape))
        if first[1] is None:
            first = (place, shape[axis])
        elif shape[axis] != first[1]:
            given = {"path": place, "size": shape[axis], "axis": axis, "first": first[0], "length": first[1]}
            raise ValueError(RAGGED.format(name=name, **given))


class _Slices(NamedTuple):
    """What a loop goes over: `x` is a new graph in each step."""

    leaves: list[Any]
    graphdef: _core.GraphDef
    length: int
    names: list[str]

    @staticmethod
    def of(name: str, xs: Any, length: int | None) -> _Slices:
        if length is not None and not isinstance(length, Tracer) and type(length) is not int:
            length = _whole(name, length)
        if isinstance(length, int) and length < 0:
            raise ValueError(WRONG_LENGTH.format(name=name, given=length))
        leaves, graphdef = _core.record((xs,), ("xs",), [0], None)
        names, first = [place_name(path, ("xs",)) for path in graphdef.leaf_paths()], ""
        for leaf, place in zip(leaves, names, strict=True):
            shape = np.shape(leaf)
            if not shape:
                raise ValueError(NOT_SLICED.format(name=name, path=place))
            if length is None:
                length, first = shape[0], place
            elif shape[0] != length:
                other = first or f"length={length}"
                raise ValueError(OTHER_LENGTH.format(name=name, path=place, count=shape[0], first=other, length=length))
            first = first or place
        if length is None:
            raise ValueError(NO_LENGTH.format(name=name))
        return _Slices([x.copy() if isinstance(x, np.ndarray) else x for x in leaves], graphdef, length, names)

    @property
    def asked(self) -> int | None:
        """What JAX is told: it takes a symbolic number of rows from the arrays only."""
        return None if self.leaves else self.length

    def rebuilt(self, rows: Sequence[Any]) -> Any:
        return _core.unflatten(self.graphdef, list(rows))


def _whole(name: str, length: Any) -> Any:
    """A number of steps, as JAX takes it: 3.0 is 3, and a symbolic one is itself."""
    if is_dimension(type(length)):
        return length
    with contextlib.suppress(TypeError, ValueError):
        if int(length) == length:
            return int(length)
    raise ValueError(WRONG_LENGTH.format(name=name, given=length))


def _pair(name: str, result: Any) -> tuple[Any, Any]:
    several = type(result) in (tuple, list)
    if not several or len(result) != 2:
        raise TypeError(NOT_A_PAIR.format(name=name, found=type_text(result) + f" of {len(result)}" * several))
    return cast("tuple[Any, Any]", result)


def _plain_scan(name: str, f: Callable[..., Any], carry: Any, slices: _Slices, reverse: bool) -> tuple[Any, Any]:
    """The loop in Python, on the caller's own objects: what `jax.disable_jit` asks for."""
    ys: list[tuple[list[Any], _core.GraphDef]] = []
    for i in reversed(range(slices.length)) if reverse else range(slices.length):
        carry, y = _pair(name, f(carry, slices.rebuilt([leaf[i] for leaf in slices.leaves])))
        ys.append(_core.flatten(with_arrays(y)))
    ys = ys[::-1] if reverse else ys
    changing = {d.path for _, graphdef in ys for d in differences(ys[0][1], graphdef, ("y",))}
    if changing:  # numbers that the steps change: a compiled loop traces them

        def changes(path: tuple[Any, ...]) -> bool:
            return place_name(path, ("y",)) in changing

        ys = [_core.record((_core.unflatten(g, y),), ("y",), [0], None, dynamic=changes) for y, g in ys]
    for _, graphdef in ys:
        if graphdef != ys[0][1]:
            text = describe(ys[0][1], graphdef, ("y",))
            raise StructureError(OTHER_ELEMENTS.format(name=name, differences=text))
    columns = zip(*(leaves for leaves, _ in ys), strict=True)
    return carry, _core.unflatten(ys[0][1], [jnp.stack([jnp.asarray(x) for x in column]) for column in columns])


def _batched_map(name: str, f: Callable[..., Any], slices: _Slices, batch_size: int) -> Any:
    program = Program(name, [f], [None])
    structure: list[_core.GraphDef] = []

    def flat(rows: Any) -> Any:
        def body(functions: list[Callable[..., Any]], _: list[Any]) -> list[Any]:
            leaves, graphdef = _core.flatten(with_arrays(functions[0](slices.rebuilt(rows))))
            structure[:] = [graphdef]
            return leaves

        return unchanged(program, program.leaves, body, "with batch_size, f")

    out = jax.lax.map(named(flat, program), slices.leaves, batch_size=batch_size)
    return _core.unflatten(structure[-1], out)
