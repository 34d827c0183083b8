# SPDX-License-Identifier: Apache-2.0
"""What graftax advises while it records: each advice once, with the name of what it is about."""

from __future__ import annotations

import warnings
from typing import Any, cast

import numpy as np
from jax.tree_util import keystr

from . import _core
from ._errors import BIG_CAPTURED, STATIC_CHANGES, CapturedArrayWarning, RecompileWarning

_BIG = 1 << 20  # bytes
_BY_VALUE = (int, float, complex, str, bytes, type(None))
_PATIENCE = 8  # versions that differ from the one before in the same static


def _short(value: object) -> str:
    try:
        return repr(value)[:40]
    except Exception:
        return object.__repr__(value)


class Advice:
    """Follows the structures of one function as they are recorded."""

    def __init__(self) -> None:
        self._last: _core.GraphDef | None = None
        self._values: dict[tuple[object, ...], list[str]] = {}
        self._warned: set[object] = set()

    def captured(
        self, name: str, leaves: list[Any], graphdef: _core.GraphDef, root_names: tuple[str, ...], first: int
    ) -> None:
        """Warns of big NumPy arrays below the roots from `first` on, which the function captures."""
        if not any(isinstance(x, np.ndarray) and x.nbytes > _BIG for x in leaves):
            return
        for leaf, path in zip(leaves, graphdef.leaf_paths(), strict=True):
            root = path[0] if len(root_names) > 1 else 0
            where = root_names[root] + keystr(path[len(root_names) > 1 :])
            if root >= first and isinstance(leaf, np.ndarray) and leaf.nbytes > _BIG and where not in self._warned:
                self._warned.add(where)
                message = BIG_CAPTURED.format(name=name, path=where, size=leaf.nbytes >> 20)
                warnings.warn(message, CapturedArrayWarning, stacklevel=3)

    def static_changes(self, name: str, graphdef: _core.GraphDef, root_names: tuple[str, ...]) -> None:
        """Compares a new structure with the one before; warns when one static alone keeps changing."""
        before, self._last = self._last, _core.weaken(graphdef)
        change = before and before._static_change(graphdef)  # pyright: ignore[reportPrivateUsage]
        if not change:
            return
        path, value = change
        values = self._values.setdefault(path, [])
        values.append(_short(value))
        del values[:-_PATIENCE]
        if len(values) < _PATIENCE or path in self._warned:
            return
        self._warned.add(path)
        root, rest = (path[0], path[1:]) if len(root_names) > 1 else (0, path)
        where = root_names[cast(int, root)] + keystr(cast(Any, rest))
        shown = ", ".join(values[-3:])
        message = STATIC_CHANGES.format(name=name, path=where, values=shown, count=_PATIENCE + 1)
        warnings.warn(message, RecompileWarning, stacklevel=3)


def note_comparison(error: BaseException, graphdef: _core.GraphDef, root_names: tuple[str, ...]) -> None:
    """Adds to an error that a static's own `__eq__` raised where the statics are that are compared in that way."""
    places: list[str] = []
    for path, op, _, value in graphdef.instructions():
        if op == "static" and type(value).__eq__ is not object.__eq__ and not isinstance(value, _BY_VALUE):
            root, rest = (path[0], path[1:]) if len(root_names) > 1 else (0, path)
            places.append(f"{root_names[cast(int, root)] + keystr(rest)} ({type(value).__qualname__})")
    if places:
        error.add_note(f"graftax was comparing {', '.join(places[:4])} with earlier calls")
