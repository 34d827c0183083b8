# SPDX-License-Identifier: Apache-2.0
"""Names of a class that are looked up without a word to its metaclass, whose `__getattr__` may do anything."""

from __future__ import annotations

from typing import Any


def in_mro(cls: type, name: str) -> Any:
    """What the first of the class and its bases that has this name holds there, a descriptor as itself; or None."""
    for base in cls.__mro__:
        if name in vars(base):
            return vars(base)[name]
    return None
