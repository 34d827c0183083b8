# SPDX-License-Identifier: Apache-2.0
"""Progress bars on standard error, only if that is a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from graftax._base.size_text import short_bytes

ProgressCallback = Callable[[int, int, float], Any]  # (done, total, seconds since the start)

_WIDTH = 24


class Bar:
    """The default progress display of `warm` and `load_compiled`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, done: int, total: int, seconds: float) -> None:
        self._show(done, total, f"{done}/{total} programs, {seconds:.1f} s")

    def _show(self, done: int, total: int, text: str) -> None:
        if not sys.stderr.isatty():
            return
        filled = _WIDTH * done // total
        text = f"{self._name}: [{'#' * filled}{'.' * (_WIDTH - filled)}] {text}"
        print(f"\r\x1b[K{text}", end="\n" if done == total else "", file=sys.stderr, flush=True)


class ByteBar(Bar):
    """The display of what reads or writes so many bytes, once that takes longer than a second."""

    def __init__(self, name: str, total: int) -> None:
        super().__init__(name)
        self._done, self._total, self._begin, self._seen = 0, total, time.monotonic(), 0.0

    def add(self, count: int) -> None:
        """So many more bytes are done."""
        self._done += count
        seconds = time.monotonic() - self._begin
        is_end = self._done >= self._total
        # A terminal takes its time, too.
        if self._total and seconds > 1 and (is_end or seconds - self._seen > 0.1):
            self._seen = seconds
            done = min(self._done, self._total)
            self._show(done, self._total, f"{short_bytes(done)} of {short_bytes(self._total)}, {seconds:.1f} s")
