# SPDX-License-Identifier: Apache-2.0
"""Looks names of a class up without its metaclass, whose `__getattr__` may do anything."""

from __future__ import annotations

from typing import Any


def in_mro(cls: type, name: str) -> Any:
    """The value of a name in the class or its first base that has it, a descriptor as itself; None if there is none."""
    for base in cls.__mro__:
        if name in vars(base):
            return vars(base)[name]
    return None
