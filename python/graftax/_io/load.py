# SPDX-License-Identifier: Apache-2.0
"""`load`: reads a file into new objects, or into existing ones."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, TypedDict, TypeVar, Unpack, overload

import jax
from jax.sharding import Mesh
from jax.tree_util import GetAttrKey

from graftax._graph.path import Path, without_root
from graftax._graph.patterns import Pattern
from graftax._io.build import ObjectBuilder, unknown_names
from graftax._io.decode_graph import FileGraph
from graftax._io.importable_names import MISSING, NameResolver
from graftax._io.load_like import LoadInto
from graftax._io.placement import Placement, Stored
from graftax._io.reader import Source, named_errors
from graftax._io.tensor import Leaf
from graftax._io.tensor_names import name_parts
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
    mesh: Mesh | None
    classes: Any
    lazy: bool


@overload
def load(path: str | os.PathLike[str], like: None = None, **options: Unpack[LoadOptions]) -> Any: ...
@overload
def load(path: str | os.PathLike[str], like: T, **options: Unpack[LoadOptions]) -> T: ...
@boundary
def load(
    path: str | os.PathLike[str],
    like: object = None,
    *,
    only: object = None,
    into: bool = False,
    strict: bool = True,
    cast: bool = False,
    rename: Mapping[str, str] | None = None,
    shard: object = None,
    mesh: Mesh | None = None,
    classes: object = (),
    lazy: bool = False,
) -> Any:
    """Reads a file of `graftax.save`, or the tensors of any safetensors file.

    Nothing is imported or unpickled, and no `__init__`, `__setattr__` or `__reduce__` is called: a file is data. On a
    CPU, arrays stay in the mapped file without a copy.

    Args:
        path: the path of the file.
        like: objects of the same structure, or their abstract form from `graftax.eval_shape`. Values are matched by
            path; values that no file can hold (a lambda, a lock) come from here. Without it, new objects are built.
        only: which leaves are loaded, as in `graftax.partition`; the others are those of `like`, or None.
        into: writes the values into `like` itself, all of them or none.
        strict: False keeps the values of `like` that the file does not have, and ignores parts that only the file has.
        cast: arrays get the dtype that they have in `like`, and numbers become scalar arrays or the other way round.
        rename: maps patterns of paths in the file to patterns of paths in `like`: `{"old.**": "new.**"}`.
        shard: a `jax.sharding.Sharding`, a `PartitionSpec` of `mesh`, `graftax.Rules`, or a function from
            (path, jax.ShapeDtypeStruct) to one, for arrays that are not committed to devices in `like`.
        mesh: the mesh of the specs; it also replaces a saved mesh with the same axes.
        classes: classes and functions that the file may name besides those in `like` and registered ones, patterns of
            them in loaded modules (`"mypkg.*"`), or "dict" to load objects of unknown classes as dicts.
        lazy: arrays are NumPy arrays in the mapped file, which are read when they are used. Typed keys and refs, which
            NumPy does not have, are read at once.

    Returns:
        new objects, or `like` itself with `into=True`. For a file of another writer without `like`, a dict.

    Raises:
        LoadError: if the file is damaged or names unknown classes, or with every difference from `like`.

    Example:
        >>> model = {"w": jnp.zeros(3), "epoch": 0}
        >>> graftax.save(folder / "model.safetensors", {"w": jnp.ones(3), "epoch": 7})
        >>> graftax.load(folder / "model.safetensors", model, into=True)["epoch"], model["epoch"]
        (7, 7)
    """
    if into and like is None:
        raise TypeError("into=True needs like=, the object that gets the values")
    source = Source(os.fspath(path))
    placement = Placement(source, shard, mesh, lazy)
    if like is None and rename is not None:
        raise TypeError("rename= needs like=, whose paths are the new names")
    with named_errors(source.path):
        if like is not None:
            return LoadInto(source, placement, like, only, strict, cast, classes).load(dict(rename or {}), into)
        if source.graph is None:
            return _tensors(source, placement, only)
        return _load_new(source, placement, only, classes)


def load_stored(source: Source) -> Any:
    """As `load`, with a `StoredArray` in the place of each array.

    Raises:
        LoadError: if the file is damaged or names unknown classes.
    """
    with named_errors(source.path):
        return _load_new(source, Stored(source), None, ())


def _load_new(source: Source, placement: Placement, patterns: object, classes: object) -> Any:
    """Builds new objects from a file, without `like`."""
    resolver = NameResolver({}, classes)
    file_graph, decoder = source.file_graph(resolver, placement.mesh)
    is_selected = _coverage(patterns)

    # Rules are applied to the whole graph, so it is built once with abstract arrays.
    if placement.needs_graph:
        abstract = ObjectBuilder(file_graph, decoder, functools.partial(_abstract, source, file_graph)).value(0)
        if abstract is not MISSING:
            placement.apply_rules(abstract)

    # An array that `only=` leaves out is None, as in `partition`; one that the file lacks is an error.
    def array(number: int) -> Any:
        row, path = file_graph.rows[number], functools.partial(file_graph.path, number)
        if is_selected is not None and not is_selected(path()):
            return None
        if row.op == "-":
            return resolver.note_missing(f"the array at {path()!r}, which was left out of the file")
        return placement.value(file_graph.arrays[row.arg], path)

    build = ObjectBuilder(file_graph, decoder, array)
    value = build.value(0)
    # All unknown names are collected, so that one error lists them.
    if value is MISSING:
        build.note_unknown()
        raise unknown_names(resolver.unknown, source.path)
    return value


def _abstract(source: Source, file_graph: FileGraph, number: int) -> object:
    """The abstract array of a row."""
    row = file_graph.rows[number]
    if row.op == "-":
        return None
    leaf = file_graph.arrays[row.arg]
    return jax.ShapeDtypeStruct(source.shape(leaf), source.dtype(leaf))


def _coverage(patterns: object) -> Callable[[Path], bool] | None:
    """Tells whether `only=`, where there is no `like`, covers a path; None for all paths."""
    if patterns is None:
        return None
    # Other filters need an object to look at.
    texts = [patterns] if isinstance(patterns, (str, Path)) else patterns
    if not isinstance(texts, (list, tuple)) or not texts or not all(isinstance(text, (str, Path)) for text in texts):
        raise TypeError("only= without like= takes patterns of paths: other filters need the values of like=")
    parsed = [Pattern(without_root(str(text))) for text in texts]
    return lambda path: any(pattern.covers(path) for pattern in parsed)


def _tensors(source: Source, placement: Placement, patterns: object) -> dict[str, Any]:
    """The tensors of another writer's file, by name."""
    is_selected = _coverage(patterns)
    paths = {name: Path(map(GetAttrKey, name_parts(name))) for name in source.tensors}
    return {
        name: placement.value(Leaf(name), functools.partial(Path, path))
        for name, path in paths.items()
        if is_selected is None or is_selected(path)
    }
