# SPDX-License-Identifier: Apache-2.0
"""Progress bars on standard error, only if that is a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from graftax._base.size_text import short_bytes

ProgressCallback = Callable[[int, int, float], object]  # (count of finished ones, total, seconds since the start)

_WIDTH = 24


class Bar:
    """The default progress display of `warm` and `load_compiled`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, count: int, total: int, seconds: float) -> None:
        self._show(count, total, f"{count}/{total} programs, {seconds:.1f} s")

    def _show(self, count: int, total: int, text: str) -> None:
        if not sys.stderr.isatty():
            return
        filled = _WIDTH * count // total
        text = f"{self._name}: [{'#' * filled}{'.' * (_WIDTH - filled)}] {text}"
        # To the beginning of the line, and clear what a longer text has left there.
        print(f"\r\x1b[K{text}", end="\n" if count == total else "", file=sys.stderr, flush=True)


class ByteBar(Bar):
    """The display of reading or writing a number of bytes, once that takes longer than a second."""

    def __init__(self, name: str, total: int) -> None:
        super().__init__(name)
        self._count, self._total, self._begin, self._shown_at = 0, total, time.monotonic(), 0.0

    def add(self, count: int) -> None:
        """Counts further bytes that were read or written."""
        self._count += count
        seconds = time.monotonic() - self._begin
        is_end = self._count >= self._total
        # Ten times a second at most: a terminal takes its time, too.
        if self._total and seconds > 1 and (is_end or seconds - self._shown_at > 0.1):
            self._shown_at = seconds
            count = min(self._count, self._total)
            self._show(count, self._total, f"{short_bytes(count)} of {short_bytes(self._total)}, {seconds:.1f} s")
