# SPDX-License-Identifier: Apache-2.0
"""Where an array goes: to the devices of another one, to those of a sharding, to the default one, or nowhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from graftax._graph.path import Path
from graftax._io.reader import Source
from graftax._io.tensor import Leaf, made
from graftax._sharding.rules import Rules

NO_MESH = "shard= gives {spec} for {path!r}, which says nothing without a mesh: give mesh= too"


class Placing:
    """How arrays come to their devices.

    Args:
        shard: a sharding, a spec, `Rules` or a function from (path, jax.ShapeDtypeStruct) to one; None: nothing said.
        mesh: of the specs.
        lazy: they stay in the file: NumPy arrays whose pages are read when they are used, but for keys and refs.
    """

    def __init__(self, source: Source, shard: Any, mesh: Any, lazy: bool) -> None:
        self._source, self._shard, self._mesh, self._lazy = source, shard, mesh, lazy
        self._made: dict[tuple[str, Any], Any] = {}
        self._by_path: dict[Path, Any] | None = None

    @property
    def wants_objects(self) -> bool:
        """Does `shard` look at the whole graph before it says something of an array?"""
        return isinstance(self._shard, Rules)

    def look_at(self, obj: Any) -> None:
        """Shows the rules the objects; abstract arrays will do. Raises StructureError where the rules do not fit."""
        self._by_path = self._shard.shardings(obj, self._mesh)

    def value(self, leaf: Leaf, path: Callable[[], Path], sharding: Sharding | None = None, dtype: Any = None) -> Any:
        """The value of an array of the graph: one object, wherever it stands.

        Args:
            sharding: the one that it has in `like`.
            dtype: the one that it has there, where that is another.
        """
        known = self._made.get((leaf.name, dtype))
        if known is None:
            host = self._source.array(leaf)
            if dtype is not None and dtype != host.dtype and leaf.key is None:
                host = host.astype(dtype)
            if self._lazy and leaf.key is None and leaf.kind != "ref":  # those are no plain arrays
                known = host[()] if leaf.kind == "scalar" else host
            else:
                sharding = sharding or self.sharding(path, host)
                known = made(leaf, host, lambda x: _put(x, sharding))
            self._made[leaf.name, dtype] = known
        return known

    def sharding(self, path: Callable[[], Path], host: Any) -> Sharding | None:
        """What `shard` says of an array."""
        found = self._shard
        if self._by_path is not None:
            return self._by_path.get(path())
        if callable(found) and not isinstance(found, (Sharding, PartitionSpec)):
            found = cast("Callable[..., Any]", found)(path(), jax.ShapeDtypeStruct(host.shape, host.dtype))
        if isinstance(found, PartitionSpec):
            if self._mesh is None:
                raise ValueError(NO_MESH.format(spec=found, path=path()))
            return NamedSharding(self._mesh, found)
        return found


def _put(host: np.ndarray[Any, Any], sharding: Sharding | None) -> Any:
    """An array on its devices; on a CPU where its bytes are, without a copy. It keeps its dtype, of 64 bits too."""
    if isinstance(host, jax.Array):  # of a checkpoint: there already
        return host
    wide = host.dtype.itemsize // (2 if host.dtype.kind == "c" else 1) > 4
    with jax.enable_x64(True) if wide and not jax.config.jax_enable_x64 else contextlib.nullcontext():
        if sharding is None:
            return jax.device_put(host, may_alias=True)
        if sharding.is_fully_addressable:
            return jax.device_put(host, sharding, may_alias=True)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
