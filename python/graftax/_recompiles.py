# SPDX-License-Identifier: Apache-2.0
"""Notices a static value that changes on most calls, and says so once."""

from __future__ import annotations

import warnings
from typing import Any, cast

from jax.tree_util import keystr

from . import _core
from ._errors import STATIC_CHANGES, RecompileWarning

_PATIENCE = 8  # versions that differ from the one before in the same static


class Recompiles:
    """Follows the structures of one function as they are recorded."""

    def __init__(self) -> None:
        self._last: _core.GraphDef | None = None
        self._values: dict[tuple[object, ...], list[str]] = {}
        self._warned: set[tuple[object, ...]] = set()

    def note(self, name: str, graphdef: _core.GraphDef, root_names: tuple[str, ...]) -> None:
        """Compares a new structure with the one before; warns when one static alone keeps changing."""
        before, self._last = self._last, _core.weaken(graphdef)
        change = before and before._static_change(graphdef)  # pyright: ignore[reportPrivateUsage]
        if not change:
            return
        path, value = change
        values = self._values.setdefault(path, [])
        values.append(repr(value)[:40])
        if len(values) < _PATIENCE or path in self._warned:
            return
        self._warned.add(path)
        root, rest = (path[0], path[1:]) if len(root_names) > 1 else (0, path)
        where = root_names[cast(int, root)] + keystr(cast(Any, rest))
        shown = ", ".join(values[-3:])
        del values[:-3]
        message = STATIC_CHANGES.format(name=name, path=where, values=shown, count=_PATIENCE + 1)
        warnings.warn(message, RecompileWarning, stacklevel=4)
