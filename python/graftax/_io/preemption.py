# SPDX-License-Identifier: Apache-2.0
"""The notice that the system ends this program: SIGTERM, which all hosts learn of where `jax.distributed` runs."""

from __future__ import annotations

import signal
import threading
from typing import Any

import jax
from jax.experimental import multihost_utils


class Preemption:
    """Whether this program is to end, and at which step all hosts save before they do.

    With `jax.distributed` JAX takes the signal, and says which step it is. Without, this takes it between `listen` and
    `close`, where nobody else does. It is then raised again where the program goes on as if nothing had been.
    """

    def __init__(self) -> None:
        self._listens = self._noticed = False
        self.saved = False

    def listen(self) -> None:
        """Handlers belong to the main thread, and one of the user's stays."""
        alone = not jax.distributed.is_initialized() and threading.current_thread() is threading.main_thread()
        if not self._listens and alone and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._listens = signal.signal(signal.SIGTERM, self._note) is signal.SIG_DFL

    def reached(self, step: int) -> bool:
        """Is this the step that is saved before the end? All hosts ask at each step, and all get the same answer."""
        if self._listens:
            return self._noticed
        try:
            return multihost_utils.reached_preemption_sync_point(step)
        except RuntimeError:  # jax_enable_preemption_service is off
            return False

    def close(self, end: bool) -> None:
        """Gives the signal back. Ends the program where it came and nothing was saved since, if that is wanted."""
        if self._listens:
            self._listens = False
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if end and self._noticed and not self.saved:
                signal.raise_signal(signal.SIGTERM)

    def end(self) -> None:
        """What the signal does by itself."""
        self.saved = False
        self.close(True)

    def _note(self, number: int, frame: Any) -> None:
        self._noticed = True
