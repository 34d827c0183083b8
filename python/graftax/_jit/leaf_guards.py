# SPDX-License-Identifier: Apache-2.0
"""What a program depends on of the leaves of a call, besides their structure: which are NumPy arrays, or one array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from graftax import _core

ARRAYS = {True: "one array", False: "several arrays"}


class LeafGuards(NamedTuple):
    """As an entry has them, where another process runs its program, or a stage that was compiled ahead of time."""

    numpy_leaves: list[bool] | None = None
    alike: Sequence[list[list[int]]] = ()

    @staticmethod
    def of(entry: _core.Entry) -> LeafGuards:
        return LeafGuards(entry.numpy_leaves, entry.alike)

    def put(self, entry: _core.Entry) -> None:
        """From now on the entry serves only calls that these guards let through."""
        if self.numpy_leaves is not None:
            entry.numpy_leaves = self.numpy_leaves
        entry.alike = list(self.alike)

    def among(self, numbers: Sequence[int]) -> LeafGuards:
        """The same where leaf i is called `numbers[i]`, without those that have no number: it is negative."""
        count = sum(number >= 0 for number in numbers)
        numpy_leaves = None if self.numpy_leaves is None else [False] * count
        for number, was_numpy in zip(numbers, self.numpy_leaves or (), strict=numpy_leaves is not None):
            if number >= 0 and numpy_leaves is not None:
                numpy_leaves[number] = was_numpy
        alike = [[[numbers[leaf] for leaf in group if numbers[leaf] >= 0] for group in groups] for groups in self.alike]
        return LeafGuards(numpy_leaves, [[group for group in groups if group] for groups in alike])

    def serves(self, leaves: Sequence[object]) -> bool:
        return self.broken(leaves) is None

    def broken(self, leaves: Sequence[object]) -> tuple[list[int], str, str] | None:
        """(the leaves, what they were, what they are) where a call needs another program."""
        for i, was_numpy in enumerate(self.numpy_leaves or ()):
            if not was_numpy and isinstance(leaves[i], np.ndarray | np.generic):
                return [i], "no NumPy array", "a NumPy array, and the code changes arrays in place"
        for groups in self.alike:
            first: dict[int, int] = {}
            for group in groups:
                array = leaves[group[0]]
                other = next((i for i in group if leaves[i] is not array), None)
                if other is not None:
                    return [group[0], other], ARRAYS[True], ARRAYS[False]
                if (before := first.setdefault(id(array), group[0])) != group[0]:
                    return [before, group[0]], ARRAYS[False], ARRAYS[True]
        return None
