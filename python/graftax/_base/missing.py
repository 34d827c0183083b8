# SPDX-License-Identifier: Apache-2.0
"""The value that stands for "nothing is there"."""

from __future__ import annotations


class Missing:
    """Stands for a parameter without default, or a global that is not there."""

    def __repr__(self) -> str:
        return "missing"


MISSING = Missing()
