# SPDX-License-Identifier: Apache-2.0
"""A picture as a drawing: a box for each object, an arrow for each reference, several to one that is shared."""

from __future__ import annotations

import html
from typing import NamedTuple

from graftax._base.size_text import short_bytes
from graftax._show.format import cut
from graftax._show.picture import Picture

TOO_MANY = "a drawing of {count} objects could not be read: use html(), or draw a part of it. At most {most} are drawn."

_MAX_BOXES = 80  # boxes
_MAX_ROWS = 14  # of a box
_CHARACTERS = 34  # of a row
_WIDE, _HIGH = 7.3, 18  # pixels of a character and of a row
_PAD, _COLUMN_GAP, _ROW_GAP = 9, 64, 14  # pixels inside of a box, and between boxes
_LANE, _LANES = 5, 5  # pixels between arrows that go around boxes, and how many lie side by side

_STYLE = """
text { font: 12px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace; fill: #1d2026; }
.back { fill: #ffffff; } .box { fill: #f6f7fa; stroke: #c4c9d2; } .head { fill: #e6eefb; stroke: #c4c9d2; }
.title { font-weight: 600; fill: #0b4f96; } .soft { fill: #5d6470; } .array { fill: #14713d; } .value { fill: #8a4b00; }
.mark { fill: #b3261e; font-weight: 600; }
.edge { fill: none; stroke: #8b93a1; stroke-width: 1.2; } .again { stroke: #8a2be2; stroke-dasharray: 4 3; }
.tip { fill: #8b93a1; } .tip-again { fill: #8a2be2; }
@media (prefers-color-scheme: dark) {
text { fill: #e4e6eb; } .back { fill: #16181d; } .box { fill: #1e222a; stroke: #444b57; }
.head { fill: #22314a; stroke: #444b57; } .title { fill: #8cc0ff; } .soft { fill: #98a0ad; } .array { fill: #75d69c; }
.value { fill: #e9b872; } .mark { fill: #ff8f85; } .edge { stroke: #78808e; } .again { stroke: #c99bff; }
.tip { fill: #78808e; } .tip-again { fill: #c99bff; } }
"""


def escape(text: str) -> str:
    """A text as XML, which cannot hold control characters or lone surrogates."""
    return html.escape("".join(character if character.isprintable() else "\ufffd" for character in text))


class _RowText(NamedTuple):
    label: str
    text: str
    style: str
    marks: str
    target: int | None  # the row whose box an arrow leads to
    is_repeated: bool  # that box is drawn at another row


class _Box:
    """One object: its position, its title and its rows."""

    def __init__(self, picture: Picture, number: int, level: int) -> None:
        self.number, self.level = number, level
        size = picture.sizes[number].bytes
        tag = f" #{picture.tags[number]}" if number in picture.tags else ""
        self.title = cut(picture.text(number), _CHARACTERS) + tag
        self.marks = _marks(picture, number)
        self.weight = short_bytes(size) if size else ""
        children = picture.children(number)
        shown = children if len(children) <= _MAX_ROWS else children[: _MAX_ROWS - 1]
        self.rows = [_row(picture, label, child) for label, child in shown]
        if len(shown) < len(children):
            self.rows.append(_RowText("", f"… {len(children) - len(shown)} more", "soft", "", None, False))
        head = len(self.title) + len(self.marks) + len(self.weight) + 2
        longest = max([len(r.label) + 2 + len(r.text) + len(r.marks) for r in self.rows] + [head])
        self.width = longest * _WIDE + 2 * _PAD
        self.height = _HIGH * (len(self.rows) + 1) + _PAD
        self.x = self.y = 0.0


def _marks(picture: Picture, number: int) -> str:
    return "".join(f"  {mark}" for mark in picture.marks(number))


def _row(picture: Picture, label: str, number: int) -> _RowText:
    first_row = picture.first_rows.get(number)
    target = number if first_row is None else first_row
    if picture.is_open(target):
        text = f"#{picture.tags[target]}" if first_row is not None else ""
        # The box of a first row has its marks.
        marks = "" if first_row is None else _marks(picture, number)
        return _RowText(label, text, "soft", marks, target, first_row is not None)
    text = cut(picture.text(number), _CHARACTERS)
    if target in picture.tags:
        text += f" #{picture.tags[target]}"
    style = "array" if picture.style(number) == "array" else "value"
    return _RowText(label, text, style, _marks(picture, number), None, False)


def drawing(picture: Picture) -> str:
    """The drawing, as SVG.

    Raises:
        ValueError: if there are too many boxes.
    """
    boxes = _boxes(picture)
    if len(boxes) > _MAX_BOXES:
        raise ValueError(TOO_MANY.format(count=f"{len(boxes):,}", most=_MAX_BOXES))
    width, height = _lay_out(list(boxes.values()))
    right: dict[int, float] = {}
    for box in boxes.values():
        right[box.level] = max(right.get(box.level, 0), box.x + box.width)
    # An arrow to the next column is a curve. Any other runs around all boxes, in a lane below them.
    parts: list[str] = []
    lanes = 0
    for box in boxes.values():
        for i, row in enumerate(box.rows):
            target = None if row.target is None else boxes.get(row.target)
            if target is None:
                continue
            if target.level == box.level + 1:
                parts.append(_edge(box, i, target, row.is_repeated))
            else:
                parts.append(_detour(box, i, target, right[box.level], lanes, height - _ROW_GAP))
                lanes += 1
    height += _LANE * lanes
    parts += [_drawn(box) for box in boxes.values()]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img" aria-label="{escape(picture.text(0))}"><style>{_STYLE}</style>'
        f'<rect class="back" width="100%" height="100%"/>{"".join(parts)}</svg>'
    )


def _boxes(picture: Picture) -> dict[int, _Box]:
    boxes: dict[int, _Box] = {}
    stack = [(0, 0)]
    while stack:
        number, level = stack.pop()
        box = boxes[number] = _Box(picture, number, level)
        # Too many for a drawing: no more are made, and the rest is counted for the message.
        if len(boxes) > _MAX_BOXES:
            boxes.update((i, box) for i in range(len(picture)) if picture.is_open(i))
            return boxes
        stack += [
            (row.target, level + 1) for row in reversed(box.rows) if row.target is not None and not row.is_repeated
        ]
    return boxes


def _lay_out(boxes: list[_Box]) -> tuple[float, float]:
    """Gives each box its place, a column a level, and returns the size of the whole."""
    widths: dict[int, float] = {}
    for box in boxes:
        widths[box.level] = max(widths.get(box.level, 0), box.width)
    x_of_level: dict[int, float] = {}
    x = float(_ROW_GAP + 14 + _LANE * _LANES)
    for level in sorted(widths):
        x_of_level[level] = x
        x += widths[level] + _COLUMN_GAP
    free: dict[int, float] = {}  # by level, where the next box of that column may begin
    # In pre-order, so that no box is higher than the box that points to it.
    for box in boxes:
        box.x = x_of_level[box.level]
        # Below all earlier boxes of its own column and of those to the right: they belong to a box above it.
        box.y = max((y for level, y in free.items() if level >= box.level), default=float(_ROW_GAP))
        free[box.level] = box.y + box.height + _ROW_GAP
        for level in [level for level in free if level > box.level]:
            free[level] = max(free[level], box.y)
    return x, max(box.y + box.height for box in boxes) + 2 * _ROW_GAP


def _drawn(box: _Box) -> str:
    x, y, w = box.x, box.y, box.width
    head = f"M{x:.1f} {y + _HIGH + 3:.1f}v{2 - _HIGH}q0 -5 5 -5h{w - 10:.1f}q5 0 5 5v{_HIGH - 2}z"
    parts = [
        f'<rect class="box" x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{box.height:.1f}" rx="5"/>',
        f'<path class="head" d="{head}"/>',
        f'<text class="title" x="{x + _PAD:.1f}" y="{y + 14:.1f}">{escape(box.title)}{_marked(box.marks)}</text>',
    ]
    if box.weight:
        parts.append(
            f'<text class="soft" x="{x + w - _PAD:.1f}" y="{y + 14:.1f}" text-anchor="end">{escape(box.weight)}</text>'
        )
    for i, row in enumerate(box.rows):
        baseline = y + _HIGH * (i + 2) - 1
        label = f"{escape(row.label)}<tspan class='soft'>: </tspan>" if row.label else ""
        text = f'{label}<tspan class="{row.style}">{escape(row.text)}</tspan>{_marked(row.marks)}'
        parts.append(f'<text x="{x + _PAD:.1f}" y="{baseline:.1f}">{text}</text>')
    return "".join(parts)


def _marked(marks: str) -> str:
    return f'<tspan class="mark" xml:space="preserve">{escape(marks)}</tspan>' if marks else ""


def _edge(box: _Box, row: int, target: _Box, is_repeated: bool) -> str:
    """An arrow from a row of a box to the head of a box in the next column."""
    x, y = box.x + box.width, box.y + _HIGH * (row + 2) - 5
    end_x, end_y = target.x, target.y + _HIGH / 2 + (4 if is_repeated else 0)
    bend = max((end_x - x) / 2, 24)
    curve = f"M{x:.1f} {y:.1f}C{x + bend:.1f} {y:.1f} {end_x - bend:.1f} {end_y:.1f} {end_x - 6:.1f} {end_y:.1f}"
    return _arrow(curve, end_x, end_y, is_repeated)


def _detour(box: _Box, row: int, target: _Box, right: float, lane: int, bottom: float) -> str:
    """An arrow to any other column, around all boxes: down between two columns, along the bottom, and up again."""
    x, y = box.x + box.width, box.y + _HIGH * (row + 2) - 5
    end_x, end_y = target.x, target.y + _HIGH / 2 + 4
    shift = _LANE * (lane % _LANES)
    x_down, y_along, x_up = right + 8 + shift, bottom + _LANE * (lane + 1), end_x - 14 - shift
    line = f"M{x:.1f} {y:.1f}H{x_down:.1f}V{y_along:.1f}H{x_up:.1f}V{end_y:.1f}H{end_x - 6:.1f}"
    return _arrow(line, end_x, end_y, True)


def _arrow(line: str, x: float, y: float, is_repeated: bool) -> str:
    edge, tip = ("edge again", "tip-again") if is_repeated else ("edge", "tip")
    return f'<path class="{edge}" d="{line}"/><path class="{tip}" d="M{x:.1f} {y:.1f}l-8 -4v8z"/>'
