# SPDX-License-Identifier: Apache-2.0
"""A sequence of key entries that shares what is above it with other ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self, cast, overload

from jax.tree_util import GetAttrKey


class KeyPath(Sequence[Any]):
    """Key entries in order, compared and hashed as a whole; one made from another keeps only what was added.

    Args:
        entries: of JAX: `SequenceKey`, `DictKey`, `GetAttrKey` and `FlattenedIndexKey`.
    """

    __slots__ = ("_above", "_hash", "_length", "_tail")

    _above: Self | None  # what the tail comes after
    _tail: tuple[Any, ...]
    _length: int
    _hash: int | None  # of the entries one after the other, so that it is made from that of the path above

    def __new__(cls, entries: Iterable[Any] = ()) -> Self:
        if type(entries) is cls:
            return entries
        tail = tuple(entries)
        return cls._of(None, tail, len(tail))

    @classmethod
    def _of(cls, above: Self | None, tail: tuple[Any, ...], length: int) -> Self:
        path = object.__new__(cls)
        path._above, path._tail, path._length, path._hash = above, tail, length, None
        return path

    @property
    def parent(self) -> Self:
        """The path one level above; of the root, itself."""
        if len(self._tail) == 1 and self._above is not None:
            return self._above
        return self._of(self._above, self._tail[:-1], self._length - 1) if self._tail else self

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
        one, two, i, j = self, other, len(self._tail), len(other._tail)
        while one is not two or i != j:  # below here they may be one path
            if i == 0:
                if one._above is None:
                    break
                one = one._above
                i = len(one._tail)
            elif j == 0:
                two = cast(KeyPath, two._above)
                j = len(two._tail)
            else:
                i, j = i - 1, j - 1
                if not is_entry(one._tail[i], two._tail[j]):
                    return False
        return True

    def __hash__(self) -> int:
        if self._hash is not None:
            return self._hash
        todo: list[KeyPath] = []
        path: KeyPath | None = self
        while path is not None and path._hash is None:
            todo.append(path)
            path = path._above
        value = 0 if path is None else path._hash
        for path in reversed(todo):
            for entry in path._tail:
                value = hash((value, entry))
            path._hash = value
        return cast(int, value)

    def __add__(self, other: Iterable[Any]) -> Self:
        tail = tuple(other)
        return self._of(self, tail, self._length + len(tail)) if tail else self

    def __radd__(self, other: tuple[Any, ...]) -> tuple[Any, ...]:
        return other + tuple(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """With an ancestor whose length is that of this path without its lowest bit.

        So the paths of a chain share what they are pickled as: n of them take n log n, and no path is more than log n
        deep for the pickler.
        """
        kept = self._length & (self._length - 1)
        above, tails = self._above, [self._tail]
        while above is not None and above._length > kept:
            tails.append(above._tail)
            above = above._above
        tail = tuple(itertools.chain.from_iterable(reversed(tails)))
        return (type(self), (tail,)) if above is None else (_below, (above, tail))

    def _tails(self) -> Iterator[tuple[Any, ...]]:
        path: KeyPath | None = self
        while path is not None:
            yield path._tail
            path = path._above


def _below(above: KeyPath, tail: tuple[Any, ...]) -> KeyPath:
    return above + tail


def entry_text(entry: Any) -> str:
    """What `str` says of a key entry. That of JAX fails for a name with half of a surrogate pair (`os.fsdecode`)."""
    return f".{entry.name}" if type(entry) is GetAttrKey else str(entry)


def keystr(path: Iterable[Any]) -> str:
    """The text of key entries, as that of JAX's `keystr`."""
    return "".join(map(entry_text, path))


def is_entry(wanted: Any, entry: Any) -> bool:
    """Is one key entry the other? 1 and True are one key for a dict, but not for a path."""
    return (
        type(wanted) is type(entry)
        and wanted == entry
        and type(getattr(wanted, "key", None)) is type(getattr(entry, "key", None))
    )
