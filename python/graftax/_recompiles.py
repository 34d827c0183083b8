# SPDX-License-Identifier: Apache-2.0
"""Notices a static value that changes on most calls, and says so once."""

from __future__ import annotations

import warnings
from typing import Any

from jax.tree_util import keystr

from . import _core
from ._errors import STATIC_CHANGES, RecompileWarning

_PATIENCE = 8  # versions that differ from the one before in the same static


class Recompiles:
    """Follows the structures of one function as they are recorded."""

    def __init__(self) -> None:
        self._last: list[tuple[Any, ...]] | None = None
        self._count: dict[Any, list[Any]] = {}
        self._warned: set[Any] = set()
        self._seen = 0

    def note(self, name: str, graphdef: _core.GraphDef, root_names: tuple[str, ...]) -> None:
        """Compares a new structure with the one before; warns when one static alone keeps changing."""
        self._seen += 1
        if self._seen > 4 * _PATIENCE and not self._count:
            return
        now = [
            (path, op, cls, repr(value)[:40] if op == "static" else value)
            for path, op, cls, value in graphdef.instructions()[:2000]
        ]
        before, self._last = self._last, now
        if before is None or len(before) != len(now):
            return
        changed = [(b, n) for b, n in zip(before, now, strict=True) if b != n]
        if len(changed) != 1 or changed[0][1][1] != "static" or changed[0][0][0] != changed[0][1][0]:
            return
        path, _, _, value = changed[0][1]
        values = self._count.setdefault(path, [])
        values.append(value)
        if len(values) < _PATIENCE or path in self._warned:
            return
        self._warned.add(path)
        root, rest = (path[0], path[1:]) if len(root_names) > 1 else (0, path)
        message = STATIC_CHANGES.format(
            name=name, path=root_names[root] + keystr(rest), values=", ".join(values[-3:]), count=len(values) + 1
        )
        warnings.warn(message, RecompileWarning, stacklevel=4)
