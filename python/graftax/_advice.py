# SPDX-License-Identifier: Apache-2.0
"""What graftax advises while it records: each advice once, with the name of what it is about."""

from __future__ import annotations

import itertools
import re
import sys
import types
import warnings
from collections import deque
from typing import Any

import numpy as np

from . import _core
from ._difference import Difference, differences
from ._errors import CapturedArrayWarning, RecompileWarning
from ._handles import HandleLayout
from ._structure import Op, Structure, place_name
from ._tracebacks import INSIDE

STRUCTURE_CHANGES = (
    "{name} compiles anew on most calls: {count} structures in a row, each another than the one before. Between the "
    "last two:\n{differences}\nWhat is no array is compared, and a list that grows is a new structure each time: keep "
    "counters and logs outside of what the function is given, or make them jax.Arrays of a fixed shape."
)
STATIC_CHANGES = (
    "{name} compiles anew because {path} keeps changing (last values: {values}); {count} versions so far. Python "
    "numbers are static: to compile once, trace it with jit(..., dynamic={path!r}), pass graftax.Dynamic(value), or "
    "make it a jax.Array."
)
STATIC_CHANGES_IN_PACK = (
    "{name} compiles anew because {path} keeps changing (last values: {values}); {count} versions so far. Python "
    "numbers are static, in packed state too: to compile once, pack a jax.Array or graftax.Dynamic(value) there."
)
BIG_CAPTURED = (
    "{name} captures the NumPy array {path} ({size} MB), which is copied on every call, so that changing it is seen. "
    "Make it a jax.Array once: jnp.asarray(...)."
)

_BIG = 1 << 20  # bytes
_BY_VALUE = (int, float, complex, str, bytes, type(None))
_PATIENCE = 8  # versions that differ from the one before in the same static, or structures in a row
_ALIKE = 2  # changes before the one in question that have to be in the same place
_SHOWN = 3  # differences
_NUMBER = re.compile(r"[-+\d.einfa]+")


def _short(value: object) -> str:
    try:
        return repr(value)[:40]
    except Exception:
        return object.__repr__(value)


def caller_level() -> int:
    """The `stacklevel` for a warning of its caller: the first frame that is neither JAX's nor of this package."""
    level = 1
    while (frame := _frame(level)) is not None and frame.f_code.co_filename.startswith(INSIDE):
        level += 1
    return level


def _frame(depth: int) -> types.FrameType | None:
    try:
        return sys._getframe(depth + 1)
    except ValueError:
        return None


class Advice:
    """Follows the structures of one function as they are recorded."""

    def __init__(self) -> None:
        self._last: _core.GraphDef | None = None
        self._values: dict[tuple[object, ...], list[str]] = {}
        self._warned: set[object] = set()
        self._hits = self._row = 0
        self._changing: deque[set[str]] = deque(maxlen=_ALIKE + 1)
        self._packed: _core.GraphDef | None = None  # the structure in the packed state met last

    def captured(
        self, name: str, leaves: list[Any], graphdef: _core.GraphDef, root_names: tuple[str, ...], first: int
    ) -> None:
        """Warns of big NumPy arrays below the roots from `first` on, which the function captures."""
        if not any(isinstance(x, np.ndarray) and x.nbytes > _BIG for x in leaves):
            return
        for leaf, place in zip(leaves, graphdef.leaf_places(), strict=True):
            where = place_name(place, root_names)
            if place[0] >= first and isinstance(leaf, np.ndarray) and leaf.nbytes > _BIG and where not in self._warned:
                self._warned.add(where)
                message = BIG_CAPTURED.format(name=name, path=where, size=leaf.nbytes >> 20)
                warnings.warn(message, CapturedArrayWarning, caller_level())

    def new_structure(self, name: str, graphdef: _core.GraphDef, root_names: tuple[str, ...], hits: int) -> None:
        """Compares a new structure with the one before; warns when one static alone keeps changing, or when every call
        has another structure. `hits` counts the calls so far that had a known one."""
        before, self._last = self._last, _core.weaken(graphdef)
        self._row = self._row + 1 if hits == self._hits else 1
        self._hits = hits
        if before is None:
            return
        change = before._static_change(graphdef)  # pyright: ignore[reportPrivateUsage]
        if not change:
            self._keeps_changing(name, before, graphdef, root_names)
            return
        place, value = change
        message = STATIC_CHANGES
        if isinstance(value, HandleLayout):
            known, self._packed = self._packed, _core.weaken(value.graphdef)
            inside = known and known._static_change(value.graphdef)  # pyright: ignore[reportPrivateUsage]
            if inside:
                (root, path), (_, below) = place, inside[0]
                place, value, message = (root, (*path[:-1], *below)), inside[1], STATIC_CHANGES_IN_PACK
        values = self._values.setdefault(place, [])
        values.append(_short(value))
        del values[:-_PATIENCE]
        if len(values) < _PATIENCE or place in self._warned:
            return
        self._warned.add(place)
        where = place_name(place, root_names)
        shown = ", ".join(values[-3:])
        message = message.format(name=name, path=where, values=shown, count=_PATIENCE + 1)
        warnings.warn(message, RecompileWarning, caller_level())

    def _keeps_changing(
        self, name: str, before: _core.GraphDef, graphdef: _core.GraphDef, root_names: tuple[str, ...]
    ) -> None:
        if self._row <= _PATIENCE - _ALIKE or "structure" in self._warned:
            return
        try:
            found = list(itertools.islice(differences(before, graphdef, root_names), _SHOWN))
        except Exception:  # parts that cannot be compared: advice fails no call
            return
        self._changing.append({_without_numbers(d.path) for d in found if not _another_kind(d, root_names)})
        # The same place each time: not just many different calls.
        if len(self._changing) > _ALIKE and set.intersection(*self._changing):
            self._warned.add("structure")
            lines = "\n".join(f"  {d.line()}" for d in found)
            message = STRUCTURE_CHANGES.format(name=name, count=self._row, differences=lines)
            warnings.warn(message, RecompileWarning, caller_level())


def _another_kind(difference: Difference[str], root_names: tuple[str, ...]) -> bool:
    """Is this an argument of another kind than before, as of a function that takes many kinds?"""
    numbers = _NUMBER.fullmatch(difference.one) and _NUMBER.fullmatch(difference.other)
    return difference.path in root_names and not numbers


def _without_numbers(path: str) -> str:
    return re.sub(r"\[\d+\]", "[*]", path)


def note_comparison(error: BaseException, graphdef: _core.GraphDef, root_names: tuple[str, ...]) -> None:
    """Adds to an error that a static's own `__eq__` raised where the statics are that are compared in that way."""
    places: list[str] = []
    structure = Structure(graphdef)
    for row in structure.rows:
        value = row.value if row.op is Op.static else None
        if type(value).__eq__ is not object.__eq__ and not isinstance(value, _BY_VALUE):
            places.append(f"{place_name(structure.place(row), root_names)} ({type(value).__qualname__})")
    if places:
        error.add_note(f"graftax was comparing {', '.join(places[:4])} with earlier calls")
