# SPDX-License-Identifier: Apache-2.0
"""A call that ran out of memory: the note that names its largest arguments."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.core

from graftax import _core
from graftax._base.size_text import count_text, short_bytes
from graftax._jit.leaf_names import named_leaves

LARGEST = "{name} takes {arrays} of {size} on a device. The largest:\n{rows}\n{remedy}"
REMEDY = (
    "graftax.memory(f, *args) says what results and temporaries need; donate= reuses the memory of arguments for "
    "results."
)

_ROWS = 10


def note_largest(error: BaseException, name: str, recording: _core.Recording) -> None:
    """Adds the largest arrays of a call to its error, each with its path."""
    # A call inside of this one has run out of memory, and has said so.
    if any(REMEDY in note for note in getattr(error, "__notes__", ())):
        return
    arrays: dict[int, tuple[int, str]] = {}
    for leaf, path in named_leaves(recording):
        if hasattr(leaf, "dtype"):
            is_placed = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
            size = bytes_on_a_device(leaf, leaf.sharding if is_placed else None)
            # One array at several paths is in memory once.
            arrays.setdefault(id(leaf), (size, f"  {path}: {leaf.dtype}{list(leaf.shape)}, {short_bytes(size)}"))
    ordered = sorted(arrays.values(), key=lambda array: -array[0])
    total = short_bytes(sum(size for size, _ in ordered))
    rows = "\n".join(row for _, row in ordered[:_ROWS])
    if rows:
        count = count_text(len(ordered), "array")
        error.add_note(LARGEST.format(name=name, arrays=count, size=total, rows=rows, remedy=REMEDY))


def bytes_on_a_device(array: Any, sharding: jax.sharding.Sharding | None) -> int:
    """The bytes that one device holds of an array, or of what has its shape and dtype."""
    shape = array.shape if sharding is None else sharding.shard_shape(tuple(array.shape))
    return math.prod(shape) * array.dtype.itemsize
