# SPDX-License-Identifier: Apache-2.0
"""The properties of a leaf that `jax.jit` compiles for: calls with equal signatures run one executable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import numpy as np

from graftax import _core
from graftax._explain.cause_texts import Cause
from graftax._jax.arrays import array_class

_ARRAY = array_class()


class ArraySignature(NamedTuple):
    """The properties of one leaf that a compiled program depends on."""

    shape: tuple[Any, ...]
    dtype: Any
    weak: bool
    sharding: jax.sharding.Sharding | None  # None: not placed, JAX chooses
    committed: bool | None  # None: it is a tracer

    def causes(self, current: ArraySignature, path: str) -> Iterator[Cause]:
        """One cause for each property that differs in `current`."""
        if self.shape != current.shape:
            yield Cause("shape", path, str(self.shape), str(current.shape))
        if self.dtype != current.dtype:
            yield Cause("dtype", path, str(self.dtype), str(current.dtype))
        if self.weak != current.weak:
            yield Cause("weak type", path, *(_dtype_text(signature) for signature in (self, current)))
        if self.committed is None or current.committed is None:
            return
        devices = {_devices(self), _devices(current)}
        # Report the cause that the user can act on: a commitment that changed on one device, or else the sharding.
        if self.committed != current.committed and (None in devices or len(devices) == 1):
            yield Cause("committed", path, *(_commitment_text(signature.committed) for signature in (self, current)))
        elif self.sharding != current.sharding and not (_is_unplaced(self) and _is_unplaced(current)):
            yield Cause("sharding", path, *(sharding_text(signature.sharding) for signature in (self, current)))


def array_signatures(leaves: Sequence[Any]) -> tuple[ArraySignature, ...]:
    """One signature a leaf."""
    # Equal signatures share one object: every variant keeps one for each leaf, and most are equal.
    shared: dict[ArraySignature, ArraySignature] = {}
    are_tracers = {cls: issubclass(cls, jax.core.Tracer) for cls in _core.types_of(leaves)}
    return tuple(
        signature if signature.committed is None else shared.setdefault(signature, signature)
        for signature in [
            _tracer_signature(leaf) if are_tracers[type(leaf)] else _array_signature(leaf) for leaf in leaves
        ]
    )


def _tracer_signature(leaf: Any) -> ArraySignature:
    aval: Any = leaf.aval
    if not hasattr(aval, "dtype"):  # a type that a library added to JAX, such as a Variable of NNX that is one value
        return ArraySignature((), aval, False, None, None)
    return ArraySignature(aval.shape, aval.dtype, bool(getattr(aval, "weak_type", False)), None, None)


def _array_signature(leaf: Any) -> ArraySignature:
    # Almost all leaves are of this class, whose fields need no `getattr`.
    if type(leaf) is _ARRAY:
        aval = leaf.aval
        return ArraySignature(aval.shape, aval.dtype, aval.weak_type, leaf.sharding, leaf.committed)
    # A traced number: its own value may be too big for JAX.
    if type(leaf) in (int, float):
        leaf = type(leaf)()
    aval: Any = jax.typeof(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else leaf
    weak = bool(getattr(aval, "weak_type", False))
    if not hasattr(aval, "dtype"):  # a type that a library added to JAX, such as a Variable of NNX that is one value
        return ArraySignature((), aval, False, None, None)
    if isinstance(leaf, jax.Array) and hasattr(leaf, "sharding"):
        return ArraySignature(aval.shape, aval.dtype, weak, leaf.sharding, bool(getattr(leaf, "committed", False)))
    sharding = leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None
    dtype = aval.dtype
    # A `ShapeDtypeStruct` keeps the dtype that it was given, which JAX narrows where x64 is off.
    if isinstance(leaf, jax.ShapeDtypeStruct) and isinstance(dtype, np.dtype):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return ArraySignature(tuple(aval.shape), dtype, weak, sharding, sharding is not None)


def _devices(signature: ArraySignature) -> Any:
    return None if signature.sharding is None else frozenset(signature.sharding.device_set)


def _is_unplaced(signature: ArraySignature) -> bool:
    return not signature.committed and (signature.sharding is None or len(signature.sharding.device_set) == 1)


def _dtype_text(signature: ArraySignature) -> str:
    return f"weakly typed {signature.dtype}" if signature.weak else f"{signature.dtype}"


def _commitment_text(committed: bool | None) -> str:
    return "put on its device" if committed else "on the default device"


def type_text(leaf: Any, with_weak: bool = True) -> str:
    """Dtype, shape and weak type of an array as a text. A NumPy dtype is canonicalized as JAX does it."""
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype) if isinstance(leaf, (np.ndarray, np.generic)) else leaf.dtype
    return f"{dtype}{list(leaf.shape)}{', weakly typed' if with_weak and getattr(leaf, 'weak_type', False) else ''}"


def sharding_text(sharding: Any) -> str:
    """A short text of a sharding, without addresses and ids."""
    if sharding is None:
        return "the default device"
    if isinstance(sharding, jax.sharding.NamedSharding):
        return f"{sharding.spec} on a mesh {dict(sharding.mesh.shape)}"
    devices = sorted(sharding.device_set, key=lambda device: device.id)
    return ", ".join(map(str, devices[:4])) + (", ..." if len(devices) > 4 else "")
