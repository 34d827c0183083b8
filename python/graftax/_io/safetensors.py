# SPDX-License-Identifier: Apache-2.0
"""The safetensors container: a JSON header with the position of each tensor, then the bytes of the tensors.

Implemented here, so that a file can be written one array at a time and opened without a copy. The header is checked in
full before data are read.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn, cast

import ml_dtypes
import numpy as np

from graftax._io.errors import LoadError, damaged

MAX_HEADER = 100_000_000  # bytes: the limit of the safetensors package
_MAX_DEPTH = 16  # of nested brackets in the header: three are enough
_MAX_DIMENSIONS = 64
ALIGN = 64  # XLA uses memory with this alignment without copying it

DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(bool),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "I16": np.dtype("<i2"),
    "U16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "F32": np.dtype("<f4"),
    "C64": np.dtype("<c8"),
    "F64": np.dtype("<f8"),
    "I64": np.dtype("<i8"),
    "U64": np.dtype("<u8"),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
}
# Dtypes that a file packs without gaps, by their bits, and those of the same numbers in NumPy, which take a byte each.
_PACKED_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
PACKED: dict[str, np.dtype[Any]] = {
    "F4": np.dtype(ml_dtypes.float4_e2m1fn),
    "F6_E2M3": np.dtype(ml_dtypes.float6_e2m3fn),
    "F6_E3M2": np.dtype(ml_dtypes.float6_e3m2fn),
}


class Tensor(NamedTuple):
    """The position of a tensor; `start` and `end` count from the first byte of data."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Header(NamedTuple):
    """The header of a file."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    data: int  # offset of the data
    size: int  # of the file, in bytes


def header_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The length of the header and the header, padded so that the data are aligned."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for name, tensor in tensors.items():
        entries[name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": (tensor.start, tensor.end),
        }
    text = json.dumps(entries, separators=(",", ":"), allow_nan=False).encode()
    # Trailing spaces are valid JSON.
    text += b" " * (-(len(text) + 8) % ALIGN)
    if len(text) > MAX_HEADER:
        raise ValueError(f"the header would have {len(text)} bytes; the format has room for {MAX_HEADER}")
    return len(text).to_bytes(8, "little") + text


def read_header(path: str, file: int) -> Header:
    """Reads and checks the header of an open file. It never allocates more memory than the file has bytes.

    Raises:
        LoadError: if the file is not a safetensors file, or its header contradicts its size.
    """
    size = os.fstat(file).st_size
    start = os.pread(file, 8, 0)
    # The length is untrusted: nothing of that size is allocated before it is checked against the file.
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length < 2 or length > size - 8:
        raise damaged(path, f"its {size} bytes are too few for the header that they announce")
    if length > MAX_HEADER:
        raise damaged(path, f"a header of {length} bytes")
    text = _read(file, length, 8)
    if len(text) != length:  # truncated since `fstat`
        raise damaged(path, "it ends within the header")
    entries = parse_json(path, text)
    if type(entries) is not dict:
        raise damaged(path, "the header is not an object")
    metadata = cast("dict[str, Any]", entries).pop("__metadata__", {})
    if type(metadata) is not dict or not all(type(value) is str for value in cast("dict[str, Any]", metadata).values()):
        raise damaged(path, "its metadata are not strings")
    # Tensors have to fill the data without gaps and overlaps.
    tensors = {name: _tensor(path, name, entry) for name, entry in cast("dict[str, Any]", entries).items()}
    position = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if tensor.start != position:
            raise damaged(path, f"{name!r} begins at {tensor.start}, and the bytes before it end at {position}")
        position = tensor.end
    if position != size - 8 - length:
        raise damaged(path, f"there are {size - 8 - length} bytes of data, and the header describes {position}")
    return Header(tensors, metadata, 8 + length, size)


def _read(file: int, length: int, offset: int) -> bytes:
    parts: list[bytes] = []
    # `pread` may return less than was asked for.
    while length:
        part = os.pread(file, length, offset)
        if not part:
            break
        parts.append(part)
        length -= len(part)
        offset += len(part)
    return b"".join(parts)


def parse_json(path: str, text: bytes | str, max_depth: int = _MAX_DEPTH) -> Any:
    """Parses untrusted JSON: UTF-8, of bounded depth, without duplicate keys."""
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        _refuse_depth(decoded, max_depth)
        return json.loads(decoded, object_pairs_hook=_refuse_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"its header is not JSON: {error}") from None


def _refuse_depth(text: str, max_depth: int) -> None:
    depth = 0
    # Brackets in texts do not count. The parser itself would recurse without a bound.
    for piece in _TEXT_OR_BRACKET.finditer(text):
        bracket = piece[0]
        if bracket in "[{":
            depth += 1
            if depth > max_depth:
                raise ValueError(f"it is nested deeper than {max_depth}")
        elif bracket in "]}":
            depth -= 1


_TEXT_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[\]{}]', re.DOTALL)


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # `json` keeps the last of two entries of one name, other parsers the first: a file must not mean two things.
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a name occurs in it twice")
    return entries


def _no_constant(name: str) -> NoReturn:
    """Refuses NaN and Infinity, which Python's `json` would read."""
    raise ValueError(f"{name} is not valid JSON")


def _tensor(path: str, name: str, entry: object) -> Tensor:
    fields: dict[str, Any] = entry if type(entry) is dict else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if (
        type(dtype) is not str
        or not _are_sizes(shape)
        or not _are_sizes(offsets)
        or len(cast("list[int]", offsets)) != 2
    ):
        raise damaged(path, f"its entry {name!r} does not describe a tensor")
    sizes, (start, end) = cast("list[int]", shape), cast("list[int]", offsets)
    bits = DTYPES[dtype].itemsize * 8 if dtype in DTYPES else _PACKED_BITS.get(dtype)
    if bits is None:
        raise LoadError(f"{path} has {name!r} with the dtype {dtype!r}, which this version does not know")
    if len(sizes) > _MAX_DIMENSIONS:
        raise damaged(path, f"{name!r} has {len(sizes)} dimensions")
    # The product may have thousands of digits: Python's integers do not overflow.
    if math.prod(sizes) * bits != (end - start) * 8:
        raise damaged(path, f"{name!r} of shape {tuple(sizes)} and dtype {dtype} does not have {end - start} bytes")
    if not is_addressable(sizes):
        raise damaged(path, f"{name!r} has the shape {tuple(sizes)}")
    return Tensor(dtype, tuple(sizes), start, end)


def is_addressable(sizes: Iterable[int]) -> bool:
    """Can an array have this shape? That of an empty array may be too large in its other dimensions."""
    return math.prod(size for size in sizes if size) < 1 << 58


def _are_sizes(value: object) -> bool:
    return type(value) is list and all(type(x) is int and 0 <= x < 1 << 60 for x in cast("list[Any]", value))


class MappedFile:
    """A memory-mapped file. Pages are read when they are used; writes to them stay in this process."""

    def __init__(self, path: str) -> None:
        self.path = path
        with open(path, "rb") as file:
            self.header = read_header(path, file.fileno())
            empty = self.header.size == self.header.data
            self._map = None if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def release(self) -> None:
        """Gives the memory of pages that were read back; they are read again when they are used.

        What was written into arrays of the file is lost.
        """
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
            self._map.madvise(mmap.MADV_DONTNEED)

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """The array of a tensor: a view of the mapped file if the data are aligned for the dtype, otherwise a copy."""
        tensor = self.header.tensors[name]
        if tensor.dtype in PACKED:
            raise LoadError(f"{self.path}: {name!r} is packed as {tensor.dtype}, of which JAX has no arrays")
        dtype = DTYPES[tensor.dtype]
        # An empty file cannot be mapped, and an empty tensor has no bytes.
        if self._map is None or tensor.start == tensor.end:
            return np.zeros(tensor.shape, dtype)
        offset = self.header.data + tensor.start
        flat = np.frombuffer(self._map, np.uint8, tensor.end - tensor.start, offset)
        # Files of other writers need not be aligned.
        if offset % dtype.itemsize:
            flat = flat.copy()
        return flat.view(dtype).reshape(tensor.shape)
