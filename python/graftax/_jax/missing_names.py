# SPDX-License-Identifier: Apache-2.0
"""Private names that this JAX lacks, and what is expected of those that it has."""

from __future__ import annotations

lacking: dict[str, str] = {}  # feature that is off: the missing private name of JAX; shown by the doctor


def expect(holds: bool, value: object) -> None:
    """An assertion that is not removed by `python -O`."""
    if not holds:
        raise RuntimeError(f"found {value}")
