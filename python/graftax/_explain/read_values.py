# SPDX-License-Identifier: Apache-2.0
"""The values that traced code read besides its arguments, as texts, to explain which of them changed."""

from __future__ import annotations

import enum
import types
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np

from graftax._base.missing import MISSING
from graftax._capture.abstract_classes import names_of_registered, registered_classes
from graftax._capture.code_owner import is_users_class, is_users_scope
from graftax._capture.constant_values import OF_KEYS, OF_NAMES, content, in_class
from graftax._capture.function_attributes import attribute_names
from graftax._capture.origin import Origin
from graftax._capture.read_set import ReadSet
from graftax._explain.cause_texts import Cause, plain_text
from graftax._graph.structure_diff import function_text, short_text

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None))
_NAMED = (type, types.ModuleType, types.BuiltinFunctionType, enum.Enum, np.dtype, tuple, frozenset, range, slice)

ReadValues = dict[str, tuple[str, object]]  # name: (text, token), where the token tells apart values of equal text


def read_values(reads: ReadSet | None) -> ReadValues:
    """The current values of all globals, class attributes, defaults and captures that the user's code reads."""
    values: ReadValues = {}
    if reads is None:
        return values
    # First the names by which code reads values, then what it asks of classes and functions themselves.
    for holder_ref, name in reads.names.bindings:
        holder: Any = _holder(holder_ref)
        kw_function = reads.names.keywords.get(id(holder_ref))
        if name == OF_KEYS:  # the attributes of functions follow below
            continue
        if kw_function is not None:
            if is_users_scope(kw_function.__globals__):
                values[_default(name, kw_function)] = _read_value((kw_function.__kwdefaults__ or {}).get(name, MISSING))
        elif isinstance(holder, type):
            if is_users_class(holder):
                value = in_class(holder, name)[1]
                values[Origin(holder, name).text()] = (
                    (plain_text(value), value) if name == OF_NAMES else _read_value(value)
                )
                if name == OF_NAMES:
                    bases = tuple(base.__qualname__ for base in holder.__mro__[1:])
                    values[f"the order of the bases of {holder.__qualname__}"] = plain_text(bases), holder.__mro__
        elif (text := reads.library.text(holder)) is not None:
            values[f"{text}[{plain_text(name)}]"] = _read_value(holder.get(name, MISSING))
        elif holder is not None and is_users_scope(holder):
            values[Origin(holder, name).text()] = _read_value(holder.get(name, MISSING))
    for table in reads.impure.library.containers:
        items = tuple(table.values)
        values[f"the items of {table.what}"] = plain_text(items), items
    for cls, _ in reads.abstract_classes.pairs:
        registered = registered_classes(cls)
        values[f"what is registered with {cls.__qualname__}"] = names_of_registered(registered), registered
    for owner in reads.named_owners():
        names = owner.__name__, owner.__qualname__, owner.__doc__, owner.__module__
        values[f"the names of {owner.__qualname__}"] = plain_text(names), names
    for cls in reads.attributes.parents():
        subclasses = type.__subclasses__(cls)
        values[f"the subclasses of {cls.__qualname__}"] = plain_text(tuple(subclasses)), subclasses
    for function in reads.named.functions():
        attributes = tuple(attribute_names(function))
        values[f"the attributes of {function.__qualname__}"] = plain_text(attributes), attributes
    for function in list(reads.names.functions.values()):
        values[f"function {function.__qualname__}"] = _read_value(function)
        if is_users_scope(function.__globals__):
            names = function.__code__.co_varnames[: function.__code__.co_argcount]
            for name, value in _with_defaults(names, function.__defaults__ or ()):
                values[_default(name, function)] = _read_value(value)
    for cell, function in list(reads.names.cells.values()):
        names = function.__code__.co_freevars
        for name, function_cell in zip(names, function.__closure__ or (), strict=False):
            if function_cell is cell:
                values[f"{name}, a variable of {function.__qualname__}"] = _read_value(content(cell))
    return values


def changes(previous: ReadValues, current: ReadValues) -> Iterator[Cause]:
    """A cause for each name in both whose value differs."""
    for name, (text, token) in previous.items():
        value = current.get(name)
        if value is None or (text, token) == value:
            continue
        yield Cause("read", name, text, value[0] if value[0] != text else f"another {text}")


def _default(name: str, function: types.FunctionType) -> str:
    return f"{name}, a default of {function.__qualname__}"


def _with_defaults(names: tuple[str, ...], defaults: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """Each positional parameter with its default, or MISSING."""
    required = len(names) - len(defaults)
    return ((name, defaults[i - required] if i >= required else MISSING) for i, name in enumerate(names))


def _holder(holder_ref: Any) -> Any:
    # Globals that belong to no module are held weakly, by a function that has them: a dict takes no weak references.
    if type(holder_ref) is not weakref.ref:
        return holder_ref
    function = holder_ref()
    return None if function is None else function.__globals__


def _read_value(value: object) -> tuple[str, object]:
    if value is MISSING:
        return "nothing", None
    if isinstance(value, _CONSTANTS):
        # The type tells values of equal texts apart: that of a subclass of `str` may be the text of a plain one.
        return short_text(value), type(value)
    if isinstance(value, types.FunctionType):
        # The code of a function may have been replaced.
        return function_text(value), (id(value), id(value.__code__))
    if isinstance(value, _NAMED):
        return plain_text(value), id(value)
    # Not its repr: a user's `__repr__` may be slow, wait for a device or print.
    return f"an object of the class {type(value).__qualname__}", id(value)
