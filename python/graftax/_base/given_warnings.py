# SPDX-License-Identifier: Apache-2.0
"""Counts the warnings of the traces in this thread: a program that warned is traced in each process, to warn there."""

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
