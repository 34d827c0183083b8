# SPDX-License-Identifier: Apache-2.0
"""A key path that shares its prefix with other key paths."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self, cast, overload

from jax.tree_util import GetAttrKey


class KeyPath(Sequence[Any]):
    """An immutable sequence of key entries. A path made by adding to another stores only the added entries.

    Args:
        entries: key entries of JAX: `SequenceKey`, `DictKey`, `GetAttrKey` and `FlattenedIndexKey`.
    """

    __slots__ = ("_hash", "_length", "_prefix", "_tail")

    _prefix: Self | None  # the path before the tail
    _tail: tuple[Any, ...]
    _length: int
    _hash: int | None  # computed entry by entry, so that it continues the hash of the prefix

    def __new__(cls, entries: Iterable[Any] = ()) -> Self:
        if type(entries) is cls:
            return entries
        tail = tuple(entries)
        return cls._make(None, tail, len(tail))

    @classmethod
    def _make(cls, prefix: Self | None, tail: tuple[Any, ...], length: int) -> Self:
        path = object.__new__(cls)
        path._prefix, path._tail, path._length, path._hash = prefix, tail, length, None
        return path

    @property
    def parent(self) -> Self:
        """The path one level above; of the root, itself."""
        if len(self._tail) == 1 and self._prefix is not None:
            return self._prefix
        return self._make(self._prefix, self._tail[:-1], self._length - 1) if self._tail else self

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(reversed(list(self._tails())))

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Any, ...]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, int) and -len(self._tail) <= index < 0:
            return self._tail[index]
        return tuple(self)[index]

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        return tuple(self).index(value, start, self._length if stop is None else stop)

    def __eq__(self, other: object) -> bool:
        # 1, True and 1.0 name one entry of a dict, yet they are different keys.
        if not isinstance(other, KeyPath) or self._length != other._length:
            return False
        if self._hash is not None and other._hash is not None and self._hash != other._hash:
            return False
        first, second, i, j = self, other, len(self._tail), len(other._tail)
        while first is not second or i != j:  # from here on the two may share their prefix
            if i == 0:
                if first._prefix is None:
                    break
                first = first._prefix
                i = len(first._tail)
            elif j == 0:
                second = cast(KeyPath, second._prefix)
                j = len(second._tail)
            else:
                i, j = i - 1, j - 1
                if not is_entry(first._tail[i], second._tail[j]):
                    return False
        return True

    def __hash__(self) -> int:
        if self._hash is not None:
            return self._hash
        # By a loop, and cached on the way: a path may have more prefixes than Python's stack has frames.
        todo: list[KeyPath] = []
        path: KeyPath | None = self
        while path is not None and path._hash is None:
            todo.append(path)
            path = path._prefix
        value = 0 if path is None else path._hash
        for path in reversed(todo):
            for entry in path._tail:
                value = hash((value, entry))
            path._hash = value
        return cast(int, value)

    def __add__(self, other: Iterable[Any]) -> Self:
        tail = tuple(other)
        return self._make(self, tail, self._length + len(tail)) if tail else self

    def __radd__(self, other: tuple[Any, ...]) -> tuple[Any, ...]:
        return other + tuple(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles a prefix, whose length is that of this path without its lowest bit, and the remaining entries.

        So nested paths share their prefixes in a pickle: n of them take n log n, and the pickler recurses at most
        log n deep.
        """
        prefix_length = self._length & (self._length - 1)
        prefix, tails = self._prefix, [self._tail]
        while prefix is not None and prefix._length > prefix_length:
            tails.append(prefix._tail)
            prefix = prefix._prefix
        tail = tuple(itertools.chain.from_iterable(reversed(tails)))
        return (type(self), (tail,)) if prefix is None else (_below, (prefix, tail))

    def _tails(self) -> Iterator[tuple[Any, ...]]:
        path: KeyPath | None = self
        while path is not None:
            yield path._tail
            path = path._prefix


# Pickles have this function by its name.
def _below(prefix: KeyPath, tail: tuple[Any, ...]) -> KeyPath:
    return prefix + tail


def entry_text(entry: Any) -> str:
    """`str` of a key entry. JAX's own fails for a name with half of a surrogate pair (`os.fsdecode`)."""
    return f".{entry.name}" if type(entry) is GetAttrKey else str(entry)


def keystr(path: Iterable[object]) -> str:
    """The text of key entries, as that of JAX's `keystr`."""
    return "".join(map(entry_text, path))


def is_entry(expected: object, entry: object) -> bool:
    """Are two key entries the same? 1 and True are one key of a dict, but differ in a path."""
    return (
        type(expected) is type(entry)
        and expected == entry
        and type(getattr(expected, "key", None)) is type(getattr(entry, "key", None))
    )
