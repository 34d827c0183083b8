# SPDX-License-Identifier: Apache-2.0
"""Statics of known types: the plain values by which the core compares them, and copies built from such values."""

from __future__ import annotations

import contextlib
import enum
import io
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from graftax._base.class_lookup import in_mro
from graftax._base.errors import UnsupportedValueError

PLAIN = (bool, int, float, complex, str, bytes, type(None))


def subclass_value(base: type) -> Callable[[Any], Any]:
    """A function that gives the value of an instance of a subclass: its base value and its attributes."""

    def value(obj: object) -> tuple[Any, ...]:
        attributes = getattr(obj, "__dict__", {})
        return (
            base(obj),
            *(x for k, v in attributes.items() for x in (k, v if v.__class__ in PLAIN else f"object at {id(v)}")),
        )

    return value


def known_value(obj: object) -> bytes:
    """The pickled state of a date, a decimal and the like, without its class, which may be a local one."""
    # Protocol 4 gives the same bytes on all supported Pythons.
    content = io.BytesIO()
    _StatePickler(content, 4).dump(obj.__reduce_ex__(4)[1:])
    return content.getvalue()


class _StatePickler(pickle.Pickler):
    """Pickles a class that cannot be imported by name as its id."""

    def persistent_id(self, obj: object) -> int | None:
        if not isinstance(obj, type):
            return None
        candidate: Any = sys.modules.get(obj.__module__)
        for part in obj.__qualname__.split("."):
            candidate = getattr(candidate, part, None)
        return None if candidate is obj else id(obj)


def copied_value(obj: Any) -> Any:
    """A copy of a date, a fraction or the like, without the attributes that a subclass has; an enum member itself."""
    if isinstance(obj, enum.Enum):
        return obj
    # `copy.copy` would copy the attributes too.
    make, args = obj.__reduce_ex__(4)[:2]
    return make(*args)


def exception_value(error: BaseException) -> tuple[Any, ...]:
    """The value of an exception that the core does not open: a group, a SyntaxError, one written in C."""
    parts: list[Any] = [*error.args, *_fields_in_c(error)]
    if isinstance(error, BaseExceptionGroup):
        parts = [error.message, *((e, exception_value(e)) for e in error.exceptions)]
    # Notes and other attributes are part of the value.
    parts += [x for item in vars(error).items() for x in item]
    return tuple(_part_of_exception(error, part) for part in parts)


def _fields_in_c(error: BaseException) -> list[Any]:
    classes = type(error).__mro__[: type(error).__mro__.index(BaseException)]
    kinds = (types.MemberDescriptorType, types.GetSetDescriptorType)
    fields = {n: field for c in classes for n, field in vars(c).items() if isinstance(field, kinds)}
    names_and_values: list[Any] = []
    for name in sorted(fields.keys() - {"__dict__", "__weakref__"}):
        with contextlib.suppress(AttributeError):  # not set
            names_and_values += [name, fields[name].__get__(error)]
    return names_and_values


def _part_of_exception(error: BaseException, part: object) -> object:
    if type(part) is tuple:
        return tuple(_part_of_exception(error, x) for x in part)
    if type(part) is list:
        return ("list", *(_part_of_exception(error, x) for x in part))
    if isinstance(part, (jax.Array, np.ndarray)):
        raise UnsupportedValueError(
            f"a {type(error).__name__} with arrays cannot be compared. Pass the arrays as arguments of their own."
        )
    return part if type(part) in PLAIN else f"{type(part).__qualname__} at {id(part)}"


def text_array(content: tuple[str, tuple[int, ...], bytes]) -> np.ndarray[Any, Any]:
    """A NumPy array of texts, bytes or dates, or JAX's float0 zeros, from (dtype, shape, bytes)."""
    dtype, shape, data = content
    if dtype == "|V0":
        return np.zeros(shape, jax.dtypes.float0)
    return np.frombuffer(data, dtype).reshape(shape).copy()


def write_text_array(array: np.ndarray[Any, Any], content: tuple[str, tuple[int, ...], bytes]) -> None:
    """Writes such content to an existing array, in place."""
    source = text_array(content)
    # The shape of an array may change in place; its dtype does not.
    if array.shape != source.shape:
        array.shape = source.shape  # pyright: ignore[reportDeprecated]  (the traced function did the same)
    array[...] = source


def is_structseq(cls: type) -> bool:
    """Is it a tuple with named fields that was written in C, such as `time.struct_time`?"""
    return issubclass(cls, tuple) and in_mro(cls, "n_sequence_fields") is not None and in_mro(cls, "_fields") is None


def structseq_value(obj: Any) -> tuple[Any, ...]:
    """All fields of a structseq, such as the result of `os.stat`, also those that are not items."""
    items, unnamed_fields = obj.__reduce__()[1]
    if any(isinstance(v, (jax.Array, np.ndarray)) for v in (*items, *unnamed_fields.values())):
        raise UnsupportedValueError("a structseq with arrays cannot be compared. Pass them in a tuple or a namedtuple.")
    return (*items, *unnamed_fields.values())


def slice_value(s: slice) -> tuple[Any, ...]:
    parts = (s.start, s.stop, s.step)
    if any(isinstance(p, (jax.Array, np.ndarray)) for p in parts):
        raise UnsupportedValueError("a slice with arrays cannot be compared. Pass its bounds by themselves.")
    return parts


def treedef_value(treedef: Any) -> tuple[Any, ...]:
    data = treedef.node_data()
    # The keys of a dict are a list, which has no hash.
    if data is not None and isinstance(data[1], list):
        data = (data[0], tuple(data[1]))
    return (data, treedef.num_leaves, *map(treedef_value, treedef.children()))


def numpy_value(obj: Any) -> tuple[Any, ...]:
    return (dtype_text(obj.dtype), obj.shape, obj.tobytes())


def dtype_text(dtype: np.dtype[Any]) -> str:
    """A text from which NumPy makes the dtype again."""
    return dtype.name if dtype.isbuiltin == 2 else dtype.str  # of another package: `str` is '<V1' for several of these


REDUCE: dict[type, Callable[[Any], Any]] = {
    **{base: subclass_value(base) for base in (int, float, complex, str, bytes)},
    range: lambda r: (r.start, r.stop, r.step),
    slice: slice_value,
}
