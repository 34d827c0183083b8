# SPDX-License-Identifier: Apache-2.0
"""Warnings of what keeps a function slow, seen while its calls are recorded. Each is given once."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from graftax import _core
from graftax._base.errors import CapturedArrayWarning
from graftax._graph.structure import Op, Structure, place_name
from graftax._jax.tracebacks import caller_level

BIG_CAPTURED = (
    "{name} captures the NumPy array {path} ({size} MB), which is copied on every call, so that changing it is seen. "
    "Make it a jax.Array once: jnp.asarray(...)."
)

_BIG = 1 << 20  # bytes
_BY_VALUE = (int, float, complex, str, bytes, type(None))


class Advice:
    """Looks at the structures that one function is called with."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def captured(
        self, name: str, leaves: list[Any], graphdef: _core.GraphDef, root_names: tuple[str, ...], first: int
    ) -> None:
        """Warns of big NumPy arrays below the roots from `first` on, which the function captures."""
        if len(root_names) <= first or not any(isinstance(x, np.ndarray) and x.nbytes > _BIG for x in leaves):
            return
        for leaf, place in zip(leaves, graphdef.leaf_places(), strict=True):
            where = place_name(place, root_names)
            if place[0] >= first and isinstance(leaf, np.ndarray) and leaf.nbytes > _BIG and where not in self._warned:
                self._warned.add(where)
                message = BIG_CAPTURED.format(name=name, path=where, size=leaf.nbytes >> 20)
                warnings.warn(message, CapturedArrayWarning, caller_level())


def note_comparison(error: BaseException, graphdef: _core.GraphDef, root_names: tuple[str, ...]) -> None:
    """Adds to an error out of a static's own `__eq__` the key paths of the statics that are compared with it."""
    places: list[str] = []
    structure = Structure(graphdef)
    for row in structure.rows:
        value = row.value if row.op is Op.static else None
        if type(value).__eq__ is not object.__eq__ and not isinstance(value, _BY_VALUE):
            places.append(f"{place_name(structure.place(row), root_names)} ({type(value).__qualname__})")
    if places:
        error.add_note(f"graftax was comparing {', '.join(places[:4])} with earlier calls")
