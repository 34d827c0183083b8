# SPDX-License-Identifier: Apache-2.0
"""How many warnings the traces in this thread have given. Who runs a finished program without a trace gives none."""

from __future__ import annotations

import threading


class _Thread(threading.local):
    count = 0


_thread = _Thread()


def note_warning() -> None:
    """A trace warns of something that the traced code does."""
    _thread.count += 1


def count_warnings() -> int:
    """The number of warnings so far."""
    return _thread.count
