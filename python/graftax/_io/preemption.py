# SPDX-License-Identifier: Apache-2.0
"""Preemption: the system announces by SIGTERM that it will end the program; `jax.distributed` tells all hosts."""

from __future__ import annotations

import signal
import threading

import jax
from jax.experimental import multihost_utils


class Preemption:
    """Tells whether the program is about to be ended, and at which step all hosts save before that.

    With `jax.distributed`, JAX handles the signal and agrees on the step. Without it, this class handles the signal
    between `listen` and `close`, unless another handler is installed. If the program goes on without saving, the
    signal is raised again.
    """

    def __init__(self) -> None:
        self._listens = self._noticed = False
        self.saved = False  # set by `Checkpoints`, once the step is complete

    def listen(self) -> None:
        """Installs the handler, if this is the main thread and the user has not installed one."""
        # Python delivers signals to the main thread, and `jax.distributed` has a handler of its own.
        can_listen = not jax.distributed.is_initialized() and threading.current_thread() is threading.main_thread()
        if not self._listens and can_listen and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._listens = signal.signal(signal.SIGTERM, self._note) is signal.SIG_DFL

    def reached(self, step_number: int) -> bool:
        """Is this the step to save before the end? All hosts call this at each step, and get the same answer."""
        if self._listens:
            return self._noticed
        try:
            return multihost_utils.reached_preemption_sync_point(step_number)
        except RuntimeError:  # jax_enable_preemption_service is off
            return False

    def close(self, end: bool) -> None:
        """Removes the handler. With `end`, raises the signal again if it came and nothing was saved since."""
        if self._listens:
            self._listens = False
            # The default again, so that the raised signal ends the program.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if end and self._noticed and not self.saved:
                signal.raise_signal(signal.SIGTERM)

    def end(self) -> None:
        """Does what the signal would have done."""
        self.saved = False
        self.close(True)

    def _note(self, number: int, frame: object) -> None:
        self._noticed = True
