# SPDX-License-Identifier: Apache-2.0
"""What a read set notes of the trace that runs in this thread."""

from __future__ import annotations

import threading
from typing import Any

from ._origin import Origin


class Now(threading.local):
    """The trace that runs in this thread: others may trace the same function at once."""

    def __init__(self) -> None:
        self.shown: set[tuple[int, str | None]] | None = None  # what it sees rebuilt
        self.before: dict[tuple[int, str | None], tuple[Origin, Any]] = {}  # what it may set, and held before
        self.noted: tuple[int, int, int] = (0, 0, 0)
        self.trace: Any = None  # that of JAX
        self.touched: set[tuple[int, str]] = set()  # names of globals and modules that the code noted last has
        self.runs = False  # has the traced function begun? From then on its own code calls it
