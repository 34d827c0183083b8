# SPDX-License-Identifier: Apache-2.0
"""An array of a checkpoint that lies beside the graph's file, as Orbax takes and gives it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from graftax._io.tensor import LOGICAL, Outgoing, Outside

_SMALL = 64 * 1024  # bytes: leaves up to here are in the graph's own file
# What Orbax writes. Others are in the graph's file, whatever their size; where each process has a part, they are bytes.
_DTYPES = frozenset(
    ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
    + ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
)


def is_beside(array: Outgoing) -> bool:
    """Large arrays, and those of which each process has a part."""
    held = array.held
    if isinstance(held, jax.Array) and not (held.is_fully_addressable or held.is_fully_replicated):
        return True
    return np.dtype(held.dtype).name in _DTYPES and array.tensor.end > _SMALL


def given(held: Any) -> Any:
    """What Orbax gets. It writes later: NumPy arrays, which can be assigned, are copied; so is what may be donated."""
    if isinstance(held, np.ndarray):
        return held.copy()
    if held.is_fully_addressable and jax.process_count() > 1:  # each has one of its own: that of process 0 counts
        return np.array(held)
    if np.dtype(held.dtype).name not in _DTYPES:
        return jax.jit(_bytes)(held)
    on_host = any(device.platform == "cpu" for device in held.sharding.device_set)
    return jnp.copy(held) if on_host else held


def asked(outside: Outside, sharding: Sharding | None) -> Any:
    """What Orbax is asked for: an array with a sharding; one of NumPy where a process puts its own where it belongs."""
    dtype = LOGICAL[outside.dtype if outside.dtype in _DTYPES else "uint8"]
    if sharding is None or (sharding.is_fully_addressable and jax.process_count() > 1):
        return np.empty(outside.shape, dtype)
    return jax.ShapeDtypeStruct(outside.shape, dtype, sharding=sharding)


def found(outside: Outside, held: Any) -> Any:
    """The array, of what Orbax gives."""
    if outside.dtype in _DTYPES:
        return held
    dtype = LOGICAL[outside.dtype]
    if isinstance(held, np.ndarray):
        return held.view(dtype) if _is_whole(dtype) else held.astype(_bits(dtype)).view(dtype)
    return jax.jit(_of_bytes, static_argnums=1, out_shardings=held.sharding)(held, dtype)


def _is_whole(dtype: np.dtype[Any]) -> bool:
    """Does a number fill its byte? Smaller ones share it on a device, and never on the host."""
    return jnp.finfo(dtype).bits == 8 if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).bits == 8


def _bits(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Of smaller numbers: the unsigned ones of as many bits."""
    size = jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).bits
    return LOGICAL[f"uint{size}"]


def _bytes(x: Any) -> Any:
    if _is_whole(x.dtype):
        return jax.lax.bitcast_convert_type(x, jnp.uint8)
    return jax.lax.bitcast_convert_type(x, _bits(x.dtype)).astype(jnp.uint8)


def _of_bytes(x: Any, dtype: np.dtype[Any]) -> Any:
    if _is_whole(dtype):
        return jax.lax.bitcast_convert_type(x, dtype)
    return jax.lax.bitcast_convert_type(x.astype(_bits(dtype)), dtype)
