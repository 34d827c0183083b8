# SPDX-License-Identifier: Apache-2.0
"""The plain values by which the core compares statics of known types, and new ones made from such values."""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from graftax._base.errors import UnsupportedValueError

PLAIN = (bool, int, float, complex, str, bytes, type(None))


def subclass_value(base: type) -> Callable[[Any], Any]:
    def value(obj: Any) -> tuple[Any, ...]:
        attributes = getattr(obj, "__dict__", {})
        return (
            base(obj),
            *(x for k, v in attributes.items() for x in (k, v if v.__class__ in PLAIN else f"object at {id(v)}")),
        )

    return value


def known_value(obj: Any) -> bytes:
    """The state of a date, a decimal and the like, without the name of its class: a local class has none."""
    content = io.BytesIO()
    _StatePickler(content, 4).dump(obj.__reduce_ex__(4)[1:])
    return content.getvalue()


class _StatePickler(pickle.Pickler):
    """Spells a class that has no name to import it by as a number."""

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, type):
            return None
        found: Any = sys.modules.get(obj.__module__)
        for part in obj.__qualname__.split("."):
            found = getattr(found, part, None)
        return None if found is obj else id(obj)


def remade(obj: Any) -> Any:
    """A new instance of the class of a date, a fraction or the like, of equal value, without its attributes."""
    make, args = obj.__reduce_ex__(4)[:2]
    return make(*args)


def exception_value(error: BaseException) -> tuple[Any, ...]:
    """What an exception is that the core does not make: a group, a SyntaxError, or one that others wrote in C."""
    parts: list[Any] = [*error.args, *_fields_in_c(error)]
    if isinstance(error, BaseExceptionGroup):
        parts = [error.message, *((e, exception_value(e)) for e in error.exceptions)]
    parts += [x for item in vars(error).items() for x in item]
    return tuple(_part_of_exception(error, part) for part in parts)


def _fields_in_c(error: BaseException) -> list[Any]:
    classes = type(error).__mro__[: type(error).__mro__.index(BaseException)]
    kinds = (types.MemberDescriptorType, types.GetSetDescriptorType)
    found = {n: field for c in classes for n, field in vars(c).items() if isinstance(field, kinds)}
    out: list[Any] = []
    for name in sorted(found.keys() - {"__dict__", "__weakref__"}):
        with contextlib.suppress(AttributeError):  # it is not set
            out += [name, found[name].__get__(error)]
    return out


def _part_of_exception(error: BaseException, part: Any) -> Any:
    if type(part) is tuple:
        return tuple(_part_of_exception(error, x) for x in part)
    if type(part) is list:
        return ("list", *(_part_of_exception(error, x) for x in part))
    if isinstance(part, (jax.Array, np.ndarray)):
        raise UnsupportedValueError(
            f"a {type(error).__name__} with arrays cannot be compared. Pass the arrays beside it."
        )
    return part if type(part) in PLAIN else f"{type(part).__qualname__} at {id(part)}"


def text_array(content: tuple[str, tuple[int, ...], bytes]) -> np.ndarray[Any, Any]:
    """A new NumPy array of text, bytes or dates, or JAX's zeros of no dtype, from (dtype, shape, bytes)."""
    dtype, shape, data = content
    if dtype == "|V0":
        return np.zeros(shape, jax.dtypes.float0)
    return np.frombuffer(data, dtype).reshape(shape).copy()


def write_text_array(array: np.ndarray[Any, Any], content: tuple[str, tuple[int, ...], bytes]) -> None:
    new = text_array(content)
    if array.shape != new.shape:
        array.shape = new.shape  # pyright: ignore[reportDeprecated]  (as the function did)
    array[...] = new


def is_structseq(cls: type) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "n_sequence_fields") and not hasattr(cls, "_fields")


def structseq_value(obj: Any) -> tuple[Any, ...]:
    """All fields of a structseq, those too that are no items."""
    items, more = obj.__reduce__()[1]
    if any(isinstance(v, (jax.Array, np.ndarray)) for v in (*items, *more.values())):
        raise UnsupportedValueError("a structseq with arrays cannot be compared. Pass them in a tuple or a namedtuple.")
    return (*items, *more.values())


def slice_value(s: slice) -> tuple[Any, ...]:
    parts = (s.start, s.stop, s.step)
    if any(isinstance(p, (jax.Array, np.ndarray)) for p in parts):
        raise UnsupportedValueError("a slice with arrays cannot be compared. Pass its bounds by themselves.")
    return parts


def treedef_value(treedef: Any) -> tuple[Any, ...]:
    data = treedef.node_data()
    if data is not None and isinstance(data[1], list):  # the keys of a dict
        data = (data[0], tuple(data[1]))
    return (data, treedef.num_leaves, *map(treedef_value, treedef.children()))


def numpy_value(obj: Any) -> tuple[Any, ...]:
    return (obj.dtype.str, obj.shape, obj.tobytes())


REDUCE: dict[type, Callable[[Any], Any]] = {
    **{base: subclass_value(base) for base in (int, float, complex, str, bytes)},
    range: lambda r: (r.start, r.stop, r.step),
    slice: slice_value,
}
