# SPDX-License-Identifier: Apache-2.0
"""The traces that run in this thread."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from graftax import _core
from graftax._capture.numpy_in_place import NumpyWatch
from graftax._jax.traces import current_trace

_THREAD = threading.local()  # .traces: outermost first


class RunningTrace:
    """A trace while it runs.

    Attributes:
        trace: the core's trace; None once it has ended.
        recording, roots, leaves: of the objects that it rebuilds, which may become more. Empty once it has ended.
        numpy: watches the caller's NumPy arrays.
        inner: the JAX traces that began inside it.
        copies: functions that describe changes to copies that transforms made in it.
    """

    def __init__(
        self, trace: _core.Trace, recording: _core.Recording, roots: tuple[object, ...], leaves: Sequence[object]
    ) -> None:
        """Begins it: from now on it is the innermost one of this thread."""
        self.trace: _core.Trace | None = trace
        self.recording: _core.Recording | None = recording
        self.roots, self.leaves = roots, leaves
        self.numpy: NumpyWatch | None = None
        self.inner: list[weakref.ref[Any]] = []
        self.copies: list[Callable[[], str]] = []
        outer, trace_of_jax = running_traces(), current_trace()
        if outer and trace_of_jax is not None:
            outer[-1].inner.append(weakref.ref(trace_of_jax))
        _THREAD.traces = (*outer, self)

    def end(self) -> None:
        """Ends it, and the one around it goes on."""
        _THREAD.traces = running_traces()[:-1]
        # Derivative rules run later, and may still refer to this object.
        self.trace = self.recording = None
        self.roots, self.leaves = (), ()


def running_traces() -> tuple[RunningTrace, ...]:
    """The running traces of this thread, outermost first."""
    return getattr(_THREAD, "traces", ())


def originals(rebuilt: object) -> list[tuple[RunningTrace, object]]:
    """The objects that a rebuilt one is a copy of: one for each running trace that rebuilt it, innermost first."""
    objects: list[tuple[RunningTrace, object]] = []
    for running in reversed(running_traces()):
        original = running.trace.original(rebuilt) if running.trace is not None else None
        if original is not None:
            objects.append((running, original))
            rebuilt = original
    return objects


def note_copy(changes: Callable[[], str]) -> None:
    """Registers a copy that the running trace has made: the trace fails if `changes()` describes a change to it."""
    traces = running_traces()
    if traces:
        traces[-1].copies.append(changes)
