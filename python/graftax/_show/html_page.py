# SPDX-License-Identifier: Apache-2.0
"""A picture as a self-contained HTML page. Rows are drawn when their parent is opened."""

from __future__ import annotations

import html
import importlib.resources
import json
import re
from collections.abc import Sequence
from typing import Any

from graftax._show.picture import Picture

_FRAME = 480  # pixels of a notebook


def page(picture: Picture, notes: Sequence[str]) -> str:
    template = importlib.resources.files("graftax._show").joinpath("page.html").read_text(encoding="utf-8")
    title = picture.text(0)
    data = json.dumps(_columns(picture), separators=(",", ":"), ensure_ascii=False)
    # Within a script HTML reads "</script", "<!--" and "<script": no "<" is left, which JSON can spell otherwise.
    filled = {"TITLE": html.escape(title), "NOTES": "".join(f"<p>{html.escape(note)}</p>" for note in notes)}
    filled["DATA"] = data.replace("<", "\\u003c")
    # In one pass: what is filled in may have braces of its own.
    text = re.sub(r"\{\{([A-Z]+)\}\}", lambda match: filled[match[1]], template)
    # A name may hold half a character (a lone surrogate), which no file can have as UTF-8.
    return text.encode("utf-8", "replace").decode("utf-8")


def framed(text: str) -> str:
    """The page inside an iframe, for notebooks."""
    source = html.escape(text, quote=True)
    return f'<iframe srcdoc="{source}" style="width:100%;height:{_FRAME}px;border:0" loading="lazy"></iframe>'


def _columns(picture: Picture) -> dict[str, Any]:
    """The data of the page, by column: rows in pre-order, with texts as indices into one list."""
    order, parents, labels = _walk(picture)
    position = {number: i for i, number in enumerate(order)}
    texts: dict[str, int] = {}

    def number_of_text(text: str) -> int:
        return texts.setdefault(text, len(texts))

    # The style of the page has a class for each of these numbers: k0, k1 and k2.
    kinds = {"node": 0, "array": 1, "value": 2}
    sizes = picture.sizes
    columns: dict[str, Any] = {
        "up": parents,
        "label": [number_of_text(label) for label in labels],
        "text": [number_of_text(picture.text(number)) for number in order],
        "kind": [kinds[picture.style(number)] for number in order],
        "parameters": [sizes[number].parameters for number in order],
        "bytes": [sizes[number].bytes for number in order],
        "first": {
            position[p]: position.get(first_row, 0) for p, first_row in picture.first_rows.items() if p in position
        },
        "number": {position[p]: n for p, n in picture.tags.items() if p in position},
        "marks": {i: marks for i, number in enumerate(order) if (marks := picture.marks(number))},
        "only": picture.shown_rows is not None,
    }
    return {**columns, "texts": list(texts)}


def _walk(picture: Picture) -> tuple[list[int], list[int], list[str]]:
    """(rows, the position of each row's parent, labels), in pre-order."""
    order: list[int] = []
    parents: list[int] = []
    labels: list[str] = []
    stack: list[tuple[int, int, str]] = [(0, -1, "")]
    while stack:
        number, parent, label = stack.pop()
        position = len(order)
        order.append(number)
        parents.append(parent)
        labels.append(label)
        # A row that repeats an object leads to the first one, so a cycle ends here.
        if number not in picture.first_rows and picture.is_open(number):
            stack += [(child, position, name) for name, child in reversed(picture.children(number))]
    return order, parents, labels
