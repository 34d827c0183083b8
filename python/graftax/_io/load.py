# SPDX-License-Identifier: Apache-2.0
"""`load`: a file as new objects, or its values in objects that are there."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any, TypedDict, TypeVar, Unpack, overload

import jax
from jax.tree_util import GetAttrKey

from graftax._graph.path import Path, without_root
from graftax._graph.patterns import Pattern
from graftax._io.build import Build, unknown_names
from graftax._io.decode_graph import Rows
from graftax._io.importable_names import MISSING, Known
from graftax._io.load_into import Like
from graftax._io.placement import Placing
from graftax._io.reader import Source, named_errors
from graftax._io.tensor import Leaf
from graftax._io.tensor_names import named
from graftax._jax.tracebacks import boundary

T = TypeVar("T")


class LoadOptions(TypedDict, total=False):
    """The keyword arguments of `load`, for type checkers."""

    only: Any
    into: bool
    strict: bool
    cast: bool
    rename: Mapping[str, str] | None
    shard: Any
    mesh: Any
    classes: Any
    lazy: bool


@overload
def load(path: str | os.PathLike[str], like: None = None, **options: Unpack[LoadOptions]) -> Any: ...
@overload
def load(path: str | os.PathLike[str], like: T, **options: Unpack[LoadOptions]) -> T: ...
@boundary
def load(
    path: str | os.PathLike[str],
    like: Any = None,
    *,
    only: Any = None,
    into: bool = False,
    strict: bool = True,
    cast: bool = False,
    rename: Mapping[str, str] | None = None,
    shard: Any = None,
    mesh: Any = None,
    classes: Any = (),
    lazy: bool = False,
) -> Any:
    """Reads what `graftax.save` wrote, or the tensors of any safetensors file.

    Nothing is imported or unpickled, and no `__init__`, `__setattr__` or `__reduce__` is called: a file is data. On a
    CPU arrays stay in the mapped file, without a copy.

    Args:
        path: of the file.
        like: objects of the structure that is wanted, or what `graftax.eval_shape` says of them. Values are matched by
            path; what no file can hold (a lambda, a lock) comes from here. Without it the objects are made anew.
        only: which leaves are loaded, as in `graftax.partition`; the others are those of `like`, or None.
        into: `like` itself gets the values, in place, all or none.
        strict: False: what is missing in the file stays as it is in `like`, and what it has besides is left out.
        cast: arrays get the dtype that they have in `like`, and numbers become arrays of one number, or the other way.
        rename: patterns of paths in the file, and what they are in `like`: `{"old.**": "new.**"}`.
        shard: a `jax.sharding.Sharding`, a `PartitionSpec` of `mesh`, `graftax.Rules`, or a function from
            (path, jax.ShapeDtypeStruct) to one, for arrays that `like` has not committed to devices.
        mesh: of the specs, and in the place of a saved mesh of the same axes.
        classes: classes and functions that the file may name besides those in `like` and registered ones, patterns of
            them in loaded modules (`"mypkg.*"`), or "dict": objects of unknown classes become dicts.
        lazy: arrays are NumPy arrays in the mapped file, and nothing of them is read before they are used. Typed keys
            and refs, which NumPy has none of, are read.

    Returns:
        the objects: new ones, or `like` itself with `into=True`. Of a file of others without `like`, a dict.

    Raises:
        LoadError: where the file is damaged, where it names what is not known, or with every difference from `like`.

    Example:
        >>> model = {"w": jnp.zeros(3), "epoch": 0}
        >>> graftax.save(folder / "model.safetensors", {"w": jnp.ones(3), "epoch": 7})
        >>> graftax.load(folder / "model.safetensors", model, into=True)["epoch"], model["epoch"]
        (7, 7)
    """
    if into and like is None:
        raise TypeError("into=True needs like=, the object that gets the values")
    source = Source(os.fspath(path))
    placing = Placing(source, shard, mesh, lazy)
    if like is None and rename is not None:
        raise TypeError("rename= needs like=, whose paths are the new names")
    with named_errors(source.path):
        if like is not None:
            return Like(source, placing, like, only, strict, cast, classes, mesh).loaded(dict(rename or {}), into)
        if source.graph is None:
            return _tensors(source, placing, only)
        return _anew(source, placing, only, classes, mesh)


def _anew(source: Source, placing: Placing, only: Any, classes: Any, mesh: Any) -> Any:
    known = Known({}, classes)
    rows, decoder = source.rows(known, mesh)
    wanted = _wanted(only)

    if placing.wants_objects:
        abstract = Build(rows, decoder, functools.partial(_abstract, source, rows)).value(0)
        if abstract is not MISSING:
            placing.look_at(abstract)

    def array(number: int) -> Any:
        row, path = rows.all[number], functools.partial(rows.path, number)
        if wanted is not None and not wanted.covers(path()):
            return None
        if row.op == "-":
            return known.missing(f"the array at {path()!r}, which was left out of the file")
        return placing.value(rows.arrays[row.arg], path)

    build = Build(rows, decoder, array)
    value = build.value(0)
    if value is MISSING:
        build.note_unknown()
        raise unknown_names(known.unknown, source.path)
    return value


def _abstract(source: Source, rows: Rows, number: int) -> Any:
    row = rows.all[number]
    if row.op == "-":
        return None
    leaf = rows.arrays[row.arg]
    return jax.ShapeDtypeStruct(source.shape(leaf), source.dtype(leaf))


def _wanted(only: Any) -> Any:
    """What a pattern, or several, mean without objects to ask."""
    if only is None:
        return None
    texts = [only] if isinstance(only, (str, Path)) else list(only) if isinstance(only, (list, tuple)) else []
    if not texts or not all(isinstance(text, (str, Path)) for text in texts):
        raise TypeError("only= without like= takes patterns of paths: there is nothing that another filter could ask")
    return _Any([Pattern(without_root(str(text))) for text in texts])


class _Any:
    """Several patterns."""

    def __init__(self, patterns: list[Pattern]) -> None:
        self._patterns = patterns

    def covers(self, path: Path) -> bool:
        return any(pattern.covers(path) for pattern in self._patterns)


def _tensors(source: Source, placing: Placing, only: Any) -> dict[str, Any]:
    """The tensors of a file of others, by name."""
    wanted = _wanted(only)
    paths = {name: Path(map(GetAttrKey, named(name))) for name in source.tensors}
    return {
        name: placing.value(Leaf(name), functools.partial(Path, path))
        for name, path in paths.items()
        if wanted is None or wanted.covers(path)
    }
