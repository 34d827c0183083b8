# SPDX-License-Identifier: Apache-2.0
"""Arrays of a checkpoint that Orbax stores, outside of the graph's file: conversion to and from what Orbax handles."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from graftax._io.tensor import LOGICAL, ArrayToSave, ExternalArray
from graftax._jax.compilation import own_jit

_MAX_INLINE = 64 * 1024  # bytes; smaller arrays are in the graph's file
# The dtypes that Orbax writes. Other arrays are in the graph's file, or saved as bytes if each process has a part.
_DTYPES = frozenset(
    ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
    + ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
)


def is_external(array: ArrayToSave) -> bool:
    """Does Orbax store the array? It does so for large arrays, and for those of which each process has a part."""
    data = array.array
    if isinstance(data, jax.Array) and not (data.is_fully_addressable or data.is_fully_replicated):
        return True
    return np.dtype(data.dtype).name in _DTYPES and array.tensor.end > _MAX_INLINE


def orbax_input(array: Any) -> Any:
    """The array to pass to Orbax. It writes in the background: arrays that may be assigned or donated are copied."""
    if isinstance(array, np.ndarray):
        return array.copy()
    if array.is_fully_addressable and jax.process_count() > 1:  # each process has its own: that of process 0 is saved
        return np.array(array)
    if np.dtype(array.dtype).name not in _DTYPES:
        return own_jit(_to_bytes)(array)
    # On a CPU the host array shares the memory of the array, which a donation would reuse before Orbax has written it.
    on_host = any(device.platform == "cpu" for device in array.sharding.device_set)
    return jnp.copy(array) if on_host else array


def restore_args(external: ExternalArray, sharding: Sharding | None) -> np.ndarray[Any, Any] | jax.ShapeDtypeStruct:
    """The abstract array to request from Orbax: with a sharding, or of NumPy where the process itself places it."""
    dtype = LOGICAL[external.dtype if external.dtype in _DTYPES else "uint8"]
    if sharding is None or (sharding.is_fully_addressable and jax.process_count() > 1):
        return np.empty(external.shape, dtype)
    return jax.ShapeDtypeStruct(external.shape, dtype, sharding=sharding)


def restored_array(external: ExternalArray, restored: Any) -> Any:
    """The array of its own dtype, from what Orbax returns."""
    if external.dtype in _DTYPES:
        return restored
    dtype = LOGICAL[external.dtype]
    if isinstance(restored, np.ndarray):
        return restored.astype(_unsigned_dtype(dtype), copy=False).view(dtype)
    # On the devices: each process has only its own part.
    return own_jit(_from_bytes, static_argnums=1, out_shardings=restored.sharding)(restored, dtype)


def _unsigned_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The unsigned dtype of as many bits: numbers of less than a byte are packed on a device, but not on the host."""
    size = jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).bits
    return LOGICAL[f"uint{size}"]


def _to_bytes(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, _unsigned_dtype(x.dtype)).astype(jnp.uint8)


def _from_bytes(x: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    return jax.lax.bitcast_convert_type(x.astype(_unsigned_dtype(dtype)), dtype)
