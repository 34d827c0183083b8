# SPDX-License-Identifier: Apache-2.0
"""`peek`: what is in a file, without its data."""

from __future__ import annotations

import math
import os
from typing import NamedTuple

from graftax._io.importable_names import Known
from graftax._io.reader import Source, named_errors
from graftax._io.tensor import Leaf
from graftax._jax.tracebacks import boundary


class Tensor(NamedTuple):
    """One array in a file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


class Peek:
    """What a file says of itself; printed, a table.

    Attributes:
        tensors: what is there, in the order of the graph.
        metadata: the texts that it was saved with.
        classes: the classes and functions that it names.
        format: of the graph; None for a file of others.
    """

    def __init__(
        self, path: str, tensors: list[Tensor], metadata: dict[str, str], classes: list[str], format: int | None
    ) -> None:
        self.path, self.tensors, self.metadata, self.classes, self.format = path, tensors, metadata, classes, format

    @property
    def parameters(self) -> int:
        """How many numbers there are."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors)

    def __repr__(self) -> str:
        rows = [(t.name, f"{t.dtype}[{','.join(map(str, t.shape))}]", f"{t.bytes:,}") for t in self.tensors]
        rows.append((f"{len(rows)} arrays", f"{self.parameters:,} numbers", f"{self.bytes:,} bytes"))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}".rstrip() for a, b, c in rows]
        lines += [f"{name}: {text}" for name, text in self.metadata.items()]
        return "\n".join(lines)


def _size(source: Source, leaf: Leaf) -> int:
    if leaf.outside is not None:
        return math.prod(leaf.outside.shape) * source.dtype(leaf).itemsize
    tensor = source.tensor(leaf.name)
    return tensor.end - tensor.start


@boundary
def peek(path: str | os.PathLike[str]) -> Peek:
    """Says what is in a safetensors file: names, shapes, dtypes, sizes. No data are read.

    Args:
        path: the file.

    Raises:
        LoadError: where the file is damaged.

    Example:
        >>> graftax.save(folder / "model.safetensors", {"w": jnp.ones((2, 3)), "epoch": 7})
        >>> graftax.peek(folder / "model.safetensors")
        [w]       float32[2,3]  24
        1 arrays  6 numbers     24 bytes
    """
    return peek_source(Source(os.fspath(path)))


def peek_source(source: Source) -> Peek:
    """What an opened file says of itself."""
    metadata = source.metadata
    if source.graph is None:
        leaves, names, number = [Leaf(name) for name in source.tensors], [], None
    else:
        with named_errors(source.path):
            rows, _ = source.rows(Known({}, ()), None)
        leaves, names, number = rows.arrays, source.graph["names"], source.graph.get("format")
    tensors: list[Tensor] = []
    for leaf in leaves:
        shape, dtype = source.shape(leaf), str(source.dtype(leaf))
        if leaf.key is not None:
            shape, dtype = shape[:-1], f"key<{leaf.key}>"
        tensors.append(Tensor(leaf.name, shape, dtype, _size(source, leaf)))
    return Peek(source.path, tensors, metadata, list(names), number)
