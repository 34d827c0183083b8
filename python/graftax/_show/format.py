# SPDX-License-Identifier: Apache-2.0
"""Texts for the values in a graph. No user code runs, and nothing is read from a device unless `values` is set."""

from __future__ import annotations

import datetime
import enum
import functools
import pathlib
import types
from typing import Any, cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from graftax._base.class_lookup import in_mro
from graftax._graph.types.describe import plain

_LONG = 60  # characters of a value
_FEW = 6  # elements of an array that are written out
_WRITTEN = (bool, int, float, complex, str, bytes, bytearray, type(None), type(...), range, slice, np.generic, np.dtype)
_SHARDING_TYPES = (jax.sharding.AbstractMesh, jax.sharding.Mesh, jax.sharding.PartitionSpec, jax.sharding.Sharding)
_REPR_TYPES = (*_WRITTEN, pathlib.PurePath, datetime.date, datetime.time, datetime.timedelta, *_SHARDING_TYPES)
_CONTAINERS = (list, tuple, dict, set, frozenset)


def cut(text: str, length: int = _LONG) -> str:
    """A text on one line. The middle of a long text is left out."""
    text = " ".join(text.split())
    return text if len(text) <= length else f"{text[: length * 2 // 3]} … {text[-(length // 4) :]}"


def name_of_type(cls: type) -> str:
    """The name of a class, without the function that defines it."""
    name = cls.__qualname__.rpartition("<locals>.")[2]
    return {"ArrayImpl": "Array", "NoneType": "None"}.get(name, name)


def type_text(value: object) -> str:
    """What an object is: its class, its length, the name of a function."""
    name = name_of_type(type(value))
    if isinstance(value, types.FunctionType):
        return f"function {value.__qualname__.rpartition('<locals>.')[2]}"
    if isinstance(value, types.MethodType):
        return f"method {getattr(value.__func__, '__qualname__', '')}"
    if isinstance(value, functools.partial):
        return f"partial of {_callable_name(cast('Any', value).func)}"
    # A named tuple is known by its class, and has as many items as that has fields.
    if isinstance(value, _CONTAINERS) and in_mro(type(value), "_fields") is None:
        return f"{name} of {_length(value)}"
    return name


def _length(value: object) -> int:
    base: Any = next(base for base in _CONTAINERS if isinstance(value, base))
    # Not by `len`: a subclass may have a `__len__` of its own, which is the user's code.
    return base.__len__(value)


def _callable_name(function: object) -> str:
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
    return name if isinstance(name, str) else name_of_type(type(function))


def value_text(value: Any) -> str:
    """A value that is neither an array nor a node: its `repr` if the type is known, otherwise its type."""
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, jax.ShapeDtypeStruct):
        return f"ShapeDtypeStruct {value.dtype}{list(value.shape)}"
    if isinstance(value, type):
        return f"class {name_of_type(value)}"
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    text = plain_text(value)
    if text is not None:
        return text
    # The `repr` of other types is code of the user, or of a library, which may be slow or read arrays.
    if isinstance(value, _REPR_TYPES):
        return cut(repr(value))
    if isinstance(value, np.ndarray):
        return f"NumPy {value.dtype}{list(value.shape)}"
    name = getattr(value, "__name__", None) if callable(value) else None
    class_name = name_of_type(type(value))
    return f"{class_name} {name}" if isinstance(name, str) else class_name


def plain_text(value: Any, depth: int = 3) -> str | None:
    """The `repr` of plain values and containers of them. None for anything else, whose `repr` is user code."""
    value = plain(value)
    # Only a part of it: the `repr` of megabytes takes long.
    if type(value) in (str, bytes, bytearray):
        return cut(repr(value[:200]), _LONG)
    # Python refuses to write an integer of more than 4300 digits.
    if type(value) in (int, float, complex, bool, type(None), type(...), range):
        return cut(repr(value)) if type(value) is not int or value.bit_length() < 1000 else "int of many digits"
    if isinstance(value, np.generic):
        return repr(value)
    if type(value) in _CONTAINERS and depth:
        items: list[Any] = list(value.items() if isinstance(value, dict) else value)
        if len(items) > 50:
            return None
        if isinstance(value, dict):
            pairs = [(plain_text(k, depth - 1), plain_text(v, depth - 1)) for k, v in items]
            texts = [None if k is None or v is None else f"{k}: {v}" for k, v in pairs]
        else:
            texts = [plain_text(item, depth - 1) for item in items]
        if None in texts:
            return None
        items_text = ", ".join(cast("list[str]", texts))
        if isinstance(value, list):
            return f"[{items_text}]"
        if isinstance(value, tuple):
            return f"({items_text},)" if len(items) == 1 else f"({items_text})"
        if isinstance(value, dict):
            return f"{{{items_text}}}"
        return f"{{{items_text}}}" if items else f"{type(value).__name__}()"
    return None


# ---- arrays


def size_of(array: Any) -> tuple[int, int] | None:
    """(parameters, bytes) of an array. None for a value that counts as an array and has no shape or dtype."""
    try:
        count = int(np.prod(array.shape))
        inexact = jnp.issubdtype(array.dtype, np.inexact)
        item = getattr(array.dtype, "itemsize", 0)
        return (count if inexact else 0), count * int(item)
    except (AttributeError, TypeError):
        return None


def array_type(array: Any) -> str:
    """dtype and shape."""
    dtype = getattr(array, "dtype", None)
    if dtype is None:
        return value_text(array)
    text = f"{dtype}{list(array.shape)}"
    if isinstance(array, np.ndarray):
        return f"NumPy {text}"
    if isinstance(array, np.generic):
        return f"NumPy scalar {text}"
    if isinstance(array, jax.core.Tracer):
        return f"traced {text}"
    return text


def array_text(array: Any, values: bool) -> str:
    """The type of an array, and its devices unless it is on the default device."""
    text = array_type(array)
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        return f"{text} {_numbers(array)}" if values and isinstance(array, (np.ndarray, np.generic)) else text
    parts = [text, _device_text(array)]
    if array.is_deleted():
        parts.append("deleted")
    elif values:
        parts.append(_numbers(array))
    return " ".join(filter(None, parts))


def _device_text(array: Any) -> str:
    sharding = array.sharding
    count = len(sharding.device_set)
    if count > 1:
        spec = getattr(sharding, "spec", None)
        if sharding.is_fully_replicated:
            return f"replicated on {count} devices"
        devices = f"on {count} devices"
        return devices if spec is None else f"P{tuple(spec)!r} {devices}"
    (device,) = sharding.device_set
    return "" if device == _default_device() else f"on {device.platform}:{device.id}"


def _default_device() -> Any:
    chosen: Any = jax.config.jax_default_device
    return chosen if chosen is not None and not isinstance(chosen, str) else jax.local_devices()[0]


def _numbers(array: Any) -> str:
    """The numbers of a small array, or mean, deviation and range. Copies from the device."""
    try:
        if not jnp.issubdtype(array.dtype, np.number) and not jnp.issubdtype(array.dtype, np.bool_):
            return ""
        if array.size <= _FEW:
            return "= " + cut(str(np.asarray(array).tolist()))
        real = jnp.abs(array) if jnp.issubdtype(array.dtype, np.complexfloating) else jnp.asarray(array)
        real = real.astype(jnp.float32)
        mean, std, minimum, maximum = (float(x) for x in (real.mean(), real.std(), real.min(), real.max()))
        return f"= {mean:.3g} ± {std:.3g} in [{minimum:.3g}, {maximum:.3g}]"
    # A deleted array has no numbers, and neither has one that is only partly on this process.
    except Exception:
        return ""
