# SPDX-License-Identifier: Apache-2.0
"""What `jax.jit` looks at of one leaf: two calls with the same looks run one executable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import numpy as np

from graftax._explain.cause import Cause
from graftax._jax.compat import array_class

_ARRAY = array_class()


class Look(NamedTuple):
    """One leaf, as far as a compiled program depends on it."""

    shape: tuple[Any, ...]
    dtype: Any
    weak: bool
    sharding: Any  # None: wherever JAX puts it
    committed: bool | None  # None: it is traced

    def causes(self, now: Look, path: str) -> Iterator[Cause]:
        """What has changed, each by itself."""
        if self.shape != now.shape:
            yield Cause("shape", path, str(self.shape), str(now.shape))
        if self.dtype != now.dtype:
            yield Cause("dtype", path, str(self.dtype), str(now.dtype))
        if self.weak != now.weak:
            yield Cause("weak type", path, *(_weakly(look) for look in (self, now)))
        if self.committed is None or now.committed is None:
            return
        places = {_places(self), _places(now)}
        if self.committed != now.committed and (None in places or len(places) == 1):
            yield Cause("committed", path, *(_tied(look.committed) for look in (self, now)))
        elif self.sharding != now.sharding and not (_anywhere(self) and _anywhere(now)):
            yield Cause("sharding", path, *(sharding_text(look.sharding) for look in (self, now)))


def looks(leaves: Sequence[Any]) -> tuple[Look, ...]:
    """One a leaf; leaves that look alike share theirs, since each program that was compiled keeps them."""
    met: dict[Look, Look] = {}
    return tuple(look if look.committed is None else met.setdefault(look, look) for look in map(_look, leaves))


def _look(leaf: Any) -> Look:
    if type(leaf) is _ARRAY:
        aval = leaf.aval
        return Look(aval.shape, aval.dtype, aval.weak_type, leaf.sharding, leaf.committed)
    if type(leaf) in (int, float):  # a traced number, which may be more than JAX can take
        leaf = type(leaf)()
    aval: Any = jax.typeof(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else leaf
    weak = bool(getattr(aval, "weak_type", False))
    if not hasattr(aval, "dtype"):  # a type that somebody else made, such as a Variable of NNX that is one value
        return Look((), aval, False, None, None)
    if isinstance(leaf, jax.core.Tracer):
        return Look(aval.shape, aval.dtype, weak, None, None)
    if isinstance(leaf, jax.Array) and hasattr(leaf, "sharding"):
        return Look(aval.shape, aval.dtype, weak, leaf.sharding, bool(getattr(leaf, "committed", False)))
    sharding = leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None
    dtype = aval.dtype
    if isinstance(leaf, jax.ShapeDtypeStruct) and isinstance(dtype, np.dtype):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return Look(tuple(aval.shape), dtype, weak, sharding, sharding is not None)


def _places(look: Look) -> Any:
    return None if look.sharding is None else frozenset(look.sharding.device_set)


def _anywhere(look: Look) -> bool:
    return not look.committed and (look.sharding is None or len(look.sharding.device_set) == 1)


def _weakly(look: Look) -> str:
    return f"weakly typed {look.dtype}" if look.weak else f"{look.dtype}"


def _tied(committed: bool | None) -> str:
    return "put on its device" if committed else "on the default device"


def sharding_text(sharding: Any) -> str:
    """A sharding in few words, without the addresses and ids that tell nothing."""
    if sharding is None:
        return "the default device"
    if isinstance(sharding, jax.sharding.NamedSharding):
        return f"{sharding.spec} on a mesh {dict(sharding.mesh.shape)}"
    devices = sorted(sharding.device_set, key=lambda device: device.id)
    return ", ".join(map(str, devices[:4])) + (", ..." if len(devices) > 4 else "")
