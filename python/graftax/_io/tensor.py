# SPDX-License-Identifier: Apache-2.0
"""One array of a graph as a tensor of a file, and back: what the format has no dtype for, and what no tensor says."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from graftax._base.errors import UnsupportedValueError
from graftax._io.errors import LoadError, Malformed
from graftax._io.safetensors import DTYPES, Tensor, is_addressable
from graftax._jax.compat import as_weak, ref_types

GONE = "it was deleted or donated: there is nothing left to save"
NO_DATA = "a {cls} has no data to save"
ELSEWHERE = (
    "it lies on devices of other processes: one process cannot write it. Use graftax.Checkpoints, which lets each "
    "write its own part"
)

# As the dtype of a tensor. Float8 has codes in the format that few readers know: bytes, with the dtype beside them.
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


class Outside(NamedTuple):
    """An array that lies beside the file."""

    place: str
    dtype: str
    shape: tuple[int, ...]


class Leaf(NamedTuple):
    """What the graph says of one array: its tensor, and what that does not tell."""

    name: str
    kind: str = "jax"  # or "numpy", "scalar" (one of NumPy's), "ref" (a mutable array of JAX)
    dtype: str | None = None  # where the tensor holds it as bytes
    weak: bool = False
    key: str | None = None  # typed keys: the implementation
    outside: Outside | None = None  # in a checkpoint: the file has no tensor for it

    def to_json(self) -> dict[str, Any]:
        defaults = Leaf._field_defaults
        return {
            name: value for name, value in self._asdict().items() if name not in defaults or value != defaults[name]
        }

    @staticmethod
    def from_json(found: Any) -> Leaf:
        """Unknown fields are ignored. Raises Malformed where one has the wrong type."""
        if type(found) is not dict:
            raise Malformed("an array that is no object")
        fields: dict[str, Any] = {name: found[name] for name in Leaf._fields if name in found}
        texts = [fields.get("name"), fields.get("kind", "jax"), fields.get("dtype", ""), fields.get("key", "")]
        if not all(type(text) is str for text in texts) or type(fields.get("weak", False)) is not bool:
            raise Malformed("an array with a field of the wrong type")
        if fields.get("outside") is not None:
            fields["outside"] = _outside(fields["outside"])
        leaf = Leaf(**fields)
        if leaf.kind not in ("jax", "numpy", "scalar", "ref") or (leaf.dtype or "int8") not in LOGICAL:
            raise Malformed(f"an array of an unknown kind or dtype: {leaf.kind} {leaf.dtype}")
        return leaf


def _outside(found: Any) -> Outside:
    held: list[Any] = found if type(found) is list else []
    if [type(part) for part in held] != [str, str, list] or held[1] not in LOGICAL:
        raise Malformed("an array that lies outside of the file, and nobody says where")
    if not all(type(size) is int and size >= 0 for size in held[2]) or not is_addressable(held[2]):
        raise Malformed("an array with a shape that is none")
    return Outside(held[0], held[1], tuple(held[2]))


class Outgoing(NamedTuple):
    """An array that is written: what a file says of it, and how its bytes are made when their turn comes."""

    leaf: Leaf
    tensor: Tensor  # at 0
    itemsize: int
    fetch: Callable[[], np.ndarray[Any, Any]]
    held: Any  # the array itself; of keys, their data


def outgoing(value: Any, name: str, dtype: np.dtype[Any] | None, by_all: bool = False) -> Outgoing:
    """How one array is written; `dtype` is for floating arrays alone. `by_all`: each process writes its own part.

    Raises:
        UnsupportedValueError: where there is no data.
    """
    kind, key, weak = "numpy", None, False
    if isinstance(value, ref_types):
        kind, value = "ref", value[...]
    elif isinstance(value, np.generic):
        kind = "scalar"
    elif not isinstance(value, np.ndarray):
        kind = "jax"
    if isinstance(value, jax.core.Tracer):
        raise UnsupportedValueError(NO_DATA.format(cls="value of a running trace (a tracer)"))
    if isinstance(value, jax.Array):
        if value.is_deleted():
            raise UnsupportedValueError(GONE)
        if not by_all and not value.is_fully_addressable and not value.is_fully_replicated:
            raise UnsupportedValueError(ELSEWHERE)
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            key, value = str(jax.random.key_impl(value)), jax.random.key_data(value)
        weak = bool(value.weak_type)
    given = np.dtype(value.dtype)
    to = dtype if dtype is not None and key is None and jnp.issubdtype(given, jnp.floating) else given
    shape, logical = tuple(value.shape), None
    code, held = _CODES.get(to), shape
    if code is None:
        if to.name not in LOGICAL:
            raise UnsupportedValueError(f"there is no form for the dtype {to}")
        code, logical, held = "U8", to.name, shape if to.itemsize == 1 else (*shape, to.itemsize)
    size = math.prod(shape) * to.itemsize
    leaf = Leaf(name, kind, logical, weak, key)
    return Outgoing(leaf, Tensor(code, held, 0, size), to.itemsize, lambda: _on_host(value, to), value)


def _on_host(value: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """The bytes, as a flat array. An array of JAX keeps no copy of them on the host."""
    if isinstance(value, jax.Array):
        if value.is_deleted():
            raise UnsupportedValueError(GONE)
        shards = value.addressable_shards
        if value.is_fully_replicated:
            host = np.asarray(shards[0].data)
        else:
            host = np.empty(value.shape, value.dtype)
            for shard in shards:
                if shard.replica_id == 0:
                    host[shard.index] = np.asarray(shard.data)
    else:
        host = np.asarray(value)
    host = np.asarray(host.astype(dtype, copy=False), order="C")
    return host.reshape(-1).view(np.uint8)


def logical_dtype(leaf: Leaf, tensor: Tensor) -> np.dtype[Any]:
    """What an array is of, apart from typed keys."""
    return DTYPES[tensor.dtype] if leaf.dtype is None else LOGICAL[leaf.dtype]


def logical_shape(leaf: Leaf, tensor: Tensor) -> tuple[int, ...]:
    """The shape of an array; of keys, that of their data without what one key has.

    Raises:
        LoadError: where the tensor cannot hold such an array.
    """
    shape = tensor.shape
    if leaf.dtype is not None and LOGICAL[leaf.dtype].itemsize != 1:
        if tensor.dtype != "U8" or shape[-1:] != (LOGICAL[leaf.dtype].itemsize,):
            raise LoadError(f"{leaf.name!r} holds no {leaf.dtype}")
        return shape[:-1]
    if leaf.dtype is not None and tensor.dtype != "U8":
        raise LoadError(f"{leaf.name!r} holds no {leaf.dtype}")
    return shape


def logical(leaf: Leaf, tensor: Tensor, held: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array that a tensor holds, on the host, without a copy."""
    if leaf.dtype is None:
        return held
    shape, dtype = logical_shape(leaf, tensor), LOGICAL[leaf.dtype]
    if math.prod(shape) == 0:
        return np.zeros(shape, dtype)
    return held.reshape(-1).view(dtype).reshape(shape)


def made(leaf: Leaf, host: np.ndarray[Any, Any], put: Callable[[np.ndarray[Any, Any]], Any]) -> Any:
    """The value of the graph. `put` brings an array to its devices.

    Raises:
        LoadError: for keys of an implementation that is not known, or of another size.
    """
    if leaf.kind == "numpy":
        return host
    if leaf.kind == "scalar":
        if host.shape != ():
            raise LoadError(f"{leaf.name!r} is a scalar of shape {host.shape}")
        return host[()]
    if leaf.key is not None:
        try:
            return jax.random.wrap_key_data(put(host), impl=leaf.key)
        except (TypeError, ValueError) as error:
            raise LoadError(f"{leaf.name!r} holds no keys of {leaf.key!r}: {error}") from error
    value = put(host)
    if leaf.weak:
        value = as_weak(value)
    return jax.new_ref(value) if leaf.kind == "ref" else value
