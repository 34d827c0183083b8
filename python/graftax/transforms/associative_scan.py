# SPDX-License-Identifier: Apache-2.0
"""All prefix sums under a function, in parallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from graftax import _core
from graftax._base.errors import StructureError
from graftax._graph.structure import place_name
from graftax._graph.structure_diff import differences_text
from graftax._jax.tracebacks import boundary
from graftax.transforms._engine.carry import call_pure
from graftax.transforms._engine.eager_compile import run_compiled
from graftax.transforms._engine.lift import name_of
from graftax.transforms._engine.program import Program
from graftax.transforms._engine.slices import OTHER_ELEMENTS

T = TypeVar("T")

NO_AXIS = "{name}: {path} has the shape {shape}, and no axis {axis} to go along."
RAGGED = (
    "{name}: {path} has {size} elements along axis {axis} and {first} has {length}. All arrays need the same number."
)


@boundary
def associative_scan(fn: Callable[[T, T], T], elems: T, reverse: bool = False, axis: int = 0) -> T:
    """`jax.lax.associative_scan` for functions of any objects: all prefix "sums" of `elems` under `fn`, in parallel.

    Args:
        fn: an associative function of two graphs like `elems`, whose arrays have any number of rows along `axis`. It
            returns a third, and must not change anything.
        elems: any graph of arrays of equal length along `axis`.
        reverse, axis: as in `jax.lax.associative_scan`.

    Returns:
        a graph like `elems`.

    Raises:
        StructureError: if `fn` returns another structure; names the path.

    Example:
        >>> graftax.associative_scan(lambda a, b: {"x": a["x"] + b["x"]}, {"x": jnp.arange(4)})
        {'x': Array([0, 1, 3, 6], dtype=int32)}
    """
    return run_compiled("associative_scan", [fn], [None, None], [elems, reverse, axis], _associative_scan)


def _associative_scan(functions: Sequence[Callable[..., Any]], operands: Sequence[Any], extra: Sequence[Any]) -> Any:
    fn, (elems, reverse, axis) = functions[0], extra
    name = name_of(fn, "associative_scan")
    leaves, graphdef = _core.flatten(elems)
    # The operands are placeholders: JAX calls `flat` with parts of `elems`, whose sizes differ from call to call.
    program = Program(name, functions, operands)
    _refuse_ragged(name, leaves, graphdef, axis)

    def flat(left_leaves: Sequence[jax.Array], right_leaves: Sequence[jax.Array]) -> list[Any]:
        def body(functions: list[Callable[..., Any]], _: list[Any]) -> None:
            result = functions[0](_core.unflatten(graphdef, left_leaves), _core.unflatten(graphdef, right_leaves))
            results.append(_core.flatten(result))

        results: list[tuple[list[Any], _core.GraphDef]] = []
        # A change would be made once for each level of the tree in which JAX combines elements, not once for each.
        call_pure(program, program.leaves, body, "fn")
        leaves, structure = results[-1]
        if structure != graphdef:
            text = differences_text(graphdef, structure, ("elems",))
            raise StructureError(OTHER_ELEMENTS.format(name=name, differences=text))
        return leaves

    return _core.unflatten(graphdef, jax.lax.associative_scan(flat, leaves, reverse=reverse, axis=axis))


def _refuse_ragged(name: str, leaves: Sequence[object], graphdef: _core.GraphDef, axis: int) -> None:
    """Raises ValueError, with the key path, if an array has another length along the axis. JAX does not name it."""
    reference: tuple[str, int] | None = None  # the first array's path and length
    for leaf, key_path in zip(leaves, graphdef.leaf_places(), strict=True):
        shape, path = np.shape(leaf), place_name(key_path, ("elems",))
        if not -len(shape) <= axis < len(shape):
            raise ValueError(NO_AXIS.format(name=name, path=path, axis=axis, shape=shape))
        if reference is None:
            reference = (path, shape[axis])
        elif shape[axis] != reference[1]:
            details = {"path": path, "size": shape[axis], "axis": axis, "first": reference[0], "length": reference[1]}
            raise ValueError(RAGGED.format(name=name, **details))
