# SPDX-License-Identifier: Apache-2.0
"""A line on a terminal that grows with what is done; nothing where the standard error is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

Tell = Callable[[int, int, float], Any]  # how many are done, of how many, and the seconds since the start

_WIDTH = 24


class Bar:
    """What `warm` and `load_compiled` show by themselves."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, done: int, of: int, seconds: float) -> None:
        if not sys.stderr.isatty():
            return
        filled = _WIDTH * done // of
        text = f"{self._name}: [{'#' * filled}{'.' * (_WIDTH - filled)}] {done}/{of} programs, {seconds:.1f} s"
        print(f"\r\x1b[K{text}", end="\n" if done == of else "", file=sys.stderr, flush=True)
