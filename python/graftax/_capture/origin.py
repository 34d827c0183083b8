# SPDX-License-Identifier: Apache-2.0
"""Where a root comes from that is not an argument."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from graftax import _core
from graftax._base.missing import MISSING


class Origin(NamedTuple):
    """A name of a module's dict or of a class; without a name, a function.

    If the code assigns the name, the root is a cell with its value: what changes is the name itself.
    """

    holder: Any
    name: str | None
    assigned: bool = False

    @property
    def key(self) -> tuple[int, str | None]:
        """Where it is, whether or not the name is assigned."""
        return id(self.holder), self.name

    @property
    def what(self) -> tuple[int, str | None, bool]:
        """Equal for equal origins. Origins themselves must not be compared: dicts compare what they hold."""
        return id(self.holder), self.name, self.assigned

    def text(self) -> str:
        """How messages call it."""
        if self.name is None:
            return f"function {self.holder.__qualname__}"
        if isinstance(self.holder, type):
            return f"class attribute {self.holder.__qualname__}.{self.name}"
        if not self.name.isidentifier():  # the holder is a table of ours: what a cache gives out, or a library keeps
            return self.name
        return f"global {self.holder.get('__name__', '?')}.{self.name}"

    def value(self) -> Any:
        """What is there now; of a class, past what a running trace shows in it."""
        if self.name is None:
            return self.holder
        if isinstance(self.holder, type):
            return _core.class_attribute(self.holder, self.name)
        return self.holder.get(self.name, MISSING)

    def put(self, value: object) -> None:
        """Gives the name another value; MISSING deletes it. A metaclass is not asked."""
        if isinstance(self.holder, type):
            _core.set_class_attribute(self.holder, self.name or "", value)
        elif value is not MISSING:
            self.holder[self.name] = value
        else:
            self.holder.pop(self.name, None)

    def feeds(self, holder: object) -> bool:
        """Does a binding of its name, in this dict or class, have its value from here?"""
        if isinstance(holder, weakref.ref):  # globals of `exec`, held by a function that has them
            function = holder()
            return function is not None and function.__globals__ is self.holder
        if isinstance(holder, type) and isinstance(self.holder, type):
            # A class without a value of its own has that of a base.
            return self.holder in holder.__mro__
        return holder is self.holder
