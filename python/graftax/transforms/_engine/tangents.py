# SPDX-License-Identifier: Apache-2.0
"""Graphs of tangents and cotangents, matched to the arrays that they are of by key path."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from graftax import _core
from graftax._base.errors import StructureError, some
from graftax._graph.structure import Op, Row, Structure, path_text

OTHER_SHAPE = "{name}: the {what} at {path} has to be {expected}, and is {given}."
OTHER_TANGENT = (
    "{name}: there is a {what} at {path}, where nothing is differentiated. A {what} stands in the place of a floating "
    "array, in a graph of the same structure, with None for zero: here at {expected}."
)
NO_TANGENT = (
    "{name}: there is no {what} for {path}. A {what} stands in the place of each floating array, in a graph of the "
    "same structure; None, or a static, stands for zero."
)


def is_inexact(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return isinstance(leaf, (float, complex)) if dtype is None else _is_inexact(dtype)


def is_key(leaf: Any) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.extended)


@functools.cache
def _is_inexact(dtype: Any) -> bool:
    return not jnp.issubdtype(dtype, jax.dtypes.extended) and jnp.issubdtype(dtype, jnp.inexact)


class TangentType(NamedTuple):
    """What a tangent has to look like, and where it stands."""

    root: int
    path: tuple[Any, ...]
    name: str
    shape: tuple[int, ...]
    dtype: Any

    @staticmethod
    def of(leaf: Any, root: int, path: tuple[Any, ...], name: str) -> TangentType:
        inexact = is_inexact(leaf)
        return TangentType(root, path, name, np.shape(leaf), jnp.result_type(leaf) if inexact else jax.dtypes.float0)

    def zeros(self) -> Any:
        zeros = np.zeros if self.dtype == jax.dtypes.float0 else jnp.zeros
        return zeros(self.shape, self.dtype)


def is_nothing(x: Any) -> bool:
    return getattr(x, "dtype", None) == jax.dtypes.float0


def matched(
    name: str,
    what: str,
    wanted: Sequence[TangentType],
    given: tuple[Any, ...],
    like: _core.GraphDef | None = None,
    numbers: bool = False,
) -> tuple[Any, ...]:
    """One tangent for each leaf, out of graphs that hold them in the same places; zeros where they hold None.

    What stands in the place of another leaf of `like` is left alone, as JAX leaves the cotangent of an integer. With
    `numbers`, a Python number of the right dtype stays one.
    """
    found, again = places_in(given)

    def at(place: Any) -> Any:
        for end in range(1, len(place) + 1):
            if place[:end] in again:
                return at((*again[place[:end]], *place[end:]))
        return place

    out: list[Any] = []
    used: set[Any] = set()
    missing: list[TangentType] = []
    for shape in wanted:
        place = at((shape.root, *shape.path))
        used.add(place)
        if not (is_nothing(shape) or any(place[:end] in found for end in range(1, len(place) + 1))):
            missing.append(shape)
        is_array, value = found.get(place, (False, None))
        zero = value is None or isinstance(value, SymbolicZero) or is_nothing(value)
        if type(value) in (int, float, complex) and shape.shape == () and not is_nothing(shape):
            is_array = not isinstance(value, complex) or jnp.issubdtype(shape.dtype, jnp.complexfloating)
            if is_array and not (numbers and jnp.result_type(value) == shape.dtype):
                value = jnp.asarray(value, shape.dtype)
        if zero:
            value = shape.zeros()
        elif not is_array or np.shape(value) != shape.shape or jnp.result_type(value) != shape.dtype:
            expected = f"{shape.dtype}{list(shape.shape)}"
            text = f"{jnp.result_type(value)}{list(np.shape(value))}" if is_array else repr(value)
            raise StructureError(
                OTHER_SHAPE.format(name=name, what=what, path=shape.name, expected=expected, given=text)
            )
        out.append(value)
    others = {(root, *path) for root, path in like.leaf_places()} if like is not None else ()
    for place, (is_array, value) in found.items():
        if is_array and place not in used and place not in others and not is_nothing(value):
            expected = some([shape.name for shape in wanted if not is_nothing(shape)]) or "no place"
            path = f"{_root_name(wanted, place[0], what)}{path_text(place[1:])}"
            raise StructureError(OTHER_TANGENT.format(name=name, what=what, path=path, expected=expected))
    if missing:
        raise StructureError(NO_TANGENT.format(name=name, what=what, path=some([shape.name for shape in missing])))
    return tuple(out)


def _root_name(wanted: Sequence[TangentType], root: int, what: str) -> str:
    """How messages name one of the graphs of tangents: as that of the operand."""
    names = [shape.name.removesuffix(path_text(shape.path)) for shape in wanted if shape.root == root]
    return names[0] if names else f"{what}s[{root}]"


def places_in(given: tuple[Any, ...]) -> tuple[dict[Any, tuple[bool, Any]], dict[Any, Any]]:
    """({(root, *path): (is it an array, value)}, {place of a node met again: its first place})."""
    leaves, graphdef = _core.record(given)
    found: dict[Any, tuple[bool, Any]] = {}
    again: dict[Any, Any] = {}
    structure = Structure(graphdef)

    def at(row: Row) -> tuple[Any, ...]:
        root, path = structure.place(row)
        return root, *path

    for row in structure.rows:
        if row.op is Op.leaf:
            found[at(row)] = (True, leaves[row.leaf])
        elif row.op is Op.static:
            found[at(row)] = (False, row.value)
        elif row.op is Op.node:
            if row.type is SymbolicZero:
                found[at(row)] = (False, None)
        else:
            again[at(row)] = at(structure.target(row))
    return found, again
