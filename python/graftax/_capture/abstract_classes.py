# SPDX-License-Identifier: Apache-2.0
"""What is registered with abstract classes: it decides what `isinstance` says of objects of other classes."""

from __future__ import annotations

import abc
from typing import Any

try:
    from _abc import _get_dump  # pyright: ignore[reportMissingImports, reportUnknownVariableType]
except ImportError:  # an interpreter without it
    _get_dump = None


def registered_classes(cls: type) -> object:
    """What is registered with an abstract class and with its subclasses: equal while `isinstance` says the same."""
    # Without the registry of a class, only the interpreter's count of all registrations tells that there was one.
    if _get_dump is None:
        return abc.get_cache_token()
    registered, classes = set[Any](), [cls]
    while classes:
        cls = classes.pop()
        if isinstance(cls, abc.ABCMeta):
            # As weak references, which are equal while their classes are the same.
            registered.update(_get_dump(cls)[0])
        classes += type.__subclasses__(cls)
    return frozenset(registered)


def names_of_registered(registered: object) -> str:
    """The classes that `registered_classes` gave, as a text."""
    if not isinstance(registered, frozenset):
        return "unknown"
    classes = [reference() for reference in registered]
    return ", ".join(sorted(cls.__qualname__ for cls in classes if cls is not None)) or "nothing"


class AbstractClasses:
    """The abstract classes about which code asks `isinstance`, with what was registered when the trace began."""

    def __init__(self) -> None:
        self._registered: dict[abc.ABCMeta, object] = {}

    def __len__(self) -> int:
        return len(self._registered)

    def note(self, value: object) -> None:
        """Notes a class, or the classes of a tuple, that code names beside `isinstance`."""
        cls: Any
        for cls in value if isinstance(value, tuple) else (value,):
            if isinstance(cls, abc.ABCMeta) and cls not in self._registered:
                self._registered[cls] = registered_classes(cls)

    def begin(self) -> None:
        """A trace begins: it sees what was registered up to now, also by traces that were discarded."""
        self._registered = {cls: registered_classes(cls) for cls in self._registered}

    @property
    def pairs(self) -> list[tuple[type, object]]:
        """(class, what is registered with it), as `Reads` compares them."""
        return list(self._registered.items())
