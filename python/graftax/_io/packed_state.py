# SPDX-License-Identifier: Apache-2.0
"""The contents of packed state as lines of text, to compare a file with `like`: its structure itself is not saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from graftax._base.errors import some
from graftax._base.handles import HandleLayout
from graftax._base.key_path import keystr
from graftax._graph.structure import Op, Structure, place_name
from graftax._io.importable_names import full_name

OTHER_STATE = (
    "the packed state is {theirs} in the file, {mine} in like. Its arrays lie in the file one after "
    "another, and everything else comes from like: give like= the same structure, shapes and values; or "
    "save what is not packed (state.unpack()), which is matched by name, and pack what is loaded"
)
_MAX_LINES = 3


def layout_lines(layout: HandleLayout, json_of: Callable[[Any], Any]) -> list[str]:
    """A line for each array, in the order of the buffers, and for each other part.

    Args:
        layout: the layout of the handle.
        json_of: gives the JSON of a value, with full names in it.
    """
    structure = Structure(layout.graphdef)
    lines = [f"{keystr(path)}: {array_text}" for path, array_text in layout.shapes.items()]
    for row in structure.rows:
        parts = [full_name(row.type)] if row.type is not None else []
        if row.op in (Op.static, Op.node) and row.value is not None:
            parts.append(json.dumps(json_of(row.value), sort_keys=True))
        elif row.op is not Op.node:
            parts.append(row.op.name if row.op is not Op.leaf else f"array {row.leaf}")
        if row.op is not Op.leaf and structure.target(row) is not row:
            parts.append(f"that at {place_name(structure.root_path(structure.target(row)), ('obj',))}")
        lines.append(f"{place_name(structure.root_path(row), ('obj',))}: {' '.join(parts)}")
    return lines


def layout_difference(theirs: list[Any], mine: list[str]) -> str | None:
    """The message for lines of a file that differ from those of `like`; None where they are the same."""
    if theirs == mine:
        return None
    # The message shows what only one side has, in order; if that is nothing, the same lines in another order.
    only_theirs, only_mine = (
        [line for line in a if line not in b] for a, b in ((theirs, set(mine)), (mine, set(map(str, theirs))))
    )
    if not only_theirs and not only_mine:
        only_theirs, only_mine = list(theirs), mine
    return OTHER_STATE.format(theirs=_text(only_theirs), mine=_text(only_mine))


def _text(lines: list[Any]) -> str:
    return f"({some(list(map(str, lines)), _MAX_LINES)})"
