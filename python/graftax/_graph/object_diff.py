# SPDX-License-Identifier: Apache-2.0
"""Two object graphs side by side: are they equal, and where are they not?"""

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
from graftax._graph.structure_diff import Difference, Way, lockstep, spelled
from graftax._graph.types.describe import plain
from graftax._jax.tracebacks import boundary


@boundary
def equal(one: Any, other: Any, *, rtol: float = 0.0, atol: float = 0.0, sharing: bool = True) -> bool:
    """Are two object graphs equal: types, keys, values, arrays, and what is shared in them?

    Values are compared with their types: `1`, `1.0` and `True` differ. `nan` equals itself. Arrays have to have the
    same shape and dtype; in them 0.0 equals -0.0, and weak types do not count. The order of dict keys and attributes
    does not count, but in an `OrderedDict`.

    Args:
        one, other: the roots.
        rtol, atol: how far inexact arrays may be apart, as in `numpy.allclose`.
        sharing: the same objects have to be shared in both. False: only what is reached counts.

    Example:
        >>> layer = [jnp.ones(2)]
        >>> graftax.equal([layer, layer], graftax.copy([layer, layer]))
        True
        >>> graftax.equal([layer, layer], [layer, graftax.copy(layer)])
        False
    """
    same = _same_leaves(one, other, rtol, atol)
    return next(_differences(one, other, rtol, atol, sharing), None) is None if same is None else same


@boundary
def diff(
    one: Any, other: Any, *, rtol: float = 0.0, atol: float = 0.0, sharing: bool = True, limit: int | None = None
) -> list[Difference[Path]]:
    """Every place where two object graphs differ; below such a place nothing more is compared.

    Args:
        one, other, rtol, atol, sharing: as in `equal`.
        limit: how many are looked for; None: all.

    Example:
        >>> print(*graftax.diff({"a": 1, "b": [2]}, {"a": 1, "b": [3]}), sep="\\n")
        obj[b][0]: int 2 and int 3
    """
    return list(islice(_differences(one, other, rtol, atol, sharing), limit))


def _same_leaves(one: Any, other: Any, rtol: float, atol: float) -> bool | None:
    """Are the arrays of one structure equal? None: a closer look is needed."""
    try:
        leaves, structure = _core.flatten(one)
        others, structure_too = _core.flatten(other)
        if structure != structure_too:
            return None
        return all(leaf_difference(x, y, rtol, atol) is None for x, y in zip(leaves, others, strict=True))
    except Exception:  # it is raised again, with its path
        return None


def _differences(one: Any, other: Any, rtol: float, atol: float, sharing: bool) -> Iterator[Difference[Path]]:
    left, right = Graph(one), Graph(other)
    there: dict[int, int] = {}  # which node of the second graph stands for a node of the first
    here: dict[int, int] = {}
    met: set[tuple[int, int]] = set()

    def apart(x: GraphRow, y: GraphRow) -> tuple[str, str] | None:
        if not (x.is_leaf or y.is_leaf):
            return node_difference(x.value, y.value)
        return leaf_difference(x.value, y.value, rtol, atol) if x.what == y.what else _both(x.value, y.value)

    def meet(a: int, b: int, way: Way) -> Generator[Difference[Path], None, list[tuple[int, int, Any]]]:
        x, y = left.rows[a], right.rows[b]
        if not (x.is_leaf or y.is_leaf):
            first, second = there.setdefault(x.target, y.target), here.setdefault(y.target, x.target)
            if sharing and (first != y.target or second != x.target or x.what != y.what):
                yield Difference(Path(spelled(way)), _sharing_text(left, a), _sharing_text(right, b))
                return []
            if (x.target, y.target) in met:
                return []
            met.add((x.target, y.target))
        try:
            texts = apart(x, y)
        except Exception as error:  # an array that is gone, a tracer
            raise at_path(error, repr(Path(spelled(way))))  # noqa: B904 - it is the same one
        if texts is not None:
            yield Difference(Path(spelled(way)), *texts)
        if x.is_leaf or y.is_leaf or type(x.value) is not type(y.value):
            return []
        below = dict(right.key_entries(y.target))
        return [(number, below[entry], entry) for entry, number in left.key_entries(x.target) if entry in below]

    return lockstep(meet, 0, 0)


def _sharing_text(graph: Graph, number: int) -> str:
    row = graph.rows[number]
    name = type(row.value).__qualname__
    return f"{name} of {graph.path(row.target)!r} once more" if row.what == "ref" else f"{name} of its own"


def _both(x: Any, y: Any) -> tuple[str, str]:
    return _text(x), _text(y)


def _text(value: Any) -> str:
    try:
        return value_text(value)
    except Exception:  # no tree, such as a dict whose keys cannot be sorted, or a class whose flatten fails
        return _with_keys(value, [entry for entry, _ in _core.children_with_keys(value)])


def leaf_difference(x: Any, y: Any, rtol: float = 0.0, atol: float = 0.0) -> tuple[str, str] | None:
    """How two values differ that are no nodes."""
    if x is y:
        return None
    x, y = plain(x), plain(y)
    if type(x) is not type(y) and not (isinstance(x, jax.Array) and isinstance(y, jax.Array)):
        return _both(x, y)
    if isinstance(x, (jax.Array, np.ndarray, np.generic)):
        return _array_difference(x, y, rtol, atol)
    return None if _same_value(x, y) else _both(x, y)


def _same_value(x: Any, y: Any) -> bool:
    """Are these equal as static values? What hides its state (a generator) is equal to itself only."""
    try:
        return bool(_core.flatten(x)[1] == _core.flatten(y)[1])
    except UnsupportedValueError:
        return False


def _array_difference(x: Any, y: Any, rtol: float, atol: float) -> tuple[str, str] | None:
    if x.dtype != y.dtype or x.shape != y.shape:
        return _both(x, y)
    a, b = numbers_of(x), numbers_of(y)
    if np.all(a == b):
        return None
    same = equal_numbers(a, b, rtol, atol)
    if np.all(same):
        return None
    count = int(np.size(same) - np.count_nonzero(same))
    one, other = _both(x, y)
    if np.size(same) == 1:
        return f"{one} {a.reshape(())[()]!s}", f"{other} {b.reshape(())[()]!s}"
    first = tuple(int(i) for i in np.argwhere(~np.asarray(same))[0])
    where = f"{count} of {np.size(same)} elements differ, the first at {list(first)}"
    return f"{one} {a[first]!s}", f"{b[first]!s} ({where})"


def numbers_of(x: Any) -> Any:
    """An array as NumPy's, of a dtype that NumPy can compare: a random key by its data."""
    a = _whole(x if isinstance(x.dtype, np.dtype) else jax.random.key_data(x))
    inexact = a.dtype.kind not in "fciub" and jax.numpy.issubdtype(a.dtype, np.inexact)  # bfloat16 and its like
    return a.astype(np.float32) if inexact else a


def _whole(x: Any) -> Any:
    """A NumPy array. One that spans hosts is gathered: all of them have to ask."""
    concrete = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    if concrete and not (x.is_fully_addressable or x.is_fully_replicated):
        from jax.experimental import multihost_utils  # takes long to import, and few need it

        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(x)


def equal_numbers(a: Any, b: Any, rtol: float, atol: float) -> Any:
    """Where two arrays of one shape and dtype are equal: nan and NaT equal themselves."""
    if a.dtype.kind in "fc":
        with np.errstate(all="ignore"):
            return np.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
    same = a == b
    return same | (np.isnat(a) & np.isnat(b)) if a.dtype.kind in "mM" else same


def node_difference(x: Any, y: Any) -> tuple[str, str] | None:
    """How two nodes differ in themselves: in their types, their keys, or what they are besides their children."""
    if type(x) is not type(y):
        return _text(x), _text(y)
    keys, others = ([entry for entry, _ in _core.children_with_keys(value)] for value in (x, y))
    mine, its = ({(entry, *_key_type(entry)) for entry in key_entries} for key_entries in (keys, others))
    if mine != its:
        missing = [k for k in keys if (k, *_key_type(k)) not in its]
        extra = [k for k in others if (k, *_key_type(k)) not in mine]
        return _with_keys(x, missing), _with_keys(y, extra)
    if type(x).__name__ == "OrderedDict" and keys != others:
        return _order(keys), _order(others)
    # A node without children is compared whole; with children, without them.
    if not keys and not _same_value(x, y):
        return _text(x), _text(y)
    if keys and not _same_value(_content(x), _content(y)):
        return _text(x), _text(y)
    if getattr(x, "maxlen", None) != getattr(y, "maxlen", None) and hasattr(x, "maxlen"):
        return f"maxlen {x.maxlen}", f"maxlen {y.maxlen}"
    if isinstance(x, types.FunctionType) and x.__code__ is not y.__code__:
        return _text(x), _text(y)
    return None


# Classes derived from these may have attributes beside a content that is no child.
_CONTENT = (str, bytes, int, float, complex, set, frozenset, bytearray, array.array)


def _content(x: Any) -> Any:
    base: Any = next((base for base in _CONTENT if issubclass(type(x), base)), None)
    if base is None:
        return None
    if base is array.array:
        return x.typecode, x.tobytes()
    return base(x) if base in (set, frozenset, bytearray) else base.__getnewargs__(x)[0]


def _with_keys(value: Any, only: list[Any]) -> str:
    name = type(value).__qualname__
    return f"{name} with {_names(only)}" if only else f"{name} without"


def _key_type(entry: Any) -> tuple[type, ...]:
    """`1` and `True` are one key for a dict, but not here."""
    key = getattr(entry, "key", None)
    return (type(key), *map(type, cast("tuple[Any, ...]", key))) if isinstance(key, tuple) else (type(key),)


def _order(keys: list[Any]) -> str:
    return f"the order {_names(keys)}"


def _names(key_entries: list[Any]) -> str:
    return some([str(Path((k,))) for k in key_entries])
