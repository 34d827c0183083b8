# SPDX-License-Identifier: Apache-2.0
"""Short texts for counts and bytes."""

from __future__ import annotations

_UNITS = ("", "k", "M", "G", "T", "P")


def count_text(count: int, noun: str) -> str:
    """1 array, 2 arrays."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def short_number(count: int) -> str:
    """1,234,567 as 1.23 M."""
    return _scaled(float(count), "") if count >= 10_000 else f"{count:,}"


def short_bytes(count: int) -> str:
    """1,234,567 as 1.23 MB."""
    return _scaled(float(count), "B") if count >= 1000 else f"{count} B"


def _scaled(count: float, unit: str) -> str:
    for prefix in _UNITS[:-1]:
        # From 999.5 on, three digits are rounded to 1e+03: the next prefix makes that 1.
        if count < 999.5:
            return f"{count:.3g} {prefix}{unit}"
        count /= 1000
    return f"{count:.3g} {_UNITS[-1]}{unit}"
