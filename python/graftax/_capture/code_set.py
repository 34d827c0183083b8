# SPDX-License-Identifier: Apache-2.0
"""Code objects by identity: code of two modules may be equal, and reads the globals of its own module."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from types import CodeType


class CodeSet:
    """A set of code objects that keeps none of them alive, and in which equal ones are several."""

    def __init__(self) -> None:
        self._by_id: dict[int, weakref.ref[CodeType]] = {}

    def add(self, code: CodeType) -> None:
        if code not in self:
            codes, key = self._by_id, id(code)

            def forget(reference: weakref.ref[CodeType]) -> None:
                if codes.get(key) is reference:
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
