# SPDX-License-Identifier: Apache-2.0
"""An opened file: its header, its graph, and the arrays, in one file or in several."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Generator
from typing import Any, cast

import numpy as np

from graftax._io.decode_graph import NEEDS, Rows
from graftax._io.errors import LoadError, Malformed, damaged
from graftax._io.importable_names import Known
from graftax._io.json_values import Decoder
from graftax._io.safetensors import Mapped, Tensor, parsed
from graftax._io.tensor import LOGICAL, Leaf, logical, logical_dtype, logical_shape

_MOST_DEPTH = 250  # of brackets in the graph: tuples in tuples are all that nests
_PART = re.compile(r"[^/\\\0]+-\d{5,}-of-\d{5,}\.safetensors")


@contextlib.contextmanager
def named_errors(path: str) -> Generator[None]:
    """What is malformed within is so in the file at `path`."""
    try:
        yield
    except (Malformed, RecursionError) as error:
        raise damaged(path, str(error)) from None


OUTSIDE = (
    "{path} is a part of a checkpoint, and {name!r} is in another: graftax.Checkpoints(folder).restore(like) reads both"
)


class Source:
    """The file at `path`, with those that it lists.

    Raises:
        LoadError: where it is damaged, or of a later format.
        OSError: where it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._files, self.graph = _opened(path)
        self.metadata = dict(self._files[0].header.metadata)
        self.metadata.pop("graftax", None)
        if self.graph is not None:
            self.metadata.pop("format", None)
        self._tensors: dict[str, Mapped] = {}
        self.beside: dict[str, Any] = {}  # arrays of a checkpoint, by place
        for file in self._files:
            for name in file.header.tensors:
                if name in self._tensors:
                    raise damaged(path, f"{name!r} is in two of its files")
                self._tensors[name] = file

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, in the order of the file."""
        return {name: file.header.tensors[name] for name, file in self._tensors.items()}

    def rows(self, known: Known, mesh: Any) -> tuple[Rows, Decoder]:
        """The graph, checked, and what reads the values in it. Raises Malformed."""
        held = self.graph or {}
        names: Any = held.get("names")
        if type(names) is not list or not all(type(name) is str for name in cast("list[Any]", names)):
            raise Malformed("the names are no texts")
        decoder = Decoder(cast("list[str]", names), known, mesh)
        rows = Rows(held, decoder)
        for leaf in rows.arrays:
            if leaf.outside is None and leaf.name not in self._tensors:
                raise Malformed(f"there is no tensor {leaf.name!r}")
        return rows, decoder

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name].header.tensors[name]

    def shape(self, leaf: Leaf) -> tuple[int, ...]:
        return leaf.outside.shape if leaf.outside else logical_shape(leaf, self.tensor(leaf.name))

    def dtype(self, leaf: Leaf) -> np.dtype[Any]:
        return LOGICAL[leaf.outside.dtype] if leaf.outside else logical_dtype(leaf, self.tensor(leaf.name))

    def array(self, leaf: Leaf) -> np.ndarray[Any, Any]:
        """The data of an array; of keys, what they are made of."""
        if leaf.outside is not None:
            if leaf.outside.place not in self.beside:
                raise LoadError(OUTSIDE.format(path=self.path, name=leaf.name))
            return self.beside[leaf.outside.place]
        return logical(leaf, self.tensor(leaf.name), self._tensors[leaf.name].array(leaf.name))


def _opened(path: str) -> tuple[list[Mapped], dict[str, Any] | None]:
    """The file with its parts, and its graph. Where another save removes the parts meanwhile, those of that save."""
    before: Mapped | None = None
    while True:
        first = Mapped(path)
        text = first.header.metadata.get("graftax")
        graph = None if text is None else _graph(path, text)
        try:
            return [first, *map(Mapped, _parts(path, graph))], graph
        except FileNotFoundError:
            if before is not None and before.header == first.header:  # nobody has: a part is gone
                raise
            before = first


def _graph(path: str, text: str) -> dict[str, Any]:
    graph = parsed(path, text, _MOST_DEPTH)
    if type(graph) is not dict:
        raise damaged(path, "its graph is no object")
    graph = cast("dict[str, Any]", graph)
    needs = graph.get("needs")
    if type(needs) is not int:
        raise damaged(path, "its graph does not say what it needs")
    if needs > NEEDS:
        raise LoadError(
            f"{path} needs a reader of format {needs}, and this version of graftax reads up to {NEEDS}: update graftax"
        )
    return graph


def _parts(path: str, graph: dict[str, Any] | None) -> list[str]:
    names: Any = (graph or {}).get("parts", [])
    if type(names) is not list or not all(type(n) is str and _PART.fullmatch(n) for n in cast("list[Any]", names)):
        raise damaged(path, "the files that it lists have no names of such files")
    return [os.path.join(os.path.dirname(os.path.realpath(path)), name) for name in cast("list[str]", names)]


def part_names(path: str) -> list[str]:
    """The names of the files that belong to the one at `path`."""
    header = Mapped(path).header
    text = header.metadata.get("graftax")
    return [] if text is None else [os.path.basename(part) for part in _parts(path, _graph(path, text))]
