# SPDX-License-Identifier: Apache-2.0
"""A progress bar on standard error, only if that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

ProgressCallback = Callable[[int, int, float], Any]  # (done, total, seconds since the start)

_WIDTH = 24


class Bar:
    """The default progress display of `warm` and `load_compiled`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, done: int, total: int, seconds: float) -> None:
        if not sys.stderr.isatty():
            return
        filled = _WIDTH * done // total
        text = f"{self._name}: [{'#' * filled}{'.' * (_WIDTH - filled)}] {done}/{total} programs, {seconds:.1f} s"
        print(f"\r\x1b[K{text}", end="\n" if done == total else "", file=sys.stderr, flush=True)
