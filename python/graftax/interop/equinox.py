# SPDX-License-Identifier: Apache-2.0
"""Equinox modules: read as fields."""

from __future__ import annotations

import sys
from functools import WRAPPER_ASSIGNMENTS
from typing import Any

from equinox import Module
from equinox.nn import State

from graftax._base.type_record import Description, TreeDescription

# Equinox's own unflatten fills attributes that are not there with a mark of its own.
_ABSENT = getattr(sys.modules.get("equinox._module._flatten"), "MISSING", None)


# How `eqx.error_if` raises: a host function fails, and the wrapper around the call looks for the rest here.
_ERRORS, _FAILED = "equinox._errors", "_EquinoxRuntimeError: "


def describe(cls: type[Any]) -> Description | None:
    """A module is its dataclass fields, in their order: what Equinox flattens it to. None for other classes."""
    if cls is State:
        # Its flatten refuses a state that is used up. Reading its one attribute, a dict, gives the same leaves, and the
        # caller's state is told that it is used up.
        return Description("node", frozen=False, expires=True)
    if not issubclass(cls, Module):
        return None
    fields: dict[str, Any] = cls.__dataclass_fields__
    static = {name for name, field in fields.items() if field.metadata.get("static", False)}
    names = (*WRAPPER_ASSIGNMENTS, "__annotations__")  # functools has `__annotate__` in its place from Python 3.14 on
    static.update(name for name in names if name not in fields)  # a bound method has its function's name
    return Description("node", static_fields=frozenset(static), order=tuple(fields), absent=_ABSENT)


def is_module(obj: Any) -> bool | None:
    return isinstance(obj, Module) or None


def tree_fields(cls: type[Any], flatten: Any, unflatten: Any) -> TreeDescription | None:
    """A module's fields, where JAX has the functions that Equinox generates for them."""
    if _ABSENT is None or not issubclass(cls, Module) or getattr(unflatten, "args", None) != (cls,):
        return None
    fields: dict[str, Any] = cls.__dataclass_fields__
    others = tuple(name for name, field in fields.items() if field.metadata.get("static", False))
    children = tuple(name for name in fields if name not in others)
    order = tuple(range(len(fields)))
    return TreeDescription("fields", flatten, unflatten, children, others, order, _ABSENT, len(fields))


def raises(host: Any) -> bool:
    """Is this the host function of `eqx.error_if`?"""
    return getattr(host, "__module__", None) == _ERRORS


def own_error(error: BaseException) -> BaseException | None:
    """What `equinox.filter_jit` raises for a failed `eqx.error_if`, of which JAX has this error."""
    text = str(error)
    kind = getattr(sys.modules.get("equinox"), "EquinoxRuntimeError", None)
    if _FAILED not in text or kind is None:
        return None
    wrapper = sys.modules.get("equinox._jit")
    message, stack = getattr(wrapper, "last_error_info", None) or (
        text.partition(_FAILED)[2].partition("\n\n\n")[0],
        [],
    )
    frames = "".join(reversed([frame for frame in stack if isinstance(frame, str)]))
    whole = getattr(wrapper, "_on_error_msg", "{msg}")
    return kind(whole.format(msg=message, stack=frames))
