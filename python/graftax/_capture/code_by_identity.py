# SPDX-License-Identifier: Apache-2.0
"""Code objects and others by identity: equal code of two modules reads the globals of its own module."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class IdentitySet(Generic[T]):
    """A set of objects by identity, in the order in which they were added. It keeps none of them alive."""

    def __init__(self) -> None:
        self._by_id: dict[int, weakref.ref[Any]] = {}

    def add(self, value: T) -> None:
        if value not in self:
            references, key = self._by_id, id(value)

            def forget(reference: weakref.ref[Any]) -> None:
                if references.get(key) is reference:  # else another object has been added with the same id
                    del references[key]

            references[key] = weakref.ref(value, forget)

    def update(self, values: Iterable[T]) -> None:
        for value in values:
            self.add(value)

    def discard(self, value: T) -> None:
        if value in self:
            del self._by_id[id(value)]

    def __contains__(self, value: object) -> bool:
        reference = self._by_id.get(id(value))
        return reference is not None and reference() is value

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[T]:
        # Another thread may add some meanwhile, which a WeakSet would not allow. A dict is copied at once.
        for reference in list(self._by_id.values()):
            if (value := reference()) is not None:
                yield value


class MetCode:
    """Code objects, each with the globals that it was met with: the same code may run with those of several modules."""

    def __init__(self) -> None:
        self._codes = IdentitySet[CodeType]()
        self._scopes: dict[int, set[int]] = {}  # by the id of the code, the ids of globals; 0 for any globals

    def add(self, code: CodeType, scope: dict[str, Any] | None = None) -> None:
        """Adds code with these globals; without globals, with any."""
        if code not in self._codes:
            self._codes.add(code)
            self._scopes[id(code)] = set()
        self._scopes[id(code)].add(id(scope) if scope is not None else 0)

    def discard(self, code: CodeType) -> None:
        self._codes.discard(code)

    def has(self, code: CodeType, scope: dict[str, Any]) -> bool:
        """Was this code met with these globals?"""
        return code in self._codes and not self._scopes[id(code)].isdisjoint((0, id(scope)))

    def __contains__(self, code: object) -> bool:
        return code in self._codes

    def codes(self) -> list[CodeType]:
        return list(self._codes)

    def __iter__(self) -> Iterator[tuple[CodeType, int]]:
        """(code, the id of its globals), as the core reads it once when a trace begins."""
        for code in self._codes:
            for scope in list(self._scopes[id(code)]):
                yield code, scope
