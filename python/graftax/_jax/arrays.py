# SPDX-License-Identifier: Apache-2.0
"""Classes of arrays, references and keys, and weakly typed arrays: what JAX keeps private of them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
from jax._src.lax import lax as _lax

from graftax import _core
from graftax._jax.missing_names import lacking

try:
    from jax._src.array import ArrayImpl
except ImportError:  # asks JAX for an array, which starts its backend
    ArrayImpl: type = type(jax.numpy.zeros(()))  # pyright: ignore[reportUnknownMemberType, reportConstantRedefinition]
    lacking["import without a device"] = "jax._src.array.ArrayImpl"


def array_class() -> type:
    """The concrete class behind `jax.Array`: its instances are recognised by one pointer comparison."""
    return ArrayImpl


def is_deleted(x: object) -> bool:
    """Is it an array whose buffer was donated or deleted?"""
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_deleted()


def without_key(x: Any) -> Any:
    """The numbers of an array of typed keys; any other value as it is."""
    # NumPy cannot make an array of keys, which have no bytes that are public.
    is_key = isinstance(x, jax.Array) and jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x


def is_in_default_memory(sharding: Any) -> bool:
    """Are arrays of this sharding in the memory that their devices use by default?"""
    # A sharding may name the default memory or leave it out: `memory_kind` is None then.
    default = getattr(next(iter(sharding.device_set)), "default_memory", lambda: None)()
    return sharding.memory_kind is None or default is None or sharding.memory_kind == default.kind


@functools.cache
def key_class() -> type:
    """The class of arrays of typed PRNG keys."""
    # JAX 0.10 moved it; the old place goes with JAX 0.9.
    for module in ("jax._src.random.prng", "jax._src.prng"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(module).PRNGKeyArray
    raise ImportError("this JAX has no PRNGKeyArray where it is known")


def weak_scalar(vector: jax.Array, index: int) -> Any:
    """One element, with the weak type of a Python number. There is no public function for that."""
    return _lax._convert_element_type(jax.lax.index_in_dim(vector, index, keepdims=False), weak_type=True)


def varying_axes(x: Any) -> frozenset[Any]:
    """The mesh axes along which a value inside `jax.shard_map` differs."""
    aval: Any = jax.typeof(x)
    # JAX 0.10 moved it: `vma` goes with JAX 0.9.
    return frozenset(aval.vma if hasattr(aval, "vma") else aval.mat.varying)


def is_dimension(cls: type) -> bool:
    """The class of what `jax.export.symbolic_shape` makes, and of expressions of that? It is private."""
    return cls.__module__.endswith("export.shape_poly")


# NumPy arrays that know their JAX type, as which JAX 0.9 and later return derivatives by integers.
typed_array_types: tuple[type, ...] = ()

with contextlib.suppress(ImportError, AttributeError):
    typed_array_types = (importlib.import_module("jax._src.literals").TypedNdArray,)

# `jax.shard_map` infers specs where it is given this; its repr says jax.sharding.Infer, where no version has it yet.
inferred_specs: Any = inspect.signature(jax.shard_map).parameters["in_specs"].default


def new_ref(content: Any) -> Any:
    """A jax.Ref with this content; a Ref, or what stands for an array, is returned as it is."""
    return jax.new_ref(content) if isinstance(content, jax.Array) else content


# The class of `jax.Ref`, which is public from JAX 0.9 on.
ref_types: tuple[type, ...] = tuple(t for t in (getattr(jax, "Ref", None),) if isinstance(t, type))


def as_weak(leaf: jax.Array) -> Any:
    """The array with a weak type. There is no public conversion."""
    return leaf if leaf.weak_type else _lax._convert_element_type(leaf, leaf.dtype, weak_type=True)


_sharding_of = operator.attrgetter("_sharding")  # faster than the property `sharding`


def kinds_of_shardings(leaves: Sequence[Any]) -> set[type]:
    """The classes of the leaves' shardings; NoneType for a leaf without one."""
    try:
        return set(map(type, map(_sharding_of, leaves)))
    except AttributeError:  # a NumPy array, a number; a tracer takes long to say that it has none
        # Most often all leaves are arrays, so the exception is rare, and cheaper than a test of each leaf.
        tracers = {cls for cls in _core.types_of(leaves) if issubclass(cls, jax.core.Tracer)}
        return {type(getattr(leaf, "sharding", None)) for leaf in leaves if type(leaf) not in tracers}
