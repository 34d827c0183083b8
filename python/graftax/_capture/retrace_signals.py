# SPDX-License-Identifier: Apache-2.0
"""How a trace is told to begin anew.

Code of the trace may catch the exception that says so. So each one is counted, and a trace that ends with a higher
count begins anew, whatever it has returned or raised.
"""

from __future__ import annotations

from collections.abc import Callable

MOST_RESTARTS = 300  # more means a fault, such as code that is made anew for each trace


class NewReads(BaseException):
    """The trace has met code that reads what is not a root yet. The call begins anew with more roots.

    It is not an `Exception`, so that few handlers in the traced function stop it.

    Attributes:
        if_discarded: what to call if the body is traced again after all; None where that is certain.
    """

    if_discarded: list[Callable[[], None]] | None = None


class Signals:
    """How often the traces of one function were told to begin anew, in any thread."""

    def __init__(self) -> None:
        self.count = 0

    def give(self) -> NewReads:
        """Counts a signal, and gives the exception to raise in the code of the trace."""
        self.count += 1
        return NewReads()


class HeededSignals:
    """While entered, a trace runs. It ends with NewReads where it was told to begin anew, whatever it does instead."""

    # It is not a generator: frames of `contextlib` would be in the traceback of each error in a trace.
    def __init__(self, signals: Signals) -> None:
        self._signals, self._count_before = signals, signals.count

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        # Traces of other threads count, too: then this one is traced once more than it needs to be.
        if self._signals.count != self._count_before and not isinstance(error, KeyboardInterrupt):
            raise NewReads from error
