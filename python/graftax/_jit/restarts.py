# SPDX-License-Identifier: Apache-2.0
"""A trace that begins anew runs the body a second time, which must not do what is to be done once."""

from __future__ import annotations

import threading

from graftax._base.errors import MutationError
from graftax._capture.caches_in_traces import look_at
from graftax._capture.impure_calls import take_done_once
from graftax._capture.retrace_signals import NewReads
from graftax._jit.cache import FunctionTable
from graftax._jit.trace_growth import TraceFinished


class Restartable:
    """While entered, a call is traced. Forgets what it has done, unless it has to begin anew, which the table learns.

    No generator: frames of `contextlib` would stand in the traceback of an error in the trace.
    """

    def __init__(self, table: FunctionTable) -> None:
        self._table = table

    def __enter__(self) -> None:
        self._table.restarting.discard(threading.get_ident())
        reads = self._table.reads
        self._caches_before = look_at(None if reads is None else reads.cached.named)
        take_done_once()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        look_at(self._caches_before)
        if isinstance(error, NewReads):
            self._table.restarting.add(threading.get_ident())
            self._table.restarts += 1
        # What a finished trace has computed is repeated, not its body.
        if not isinstance(error, NewReads) or isinstance(error, TraceFinished):
            take_done_once()


def refuse_restart() -> None:
    """Raises MutationError if a trace of this thread has to begin anew that has done what is to be done once."""
    message = take_done_once()
    if message:
        raise MutationError(message)
