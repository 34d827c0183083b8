# SPDX-License-Identifier: Apache-2.0
"""What a program depends on besides the structure of a call: which leaves are NumPy arrays, and which are one array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from graftax import _core

ARRAYS = {True: "one array", False: "several arrays"}


class LeafGuards(NamedTuple):
    """The guards of an entry, for others that run its program: another process, or a stage compiled ahead of time.

    Attributes:
        numpy_leaves: the code changes arrays in place, and these leaves were NumPy arrays; None if it does not.
        alike: the code asked which of some leaves are one array. They were in these groups.
    """

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
        """The guards with leaf i renumbered as `numbers[i]`, without the leaves whose number is negative."""
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
        """(the leaves, what they were, what they are) of a call that needs another program; None for all others."""
        # An array of JAX in place of one of NumPy is no problem: the trace has had a tracer for either.
        for i, was_numpy in enumerate(self.numpy_leaves or ()):
            if not was_numpy and isinstance(leaves[i], np.ndarray | np.generic):
                return [i], "no NumPy array", "a NumPy array, and the code changes arrays in place"
        for groups in self.alike:
            # Leaves of a group have to be one array, and those of two groups have to be two.
            first_leaf: dict[int, int] = {}
            for group in groups:
                array = leaves[group[0]]
                separate = next((i for i in group if leaves[i] is not array), None)
                if separate is not None:
                    return [group[0], separate], ARRAYS[True], ARRAYS[False]
                if (first := first_leaf.setdefault(id(array), group[0])) != group[0]:
                    return [first, group[0]], ARRAYS[False], ARRAYS[True]
        return None
