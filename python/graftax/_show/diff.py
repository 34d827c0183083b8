# SPDX-License-Identifier: Apache-2.0
"""Where two object graphs differ, drawn on the first of them."""

from __future__ import annotations

from typing import Any

from graftax._base.size_text import count_text
from graftax._graph.object_diff import diff
from graftax._graph.path import Graph
from graftax._show.format import cut, type_text
from graftax._show.picture import Marks, Picture

_SIDE = 60  # characters of each side


def diff_picture(left: Any, right: Any, options: dict[str, Any]) -> tuple[Picture, list[str]]:
    """The first graph, marked where the second differs, and the line above it."""
    differences = diff(left, right, **options)
    # Filled by `marks`, which the picture calls as soon as it has numbered the rows.
    texts_of_rows: dict[int, list[str]] = {}

    def marks(graph: Graph) -> Marks:
        for difference in differences:
            text = f"≠ {cut(difference.one, _SIDE)} → {cut(difference.other, _SIDE)}"
            texts_of_rows.setdefault(graph.number(difference.path), []).append(text)
        return Marks({}, {}, texts_of_rows)

    picture = Picture(left, marks=marks)
    # The rows that differ, with all rows above them.
    picture.shown_rows = set(texts_of_rows)
    for number in texts_of_rows:
        while number > 0:
            number = picture.rows[number].parent
            picture.shown_rows.add(number)
    picture.shown_rows.add(0)
    count = count_text(len(differences), "difference") if differences else "No difference"
    return picture, [f"{count} between {type_text(left)} and {type_text(right)}."]
