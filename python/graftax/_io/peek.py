# SPDX-License-Identifier: Apache-2.0
"""`peek`: the contents of a file, without its data."""

from __future__ import annotations

import math
import os
from typing import NamedTuple

from graftax._io.importable_names import NameResolver
from graftax._io.reader import Source, named_errors
from graftax._io.tensor import Leaf
from graftax._jax.tracebacks import boundary


class Tensor(NamedTuple):
    """An array in a file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


class Peek:
    """The contents of a file; it prints as a table.

    Attributes:
        tensors: the arrays, in the order of the graph.
        metadata: the strings that were saved with the object.
        classes: the classes and functions that the file names.
        format: the version of the format; None for a file of another writer.
    """

    def __init__(
        self, path: str, tensors: list[Tensor], metadata: dict[str, str], classes: list[str], format: int | None
    ) -> None:
        self.path, self.tensors, self.metadata, self.classes, self.format = path, tensors, metadata, classes, format

    @property
    def parameters(self) -> int:
        """The number of elements of all arrays."""
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
    """Lists the arrays of a safetensors file: names, shapes, dtypes and sizes. No data are read.

    Args:
        path: the file.

    Returns:
        the list, which prints as text; its `metadata` are the strings that were saved with the object.

    Raises:
        LoadError: if the file is damaged.

    Example:
        >>> graftax.save(folder / "model.safetensors", {"w": jnp.ones((2, 3)), "epoch": 7})
        >>> graftax.peek(folder / "model.safetensors")
        [w]       float32[2,3]  24
        1 arrays  6 numbers     24 bytes
    """
    return peek_source(Source(os.fspath(path)))


def peek_source(source: Source) -> Peek:
    """The contents of an opened file."""
    metadata = source.metadata
    if source.graph is None:
        leaves, names, number = [Leaf(name) for name in source.tensors], [], None
    else:
        with named_errors(source.path):
            file_graph, _ = source.file_graph(NameResolver({}, ()), None)
        leaves, names, number = file_graph.arrays, source.graph["names"], source.graph.get("format")
    tensors: list[Tensor] = []
    # From the graph where there is one: a tensor may hold another dtype as bytes, and an array be outside of the file.
    for leaf in leaves:
        shape, dtype = source.shape(leaf), str(source.dtype(leaf))
        # The last dimension of the data belongs to each key.
        if leaf.key is not None:
            shape, dtype = shape[:-1], f"key<{leaf.key}>"
        tensors.append(Tensor(leaf.name, shape, dtype, _size(source, leaf)))
    return Peek(source.path, tensors, metadata, list(names), number)
