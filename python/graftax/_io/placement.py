# SPDX-License-Identifier: Apache-2.0
"""Placement of loaded arrays: on the devices of the array in `like`, of a sharding, on the default device, or none."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from graftax._graph.path import Path
from graftax._io.reader import Source
from graftax._io.tensor import Leaf, restore_array
from graftax._sharding.rules import Rules


class Placement:
    """Places the arrays of a file on devices.

    Args:
        source: the file.
        shard: a sharding, a spec, `Rules` or a function from (path, jax.ShapeDtypeStruct) to one; None for the default.
        mesh: the mesh of the specs.
        lazy: arrays stay in the file, as NumPy arrays whose pages are read when they are used; not keys and refs.
    """

    def __init__(self, source: Source, shard: Any = None, mesh: Mesh | None = None, lazy: bool = False) -> None:
        self._source, self._shard, self.mesh, self._lazy = source, shard, mesh, lazy
        self._values: dict[tuple[object, ...], Any] = {}
        self._by_path: dict[Path, Any] | None = None

    @property
    def needs_graph(self) -> bool:
        """Does `shard` need the whole graph before it can place an array?"""
        return isinstance(self._shard, Rules)

    def apply_rules(self, obj: Any) -> None:
        """Applies rules to a graph, whose arrays may be abstract.

        Raises:
            StructureError: if the rules do not fit.
        """
        self._by_path = self._shard.shardings(obj, self.mesh)

    def value(self, leaf: Leaf, path: Callable[[], Path], sharding: Sharding | None = None, dtype: Any = None) -> Any:
        """The value of an array; the same object for all paths of an array, if `like` has arrays of one kind there.

        Args:
            leaf: the array in the file.
            path: gives its path.
            sharding: its sharding in `like`.
            dtype: its dtype in `like`, if that differs.
        """
        # `like` may ask for one array of the file as a NumPy array and as one of JAX, in two dtypes or on two devices:
        # these are two arrays.
        key = (leaf.name, leaf.kind, dtype, sharding)
        value = self._values.get(key)
        if value is None:
            # A NumPy view of the file: its pages are read when the array is moved.
            host = self._source.array(leaf)
            if dtype is not None and dtype != host.dtype and leaf.key is None:
                host = host.astype(dtype)
            if self._lazy and leaf.key is None and leaf.kind != "ref":  # keys and refs are not NumPy arrays
                value = host[()] if leaf.kind == "scalar" else host
            else:
                sharding = sharding or self.sharding(path, host)
                value = restore_array(leaf, host, lambda x: _put_on_devices(x, sharding))
            self._values[key] = value
        return value

    def sharding(self, path: Callable[[], Path], host: Any) -> Sharding | None:
        """The sharding that `shard` gives for an array; None for the default device."""
        sharding = self._shard
        if self._by_path is not None:
            return self._by_path.get(path())
        if callable(sharding):
            sharding = cast("Callable[..., Any]", sharding)(path(), jax.ShapeDtypeStruct(host.shape, host.dtype))
        if isinstance(sharding, PartitionSpec):
            if self.mesh is None:
                raise ValueError(f"shard= gives {sharding} for {path()!r}, which needs a mesh: give mesh= too")
            return NamedSharding(self.mesh, sharding)
        return sharding


@dataclasses.dataclass(frozen=True, eq=False)
class StoredArray:
    """An array that stays in its file.

    Attributes:
        leaf: the description of the array.
        host: its data, a view of the file.
    """

    leaf: Leaf
    host: np.ndarray[Any, Any]

    def value(self) -> Any:
        """The array as it was saved, on the default device."""
        return restore_array(self.leaf, self.host, lambda x: _put_on_devices(x, None))


class Stored(Placement):
    """Leaves all arrays in the file, as `StoredArray`."""

    def value(
        self, leaf: Leaf, path: Callable[[], Path], sharding: Sharding | None = None, dtype: object = None
    ) -> Any:
        key = (leaf.name, None)
        if key not in self._values:
            self._values[key] = StoredArray(leaf, self._source.array(leaf))
        return self._values[key]


def _put_on_devices(host: np.ndarray[Any, Any] | jax.Array, sharding: Sharding | None) -> jax.Array:
    """Moves an array to its devices; to a CPU without a copy. A dtype of 64 bits is kept."""
    # From a checkpoint: Orbax has placed it, where the first of its paths in `like` asks for it.
    if isinstance(host, jax.Array):
        return host if sharding is None or host.sharding == sharding else jax.device_put(host, sharding)
    # Without x64, `device_put` would convert the array to 32 bits.
    wide = host.dtype.itemsize // (2 if host.dtype.kind == "c" else 1) > 4
    with jax.enable_x64(True) if wide and not jax.config.jax_enable_x64 else contextlib.nullcontext():
        if sharding is None:
            return jax.device_put(host, may_alias=True)
        if sharding.is_fully_addressable:
            return jax.device_put(host, sharding, may_alias=True)
        # Other processes have devices of the sharding: each provides its own part.
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
