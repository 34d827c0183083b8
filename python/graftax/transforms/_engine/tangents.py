# SPDX-License-Identifier: Apache-2.0
"""Graphs of tangents and cotangents, matched by key path to the arrays that they belong to."""

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

OTHER_SHAPE = "{name}: the {what} at {path} has to be {expected}, and is {actual}."
OTHER_TANGENT = (
    "{name}: there is a {what} at {path}, where nothing is differentiated. A {what} takes the place of a floating "
    "array, in a graph of the same structure, with None for zero: here at {expected}."
)
NO_TANGENT = (
    "{name}: there is no {what} for {path}. A {what} takes the place of each floating array, in a graph of the "
    "same structure; None, or a static, stands for zero."
)


def is_inexact(leaf: object) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return isinstance(leaf, (float, complex)) if dtype is None else _is_inexact(dtype)


def is_key(leaf: object) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.extended)


@functools.cache
def _is_inexact(dtype: Any) -> bool:
    return not jnp.issubdtype(dtype, jax.dtypes.extended) and jnp.issubdtype(dtype, jnp.inexact)


def array_text(shape: Sequence[int], dtype: object) -> str:
    return f"{dtype}{list(shape)}"


class TangentType(NamedTuple):
    """The shape and dtype that a tangent must have, and its key path."""

    root: int
    path: tuple[Any, ...]
    name: str
    shape: tuple[int, ...]
    dtype: Any

    @staticmethod
    def from_leaf(leaf: object, root: int, path: tuple[object, ...], name: str) -> TangentType:
        # As in JAX, the tangent of what has no derivative is of dtype float0, which takes no memory.
        dtype = jnp.result_type(leaf) if is_inexact(leaf) else jax.dtypes.float0
        return TangentType(root, path, name, np.shape(leaf), dtype)

    def zeros(self) -> Any:
        # JAX has no arrays of dtype float0: such zeros are NumPy's.
        zeros = np.zeros if is_float0(self) else jnp.zeros
        return zeros(self.shape, self.dtype)


def is_float0(x: object) -> bool:
    return getattr(x, "dtype", None) == jax.dtypes.float0


def match_tangents(
    name: str,
    noun: str,
    types: Sequence[TangentType],
    graphs: tuple[object, ...],
    like: _core.GraphDef | None = None,
    keep_numbers: bool = False,
) -> tuple[Any, ...]:
    """Picks one tangent for each leaf out of graphs that have them at the same key paths.

    Args:
        noun: "tangent" or "cotangent", for messages.
        graphs: the graphs of tangents; None in them is zero.
        like: the structure of the primals. Values at the paths of its other leaves are ignored, as JAX ignores the
            cotangent of an integer.
        keep_numbers: a Python number of the right dtype is not converted to an array.

    Raises:
        StructureError: if a tangent is missing, has another shape or dtype, or belongs to no leaf.
    """
    entries, first_paths = _entries_by_path(graphs)

    def resolve(key_path: tuple[Any, ...]) -> tuple[Any, ...]:
        """The key path of an entry: a node that is reached twice has its entries at its first path only."""
        for end in range(1, len(key_path) + 1):
            if key_path[:end] in first_paths:
                return resolve((*first_paths[key_path[:end]], *key_path[end:]))
        return key_path

    tangents: list[Any] = []
    used: set[Any] = set()
    missing: list[str] = []
    for type_ in types:
        key_path = resolve((type_.root, *type_.path))
        used.add(key_path)
        # An entry at a prefix of the path (a None in place of a subtree) is zero for everything below it.
        if not (is_float0(type_) or any(key_path[:end] in entries for end in range(1, len(key_path) + 1))):
            missing.append(type_.name)
        is_array, value = entries.get(key_path, (False, None))
        tangents.append(_tangent(name, noun, type_, is_array, value, keep_numbers))
    # An array that no leaf has used would be ignored: most likely its path is wrong.
    other_paths = {(root, *path) for root, path in like.leaf_places()} if like is not None else ()
    for key_path, (is_array, value) in entries.items():
        if is_array and key_path not in used and key_path not in other_paths and not is_float0(value):
            expected = some([type_.name for type_ in types if not is_float0(type_)]) or "no place"
            path = f"{_root_name(types, key_path[0], noun)}{path_text(key_path[1:])}"
            raise StructureError(OTHER_TANGENT.format(name=name, what=noun, path=path, expected=expected))
    if missing:
        raise StructureError(NO_TANGENT.format(name=name, what=noun, path=some(missing)))
    return tuple(tangents)


def _tangent(name: str, noun: str, type_: TangentType, is_array: bool, value: Any, keep_numbers: bool) -> Any:
    """The tangent that an entry stands for."""
    if value is None or isinstance(value, SymbolicZero) or is_float0(value):
        return type_.zeros()
    # A Python number is the tangent of a scalar; a complex one only of a complex scalar.
    if type(value) in (int, float, complex) and type_.shape == () and not is_float0(type_):
        is_array = not isinstance(value, complex) or jnp.issubdtype(type_.dtype, jnp.complexfloating)
        if is_array and not (keep_numbers and jnp.result_type(value) == type_.dtype):
            value = jnp.asarray(value, type_.dtype)
    if not is_array or np.shape(value) != type_.shape or jnp.result_type(value) != type_.dtype:
        expected = array_text(type_.shape, type_.dtype)
        text = array_text(np.shape(value), jnp.result_type(value)) if is_array else repr(value)
        raise StructureError(OTHER_SHAPE.format(name=name, what=noun, path=type_.name, expected=expected, actual=text))
    return value


def _root_name(types: Sequence[TangentType], root: int, noun: str) -> str:
    """The name of a graph of tangents in messages: that of its operand."""
    names = [shape.name.removesuffix(path_text(shape.path)) for shape in types if shape.root == root]
    return names[0] if names else f"{noun}s[{root}]"


def _entries_by_path(graphs: tuple[object, ...]) -> tuple[dict[Any, tuple[bool, Any]], dict[Any, Any]]:
    """Flattens graphs: (the entries by key path; the first key path of each node that is reached again, by the others).

    The key of an entry is `(root, *path)`. The entry is (whether it is an array, the value).
    """
    leaves, graphdef = _core.record(graphs)
    entries: dict[Any, tuple[bool, Any]] = {}
    first_paths: dict[Any, Any] = {}
    structure = Structure(graphdef)

    def path_of(row: Row) -> tuple[Any, ...]:
        root, path = structure.root_path(row)
        return root, *path

    for row in structure.rows:
        if row.op is Op.leaf:
            entries[path_of(row)] = (True, leaves[row.leaf])
        elif row.op is Op.static:
            entries[path_of(row)] = (False, row.value)
        elif row.op is Op.node:
            if row.type is SymbolicZero:  # a node in the recording; as a tangent it is zero, like None
                entries[path_of(row)] = (False, None)
        else:
            first_paths[path_of(row)] = path_of(structure.target(row))
    return entries, first_paths
