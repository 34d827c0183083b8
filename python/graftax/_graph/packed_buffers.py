# SPDX-License-Identifier: Apache-2.0
"""The buffers of packed state: joining small arrays into one, and splitting it again."""

from __future__ import annotations

import contextlib
import copy as copies
import itertools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from graftax._base.errors import StructureError
from graftax._jax.arrays import is_in_default_memory, ref_types
from graftax._jax.tracers import has_tracer

PACK_RESHAPED = (
    "a buffer of this packed state is {found}, and not the {size} numbers that were packed: jax.vmap, or "
    "a tree operation on the handle, changed it. Unpack under the same jax.vmap, or undo that change first."
)


class Buffer(NamedTuple):
    """The leaves in a buffer, in order; leaves of equal shape are side by side."""

    leaves: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: np.dtype[Any]


def is_plain(x: object, max_bytes: int) -> bool:
    """Can the array be part of a buffer: small, replicated, in default memory, of a dtype that NumPy has?"""
    if not isinstance(x, jax.Array) or jnp.issubdtype(x.dtype, jax.dtypes.extended) or x.dtype == jax.dtypes.float0:
        return False
    # A buffer has one dtype, which is not weak: a weakly typed scalar would come out of it as a strong one.
    if x.weak_type or x.size * x.dtype.itemsize > max_bytes:  # type: ignore[attr-defined]
        return False
    # A tracer is on no device yet, but with explicit axes its type says how it is sharded.
    if isinstance(x, jax.core.Tracer):
        spec = getattr(getattr(jax.typeof(x), "sharding", None), "spec", ())
        return all(part is None for part in spec)
    return x.sharding.is_fully_replicated and is_in_default_memory(x.sharding)


def join(leaves: list[Any]) -> jax.Array:
    """The buffer of these leaves."""
    if has_tracer(leaves):
        with _keep_64_bits():
            return _traced_join(leaves)
    # Through the host: outside of a trace, a concatenation by XLA would compile for every list of shapes.
    host = np.concatenate([np.ravel(x) for x in jax.device_get(leaves)])
    return _put_on_devices([host], leaves[0])[0]


def split(joined: object, buffer: Buffer) -> list[Any]:
    """The leaves in a buffer. A tree operation on the handle may have put another value in its place.

    Raises:
        StructureError: if that value does not have the shape of the buffer.
    """
    sizes = [math.prod(shape) for shape in buffer.shapes]
    if getattr(joined, "shape", None) != (sum(sizes),):
        actual = getattr(joined, "shape", type(joined).__name__)
        raise StructureError(PACK_RESHAPED.format(found=actual, size=sum(sizes)))
    if isinstance(joined, jax.ShapeDtypeStruct):
        return [jax.ShapeDtypeStruct(shape, joined.dtype) for shape in buffer.shapes]
    if isinstance(joined, jax.core.Tracer):
        with _keep_64_bits():
            pieces = _traced_split(joined, sizes)
            return [jax.lax.reshape(piece, shape) for piece, shape in zip(pieces, buffer.shapes, strict=True)]
    host = np.split(np.asarray(joined), np.cumsum(sizes)[:-1])
    # Copies: a view of the buffer would show what a later call writes into its memory.
    copies_of_pieces = [piece.reshape(shape).copy() for piece, shape in zip(host, buffer.shapes, strict=True)]
    return _put_on_devices(copies_of_pieces, joined) if isinstance(joined, jax.Array) else copies_of_pieces


# On the CPU, XLA compiles a kernel for each different slice of a buffer. So a buffer is split into blocks of equal
# pieces, and each block into its pieces: a thousand pieces take about sixty kernels. The barriers keep XLA from fusing
# the two steps.


def _traced_split(joined: Any, sizes: list[int]) -> list[Any]:
    blocks = [(size, count) for size, length in _runs(sizes) for count in _even_parts(length)]
    split = jax.lax.split(joined, [size * count for size, count in blocks])
    pieces: list[Any] = []
    for block, (size, count) in zip(jax.lax.optimization_barrier(tuple(split)), blocks, strict=True):
        pieces += jax.lax.split(block, [size] * count)
    return pieces


def _traced_join(leaves: list[Any]) -> jax.Array:
    pieces = [jax.lax.reshape(x, (x.size,)) for x in leaves]
    blocks: list[Any] = []
    offset = 0
    for _, length in _runs([piece.size for piece in pieces]):
        for count in _even_parts(length):
            blocks.append(jax.lax.concatenate(pieces[offset : offset + count], 0))
            offset += count
    return jax.lax.concatenate(jax.lax.optimization_barrier(tuple(blocks)), 0)


def _runs(sizes: Iterable[int]) -> list[tuple[int, int]]:
    """The runs of equal sizes: (size, length of the run)."""
    return [(size, len(list(group))) for size, group in itertools.groupby(sizes)]


def _even_parts(length: int) -> list[int]:
    """Divides a length into equal parts, about as many as each is long, and a shorter last one."""
    part = math.isqrt(length)
    return [part] * (length // part) + ([length % part] if length % part else [])


def sharding_of(x: jax.Array) -> Sharding:
    """The sharding of a replicated array, for a buffer of any rank."""
    sharding = x.sharding
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(), memory_kind=sharding.memory_kind)
    return sharding


def _put_on_devices(arrays: list[np.ndarray[Any, Any]], like: Any) -> list[jax.Array]:
    """Moves arrays to the devices of `like`; they are committed to them if it is."""
    with _keep_64_bits():
        if like.committed:
            return jax.device_put(arrays, sharding_of(like))
        with jax.default_device(next(iter(like.sharding.device_set))):
            return jax.device_put(arrays)


def _keep_64_bits() -> contextlib.AbstractContextManager[None]:
    """Keeps 64-bit arrays as they are, whatever `jax_enable_x64` is now."""
    return jax.enable_x64(True)


def copy_array(x: object) -> Any:
    """A copy of an array; any other value as it is."""
    if isinstance(x, jax.core.Tracer) and not isinstance(x, ref_types) and x.dtype != jax.dtypes.float0:
        with _keep_64_bits():
            return jnp.copy(x)
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
        return copies.deepcopy(x)
    return x
