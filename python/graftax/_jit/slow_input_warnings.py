# SPDX-License-Identifier: Apache-2.0
"""Warnings about slow inputs, found while a call is recorded. Each is given once."""

from __future__ import annotations

import warnings

import numpy as np

from graftax import _core
from graftax._base.errors import CapturedArrayWarning
from graftax._graph.structure import Op, Structure, place_name
from graftax._jax.tracebacks import caller_level
from graftax._jit.cache import FunctionTable
from graftax._jit.call_plan import RecordedCall

BIG_CAPTURED = (
    "{name} captures the NumPy array {path} ({size} MB), which is copied on every call, so that changing it is seen. "
    "Make it a jax.Array once: jnp.asarray(...)."
)

_BIG = 1 << 20  # bytes
_BY_VALUE = (int, float, complex, str, bytes, type(None))


def warn_of_slow_inputs(table: FunctionTable, call: RecordedCall) -> None:
    """Warns about inputs that make this function slow, before another structure is compiled."""
    table.history.warns = True
    recording, first_captured = call.recording, call.arguments
    # Leaves are many, and of few classes: most calls end here.
    has_numpy = any(issubclass(cls, np.ndarray) for cls in _core.types_of(recording.leaves))
    if len(recording.names) <= first_captured or not has_numpy:
        return
    for leaf, place in zip(recording.leaves, recording.graphdef.leaf_places(), strict=True):
        if place[0] < first_captured or not isinstance(leaf, np.ndarray) or leaf.nbytes <= _BIG:
            continue
        path = place_name(place, recording.names)
        if path not in table.warned_of_captured:
            table.warned_of_captured.add(path)
            message = BIG_CAPTURED.format(name=call.plan.name, path=path, size=leaf.nbytes >> 20)
            warnings.warn(message, CapturedArrayWarning, caller_level())


def note_comparison(error: BaseException, graphdef: _core.GraphDef, root_names: tuple[str, ...]) -> None:
    """Adds to an error from a static value's own `__eq__` the key paths of the values that were being compared."""
    paths: list[str] = []
    structure = Structure(graphdef)
    for row in structure.rows:
        value = row.value if row.op is Op.static else None
        # Comparing values of these types runs no code of the user.
        if type(value).__eq__ is not object.__eq__ and not isinstance(value, _BY_VALUE):
            paths.append(f"{place_name(structure.root_path(row), root_names)} ({type(value).__qualname__})")
    if paths:
        error.add_note(f"graftax was comparing {', '.join(paths[:4])} with earlier calls")
