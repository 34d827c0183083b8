# SPDX-License-Identifier: Apache-2.0
"""How a trace is told to begin anew. The exception that says so may be caught by the code of the trace: it counts all
the same, when the trace ends, however it ends."""

from __future__ import annotations

from collections.abc import Callable

MOST_RESTARTS = 300  # more would be a fault: code that is another one each time


class NewReads(BaseException):
    """The trace has met code that reads what is no root yet. The call begins anew with more roots.

    No `Exception`: few handlers in the traced function stop it.

    Attributes:
        if_discarded: what is called where the trace is traced again after all; None where that is certain.
    """

    if_discarded: list[Callable[[], None]] | None = None


class Signals:
    """How often the traces of one function were told to begin anew, in any thread."""

    def __init__(self) -> None:
        self._count = 0

    def give(self) -> NewReads:
        """What is to be raised in the code of the trace."""
        self._count += 1
        return NewReads()

    def heeded(self) -> Heeded:
        """While entered, a trace runs.

        Raises:
            NewReads: at its end, where it was told to begin anew and has returned, or raised something else.
        """
        return Heeded(self)

    @property
    def count(self) -> int:
        return self._count


class Heeded:
    """No generator: frames of `contextlib` would stand in the traceback of an error in the trace."""

    def __init__(self, signals: Signals) -> None:
        self._signals, self._before = signals, signals.count

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if self._signals.count != self._before and not isinstance(error, KeyboardInterrupt):
            raise NewReads from error
