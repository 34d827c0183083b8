# SPDX-License-Identifier: Apache-2.0
"""Looks up names without asking the class or its metaclass, whose `__getattr__` may do anything."""

from __future__ import annotations

from typing import Any


def in_mro(cls: type, name: str) -> Any:
    """The value of a name in the class or its first base that has it, a descriptor as itself; None if there is none."""
    for base in cls.__mro__:
        if name in vars(base):
            return vars(base)[name]
    return None


def held_as(obj: object, name: str) -> Any:
    """What an object that is no class holds under a name, or else its class, a descriptor as itself; or None.

    `inspect.getattr_static` would handle errors in code that is not graftax's: traces with symbols listen to those.
    """
    try:
        attributes = object.__getattribute__(obj, "__dict__")
    except AttributeError:
        attributes = None
    if type(attributes) is dict and name in attributes:
        return attributes[name]
    return in_mro(type(obj), name)
