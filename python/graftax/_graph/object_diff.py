# SPDX-License-Identifier: Apache-2.0
"""`equal` and `diff`: the comparison of two graphs of live objects."""

from __future__ import annotations

import array
import types
from collections.abc import Generator, Iterator
from itertools import islice
from typing import Any, cast

import jax
import jax.core
import numpy as np

from graftax import _core
from graftax._base.errors import UnsupportedValueError, at_path, some
from graftax._graph.node_text import value_text
from graftax._graph.path import Graph, GraphRow, Path
from graftax._graph.structure import KeyEntry
from graftax._graph.structure_diff import Difference, LinkedPath, linked_entries, lockstep
from graftax._graph.types.describe import plain
from graftax._jax.tracebacks import boundary


@boundary
def equal(one: object, other: object, *, rtol: float = 0.0, atol: float = 0.0, sharing: bool = True) -> bool:
    """Are two object graphs equal in types, keys, values, arrays and sharing?

    Values are compared with their types: `1`, `1.0` and `True` differ. `nan` equals itself. Arrays have to have the
    same shape and dtype; in them 0.0 equals -0.0, and weak types do not count. The order of dict keys and attributes
    does not count, except in an `OrderedDict`.

    Args:
        one, other: the roots.
        rtol, atol: tolerances for inexact arrays, as in `numpy.allclose`.
        sharing: the same objects have to be shared in both. False compares only the values.

    Returns:
        True if they are equal.

    Example:
        >>> layer = [jnp.ones(2)]
        >>> graftax.equal([layer, layer], graftax.copy([layer, layer]))
        True
        >>> graftax.equal([layer, layer], [layer, graftax.copy(layer)])
        False
    """
    # Most comparisons are of graphs of the same structure: then only the leaves have to be compared.
    are_equal = _same_leaves(one, other, rtol, atol)
    return next(_differences(one, other, rtol, atol, sharing), None) is None if are_equal is None else are_equal


@boundary
def diff(
    one: object, other: object, *, rtol: float = 0.0, atol: float = 0.0, sharing: bool = True, limit: int | None = None
) -> list[Difference[Path]]:
    """The places where two object graphs differ; below a difference, nothing more is compared.

    Args:
        one, other, rtol, atol, sharing: as in `equal`.
        limit: the most differences to find; None finds all.

    Returns:
        a list of differences, which is empty if the graphs are equal. Each has its `path`, and prints as text.

    Example:
        >>> print(*graftax.diff({"a": 1, "b": [2]}, {"a": 1, "b": [3]}), sep="\\n")
        obj[b][0]: int 2 and int 3
    """
    return list(islice(_differences(one, other, rtol, atol, sharing), limit))


def _same_leaves(x_root: object, y_root: object, rtol: float, atol: float) -> bool | None:
    """Are two graphs of the same structure equal in their leaves? None where only a full comparison can tell."""
    try:
        leaves, structure = _core.flatten(x_root)
        other_leaves, other_structure = _core.flatten(y_root)
        if structure != other_structure:
            return None
        return all(leaf_difference(x, y, rtol, atol) is None for x, y in zip(leaves, other_leaves, strict=True))
    except Exception:  # the full comparison raises it again, with its path
        return None


def _differences(x_root: object, y_root: object, rtol: float, atol: float, sharing: bool) -> Iterator[Difference[Path]]:
    x_graph, y_graph = Graph(x_root), Graph(y_root)
    # Nodes of each graph -> the node of the other graph that they were paired with first.
    paired_y: dict[int, int] = {}
    paired_x: dict[int, int] = {}
    compared: set[tuple[int, int]] = set()

    def difference_texts(x: GraphRow, y: GraphRow) -> tuple[str, str] | None:
        if not (x.is_leaf or y.is_leaf):
            return node_difference(x.value, y.value)
        if x.category != y.category:
            return _value_texts(x.value, y.value)
        return leaf_difference(x.value, y.value, rtol, atol)

    def compare_pair(
        x_number: int, y_number: int, path: LinkedPath
    ) -> Generator[Difference[Path], None, list[tuple[int, int, KeyEntry]]]:
        x, y = x_graph.rows[x_number], y_graph.rows[y_number]
        if not (x.is_leaf or y.is_leaf):
            # Sharing is equal if each node is paired with only one node of the other graph, in both directions.
            is_paired = paired_y.setdefault(x.target, y.target) == y.target
            is_paired = (paired_x.setdefault(y.target, x.target) == x.target) and is_paired
            if sharing and not (is_paired and x.category == y.category):
                texts = _sharing_text(x_graph, x_number), _sharing_text(y_graph, y_number)
                yield Difference(Path(linked_entries(path)), *texts)
                return []
            # Without `sharing`, a pair of nodes may be reached again, and a cycle leads back to it.
            if (x.target, y.target) in compared:
                return []
            compared.add((x.target, y.target))
        try:
            texts = difference_texts(x, y)
        except Exception as error:  # a deleted array, a tracer
            raise at_path(error, repr(Path(linked_entries(path))))  # noqa: B904 - it is the same one
        if texts is not None:
            yield Difference(Path(linked_entries(path)), *texts)
        if x.is_leaf or y.is_leaf or type(x.value) is not type(y.value):
            return []
        # Children that only one side has were reported by `node_difference`.
        other_children = dict(y_graph.key_entries(y.target))
        return [
            (number, other_children[entry], entry)
            for entry, number in x_graph.key_entries(x.target)
            if entry in other_children
        ]

    return lockstep(compare_pair, 0, 0)


def _sharing_text(graph: Graph, number: int) -> str:
    row = graph.rows[number]
    name = type(row.value).__qualname__
    return f"{name} of {graph.path(row.target)!r} once more" if row.category == "ref" else f"{name} of its own"


def _value_texts(x: object, y: object) -> tuple[str, str]:
    return _value_text(x), _value_text(y)


def _value_text(value: object) -> str:
    try:
        return value_text(value)
    except Exception:  # not a tree for JAX: a dict whose keys cannot be sorted, a class whose flatten raises
        return _text_with_keys(value, [entry for entry, _ in _core.children_with_keys(value)])


def leaf_difference(x: object, y: object, rtol: float = 0.0, atol: float = 0.0) -> tuple[str, str] | None:
    """The texts of two values without children, if they differ."""
    if x is y:
        return None
    # Symbolic numbers are compared by their current values, on which the result of the trace depends from here on.
    x, y = plain(x), plain(y)
    if type(x) is not type(y) and not (isinstance(x, jax.Array) and isinstance(y, jax.Array)):
        return _value_texts(x, y)
    if isinstance(x, (jax.Array, np.ndarray, np.generic)):
        return _array_difference(x, y, rtol, atol)
    return None if _same_value(x, y) else _value_texts(x, y)


def _same_value(x: object, y: object) -> bool:
    """Are these equal as static values? An object that hides its state (a generator) equals only itself."""
    try:
        return bool(_core.flatten(x)[1] == _core.flatten(y)[1])
    except UnsupportedValueError:
        return False


def _array_difference(x: Any, y: Any, rtol: float, atol: float) -> tuple[str, str] | None:
    if x.dtype != y.dtype or x.shape != y.shape:
        return _value_texts(x, y)
    a, b = numbers_of(x), numbers_of(y)
    # The usual case, without tolerances and NaN.
    if np.all(a == b):
        return None
    equal_elements = equal_numbers(a, b, rtol, atol)
    if np.all(equal_elements):
        return None
    count = int(np.size(equal_elements) - np.count_nonzero(equal_elements))
    x_text, y_text = _value_texts(x, y)
    if np.size(equal_elements) == 1:
        return f"{x_text} {a.reshape(())[()]!s}", f"{y_text} {b.reshape(())[()]!s}"
    # A single line has to do: the number of differing elements, and the first of them.
    index = tuple(int(i) for i in np.argwhere(~np.asarray(equal_elements))[0])
    summary = f"{count} of {np.size(equal_elements)} elements differ, the first at {list(index)}"
    return f"{x_text} {a[index]!s}", f"{b[index]!s} ({summary})"


def numbers_of(x: Any) -> Any:
    """A NumPy array of a dtype that NumPy can compare; for random keys, that of their data."""
    a = _gather(x if isinstance(x.dtype, np.dtype) else jax.random.key_data(x))
    # NumPy has no `isclose` for the dtypes of ml_dtypes (bfloat16 and its like), whose values float32 holds exactly.
    inexact = a.dtype.kind not in "fciub" and jax.numpy.issubdtype(a.dtype, np.inexact)
    return a.astype(np.float32) if inexact else a


def _gather(x: Any) -> Any:
    """A NumPy array. An array that spans hosts is gathered: all hosts have to call this."""
    concrete = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    if concrete and not (x.is_fully_addressable or x.is_fully_replicated):
        from jax.experimental import multihost_utils  # slow to import, and rarely needed

        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(x)


def equal_numbers(a: Any, b: Any, rtol: float, atol: float) -> Any:
    """The elements in which two arrays of the same shape and dtype are equal; nan and NaT equal themselves."""
    if a.dtype.kind in "fc":
        with np.errstate(all="ignore"):
            return np.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
    equal_elements = a == b
    return equal_elements | (np.isnat(a) & np.isnat(b)) if a.dtype.kind in "mM" else equal_elements


def node_difference(x: Any, y: Any) -> tuple[str, str] | None:
    """The texts of two nodes, if they differ in type, keys, or content other than their children."""
    if type(x) is not type(y):
        return _value_texts(x, y)
    keys, other_keys = ([entry for entry, _ in _core.children_with_keys(value)] for value in (x, y))
    # Keys are compared with their types, and without their order.
    x_keys, y_keys = ({(entry, *_key_type(entry)) for entry in key_entries} for key_entries in (keys, other_keys))
    if x_keys != y_keys:
        missing = [k for k in keys if (k, *_key_type(k)) not in y_keys]
        extra = [k for k in other_keys if (k, *_key_type(k)) not in x_keys]
        return _text_with_keys(x, missing), _text_with_keys(y, extra)
    if type(x).__name__ == "OrderedDict" and keys != other_keys:
        return f"the order {_key_names(keys)}", f"the order {_key_names(other_keys)}"
    # A node without children is compared as a whole, any other without its children, which the walk compares.
    one, other = (_content(x), _content(y)) if keys else (x, y)
    if not _same_value(one, other):
        return _value_texts(x, y)
    # Payloads that are neither children nor content: how long a deque may get, and what a function does.
    if getattr(x, "maxlen", None) != getattr(y, "maxlen", None) and hasattr(x, "maxlen"):
        return f"maxlen {x.maxlen}", f"maxlen {y.maxlen}"
    if isinstance(x, types.FunctionType) and x.__code__ is not y.__code__:
        return _value_texts(x, y)
    return None


# Classes derived from these have a content besides the attributes that are their children.
_CONTENT = (str, bytes, int, float, complex, set, frozenset, bytearray, array.array)


def _content(x: Any) -> Any:
    base: Any = next((base for base in _CONTENT if issubclass(type(x), base)), None)
    if base is None:
        return None
    if base is array.array:
        return x.typecode, x.tobytes()
    return base(x) if base in (set, frozenset, bytearray) else base.__getnewargs__(x)[0]


def _text_with_keys(value: object, key_entries: list[KeyEntry]) -> str:
    name = type(value).__qualname__
    return f"{name} with {_key_names(key_entries)}" if key_entries else f"{name} without"


def _key_type(entry: object) -> tuple[type, ...]:
    """The types of a key: `1` and `True` are the same key to a dict, but differ here."""
    key = getattr(entry, "key", None)
    return (type(key), *map(type, cast("tuple[Any, ...]", key))) if isinstance(key, tuple) else (type(key),)


def _key_names(key_entries: list[KeyEntry]) -> str:
    return some([str(Path((k,))) for k in key_entries])
