# SPDX-License-Identifier: Apache-2.0
"""A loop over rows, with a carry."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp

from graftax import _core, interop
from graftax._base.handles import is_handle, run_inside
from graftax._graph.stack import Each
from graftax._jax.tracebacks import boundary
from graftax.transforms._engine.carry import Loop, LoopAttempt, rows_signature
from graftax.transforms._engine.eager_compile import run_compiled
from graftax.transforms._engine.layer_loop import Layers, layers_in, noting_layers
from graftax.transforms._engine.lift import MISSING, name_of
from graftax.transforms._engine.loop_progress import Progress, reporter
from graftax.transforms._engine.loop_state import with_arrays
from graftax.transforms._engine.scan_axes import Carry, scan_by_axes
from graftax.transforms._engine.slices import Slices, as_pair, plain_loop, plain_scan

C = TypeVar("C")
X = TypeVar("X")
Y = TypeVar("Y")
# None is a carry that a user may give.
NO_CARRY: Any = object()

OTHER_LENGTH = (
    "{name}: there are {count} objects, and length={length}. (What should be sliced as in JAX goes in a tuple.)"
)


class ScanOptions(TypedDict, total=False):
    """The keyword arguments of a `scan` by axes, for type checkers."""

    length: int | None
    reverse: bool
    unroll: int | bool
    in_axes: Any
    out_axes: Any
    transform_metadata: Any


@overload
def scan(
    f: Callable[[C, X], tuple[C, Y]],
    init: C,
    xs: Each[X] | list[X],
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    progress: Progress = None,
) -> tuple[C, Y]: ...
@overload
def scan(
    f: Callable[[C, X], tuple[C, Y]],
    init: C,
    xs: X = ...,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    progress: Progress = None,
) -> tuple[C, Y]: ...
@overload
def scan(
    f: Callable[..., Any],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    progress: Progress = None,
) -> tuple[Any, Any]: ...
@overload
def scan(f: Callable[..., Any], **options: Unpack[ScanOptions]) -> Callable[..., Any]: ...
@overload
def scan(**options: Unpack[ScanOptions]) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...
@boundary
def scan(
    f: Callable[..., Any] = MISSING,
    init: Any = NO_CARRY,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    progress: Progress = None,
    in_axes: Any = (Carry, 0),
    out_axes: Any = (Carry, 0),
    transform_metadata: Any = None,
) -> Any:
    """`jax.lax.scan` for functions of any objects: `carry, y = f(carry, x)` for each `x`, compiled once.

    The state of the loop is the carry together with everything that `f` captures. A step may change arrays anywhere
    in it, in place or by returning new objects: the next step sees the change, and it is applied to the caller's
    objects at the end. Everything else has to be the same after a step as before: which objects there are, what is
    shared, static values, and each array's shape and dtype.

    Args:
        f: from (carry, x) to (carry, y).
        init: the first carry. A Python number in it that the steps change is traced.
        xs: any graph. In each step `x` is a new graph like it, with the row `array[i]` in place of each array, and a
            change to `x` is made in that row of `xs`. Or a list of layers: `x` is each of them in turn, and a change to
            `x` is a change to that layer. A list counts as a list of layers if its items are alike: one class, equal
            static values, arrays of equal shapes. A layer is a module (of Equinox, NNX, FlareJax or graftax), or an
            object of a class that JAX does not know. A list of one module whose arrays have a common first axis is
            sliced, as in JAX. `graftax.each(objects)` makes any list of objects a list of layers.
        length: how many steps; needed if `xs` holds no array.
        reverse, unroll: as in `jax.lax.scan`.
        progress: True or a title shows a bar (with the `rich` package); a function is called with (steps done, all
            steps). At most a hundred times.
        in_axes, out_axes: without `init` a function is returned (without `f`, a decorator), and these describe its
            arguments and its result. `graftax.Carry` marks what is carried from step to step, an axis means that each
            step gets a row along it, and None means the same value in all steps, or in the result the value of the
            last step. They may be trees, or have filters of NNX, as for `vmap`.
        transform_metadata: together with `in_axes`, as for `vmap`.

    Returns:
        (the last carry, a graph like `y` with the arrays of all steps stacked). Static values have to be the same in
        each `y`, and are kept once; a number by itself or in a tuple counts as an array.

    Raises:
        StructureError: if a step leaves another structure than it found, with the places.
        ValueError: if arrays of `xs` have different numbers of rows, or if the number of steps is unknown.

    Example:
        >>> def step(cell, x):
        ...     cell["hidden"] = cell["w"] * cell["hidden"] + x["x"]
        ...     return cell, {"hidden": cell["hidden"], "name": x["name"]}
        >>> cell = {"w": jnp.array(2.0), "hidden": jnp.array(0.0)}
        >>> graftax.scan(step, cell, {"x": jnp.ones(3), "name": "ones"})[1]
        {'hidden': Array([1., 3., 7.], dtype=float32), 'name': 'ones'}
        >>> cell["hidden"]
        Array(7., dtype=float32)
        >>> carry = graftax.Carry
        >>> sums = graftax.scan(lambda total, x: (total + x, total), in_axes=(carry, 1), out_axes=(carry, 0))
        >>> sums(jnp.zeros(2), jnp.ones((2, 3)))[0]
        Array([3., 3.], dtype=float32)
    """
    if f is MISSING:
        options = {"length": length, "reverse": reverse, "unroll": unroll, "in_axes": in_axes, "out_axes": out_axes}
        options["transform_metadata"] = transform_metadata
        return functools.partial(scan, **options)
    if init is NO_CARRY:
        if transform_metadata:
            f = interop.with_axis_names(f, in_axes, out_axes, transform_metadata)
        return scan_by_axes(f, in_axes, out_axes, length, reverse, unroll)
    if is_handle(init):
        return run_inside(
            name_of(f, "scan"), init, lambda m: scan(f, m, xs, length, reverse, unroll, progress=progress)
        )
    rows = xs.objects if isinstance(xs, Each) else xs
    operands, extra = [with_arrays(init), None], [rows, length, reverse, unroll, progress, isinstance(xs, Each)]
    # The functions that report progress belong to this call, so that no later one could use its compiled program.
    return _scan([f], operands, extra) if progress else run_compiled("scan", [f], operands, extra, _scan)


def _scan(functions: Sequence[Callable[..., Any]], operands: Sequence[Any], extra: Sequence[Any]) -> tuple[Any, Any]:
    xs, length, *options, is_each = extra
    name = name_of(functions[0], "scan")
    # Layers are stacked; anything else is sliced, with a note about the layers if that fails.
    layers = Layers(name, xs) if is_each else layers_in(name, xs, length)
    if isinstance(layers, Layers):
        if length is not None and length != len(layers.objects):
            raise ValueError(OTHER_LENGTH.format(name=name, count=len(layers.objects), length=length))
        return scan_layers(functions, operands, layers, options)
    with noting_layers(layers):
        return scan_rows(name, functions, operands, Slices(name, xs, length), options, lambda f, carry, x: f(carry, x))


def scan_layers(
    functions: Sequence[Callable[..., Any]], operands: Sequence[Any], layers: Layers, options: Sequence[Any]
) -> tuple[Any, Any]:
    """A loop over a list of layers. `options`: whether it goes backwards, unroll, progress."""
    name = name_of(functions[0], "scan")
    if jax.config.jax_disable_jit:
        call = functools.partial(layers.call_step, functions[0])
        return plain_loop(name, call, operands[0], layers.objects, bool(options[0]))
    # The loop runs over the stacked object; afterwards the rows that changed go back into each object.
    slices = Slices(name, layers.stacked, len(layers.objects))
    result = scan_rows(name, functions, operands, slices, options, layers.call_step, layers)
    layers.write_back()
    return result


def scan_rows(
    name: str,
    functions: Sequence[Callable[..., Any]],
    operands: Sequence[Any],
    slices: Slices,
    options: Sequence[Any],
    step: Callable[[Callable[..., Any], Any, Any], Any],
    layers: Layers | None = None,
    carry_operand: int | None = 0,
) -> tuple[Any, Any]:
    """A loop over rows: `carry, y = step(f, carry, row)`. The rows are the stacked objects of `layers`, if given."""
    f, init, (reverse, unroll, progress) = functions[0], operands[0], options
    # Without a step nothing shows the structure of `ys`: JAX raises the error for that.
    if jax.config.jax_disable_jit and slices.length:
        return plain_scan(name, functools.partial(step, f), init, slices, reverse)
    report = reporter(progress, name, slices.length)

    def attempt(loop_attempt: LoopAttempt) -> tuple[Any, Any]:
        stacked: list[_core.GraphDef] = []
        if layers is not None:
            layers.watch(loop_attempt.program)

        # What JAX scans: the flat leaves of the carry, and of one row. Besides `y`, a step returns the arrays that it
        # wrote into its slice; JAX stacks both, and `Slices.finish` writes the stacked rows into `xs`.
        def flat(carry: list[Any], x: tuple[list[Any], Any]) -> tuple[list[Any], tuple[list[Any], ...]]:
            row, index = x

            def body(functions: list[Callable[..., Any]], operands: list[Any]) -> Any:
                result, changed = slices.trace_step(row, functools.partial(step, functions[0], operands[0]))
                carried, y = as_pair(name, result)
                leaves, graphdef = _core.flatten(with_arrays(y))
                stacked[:] = [graphdef]
                outputs[:] = [leaves, changed]
                return carried

            outputs: list[list[Any]] = []
            carry = loop_attempt.trace_step(carry, body, None if layers is None else layers.require_unread)
            if report is not None:
                report(index)
            return carry, tuple(outputs)

        indices = None if report is None else jnp.arange(slices.length)
        # The arrays tell the length, if there are any: a symbolic length cannot be passed.
        length = None if slices.leaves else slices.length
        final, (ys, changed) = jax.lax.scan(
            loop_attempt.with_signature(flat, rows_signature),
            loop_attempt.init,
            (slices.leaves, indices),
            length=length,
            reverse=reverse,
            unroll=unroll,
        )
        # With a symbolic length it is not known whether a step runs.
        loop_attempt.set_final(final, isinstance(slices.length, int) and slices.length > 0)
        return _core.unflatten(stacked[-1], ys), changed

    carry, (ys, changed) = Loop(name, functions, operands, carry=carry_operand, slices=slices).run(attempt)
    slices.finish(changed)
    return carry, ys
