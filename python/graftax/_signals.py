# SPDX-License-Identifier: Apache-2.0
"""How a trace is told to begin anew. The exception that says so may be caught by the code of the trace: it counts all
the same, when the trace ends, however it ends."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

MOST_RESTARTS = 300  # more would be a fault: code that is another one each time


class NewReads(BaseException):
    """The trace has met code that reads what is no root yet. The call begins anew with more roots.

    No `Exception`: few handlers in the traced function stop it.
    """


class Signals:
    """How often the traces of one function were told to begin anew, in any thread."""

    def __init__(self) -> None:
        self._count = 0

    def give(self) -> NewReads:
        """What is to be raised in the code of the trace."""
        self._count += 1
        return NewReads()

    @contextlib.contextmanager
    def heeded(self) -> Generator[None]:
        """While entered, a trace runs.

        Raises:
            NewReads: at its end, where it was told to begin anew and has returned, or raised something else.
        """
        before = self._count
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if self._count != before:
                raise NewReads from error
            raise
        if self._count != before:
            raise NewReads
