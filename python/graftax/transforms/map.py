# SPDX-License-Identifier: Apache-2.0
"""`map`: a loop over rows without a carry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from graftax import _core
from graftax._graph.stack import Each
from graftax._jax.tracebacks import boundary
from graftax.transforms._engine.carry import call_pure
from graftax.transforms._engine.eager_compile import run_compiled
from graftax.transforms._engine.layer_loop import Layers, layers_in, noting_layers
from graftax.transforms._engine.lift import name_of, named
from graftax.transforms._engine.loop_state import with_arrays
from graftax.transforms._engine.program import Program
from graftax.transforms._engine.slices import Slices
from graftax.transforms.scan import scan_layers, scan_rows

X = TypeVar("X")
Y = TypeVar("Y")

_OPTIONS = (False, 1, None)  # of `scan`: reverse, unroll, progress


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
    f, name = functions[0], name_of(functions[0], "map")
    # As in `scan`: layers are stacked, anything else is sliced.
    layers = Layers(name, xs) if is_each else layers_in(name, xs)
    if not isinstance(layers, Layers):
        with noting_layers(layers):
            slices = Slices(name, xs, None)
            if batch_size is not None:
                return _batched_map(name, f, slices, batch_size)
            # A loop whose only state is what `f` captures.
            return scan_rows(name, functions, operands, slices, _OPTIONS, _call_without_carry, carry_operand=None)[1]
    if batch_size is not None:
        result = _batched_map(name, f, Slices(name, layers.stacked, None), batch_size)
        layers.write_back()
        return result

    def step(carry: None, x: Any) -> tuple[None, Any]:
        return carry, f(x)

    # The messages of `scan_layers` name the function that it is given.
    step.__name__ = getattr(f, "__name__", type(f).__name__)
    return scan_layers([step], [None, None], layers, _OPTIONS)[1]


def _call_without_carry(f: Callable[[Any], object], carry: None, x: Any) -> tuple[None, Any]:
    return carry, f(x)


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
