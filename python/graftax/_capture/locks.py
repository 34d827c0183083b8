# SPDX-License-Identifier: Apache-2.0
"""Locks and semaphores that a trace has taken: where it begins anew, they are as they were when it began.

Where it does not, a warning names those that it has not given back: later calls do not take them.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from typing import Any

RLock = type(threading.RLock())
LOCKS = (type(threading.Lock()), RLock, threading.Condition, threading.Semaphore)


class Locks:
    """What the locks that the code of a trace knows were, before it ran."""

    def __init__(self, locks: Iterable[object]) -> None:
        self._before: dict[int, tuple[Any, int]] = {}
        for lock in locks:
            self.note(lock)

    def note(self, lock: object) -> None:
        lock = _inner(lock)
        if id(lock) not in self._before:
            self._before[id(lock)] = lock, _free(lock)

    def left(self) -> list[str]:
        """The classes of those that the trace has left in another state. While other threads run, they may have."""
        if threading.active_count() > 1:
            return []
        return [type(lock).__qualname__ for lock, count in self._before.values() if _free(lock) != count]

    def give_back(self) -> None:
        """Releases what was taken since, and takes what was released."""
        for lock, original_count in self._before.values():
            count = _free(lock)
            for _ in range(original_count - count):
                lock.release()
            for _ in range(count - original_count):
                lock.acquire(blocking=False)


def _inner(lock: Any) -> Any:
    cls: type = type(lock)
    return lock._lock if issubclass(cls, threading.Condition) else lock


def _free(lock: Any) -> int:
    """How often it can be taken, from any number on."""
    cls: type = type(lock)
    if issubclass(cls, threading.Semaphore):
        return lock._value
    if issubclass(cls, RLock):
        count = re.search(r"count=(\d+)", repr(lock)) if lock._is_owned() else None
        return -int(count[1]) if count else 0
    return -int(lock.locked()) if issubclass(cls, LOCKS) else 0
