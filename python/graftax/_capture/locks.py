# SPDX-License-Identifier: Apache-2.0
"""Locks and semaphores that a trace has taken.

If the trace begins anew, they are put back as they were. If not, a warning names those that it has not released: later
calls do not take them.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from typing import Any

RLock = type(threading.RLock())
LOCKS = (type(threading.Lock()), RLock, threading.Condition, threading.Semaphore)


class Locks:
    """The locks that the code of a trace knows, with their states before it ran."""

    def __init__(self, locks: Iterable[object]) -> None:
        self._original_counts: dict[int, tuple[Any, int]] = {}
        for lock in locks:
            self.note(lock)

    def note(self, lock: object) -> None:
        lock = _inner(lock)
        if id(lock) not in self._original_counts:
            self._original_counts[id(lock)] = lock, _free(lock)

    def changed(self) -> list[str]:
        """The classes of the locks that the trace has left in another state."""
        # Other threads may have taken them.
        if threading.active_count() > 1:
            return []
        return [type(lock).__qualname__ for lock, count in self._original_counts.values() if _free(lock) != count]

    def give_back(self) -> None:
        """Releases what was taken since, and takes what was released."""
        for lock, original_count in self._original_counts.values():
            count = _free(lock)
            # As often as needed: a semaphore, and a lock that one thread may take again, are taken several times.
            for _ in range(original_count - count):
                lock.release()
            for _ in range(count - original_count):
                lock.acquire(blocking=False)


def _inner(lock: Any) -> Any:
    """The lock of a condition; any other lock itself."""
    cls: type = type(lock)
    return lock._lock if issubclass(cls, threading.Condition) else lock


def _free(lock: Any) -> int:
    """How often it can still be taken, up to a constant: only differences count."""
    cls: type = type(lock)
    if issubclass(cls, threading.Semaphore):
        return lock._value
    if issubclass(cls, RLock):
        # Only its text tells how often the owner has taken it.
        count = re.search(r"count=(\d+)", repr(lock)) if lock._is_owned() else None
        return -int(count[1]) if count else 0
    return -int(lock.locked()) if issubclass(cls, LOCKS) else 0
