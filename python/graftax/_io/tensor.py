# SPDX-License-Identifier: Apache-2.0
"""An array of a graph as a tensor of a file, and back, with the properties that the format has no place for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from graftax._base.errors import UnsupportedValueError
from graftax._io.errors import LoadError, Malformed
from graftax._io.safetensors import DTYPES, Tensor, is_addressable
from graftax._jax.arrays import as_weak, ref_types

_PART = 1 << 24  # bytes that are written at a time

DELETED = "it was deleted or donated: there is nothing left to save"
ELSEWHERE = (
    "it lies on devices of other processes: one process cannot write it. Use graftax.Checkpoints, which lets each "
    "write its own part"
)

# Codes of dtypes in the format. Few readers know those of float8: such arrays are bytes, with their dtype in the graph.
_CODES = {dtype: code for code, dtype in DTYPES.items() if not code.startswith("F8")}
_NAMES = (
    *("int1", "int2", "int4", "uint1", "uint2", "uint4", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"),
    *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"),
    *("float8_e5m2fnuz", "float8_e8m0fnu"),
)
LOGICAL: dict[str, np.dtype[Any]] = {
    **{dtype.name: dtype for dtype in _CODES},
    **{name: np.dtype(getattr(ml_dtypes, name)) for name in _NAMES if hasattr(ml_dtypes, name)},
    "complex128": np.dtype(np.complex128),
}


class ExternalArray(NamedTuple):
    """An array of a checkpoint whose data are not in the file."""

    key: str
    dtype: str
    shape: tuple[int, ...]


class Leaf(NamedTuple):
    """An array in the graph of a file: the name of its tensor, and what the tensor does not say.

    The fields have the names that they have in the JSON of a file.
    """

    name: str
    kind: str = "jax"  # or "numpy", "scalar" (of NumPy), "ref" (a mutable array of JAX)
    dtype: str | None = None  # set if the tensor holds the array as bytes
    weak: bool = False
    key: str | None = None  # the implementation of typed random keys
    outside: ExternalArray | None = None  # in a checkpoint, if the file has no tensor for it

    def to_json(self) -> dict[str, Any]:
        defaults = Leaf._field_defaults  # which are not written: most arrays have only a name
        return {
            name: value for name, value in self._asdict().items() if name not in defaults or value != defaults[name]
        }

    @staticmethod
    def from_json(data: object) -> Leaf:
        """Reads the JSON of an array. Unknown fields are ignored.

        Raises:
            Malformed: where a field has the wrong type.
        """
        if type(data) is not dict:
            raise Malformed("an array that is not described by a JSON object")
        fields: dict[str, Any] = {name: data[name] for name in Leaf._fields if name in data}
        texts = [fields.get("name"), fields.get("kind", "jax"), fields.get("dtype", ""), fields.get("key", "")]
        if not all(type(text) is str for text in texts) or type(fields.get("weak", False)) is not bool:
            raise Malformed("an array with a field of the wrong type")
        if fields.get("outside") is not None:
            fields["outside"] = _external_from_json(fields["outside"])
        leaf = Leaf(**fields)
        if leaf.kind not in ("jax", "numpy", "scalar", "ref") or (leaf.dtype or "int8") not in LOGICAL:
            raise Malformed(f"an array of an unknown kind or dtype: {leaf.kind} {leaf.dtype}")
        return leaf


def _external_from_json(data: object) -> ExternalArray:
    parts: list[Any] = data if type(data) is list else []
    if [type(part) for part in parts] != [str, str, list] or parts[1] not in LOGICAL:
        raise Malformed("an array outside of the file without its location")
    if not all(type(size) is int and size >= 0 for size in parts[2]) or not is_addressable(parts[2]):
        raise Malformed("an array with an invalid shape")
    return ExternalArray(parts[0], parts[1], tuple(parts[2]))


class ArrayToSave(NamedTuple):
    """An array to be written: its description, and a function that gives its bytes when they are written."""

    leaf: Leaf
    tensor: Tensor  # with the offset 0
    itemsize: int
    fetch: Callable[[], np.ndarray[Any, Any]]
    array: Any  # the array itself; for typed keys, their data


def array_to_save(value: Any, name: str, dtype: np.dtype[Any] | None, by_all_processes: bool = False) -> ArrayToSave:
    """Describes how an array is written.

    Args:
        value: the array.
        name: the name of the tensor.
        dtype: the dtype in which a floating array is written; None keeps its own.
        by_all_processes: each process writes its own part, so the array may span processes.

    Raises:
        UnsupportedValueError: if there are no data.
    """
    array_kind, key, weak = "numpy", None, False
    if isinstance(value, ref_types):
        array_kind, value = "ref", value[...]
    elif isinstance(value, np.generic):
        array_kind = "scalar"
    elif not isinstance(value, np.ndarray):
        array_kind = "jax"
    # A value without data is refused, and the error says why there are none.
    if isinstance(value, jax.core.Tracer):
        raise UnsupportedValueError("a value of a running trace (a tracer) has no data to save")
    if isinstance(value, jax.Array):
        if value.is_deleted():
            raise UnsupportedValueError(DELETED)
        if not by_all_processes and not value.is_fully_addressable and not value.is_fully_replicated:
            raise UnsupportedValueError(ELSEWHERE)
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            key, value = str(jax.random.key_impl(value)), jax.random.key_data(value)
        weak = bool(value.weak_type)
    # `dtype` is for floating arrays alone; the data of typed keys are integers anyway.
    own_dtype = np.dtype(value.dtype)
    saved_dtype = dtype if dtype is not None and key is None and jnp.issubdtype(own_dtype, jnp.floating) else own_dtype
    shape, bytes_of = tuple(value.shape), None
    code, saved_shape = _CODES.get(saved_dtype), shape
    # Dtypes without a code are saved as bytes; items of several bytes get a dimension of their own.
    if code is None:
        if saved_dtype.name not in LOGICAL:
            raise UnsupportedValueError(f"there is no encoding for the dtype {saved_dtype}")
        code, bytes_of = "U8", saved_dtype.name
        saved_shape = shape if saved_dtype.itemsize == 1 else (*shape, saved_dtype.itemsize)
    size = math.prod(shape) * saved_dtype.itemsize
    leaf = Leaf(name, array_kind, bytes_of, weak, key)
    return ArrayToSave(
        leaf, Tensor(code, saved_shape, 0, size), saved_dtype.itemsize, lambda: host_bytes(value, saved_dtype), value
    )


def host_bytes(value: object, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """The bytes as a flat array. Read from the shards, so that the JAX array does not cache a copy on the host."""
    if isinstance(value, jax.Array):
        if value.is_deleted():
            raise UnsupportedValueError(DELETED)
        shards = value.addressable_shards
        # All shards are equal, so one is enough.
        if value.is_fully_replicated:
            host = np.asarray(shards[0].data)
        else:
            host = np.empty(value.shape, value.dtype)
            for shard in shards:
                # Replicas would only overwrite the same elements.
                if shard.replica_id == 0:
                    host[shard.index] = np.asarray(shard.data)
    else:
        host = np.asarray(value)
    # The format is row-major and without gaps; a NumPy array may have any strides.
    host = np.asarray(host.astype(dtype, copy=False), order="C")
    return host.reshape(-1).view(np.uint8)


def parts_of(flat: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    """Bytes in parts of at most 16 MB."""
    return (flat[start : start + _PART] for start in range(0, flat.size, _PART))


def logical_shape(leaf: Leaf, tensor: Tensor) -> tuple[int, ...]:
    """The shape of an array; for typed keys, that of their data.

    Raises:
        LoadError: if the tensor cannot hold such an array.
    """
    shape = tensor.shape
    if leaf.dtype is None:
        return shape
    # Items of several bytes have a dimension of their own in the tensor.
    itemsize = LOGICAL[leaf.dtype].itemsize
    if tensor.dtype != "U8" or (itemsize != 1 and shape[-1:] != (itemsize,)):
        raise LoadError(f"{leaf.name!r} does not hold {leaf.dtype}")
    return shape if itemsize == 1 else shape[:-1]


def logical_array(leaf: Leaf, tensor: Tensor, raw: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array that a tensor holds, on the host, without a copy."""
    if leaf.dtype is None:
        return raw
    shape, dtype = logical_shape(leaf, tensor), LOGICAL[leaf.dtype]
    # An empty array cannot be viewed as another dtype.
    if math.prod(shape) == 0:
        return np.zeros(shape, dtype)
    return raw.reshape(-1).view(dtype).reshape(shape)


def restore_array(
    leaf: Leaf,
    host: np.ndarray[Any, Any] | jax.Array,
    put_on_devices: Callable[[np.ndarray[Any, Any] | jax.Array], jax.Array],
) -> Any:
    """The value for the graph, of the kind that was saved.

    Args:
        leaf: the description of the array.
        host: its data; from a checkpoint perhaps an array of JAX.
        put_on_devices: moves an array to its devices.

    Raises:
        LoadError: for keys of an unknown implementation, or whose data have the wrong size.
    """
    if leaf.kind == "numpy":
        return host if isinstance(host, np.ndarray) else np.array(host)  # an array of JAX comes from a checkpoint
    if leaf.kind == "scalar":
        if host.shape != ():
            raise LoadError(f"{leaf.name!r} is a scalar of shape {host.shape}")
        return host[()]
    if leaf.key is not None:
        try:
            return jax.random.wrap_key_data(put_on_devices(host), impl=leaf.key)
        except (TypeError, ValueError) as error:
            raise LoadError(f"{leaf.name!r} does not hold keys of {leaf.key!r}: {error}") from error
    value = put_on_devices(host)
    if leaf.weak:
        value = as_weak(value)
    return jax.new_ref(value) if leaf.kind == "ref" else value
