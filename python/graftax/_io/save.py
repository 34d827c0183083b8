# SPDX-License-Identifier: Apache-2.0
"""`save`: a file is written whole, or not at all."""

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
from graftax._io.encode_graph import Outline
from graftax._io.reader import part_names
from graftax._io.safetensors import ALIGN, Tensor, header_bytes
from graftax._io.tensor import Outgoing
from graftax._jax.tracebacks import boundary

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
NOT_FLOATING = (
    "dtype={dtype} is for floating arrays, which would lose what they are: give jnp.bfloat16 or another such one"
)
RESERVED = ("graftax", "format")


@boundary
def save(
    path: str | os.PathLike[str],
    obj: Any,
    *,
    only: Any = None,
    dtype: Any = None,
    metadata: Mapping[str, str] | None = None,
    max_file: str | int = "50GB",
) -> None:
    """Writes an object graph to a safetensors file: its arrays, its structure and its other values.

    An array is a tensor with the name of its key path, and any tool for such files can read it; a shared one is there
    once. The rest is a text in the file's metadata. The file appears whole: if anything fails, or the process dies,
    what was at `path` before is still there.

    Args:
        path: of the file.
        obj: any object; `graftax.load` gives it back.
        only: which arrays are written, as in `graftax.partition`. To load the others, give `like`.
        dtype: floating arrays are written in this one, such as `jnp.bfloat16`.
        metadata: texts to keep with it. `graftax.peek` reads them.
        max_file: the most bytes of one file. Beyond, arrays are in files beside it that `path` lists.

    Raises:
        UnsupportedValueError: for what no file can hold, at its path. Nothing is written.

    Example:
        >>> graftax.save(folder / "model.safetensors", {"w": jnp.ones(3), "epoch": 7})
        >>> graftax.load(folder / "model.safetensors")
        {'w': Array([1., 1., 1.], dtype=float32), 'epoch': 7}
    """
    texts = _texts(metadata)
    floating = None if dtype is None else np.dtype(dtype)
    if floating is not None and not jnp.issubdtype(floating, jnp.floating):
        raise ValueError(NOT_FLOATING.format(dtype=floating))
    outline = Outline(obj, _wanted(obj, only), floating)
    write_outline(os.path.realpath(path), outline.to_json(), outline.arrays, texts, _size(max_file))


def _wanted(obj: Any, only: Any) -> Callable[[Path], bool] | None:
    if only is None:
        return None
    graph = Graph(obj)
    return {graph.path(number) for number in selection(graph, only)}.__contains__


def _is_whole(text: str) -> bool:
    """Has it no halves of characters? Readers of JSON in other languages refuse these."""
    return text.encode("utf-8", "replace").decode() == text


def _texts(metadata: Mapping[str, str] | None) -> dict[str, str]:
    texts = dict(metadata or {})
    for name, text in cast("dict[Any, Any]", texts).items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise TypeError(f"metadata= takes texts by name, got {name!r}: {text!r}. Numbers belong into the object.")
        if not (_is_whole(name) and _is_whole(text)):
            raise ValueError(
                f"metadata= takes texts that other programs read, got half a character in {name!r}: {text!r}"
            )
        if name in RESERVED:
            raise ValueError(f"{name!r} in metadata= is a name of the format's own")
    return texts


def _size(size: str | int) -> int:
    if isinstance(size, int):
        number: float = size
    else:
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?B?)\s*", size.upper())
        if found is None or found[2] not in _UNITS:
            raise ValueError(f"max_file={size!r} is no size: write 50GB, 500MB or a number of bytes")
        number = float(found[1]) * _UNITS[found[2]]
    if number < 1:
        raise ValueError(f"max_file={size!r}: a file has a byte at least")
    return int(number)


def write_outline(
    path: str, graph: dict[str, Any], arrays: Sequence[Outgoing], texts: Mapping[str, str], most: int
) -> None:
    """Writes the graph and its arrays, in one file or in several."""
    order = _ordered(arrays)
    groups = list(_groups(order, most))
    if len(groups) < 2:
        return _write_last(path, order, {**texts, "format": "graftax", "graftax": _json(graph)})
    stem, mark = os.path.basename(path).removesuffix(".safetensors"), secrets.token_hex(4)
    names: list[str] = []
    mode = permissions(path)
    try:
        for number, group in enumerate(groups, 1):
            names.append(f"{stem}.{mark}-{number:05}-of-{len(groups):05}.safetensors")
            part = os.path.join(os.path.dirname(path), names[-1])
            with replacing(part, mode) as file:
                _write(file, group, {"format": "graftax"})
        # Until then, what was saved before is what `path` means.
        _write_last(path, [], {**texts, "format": "graftax", "graftax": _json({**graph, "parts": names})})
    except BaseException:
        _remove(path, names)
        raise


def _json(graph: dict[str, Any]) -> str:
    return json.dumps(graph, separators=(",", ":"), allow_nan=False)


def _groups(arrays: Iterable[Outgoing], most: int) -> Iterator[list[Outgoing]]:
    group: list[Outgoing] = []
    size = 0
    for array in arrays:
        if group and size + array.tensor.end > most:
            yield group
            group, size = [], 0
        group.append(array)
        size += array.tensor.end
    yield group


def _parts_of(path: str) -> list[str]:
    """The files that an earlier save to this path has made beside it."""
    try:
        return part_names(path)
    except (OSError, ValueError):
        return []


def _remove(path: str, names: Iterable[str]) -> None:
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(os.path.dirname(path), name))


def _write_last(path: str, arrays: Sequence[Outgoing], texts: Mapping[str, str]) -> None:
    """Writes the file at `path` itself, and removes the parts of the one that it replaces."""
    with contextlib.ExitStack() as stack:
        with replacing(path) as file:
            _write(file, arrays, texts)
            file.flush()
            os.fsync(file.fileno())  # what takes long, while others still may save here
            # Of two that save at once, each is to find the parts of the other.
            stack.enter_context(alone_in(os.path.dirname(path)))
            before = _parts_of(path)
        _remove(path, before)


def _write(file: IO[bytes], arrays: Sequence[Outgoing], texts: Mapping[str, str]) -> None:
    file.write(_header(arrays, texts))
    for array in arrays:
        file.write(memoryview(array.fetch()))


def _header(arrays: Sequence[Outgoing], texts: Mapping[str, str]) -> bytes:
    tensors: dict[str, Tensor] = {}
    at = 0
    for array in arrays:
        tensors[array.leaf.name] = array.tensor._replace(start=at, end=at + array.tensor.end)
        at += array.tensor.end
    return header_bytes(tensors, texts)


def file_bytes(graph: dict[str, Any], arrays: Sequence[Outgoing]) -> bytes:
    """A file of small arrays, in memory."""
    order = _ordered(arrays)
    header = _header(order, {"format": "graftax", "graftax": _json(graph)})
    return b"".join([header, *(array.fetch().tobytes() for array in order)])


def _ordered(arrays: Sequence[Outgoing]) -> list[Outgoing]:
    """Data of 64 bytes and multiples of it first, then by the size of the items.

    All of it is aligned for its items then, and most of it for XLA, without a gap, which the format does not have.
    """
    return sorted(arrays, key=lambda array: (array.tensor.end % ALIGN != 0, -array.itemsize))
