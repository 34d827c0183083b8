# SPDX-License-Identifier: Apache-2.0
"""An opened file: its header, its graph and its arrays, in one or several files."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Generator
from typing import Any, cast

import numpy as np
from jax.sharding import Mesh

from graftax._io.decode_graph import NEEDS, FileGraph
from graftax._io.errors import LoadError, Malformed, damaged
from graftax._io.importable_names import NameResolver
from graftax._io.json_values import Decoder
from graftax._io.safetensors import DTYPES, PACKED, MappedFile, Tensor, parse_json
from graftax._io.tensor import LOGICAL, Leaf, logical_array, logical_shape

_MAX_DEPTH = 250  # of nested brackets in the graph: only tuples in tuples nest deeply
_PART = re.compile(r"[^/\\\0]+-\d{5,}-of-\d{5,}\.safetensors")


@contextlib.contextmanager
def named_errors(path: str) -> Generator[None]:
    """Turns Malformed and RecursionError within this context into an error that names the file."""
    try:
        yield
    except (Malformed, RecursionError) as error:
        raise damaged(path, str(error)) from None


class Source:
    """An opened file, together with its parts.

    Raises:
        LoadError: if it is damaged, or of a later format.
        OSError: if it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._files, self.graph = _open_files(path)
        self.metadata = dict(self._files[0].header.metadata)
        self.metadata.pop("graftax", None)
        # Other writers have a text named "format" too, such as "pt": theirs is part of the user's metadata.
        if self.graph is not None:
            self.metadata.pop("format", None)
        self._tensors: dict[str, MappedFile] = {}
        self.external_arrays: dict[str, Any] = {}  # arrays of a checkpoint that are not in the file
        for file in self._files:
            for name in file.header.tensors:
                if name in self._tensors:
                    raise damaged(path, f"{name!r} is in two of its files")
                self._tensors[name] = file

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, in the order of the file."""
        return {name: file.header.tensors[name] for name, file in self._tensors.items()}

    def file_graph(self, resolver: NameResolver, mesh: Mesh | None) -> tuple[FileGraph, Decoder]:
        """The checked graph, and the reader of its values.

        Raises:
            Malformed: where the graph is invalid.
        """
        graph_data = self.graph or {}
        names: Any = graph_data.get("names")
        if type(names) is not list or not all(type(name) is str for name in cast("list[Any]", names)):
            raise Malformed("the names are not strings")
        decoder = Decoder(cast("list[str]", names), resolver, mesh)
        rows = FileGraph(graph_data, decoder)
        for leaf in rows.arrays:
            if leaf.outside is None and leaf.name not in self._tensors:
                raise Malformed(f"there is no tensor {leaf.name!r}")
        return rows, decoder

    def release(self) -> None:
        """Gives the memory of what was read back: `MappedFile.release`."""
        for file in self._files:
            file.release()

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name].header.tensors[name]

    def shape(self, leaf: Leaf) -> tuple[int, ...]:
        return leaf.outside.shape if leaf.outside else logical_shape(leaf, self.tensor(leaf.name))

    def dtype(self, leaf: Leaf) -> np.dtype[Any]:
        name = leaf.outside.dtype if leaf.outside else leaf.dtype
        if name is not None:
            return LOGICAL[name]
        code = self.tensor(leaf.name).dtype
        return DTYPES[code] if code in DTYPES else PACKED[code]

    def array(self, leaf: Leaf) -> np.ndarray[Any, Any]:
        """The data of an array; for typed keys, their key data."""
        if leaf.outside is not None:
            if leaf.outside.key not in self.external_arrays:
                raise LoadError(
                    f"{self.path} is a part of a checkpoint, and {leaf.name!r} is in another: "
                    "graftax.Checkpoints(folder).restore(like) reads both"
                )
            return self.external_arrays[leaf.outside.key]
        return logical_array(leaf, self.tensor(leaf.name), self._tensors[leaf.name].array(leaf.name))


def _open_files(path: str) -> tuple[list[MappedFile], dict[str, Any] | None]:
    """Opens a file and its parts, and reads its graph. If a save replaces them meanwhile, opens those of that save."""
    previous: MappedFile | None = None
    while True:
        # A mapped file stays readable after it is replaced, but its parts may be gone by then.
        main_file = MappedFile(path)
        text = main_file.header.metadata.get("graftax")
        graph = None if text is None else _graph(path, text)
        try:
            return [main_file, *map(MappedFile, _parts(path, graph))], graph
        except FileNotFoundError:
            # The same file once more: it was not replaced, but a part is missing.
            if previous is not None and previous.header == main_file.header:
                raise
            previous = main_file


def _graph(path: str, text: str) -> dict[str, Any]:
    graph = parse_json(path, text, _MAX_DEPTH)
    if type(graph) is not dict:
        raise damaged(path, "its graph is not an object")
    graph = cast("dict[str, Any]", graph)
    needs = graph.get("needs")
    if type(needs) is not int:
        raise damaged(path, "its graph does not say what it needs")
    # A later version may have written rows that this one would misread.
    if needs > NEEDS:
        raise LoadError(
            f"{path} needs a reader of format {needs}, and this version of graftax reads up to {NEEDS}: update graftax"
        )
    return graph


def _parts(path: str, graph: dict[str, Any] | None) -> list[str]:
    names: Any = (graph or {}).get("parts", [])
    # Only plain names: a file must not refer to files in other folders.
    if type(names) is not list or not all(type(n) is str and _PART.fullmatch(n) for n in cast("list[Any]", names)):
        raise damaged(path, "the files that it lists are not named like parts of such a file")
    return [os.path.join(os.path.dirname(os.path.realpath(path)), name) for name in cast("list[str]", names)]


def part_names(path: str) -> list[str]:
    """The names of the parts of the file at a path, which are beside it; none where no such file can be read."""
    try:
        text = MappedFile(path).header.metadata.get("graftax")
        return [] if text is None else [os.path.basename(part) for part in _parts(path, _graph(path, text))]
    except (OSError, ValueError):
        return []
