# SPDX-License-Identifier: Apache-2.0
"""`map`: a loop over rows without a carry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from graftax import _core
from graftax._graph.stack import Each
from graftax._jax.tracebacks import boundary
from graftax.transforms._engine.carry import Loop, LoopAttempt, call_pure, rows_signature
from graftax.transforms._engine.eager_compile import run_compiled
from graftax.transforms._engine.layer_loop import Layers, layers_in
from graftax.transforms._engine.lift import name_of, named
from graftax.transforms._engine.loop_state import with_arrays
from graftax.transforms._engine.program import Program
from graftax.transforms._engine.slices import Slices, plain_scan
from graftax.transforms.scan import scan_layers

X = TypeVar("X")
Y = TypeVar("Y")


@boundary
def map(f: Callable[[X], Y], xs: X, *, batch_size: int | None = None) -> Y:
    """`jax.lax.map` for functions of any objects: the results of `f(x)` for each `x` of `xs`, stacked, step by step.

    Args:
        f: a function of one argument. The next step and the caller see what it changes in captured variables, as in
            `scan`.
        xs: as in `scan`.
        batch_size: how many steps are computed at once, as by `vmap`; with it, `f` must not change what it captures.

    Returns:
        a graph like the result of `f`, as the second result of `scan`.

    Raises:
        ValueError: if arrays of `xs` have different numbers of rows, or if `xs` holds none; names the path.

    Example:
        >>> graftax.map(lambda d: {"y": d["x"] * 2, "name": d["name"]}, {"x": jnp.arange(3), "name": "net"})
        {'y': Array([0, 2, 4], dtype=int32), 'name': 'net'}
    """
    rows = xs.objects if isinstance(xs, Each) else xs
    return run_compiled("map", [f], [None], [rows, batch_size, isinstance(xs, Each)], _map)


def _map(functions: Sequence[Callable[..., Any]], operands: Sequence[Any], extra: Sequence[Any]) -> Any:
    xs, batch_size, is_each = extra
    name = name_of(functions[0], "map")
    # As in `scan`: layers are stacked, anything else is sliced.
    layers = Layers(name, xs) if is_each else layers_in(name, xs)
    if not isinstance(layers, Layers):
        try:
            return _map_rows(functions, operands, xs, batch_size)
        except Exception as error:
            if layers is not None:
                error.add_note(layers)
            raise
    if batch_size is not None:
        result = _map_rows(functions, operands, layers.stacked, batch_size)
        layers.write_back()
        return result
    return scan_layers([_as_step(functions[0])], [None, None], layers, (False, 1, None))[1]  # reverse, unroll, progress


def _as_step(f: Callable[[Any], object]) -> Callable[[None, Any], tuple[None, Any]]:
    """A step of `scan` that has no carry."""

    def step(carry: None, x: Any) -> tuple[None, Any]:
        return carry, f(x)

    step.__name__ = getattr(f, "__name__", type(f).__name__)
    return step


def _map_rows(
    functions: Sequence[Callable[..., object]], operands: Sequence[object], xs: object, batch_size: int | None
) -> Any:
    f, name = functions[0], name_of(functions[0], "map")
    slices = Slices(name, xs, None)
    if batch_size is not None:
        return _batched_map(name, f, slices, batch_size)

    if jax.config.jax_disable_jit and slices.length:
        return plain_scan(name, _as_step(f), None, slices, False)[1]

    # A loop whose only state is what `f` captures.
    def attempt(loop_attempt: LoopAttempt) -> tuple[Any, list[Any]]:
        structure: list[_core.GraphDef] = []

        def flat(carry: list[Any], rows: list[Any]) -> tuple[list[Any], tuple[list[Any], ...]]:
            outputs: list[list[Any]] = []

            def body(functions: list[Callable[..., Any]], _: list[Any]) -> None:
                result, changed = slices.trace_step(rows, functions[0])
                leaves, graphdef = _core.flatten(with_arrays(result))
                structure[:] = [graphdef]
                outputs[:] = [leaves, changed]

            return loop_attempt.trace_step(carry, body), tuple(outputs)

        flat = loop_attempt.with_signature(flat, rows_signature)
        final, (ys, changed) = jax.lax.scan(flat, loop_attempt.init, slices.leaves)
        loop_attempt.set_final(final, slices.has_rows)
        return _core.unflatten(structure[-1], ys), changed

    _, (ys, changed) = Loop(name, [f], operands, carry=None, slices=slices).run(attempt)
    slices.finish(changed)
    return ys


def _batched_map(name: str, f: Callable[..., object], slices: Slices, batch_size: int) -> Any:
    """`map` with the steps of a batch side by side: `f` must change nothing but its slice."""
    program = Program(name, [f], [None])
    structure: list[_core.GraphDef] = []

    def flat(rows: list[Any]) -> tuple[list[Any], list[Any]]:
        def body(functions: list[Callable[..., Any]], _: list[Any]) -> tuple[list[Any], list[Any]]:
            result, changed = slices.trace_step(rows, functions[0])
            leaves, graphdef = _core.flatten(with_arrays(result))
            structure[:] = [graphdef]
            return leaves, changed

        return call_pure(program, program.leaves, body, "with batch_size, f")

    ys, changed = jax.lax.map(named(flat, program), slices.leaves, batch_size=batch_size)
    slices.finish(changed)
    return _core.unflatten(structure[-1], ys)
