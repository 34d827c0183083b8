# SPDX-License-Identifier: Apache-2.0
"""Access to programs that outlive the process. The store itself is in a higher package, which calls `use`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from graftax import _core


class ProgramStore(Protocol):
    """Programs of earlier processes. `caller` is a `Jitted`."""

    def adopt(self, caller: object) -> bool:
        """Takes over what the programs of a function read, if that is unchanged. True if the function has new roots."""
        ...

    def extensible(self, compiled: object, tupled: bool) -> Any:
        """The `jax.jit` object of an entry, to which programs of the store can be added."""
        ...

    def add_program(self, caller: object, recording: _core.Recording, outcomes: list[_core.Outcome]) -> bool:
        """Adds the program for a call that is about to be traced to its entry. False if there is none."""
        ...

    def keep(self, caller: object, entry: _core.Entry) -> None:
        """Called for an entry that was traced, and most likely compiled: stores its programs."""
        ...


_find_store: Callable[[], ProgramStore | None] | None = None


def use(find_store: Callable[[], ProgramStore | None]) -> None:
    """From now on `current` asks `find_store` for the store."""
    global _find_store
    _find_store = find_store


def current() -> ProgramStore | None:
    """The store that is in use, if there is one."""
    return None if _find_store is None else _find_store()
