# SPDX-License-Identifier: Apache-2.0
"""Where two object graphs differ, drawn on the first of them."""

from __future__ import annotations

from typing import Any

from graftax._graph.object_diff import diff
from graftax._graph.path import Graph
from graftax._show.format import cut, some, type_text
from graftax._show.model import Marks, Picture

_SIDE = 60  # characters of what stands on one side


def diff_picture(one: Any, other: Any, options: dict[str, Any]) -> tuple[Picture, list[str]]:
    """The places of the first graph where the second one differs, and the line in front of them."""
    found = diff(one, other, **options)
    differ: dict[int, list[str]] = {}

    def marks(graph: Graph) -> Marks:
        for difference in found:
            text = f"≠ {cut(difference.one, _SIDE)} → {cut(difference.other, _SIDE)}"
            differ.setdefault(graph.number(difference.path), []).append(text)
        return Marks({}, {}, differ)

    picture = Picture(one, marks=marks)
    picture.only = set(differ)
    for number in differ:
        while number > 0:
            number = picture.rows[number].parent
            picture.only.add(number)
    picture.only.add(0)
    count = some(len(found), "difference") if found else "No difference"
    return picture, [f"{count} between {type_text(one)} and {type_text(other)}."]
