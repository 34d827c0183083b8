# SPDX-License-Identifier: Apache-2.0
"""Reserves space on the interpreter's stack for the calls of a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_STACK_SLOTS = 1 << 16  # of 8 bytes each; memory that is never written costs nothing


def with_room(f: Callable[[], Any]) -> Any:
    """Calls f() with all of its frames in one chunk of the interpreter's stack.

    The interpreter allocates frames in chunks of 16 KB. If a loop calls functions at the end of a chunk, each call
    allocates another chunk and frees it: a trace then takes two or three times as long. A frame that needs a big stack
    gets a big chunk, where the frames that it calls fit as well. Measured on CPython 3.13.
    """
    return f()


with_room.__code__ = with_room.__code__.replace(co_stacksize=_STACK_SLOTS + 1)
