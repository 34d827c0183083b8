# SPDX-License-Identifier: Apache-2.0
"""The buffers of packed state: small arrays joined into one, and cut out of it again."""

from __future__ import annotations

import copy as copies
import itertools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from graftax._base.errors import StructureError
from graftax._jax.compat import ref_types

PACK_RESHAPED = (
    "a buffer of this packed state is {found}, and not the {size} numbers that were packed: jax.vmap, or a tree "
    "operation on the handle, made it so. Unpack under the same jax.vmap, or turn it back first."
)


class Buffer(NamedTuple):
    """Which leaves one buffer holds, in order: those of one shape side by side."""

    leaves: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: np.dtype[Any]

    @property
    def sizes(self) -> list[int]:
        return [int(np.prod(shape)) for shape in self.shapes]


def is_plain(x: Any, max_bytes: int) -> bool:
    """Is the array nothing but its bytes, few enough, in one place?"""
    if not isinstance(x, jax.Array) or jnp.issubdtype(x.dtype, jax.dtypes.extended) or x.dtype == jax.dtypes.float0:
        return False
    if x.weak_type or x.size * x.dtype.itemsize > max_bytes:  # type: ignore[attr-defined]
        return False
    if isinstance(x, jax.core.Tracer):
        spec = getattr(getattr(jax.typeof(x), "sharding", None), "spec", ())
        return all(part is None for part in spec)
    sharding = x.sharding
    default = getattr(next(iter(sharding.device_set)), "default_memory", lambda: None)()
    in_default_memory = sharding.memory_kind is None or default is None or sharding.memory_kind == default.kind
    return sharding.is_fully_replicated and in_default_memory


def join(leaves: list[Any]) -> Any:
    if any(isinstance(x, jax.core.Tracer) for x in leaves):
        with _every_dtype():
            return _traced_join(leaves)
    host = np.concatenate([np.ravel(x) for x in jax.device_get(leaves)])
    return _placed([host], leaves[0])[0]


def cut(joined: Any, buffer: Buffer) -> list[Any]:
    """The pieces of a buffer, or of what a tree operation put in its place, where that can be cut."""
    sizes = buffer.sizes
    if getattr(joined, "shape", None) != (sum(sizes),):
        found = getattr(joined, "shape", type(joined).__name__)
        raise StructureError(PACK_RESHAPED.format(found=found, size=sum(sizes)))
    if isinstance(joined, jax.ShapeDtypeStruct):
        return [jax.ShapeDtypeStruct(shape, joined.dtype) for shape in buffer.shapes]
    if isinstance(joined, jax.core.Tracer):
        with _every_dtype():
            pieces = _traced_cut(joined, sizes)
            return [jax.lax.reshape(piece, shape) for piece, shape in zip(pieces, buffer.shapes, strict=True)]
    host = np.split(np.asarray(joined), np.cumsum(sizes)[:-1])
    # Copies: a view of the buffer would show what a later call writes into its memory.
    own = [piece.reshape(shape).copy() for piece, shape in zip(host, buffer.shapes, strict=True)]
    return _placed(own, joined) if isinstance(joined, jax.Array) else own


# XLA on the CPU compiles a kernel for each slice of a buffer, and equal kernels once. So a buffer is cut into blocks
# of equal pieces, and a block into its pieces: a thousand pieces are some sixty kernels. The barriers keep XLA from
# fusing the two steps.


def _traced_cut(joined: Any, sizes: list[int]) -> list[Any]:
    blocks = [(size, count) for size, length in _runs(sizes) for count in _even(length)]
    cut = jax.lax.split(joined, [size * count for size, count in blocks])
    pieces: list[Any] = []
    for block, (size, count) in zip(jax.lax.optimization_barrier(tuple(cut)), blocks, strict=True):
        pieces += jax.lax.split(block, [size] * count)
    return pieces


def _traced_join(leaves: list[Any]) -> Any:
    pieces = [jax.lax.reshape(x, (x.size,)) for x in leaves]
    blocks: list[Any] = []
    at = 0
    for _, length in _runs([piece.size for piece in pieces]):
        for count in _even(length):
            blocks.append(jax.lax.concatenate(pieces[at : at + count], 0))
            at += count
    return jax.lax.concatenate(jax.lax.optimization_barrier(tuple(blocks)), 0)


def _runs(sizes: Iterable[int]) -> list[tuple[int, int]]:
    """The sizes as runs of equal ones: (size, how many)."""
    return [(size, len(list(group))) for size, group in itertools.groupby(sizes)]


def _even(length: int) -> list[int]:
    """A length in about as many equal parts as each part is long, and a rest."""
    part = math.isqrt(length)
    return [part] * (length // part) + ([length % part] if length % part else [])


def sharding_of(x: Any) -> Any:
    """The sharding of an array that is in one place, fit for a buffer of any rank."""
    sharding = x.sharding
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(), memory_kind=sharding.memory_kind)
    return sharding


def _placed(arrays: list[np.ndarray[Any, Any]], like: Any) -> list[Any]:
    with _every_dtype():
        if like.committed:
            return jax.device_put(arrays, sharding_of(like))
        with jax.default_device(next(iter(like.sharding.device_set))):
            return jax.device_put(arrays)


def _every_dtype() -> Any:
    """Arrays of 64 bits stay what they are, whatever `jax_enable_x64` says now."""
    return jax.enable_x64(True)


def copied(x: Any) -> Any:
    """An array of one's own. Under a trace a copy is one more output, so it is made only where it has to be."""
    if isinstance(x, jax.core.Tracer) and not isinstance(x, ref_types) and x.dtype != jax.dtypes.float0:
        with _every_dtype():
            return jnp.copy(x)
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
        return copies.deepcopy(x)
    return x


def is_deleted(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_deleted()
