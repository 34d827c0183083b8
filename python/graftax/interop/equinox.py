# SPDX-License-Identifier: Apache-2.0
"""Equinox modules: read as fields."""

from __future__ import annotations

import sys
from functools import WRAPPER_ASSIGNMENTS
from typing import Any

from equinox import Module
from equinox.nn import State

from graftax._base.type_record import Description, TreeDescription

# The mark that Equinox's unflatten puts in place of missing attributes.
_ABSENT = getattr(sys.modules.get("equinox._module._flatten"), "MISSING", None)


# `eqx.error_if` raises in a host function. The wrapper of `filter_jit` then reads the message from this module.
_ERRORS, _FAILED = "equinox._errors", "_EquinoxRuntimeError: "


def describe(cls: type[Any]) -> Description | None:
    """Describes a module by its dataclass fields in order, as Equinox flattens it. None for other classes."""
    if cls is State:
        # A state may be used once: its flatten refuses one that has expired. Its only attribute, a dict, has the same
        # leaves, and the core marks the caller's state as expired.
        return Description("node", frozen=False, expires=True)
    if not issubclass(cls, Module):
        return None
    fields: dict[str, Any] = cls.__dataclass_fields__
    static = {name for name, field in fields.items() if field.metadata.get("static", False)}
    names = (*WRAPPER_ASSIGNMENTS, "__annotations__")  # functools has `__annotate__` in its place from Python 3.14 on
    static.update(name for name in names if name not in fields)  # a bound method has its function's name
    return Description("node", static_fields=frozenset(static), order=tuple(fields), absent=_ABSENT)


def is_module(obj: object) -> bool | None:
    return isinstance(obj, Module) or None


def tree_fields(cls: type[Any], flatten: Any, unflatten: object) -> TreeDescription | None:
    """The fields of a module, if JAX has the flatten functions that Equinox generates for it."""
    if _ABSENT is None or not issubclass(cls, Module) or getattr(unflatten, "args", None) != (cls,):
        return None
    fields: dict[str, Any] = cls.__dataclass_fields__
    static_names = tuple(name for name, field in fields.items() if field.metadata.get("static", False))
    children = tuple(name for name in fields if name not in static_names)
    order = tuple(range(len(fields)))
    return TreeDescription("fields", flatten, unflatten, children, static_names, order, _ABSENT, len(fields))


def raises(host: object) -> bool:
    """Is this the host function of `eqx.error_if`?"""
    return getattr(host, "__module__", None) == _ERRORS


def own_error(error: BaseException) -> BaseException | None:
    """The error that `equinox.filter_jit` raises for a failed `eqx.error_if`, from the one that JAX raises."""
    # JAX raises one error for every failed host function, and tells them apart only in its text.
    text = str(error)
    error_class = getattr(sys.modules.get("equinox"), "EquinoxRuntimeError", None)
    if _FAILED not in text or error_class is None:
        return None
    # The message and the stack inside of the program are in a private variable; without it, the text has to do.
    wrapper = sys.modules.get("equinox._jit")
    message, stack = getattr(wrapper, "last_error_info", None) or (
        text.partition(_FAILED)[2].partition("\n\n\n")[0],
        [],
    )
    frames = "".join(reversed([frame for frame in stack if isinstance(frame, str)]))
    template = getattr(wrapper, "_on_error_msg", "{msg}")
    return error_class(template.format(msg=message, stack=frames))
