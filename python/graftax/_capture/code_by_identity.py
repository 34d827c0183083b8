# SPDX-License-Identifier: Apache-2.0
"""Code objects by identity: equal code of two modules reads the globals of its own module."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any


class CodeSet:
    """A set of code objects by identity, which keeps none of them alive."""

    def __init__(self) -> None:
        self._by_id: dict[int, weakref.ref[CodeType]] = {}

    def add(self, code: CodeType) -> None:
        if code not in self:
            codes, key = self._by_id, id(code)

            def forget(reference: weakref.ref[CodeType]) -> None:
                if codes.get(key) is reference:  # else other code has been added with the same id
                    del codes[key]

            codes[key] = weakref.ref(code, forget)

    def update(self, codes: Iterable[CodeType]) -> None:
        for code in codes:
            self.add(code)

    def discard(self, code: CodeType) -> None:
        if code in self:
            del self._by_id[id(code)]

    def __contains__(self, code: object) -> bool:
        reference = self._by_id.get(id(code))
        return reference is not None and reference() is code

    def __iter__(self) -> Iterator[CodeType]:
        for reference in list(self._by_id.values()):
            if (code := reference()) is not None:
                yield code


class MetCode:
    """Code objects, each with the globals that it was met with: the same code may run with those of several modules."""

    def __init__(self) -> None:
        self._codes = CodeSet()
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
