# SPDX-License-Identifier: Apache-2.0
"""A trace that begins anew runs the body a second time. That must not repeat what may be done only once."""

from __future__ import annotations

import threading

from graftax._base.errors import MutationError
from graftax._capture.caches_after_traces import look_at
from graftax._capture.impure_calls import take_done_once
from graftax._capture.retrace_signals import NewReads
from graftax._jit.cache import FunctionTable
from graftax._jit.trace_growth import TraceFinished


class Restartable:
    """The block traces a call. If the trace has to begin anew, the table learns that, and what it has done is kept.

    `refuse_restart` asks for what it has done.
    """

    # This is no generator, because frames of `contextlib` would stand in the traceback of an error in the trace.
    def __init__(self, table: FunctionTable) -> None:
        self._table = table

    def __enter__(self) -> None:
        self._table.restarting.discard(threading.get_ident())
        reads = self._table.reads
        self._caches_before = look_at(None if reads is None else reads.cached.named)
        take_done_once()  # forgets what an earlier trace has done

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        look_at(self._caches_before)
        if isinstance(error, NewReads):
            self._table.restarting.add(threading.get_ident())
            self._table.restarts += 1
        # What a finished trace has computed is repeated, not its body.
        if not isinstance(error, NewReads) or isinstance(error, TraceFinished):
            take_done_once()
            if self._table.reads is not None:
                self._table.reads.library.end_body()


def refuse_restart() -> None:
    """Raises MutationError if the trace of this thread that has to begin anew has done what may be done only once."""
    message = take_done_once()
    if message:
        raise MutationError(message)
