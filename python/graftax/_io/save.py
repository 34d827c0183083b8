# SPDX-License-Identifier: Apache-2.0
"""`save`: writes a file completely or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, cast

import jax.numpy as jnp
import numpy as np

from graftax._base.whole_file import alone_in, permissions, replacing
from graftax._graph.edit import selection
from graftax._graph.path import Graph, Path
from graftax._io.encode_graph import EncodedGraph
from graftax._io.reader import part_names
from graftax._io.safetensors import ALIGN, Tensor, header_bytes
from graftax._io.tensor import ArrayToSave, parts_of
from graftax._jax.tracebacks import boundary

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
NOT_FLOATING = (
    "dtype={dtype} is not a floating dtype, and floating arrays would lose their values: give "
    "jnp.bfloat16 or another floating dtype"
)


@boundary
def save(
    path: str | os.PathLike[str],
    obj: object,
    *,
    only: object = None,
    dtype: Any = None,
    metadata: Mapping[str, str] | None = None,
    max_file: str | int = "50GB",
) -> None:
    """Writes an object graph to a safetensors file: its arrays, its structure and its other values.

    Each array is a tensor named by its key path, which any tool for such files can read; a shared array is written
    once. The rest is a string in the file's metadata. The file is replaced atomically: if anything fails, or the
    process dies, the previous file at `path` is still there.

    Args:
        path: the path of the file.
        obj: any object; `graftax.load` gives it back.
        only: which arrays are written, as in `graftax.partition`. To load the object then, pass `like`.
        dtype: the dtype in which floating arrays are written, such as `jnp.bfloat16`.
        metadata: strings to save with the object, by name. `graftax.peek` reads them.
        max_file: the maximum size of a file. Larger objects are divided among several files, which `path` lists.

    Raises:
        UnsupportedValueError: for a value that no file can hold; names its path. Nothing is written.

    Example:
        >>> graftax.save(folder / "model.safetensors", {"w": jnp.ones(3), "epoch": 7})
        >>> graftax.load(folder / "model.safetensors")
        {'w': Array([1., 1., 1.], dtype=float32), 'epoch': 7}
    """
    texts = _texts(metadata)
    floating = None if dtype is None else np.dtype(dtype)
    if floating is not None and not jnp.issubdtype(floating, jnp.floating):
        raise ValueError(NOT_FLOATING.format(dtype=floating))
    # Everything that cannot be saved raises here, before a file is created.
    encoded = EncodedGraph(obj, _selected_paths(obj, only), floating)
    write_graph(os.path.realpath(path), encoded.to_json(), encoded.arrays, texts, _size(max_file))


def _selected_paths(obj: object, selector: object) -> Callable[[Path], bool] | None:
    if selector is None:
        return None
    graph = Graph(obj)
    return {graph.path(number) for number in selection(graph, selector)}.__contains__


def _is_whole(text: str) -> bool:
    """Is it free of lone surrogates? JSON parsers of other languages refuse these."""
    return text.encode("utf-8", "replace").decode() == text


def _texts(metadata: Mapping[str, str] | None) -> dict[str, str]:
    texts = dict(metadata or {})
    for name, text in cast("dict[Any, Any]", texts).items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise TypeError(f"metadata= is a dict of strings, got {name!r}: {text!r}. Numbers belong in the object.")
        if not (_is_whole(name) and _is_whole(text)):
            raise ValueError(
                f"metadata= has to be valid Unicode for other programs, got a lone surrogate in {name!r}: {text!r}"
            )
        # The graph is itself a text in the metadata.
        if name in ("graftax", "format"):
            raise ValueError(f"{name!r} in metadata= is a name that the format reserves")
    return texts


def _size(size: str | int) -> int:
    if isinstance(size, int):
        number: float = size
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?B?)\s*", size.upper())
        if match is None or match[2] not in _UNITS:
            raise ValueError(f"max_file={size!r} is not a size: write 50GB, 500MB or a number of bytes")
        number = float(match[1]) * _UNITS[match[2]]
    if number < 1:
        raise ValueError(f"max_file={size!r}: a file has at least one byte")
    return int(number)


def write_graph(
    path: str,
    graph: dict[str, Any],
    arrays: Sequence[ArrayToSave],
    texts: Mapping[str, str],
    max_size: int,
    written: Callable[[int], object] | None = None,
) -> None:
    """Writes a graph and its arrays to one file, or to several of at most `max_size` bytes.

    Args:
        written: is called with the number of bytes after each part of an array.
    """
    order = _ordered(arrays)
    # An array is never divided: one that is larger than `max_size` has a file of its own.
    groups = list(_groups(order, max_size))
    if len(groups) < 2:
        return _write_main_file(path, order, {**texts, "format": "graftax", "graftax": _json(graph)}, written)
    # A new mark for each save: the parts of the previous one stay valid until the main file is replaced.
    stem, mark = os.path.basename(path).removesuffix(".safetensors"), secrets.token_hex(4)
    names: list[str] = []
    mode = permissions(path)
    try:
        for number, group in enumerate(groups, 1):
            names.append(f"{stem}.{mark}-{number:05}-of-{len(groups):05}.safetensors")
            part = os.path.join(os.path.dirname(path), names[-1])
            with replacing(part, mode) as file:
                _write(file, group, {"format": "graftax"}, written)
        # Last: until the main file is replaced, `path` still names the previous save.
        _write_main_file(path, [], {**texts, "format": "graftax", "graftax": _json({**graph, "parts": names})})
    except BaseException:
        _remove(path, names)
        raise


def _json(graph: dict[str, Any]) -> str:
    return json.dumps(graph, separators=(",", ":"), allow_nan=False)


def _groups(arrays: Iterable[ArrayToSave], max_size: int) -> Iterator[list[ArrayToSave]]:
    group: list[ArrayToSave] = []
    size = 0
    for array in arrays:
        if group and size + array.tensor.end > max_size:
            yield group
            group, size = [], 0
        group.append(array)
        size += array.tensor.end
    yield group


def _remove(path: str, names: Iterable[str]) -> None:
    for name in names:
        with contextlib.suppress(OSError):  # a part that stays takes space, but the save has succeeded
            os.unlink(os.path.join(os.path.dirname(path), name))


def _write_main_file(
    path: str, arrays: Sequence[ArrayToSave], texts: Mapping[str, str], written: Callable[[int], object] | None = None
) -> None:
    """Writes the main file at `path`, and removes the parts of the file that it replaces."""
    with contextlib.ExitStack() as stack:
        with replacing(path) as file:
            _write(file, arrays, texts, written)
            file.flush()
            os.fsync(file.fileno())  # slow, so before the lock is taken
            # One save at a time from here on: of two concurrent saves, the later one removes the parts of the other.
            stack.enter_context(alone_in(os.path.dirname(path)))
            # Removed below, when the file that lists them is replaced: a reader that still has it opens the new one.
            old_parts = part_names(path)
        _remove(path, old_parts)


def _write(
    file: IO[bytes], arrays: Sequence[ArrayToSave], texts: Mapping[str, str], written: Callable[[int], object] | None
) -> None:
    file.write(_header(arrays, texts))
    for array in arrays:
        # One array at a time is on the host.
        for part in parts_of(array.fetch()):
            file.write(memoryview(part))
            if written is not None:
                written(part.size)


def _header(arrays: Sequence[ArrayToSave], texts: Mapping[str, str]) -> bytes:
    tensors: dict[str, Tensor] = {}
    offset = 0
    for array in arrays:
        tensors[array.leaf.name] = array.tensor._replace(start=offset, end=offset + array.tensor.end)
        offset += array.tensor.end
    return header_bytes(tensors, texts)


def file_bytes(encoded: EncodedGraph) -> bytes:
    """The bytes of a whole file, for small arrays."""
    order = _ordered(encoded.arrays)
    header = _header(order, {"format": "graftax", "graftax": _json(encoded.to_json())})
    return b"".join([header, *(array.fetch().tobytes() for array in order)])


def _ordered(arrays: Sequence[ArrayToSave]) -> list[ArrayToSave]:
    """Orders arrays: those whose size is a multiple of 64 bytes first, then by decreasing item size.

    So all of them are aligned for their dtypes, and most of them for XLA, without gaps, which the format forbids.
    """
    return sorted(arrays, key=lambda array: (array.tensor.end % ALIGN != 0, -array.itemsize))
