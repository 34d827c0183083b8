# SPDX-License-Identifier: Apache-2.0
"""What a random program is put together of."""

from collections.abc import Sequence
from typing import NamedTuple


class Part(NamedTuple):
    """`$` stands for a prefix of its own. What is a list of texts is drawn from."""

    setup: str
    reads: list[str]  # expressions of x and n in the function: numbers, arrays, texts
    changes: list[str]  # statements between calls
    effects: Sequence[str] = ()  # statements in the function
    state: Sequence[str] = ()  # expressions that are compared after each call
