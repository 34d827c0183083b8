# SPDX-License-Identifier: Apache-2.0
"""What the code of a trace reads outside of its arguments, as it was then: a name and a text for each binding."""

from __future__ import annotations

import enum
import types
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np

from graftax._base.missing import MISSING
from graftax._capture.bytecode import OF_KEYS, OF_NAMES, in_class, is_users_class, is_users_scope
from graftax._capture.function_attributes import attribute_names
from graftax._capture.origin import Origin
from graftax._capture.read_set import ReadSet
from graftax._explain.cause import Cause, plain_text
from graftax._graph.structure_diff import function_text, short_text

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None))
_NAMED = (type, types.ModuleType, types.BuiltinFunctionType, enum.Enum, np.dtype, tuple, frozenset, range, slice)

Seen = dict[str, tuple[str, object]]  # by name: how it reads, and what tells it from another that reads alike


def bindings(reads: ReadSet | None) -> Seen:
    """The bindings of the user's own code and classes, with their values of now."""
    out: Seen = {}
    if reads is None:
        return out
    for at, name in reads._bindings:  # pyright: ignore[reportPrivateUsage]
        holder: Any = _holder(at)
        keyworded = reads._keywords.get(id(at))  # pyright: ignore[reportPrivateUsage]
        if name == OF_KEYS:  # below, of each function
            continue
        if keyworded is not None:
            if is_users_scope(keyworded.__globals__):
                out[_default(name, keyworded)] = _seen((keyworded.__kwdefaults__ or {}).get(name, MISSING))
        elif isinstance(holder, type):
            if is_users_class(holder):
                value = in_class(holder, name)[1]
                out[Origin(holder, name).text()] = (plain_text(value), value) if name == OF_NAMES else _seen(value)
        elif holder is not None and is_users_scope(holder):
            out[Origin(holder, name).text()] = _seen(holder.get(name, MISSING))
    for function in reads.named.functions():
        attributes = tuple(attribute_names(function))
        out[f"the attributes of {function.__qualname__}"] = plain_text(attributes), attributes
    for function in list(reads._functions.values()):  # pyright: ignore[reportPrivateUsage]
        out[f"function {function.__qualname__}"] = _seen(function)
        if is_users_scope(function.__globals__):
            names = function.__code__.co_varnames[: function.__code__.co_argcount]
            for name, value in _aligned(names, function.__defaults__ or ()):
                out[_default(name, function)] = _seen(value)
    for cell, function in list(reads._cells.values()):  # pyright: ignore[reportPrivateUsage]
        names = function.__code__.co_freevars
        for name, own in zip(names, function.__closure__ or (), strict=False):
            if own is cell:
                out[f"{name}, a variable of {function.__qualname__}"] = _seen(_content(cell))
    return out


def changes(before: Seen, now: Seen) -> Iterator[Cause]:
    """What both know and has another value."""
    for name, (text, token) in before.items():
        other = now.get(name)
        if other is None or (text, token) == other:
            continue
        yield Cause("read", name, text, other[0] if other[0] != text else f"another {text}")


def _default(name: str, function: types.FunctionType) -> str:
    return f"{name}, a default of {function.__qualname__}"


def _aligned(names: tuple[str, ...], defaults: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """Each positional parameter with its default. The last ones have some."""
    without = len(names) - len(defaults)
    return ((name, defaults[i - without] if i >= without else MISSING) for i, name in enumerate(names))


def _holder(at: Any) -> Any:
    if type(at) is not weakref.ref:
        return at
    function = at()
    return None if function is None else function.__globals__


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return MISSING


def _seen(value: Any) -> tuple[str, object]:
    if value is MISSING:
        return "nothing", None
    if isinstance(value, _CONSTANTS):
        return short_text(value), type(value)
    if isinstance(value, types.FunctionType):
        return function_text(value), (id(value), id(value.__code__))
    if isinstance(value, _NAMED):
        return plain_text(value), id(value)
    # A user's `__repr__` may take long, wait for a device or print.
    return f"an object of the class {type(value).__qualname__}", id(value)
