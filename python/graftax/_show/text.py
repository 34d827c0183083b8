# SPDX-License-Identifier: Apache-2.0
"""A picture as lines of text: as deep as the lines allow, with similar siblings grouped and sizes at the right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from graftax._base.size_text import short_bytes, short_number
from graftax._show.picture import Picture

_MAX_ITEMS, _MAX_ATTRIBUTES = 12, 24  # children of one row that are shown: by number, and by name
_MIN_RUN = 3  # similar siblings from which on only the first is shown
_MAX_COMPARED = 200_000  # rows that are compared to find similar siblings
_COLUMNS = 22  # of the sizes
_NARROW = 64  # columns, below which sizes are left out
_VALUES = -2  # in place of a row: several values on one line
_VALUES_WIDTH = 60  # characters of values on one line
_MAX_INDENT = 40  # levels that are indented; deeper levels share one indentation

Segment = tuple[str, str]  # text, style: tree, label, node, array, value, ref, mark, size, more


class Line(NamedTuple):
    """One line: a row, a note of what was left out (-1), or several values (-2)."""

    branches: str  # the branches of the tree
    label: str
    number: int
    note: str  # of what was left out; behind a row, that there is more below it


class Lines:
    """Chooses the rows of a picture that are shown.

    Args:
        picture: what there is.
        depth: how many levels; None: as many as `max_lines` allow.
        max_lines: of the text; None: all of it, nothing left out.
    """

    def __init__(self, picture: Picture, depth: int | None, max_lines: int | None) -> None:
        self._picture, self._max_lines = picture, max_lines
        # With no limit of lines nothing is left out, so nothing is compared either.
        self._alike_left = _MAX_COMPARED if max_lines is not None else 0
        self._signatures: dict[int, object] = {}
        self.lines = self._choose_lines(depth)

    def _choose_lines(self, depth: int | None) -> list[Line]:
        if depth is not None or self._max_lines is None:
            return list(self._lines_to(len(self._picture) if depth is None else depth))
        best: list[Line] = []
        # One level more at a time, until there are too many lines.
        for level in range(1, len(self._picture) + 2):
            lines: list[Line] = []
            for line in self._lines_to(level):
                lines.append(line)
                if len(lines) > self._max_lines and best:
                    return best
            # One level more has shown nothing more.
            if len(lines) == len(best):
                break
            best = lines
        return best

    def _lines_to(self, depth: int) -> Iterator[Line]:
        """The lines down to a level, in order."""
        picture = self._picture
        # (label, row or -1, branches of this line, branches of the lines below it, level, note)
        stack: list[tuple[str, int, str, str, int, str]] = [("", 0, "", "", 0, "")]
        while stack:
            label, number, branches, branches_below, level, note = stack.pop()
            if number < 0 or number in picture.first_rows or not picture.is_open(number):
                yield Line(branches, label, number, note)
                continue
            if level >= depth:
                yield Line(branches, label, number, "…")
                continue
            yield Line(branches, label, number, note)
            children = self._siblings(number)
            # Last child first: the stack gives them back in order.
            for i, (name, child, left_out) in reversed(list(enumerate(children))):
                is_last = i == len(children) - 1
                is_deep = level >= _MAX_INDENT
                own_branches = branches_below + ("╰─ " if is_last else "├─ ")
                child_branches = branches_below if is_deep else branches_below + ("   " if is_last else "│  ")
                stack.append((name, child, own_branches, child_branches, level + 1, left_out))

    def _siblings(self, number: int) -> list[tuple[str, int, str]]:
        """(label, row, note) of the children that are shown; the row -1 says how many are left out."""
        # Of a difference only the rows that differ; without a limit all; otherwise what is alike is left out.
        children = self._picture.children(number)
        shown_rows = self._picture.shown_rows
        if shown_rows is not None:
            shown = [(label, child, "") for label, child in children if child in shown_rows]
            omitted = len(children) - len(shown)
            return [*shown, ("", -1, f"… {omitted:,} equal")] if omitted else shown
        if self._max_lines is None:
            return [(label, child, "") for label, child in children]
        siblings: list[tuple[str, int, str]] = []
        shown, omitted = self._main_children(children)
        max_siblings = _MAX_ITEMS if shown and shown[0][0].startswith("[") else _MAX_ATTRIBUTES
        i = 0
        while i < len(shown):
            if len(siblings) >= max_siblings or self._alike_left <= 0:
                omitted += len(shown) - i
                break
            label, child = shown[i]
            # Short values, such as the settings of a layer, share a line, so that the arrays below fit in as well.
            joined = self._joined_values(shown, i)
            if joined > 1:
                siblings.append(
                    (", ".join(self._value(*child_value) for child_value in shown[i : i + joined]), _VALUES, "")
                )
                i += joined
                continue
            run = self._run_length(shown, i)
            siblings.append((label, child, ""))
            if run >= _MIN_RUN:
                siblings.append((f"{shown[i + 1][0]} … {shown[i + run - 1][0]}", -1, f"{run - 1:,} more, alike"))
            i += run if run >= _MIN_RUN else 1
        return [*siblings, ("", -1, f"… {omitted:,} more")] if omitted else siblings

    def _main_children(self, children: list[tuple[str, int]]) -> tuple[list[tuple[str, int]], int]:
        """The children of a large object, arrays and objects first, and the number of those left out."""
        if len(children) <= _MAX_ATTRIBUTES or children[0][0].startswith("["):
            return children, 0
        rows = self._picture.rows
        graph_children = [c for c in children if rows[c[1]].category != "value"][:_MAX_ATTRIBUTES]
        values = [c for c in children if rows[c[1]].category == "value"][: _MAX_ATTRIBUTES - len(graph_children)]
        chosen = {child for _, child in (*graph_children, *values)}
        return [c for c in children if c[1] in chosen], len(children) - len(chosen)

    def _value(self, label: str, number: int) -> str:
        return f"{label}: {self._picture.text(number)}"

    def _joined_values(self, children: list[tuple[str, int]], start: int) -> int:
        """The number of values, from `start` on, that fit on one line."""
        picture, index, length = self._picture, start, 0
        while index < len(children):
            label, number = children[index]
            length += len(self._value(label, number)) + 2
            if (
                picture.rows[number].category != "value"
                or label.startswith("[")
                or length > _VALUES_WIDTH
                or picture.marks(number)
            ):
                break
            index += 1
        return index - start

    def _run_length(self, children: list[tuple[str, int]], start: int) -> int:
        """The number of siblings, from `start` on, with the same types, keys and shapes."""
        index = start
        common: object = None
        while index < len(children):
            label, number = children[index]
            if number in self._picture.first_rows or not (label.startswith("[") or self._picture.is_open(number)):
                break
            signature = self._signature(number)
            if signature is None or (common is not None and signature != common):
                break
            common = signature
            index += 1
        return max(index - start, 1)

    def _signature(self, number: int) -> object:
        signature = self._signatures.get(number)
        if signature is not None:
            return signature
        picture = self._picture
        end = picture.end[number]
        # A budget for the whole picture, so that a graph of a million rows is not compared row by row.
        if end - number > self._alike_left:
            return None
        self._alike_left -= end - number
        parts: list[object] = [picture.short(number)]
        stack = [number]
        while stack:
            for label, child in picture.children(stack.pop()):
                category = "ref" if child in picture.first_rows else picture.rows[child].category
                parts.append((label, category, picture.short(child)))
                stack.append(child)
        self._signatures[number] = tuple(parts)
        return self._signatures[number]


def segments(picture: Picture, line: Line, width: int) -> list[Segment]:
    """The segments of one line, with sizes at the right if the line is wide enough."""
    if line.number == _VALUES:
        return _fitted([(line.branches, "tree"), (line.label, "value")], width)
    if line.number < 0:
        label = [(f"{line.label}  ", "label")] if line.label else []
        return _fitted([(line.branches, "tree"), *label, (line.note, "more")], width)
    number = line.number
    parts: list[Segment] = [(line.branches, "tree")]
    if line.label:
        parts.append((f"{line.label}: ", "label"))
    parts.append((picture.text(number), picture.style(number)))
    first_row = picture.first_rows.get(number)
    if first_row is not None:
        parts.append((f"  → #{picture.tags[first_row]} {picture.path(first_row)}", "ref"))
    elif number in picture.tags:
        parts.append((f"  #{picture.tags[number]}", "ref"))
    parts += [(f"  {mark}", "mark") for mark in picture.marks(number)]
    if line.note:
        parts.append((f" {line.note}", "more"))
    size = picture.sizes[number]
    if width < _NARROW or first_row is not None or not size.bytes:
        return _fitted(parts, width)
    numbers = (
        f"{short_number(size.parameters) if size.parameters else '':>10}{short_bytes(size.bytes):>{_COLUMNS - 10}}"
    )
    return [*_fitted(parts, width - _COLUMNS, pad=True), (numbers, "size")]


def _fitted(parts: list[Segment], width: int, pad: bool = False) -> list[Segment]:
    """The segments cut to a width, with `…` at the cut."""
    fitting: list[Segment] = []
    room = width
    for text, style in parts:
        if len(text) > room:
            fitting.append(((text[: room - 1] + "…")[:room], style))
            room = 0
            break
        fitting.append((text, style))
        room -= len(text)
    return [*fitting, (" " * room, "tree")] if pad and room else fitting


def heading(picture: Picture, width: int) -> list[Segment]:
    """The titles of the columns at the right."""
    if width < _NARROW or not picture.sizes[0].bytes:
        return []
    return [(" " * (width - _COLUMNS), "tree"), (f"{'parameters':>10}{'bytes':>{_COLUMNS - 10}}", "size")]
