# SPDX-License-Identifier: Apache-2.0
"""Does a model still have the parameters that its optimizer was made for, and the state for those that it has now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np

from graftax._base.errors import StructureError, some
from graftax._graph.array_aliases import array_identities
from graftax._graph.path import Graph, Path

CHANGED_MODEL = (
    "Optimizer.update: {what}. opt.refresh(model) takes the parameters of the model as it is now, and keeps the state "
    "of those that stay.{hint}"
)
ADDED = (
    "{places} of the model {are} not trained: the model that the optimizer was made for had no array of its own there"
)
NO_PARAMETER = " If {it} is no parameter, say what is trained: graftax.optimizer(tx, model, wrt=...)."
UNTIED = "{places} were one array when the optimizer was made, and are several now"
TIE_AGAIN = " To keep them tied, put one array into all these places."
TIED = "{places} were several parameters when the optimizer was made, and are one array now"


def require_no_added(graph: Graph, added: Sequence[int]) -> None:
    """Raises StructureError if there are gradients of arrays that are no parameters; names their paths."""
    if added:
        is_single = len(added) == 1
        places = _places(graph.path(number) for number in sorted(added))
        change = ADDED.format(places=places, are="is" if is_single else "are")
        hint = NO_PARAMETER.format(it="it" if is_single else "one of them")
        raise StructureError(CHANGED_MODEL.format(what=change, hint=hint))


def require_same_ties(graph: Graph, paths: Mapping[str, Sequence[Path]], numbers: Mapping[str, list[int]]) -> None:
    """Raises StructureError if parameters are tied or untied that were not when the optimizer was made.

    `paths` and `numbers` are the key paths and rows of each parameter, by name.
    """
    rows = [number for rows_of_parameter in numbers.values() for number in rows_of_parameter]
    identity_of = dict(zip(rows, array_identities([graph.rows[number].value for number in rows]), strict=True))
    name_of: dict[Any, str] = {}
    for name, rows_of_parameter in numbers.items():
        # None: which array it is outside of all traces is not known.
        identities = {identity_of[number] for number in rows_of_parameter} - {None}
        if len(identities) > 1:
            change = UNTIED.format(places=_places(paths[name]))
            raise StructureError(CHANGED_MODEL.format(what=change, hint=TIE_AGAIN))
        # Rows as well: a shared object has one row, whatever is known of its arrays.
        for identity in (*identities, *rows_of_parameter):
            first_name = name_of.setdefault((identity in identities, identity), name)
            if first_name != name:
                places = _places([paths[first_name][0], paths[name][0]])
                raise StructureError(CHANGED_MODEL.format(what=TIED.format(places=places), hint=""))


def _places(paths: Iterable[Path]) -> str:
    return some([repr(path) for path in paths])


def with_kept_parts(old_state: Any, new_state: Any) -> Any:
    """The new state, with an array of the old state wherever that has one of the same shape and dtype."""
    if isinstance(new_state, dict) and isinstance(old_state, dict):
        old, new = cast("dict[Any, Any]", old_state), cast("dict[Any, Any]", new_state)
        return {key: with_kept_parts(old[key], value) if key in old else value for key, value in new.items()}
    if type(new_state) is type(old_state) and isinstance(new_state, (tuple, list)):
        old_parts, new_parts = cast("list[Any]", old_state), cast("list[Any]", new_state)
        if len(old_parts) == len(new_parts):
            parts = map(with_kept_parts, old_parts, new_parts)
            return type(new_state)(*parts) if hasattr(new_state, "_fields") else type(new_state)(parts)
    # What is no array, such as None or a setting, is that of the new state.
    return old_state if _array_type(old_state) == _array_type(new_state) is not None else new_state


def _array_type(value: object) -> tuple[object, ...] | None:
    return (value.shape, value.dtype) if isinstance(value, (jax.Array, np.ndarray)) else None
