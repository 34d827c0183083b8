# SPDX-License-Identifier: Apache-2.0
"""NumPy arrays that are constants of a program: what runs once, in the trace, must not write to them."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager

import numpy as np


@contextmanager
def read_only(arrays: Iterable[np.ndarray]) -> Generator[None]:
    """While entered, writing to one of these arrays raises NumPy's own error, in the line that writes."""
    writable = [array for array in {id(array): array for array in arrays}.values() if array.flags.writeable]
    for array in writable:
        array.flags.writeable = False
    try:
        yield
    finally:
        for array in writable:
            array.flags.writeable = True
