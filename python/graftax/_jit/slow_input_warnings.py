# SPDX-License-Identifier: Apache-2.0
"""Warnings about slow inputs, found while a call is recorded. Each is given once."""

from __future__ import annotations

import warnings

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
    """Inspects the structures that one function is called with, and remembers what it has warned about."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def captured(
        self,
        name: str,
        leaves: list[object],
        graphdef: _core.GraphDef,
        root_names: tuple[str, ...],
        first_captured: int,
    ) -> None:
        """Warns about big NumPy arrays that the function captures: those of the roots from `first_captured` on."""
        # Leaves are many, and of few classes: most calls end here.
        has_numpy = any(issubclass(cls, np.ndarray) for cls in _core.types_of(leaves))
        if len(root_names) <= first_captured or not has_numpy:
            return
        for leaf, path in zip(leaves, graphdef.leaf_places(), strict=True):
            path_text = place_name(path, root_names)
            if (
                path[0] >= first_captured
                and isinstance(leaf, np.ndarray)
                and leaf.nbytes > _BIG
                and path_text not in self._warned
            ):
                self._warned.add(path_text)
                message = BIG_CAPTURED.format(name=name, path=path_text, size=leaf.nbytes >> 20)
                warnings.warn(message, CapturedArrayWarning, caller_level())


def note_comparison(error: BaseException, graphdef: _core.GraphDef, root_names: tuple[str, ...]) -> None:
    """Adds to an error from a static value's own `__eq__` the key paths of the values that were being compared."""
    paths: list[str] = []
    structure = Structure(graphdef)
    for row in structure.rows:
        value = row.value if row.op is Op.static else None
        if type(value).__eq__ is not object.__eq__ and not isinstance(value, _BY_VALUE):
            paths.append(f"{place_name(structure.root_path(row), root_names)} ({type(value).__qualname__})")
    if paths:
        error.add_note(f"graftax was comparing {', '.join(paths[:4])} with earlier calls")
