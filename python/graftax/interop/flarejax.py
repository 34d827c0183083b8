# SPDX-License-Identifier: Apache-2.0
"""FlareJax modules: read as fields.

FlareJax flattens a whole graph of modules, lists, tuples and dicts in Python, and sorts attributes by name wherever it
reads them. So their order is not part of the key, and a compiled function sees them sorted.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

from flarejax import Module

from graftax._base.type_record import Description

_READ_BY = ("tree_flatten", "tree_unflatten", "__getattribute__")
_THEIRS = [inspect.getattr_static(Module, name) for name in _READ_BY]


def describe(cls: type[Any]) -> Description | None:
    """Describes a module by its attributes and slots. None for other classes, and for modules with their own flatten.

    Frozen dataclasses count as mutable: FlareJax keeps shared references to every module.
    """
    if Module not in cls.__mro__ or any(map(_is_laid_out_in_c, cls.__mro__[:-1])):
        return None
    if [inspect.getattr_static(cls, name) for name in _READ_BY] != _THEIRS:
        return None
    slots = sorted(_slots(cls))
    if slots != sorted(getattr(cls, "__slots__", ())):  # FlareJax reads those of one class
        return None
    return Description("node", frozen=False, by_name=not slots)


def is_module(obj: object) -> bool | None:
    return isinstance(obj, Module) or None


def _is_laid_out_in_c(base: type[Any]) -> bool:
    """Do instances hold more than attributes, such as the items of a list? FlareJax loses or mistakes these."""
    return isinstance(vars(base).get("__new__"), types.BuiltinFunctionType)


def _slots(cls: type[Any]) -> list[str]:
    """The slots of the class and its bases that no other attribute hides."""
    attributes = [(name, value) for base in cls.__mro__ for name, value in vars(base).items()]
    members = [(name, value) for name, value in attributes if isinstance(value, types.MemberDescriptorType)]
    return [name for name, value in members if inspect.getattr_static(cls, name) is value]
