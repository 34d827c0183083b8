# SPDX-License-Identifier: Apache-2.0
"""A picture as lines of text: as deep as so many lines allow, siblings that are alike once, sizes at the right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from graftax._show.format import short_bytes, short_number
from graftax._show.model import Picture

_MOST_BESIDE, _MOST_NAMED = 12, 24  # children of one row that are shown: by number, and by name
_ALIKE = 3  # siblings in a row from which on one stands for them
_COMPARED = 200_000  # rows that are looked at to find them
_COLUMNS = 22  # of the sizes
_NARROW = 64  # columns, below which sizes are left out
_VALUES = -2
_BESIDE = 60  # characters of values on one line
_MOST_DEEP = 40  # levels that are indented on their own; deeper ones stand below each other

Segment = tuple[str, str]  # text, style: tree, label, node, array, value, ref, mark, size, more


class Line(NamedTuple):
    """One line: a row, what was left out (-1), or several values in a row (-2)."""

    before: str  # the branches of the tree
    label: str
    number: int
    more: str  # of what was left out; behind a row, that there is more below it


class Lines:
    """Chooses what of a picture is shown.

    Args:
        picture: what there is.
        depth: how many levels; None: as many as `most` lines allow.
        most: lines; None: all of it, nothing left out.
    """

    def __init__(self, picture: Picture, depth: int | None, most: int | None) -> None:
        self._picture, self._most = picture, most
        self._alike_left = _COMPARED if most is not None else 0
        self._signatures: dict[int, object] = {}
        self.lines = self._chosen(depth)

    def _chosen(self, depth: int | None) -> list[Line]:
        if depth is not None or self._most is None:
            return list(self._at(len(self._picture) if depth is None else depth))
        best: list[Line] = []
        for level in range(1, len(self._picture) + 2):
            lines: list[Line] = []
            for line in self._at(level):
                lines.append(line)
                if len(lines) > self._most and best:
                    return best
            if len(lines) == len(best):
                break  # nothing is deeper
            best = lines
        return best

    def _at(self, depth: int) -> Iterator[Line]:
        """The lines of so many levels, in order."""
        picture = self._picture
        # Each: label, row or -1, branches before it, branches before what is below, its level.
        stack: list[tuple[str, int, str, str, int, str]] = [("", 0, "", "", 0, "")]
        while stack:
            label, number, before, below, level, more = stack.pop()
            if number < 0 or number in picture.first or not picture.is_open(number):
                yield Line(before, label, number, more)
                continue
            if level >= depth:
                yield Line(before, label, number, "…")
                continue
            yield Line(before, label, number, more)
            children = self._siblings(number)
            for i, (name, child, left_out) in reversed(list(enumerate(children))):
                last = i == len(children) - 1
                deep = level >= _MOST_DEEP
                branch = below + ("╰─ " if last else "├─ ")
                under = below if deep else below + ("   " if last else "│  ")
                stack.append((name, child, branch, under, level + 1, left_out))

    def _siblings(self, number: int) -> list[tuple[str, int, str]]:
        """(label, row, more) of what is shown below a row; -1 where some are left out."""
        children = self._picture.children(number)
        only = self._picture.only
        if only is not None:
            kept = [(label, child, "") for label, child in children if child in only]
            rest = len(children) - len(kept)
            return [*kept, ("", -1, f"… {rest:,} equal")] if rest else kept
        if self._most is None:
            return [(label, child, "") for label, child in children]
        found: list[tuple[str, int, str]] = []
        kept, rest = self._most_of(children)
        most = _MOST_BESIDE if kept and kept[0][0].startswith("[") else _MOST_NAMED
        i = 0
        while i < len(kept):
            if len(found) >= most or self._alike_left <= 0:
                rest += len(kept) - i
                break
            label, child = kept[i]
            joined = self._joined(kept, i)
            if joined > 1:
                found.append((", ".join(self._value(*one) for one in kept[i : i + joined]), _VALUES, ""))
                i += joined
                continue
            run = self._run(kept, i)
            found.append((label, child, ""))
            if run >= _ALIKE:
                found.append((f"{kept[i + 1][0]} … {kept[i + run - 1][0]}", -1, f"{run - 1:,} more, alike"))
            i += run if run >= _ALIKE else 1
        return [*found, ("", -1, f"… {rest:,} more")] if rest else found

    def _most_of(self, children: list[tuple[str, int]]) -> tuple[list[tuple[str, int]], int]:
        """The children of an object that has many, arrays and objects first; and how many are left out."""
        if len(children) <= _MOST_NAMED or children[0][0].startswith("["):
            return children, 0
        rows = self._picture.rows
        first = [c for c in children if rows[c[1]].what != "value"][:_MOST_NAMED]
        values = [c for c in children if rows[c[1]].what == "value"][: _MOST_NAMED - len(first)]
        kept = {child for _, child in (*first, *values)}
        return [c for c in children if c[1] in kept], len(children) - len(kept)

    def _value(self, label: str, number: int) -> str:
        return f"{label}: {self._picture.text(number)}"

    def _joined(self, children: list[tuple[str, int]], start: int) -> int:
        """How many values from here on stand on one line."""
        picture, at, length = self._picture, start, 0
        while at < len(children):
            label, number = children[at]
            length += len(self._value(label, number)) + 2
            if (
                picture.rows[number].what != "value"
                or label.startswith("[")
                or length > _BESIDE
                or picture.marks(number)
            ):
                break
            at += 1
        return at - start

    def _run(self, children: list[tuple[str, int]], start: int) -> int:
        """How many siblings from here on are alike: of the same types, keys and shapes."""
        at = start
        like: object = None
        while at < len(children):
            label, number = children[at]
            if number in self._picture.first or not (label.startswith("[") or self._picture.is_open(number)):
                break
            signature = self._signature(number)
            if signature is None or (like is not None and signature != like):
                break
            like = signature
            at += 1
        return max(at - start, 1)

    def _signature(self, number: int) -> object:
        known = self._signatures.get(number)
        if known is not None:
            return known
        picture = self._picture
        end = picture.end[number]
        if end - number > self._alike_left:
            return None
        self._alike_left -= end - number
        parts: list[object] = [picture.short(number)]
        stack = [number]
        while stack:
            for label, child in picture.children(stack.pop()):
                parts.append((label, picture.kind(child), picture.short(child)))
                stack.append(child)
        self._signatures[number] = tuple(parts)
        return self._signatures[number]


def segments(picture: Picture, line: Line, width: int) -> list[Segment]:
    """One line, with its sizes at the right where there is room."""
    if line.number == _VALUES:
        return _fitted([(line.before, "tree"), (line.label, "value")], width)
    if line.number < 0:
        label = [(f"{line.label}  ", "label")] if line.label else []
        return _fitted([(line.before, "tree"), *label, (line.more, "more")], width)
    number = line.number
    found: list[Segment] = [(line.before, "tree")]
    if line.label:
        found.append((f"{line.label}: ", "label"))
    found.append((picture.text(number), picture.look(number)))
    first = picture.first.get(number)
    if first is not None:
        found.append((f"  → #{picture.tags[first]} {picture.path(first)}", "ref"))
    elif number in picture.tags:
        found.append((f"  #{picture.tags[number]}", "ref"))
    found += [(f"  {word}", "mark") for word in picture.marks(number)]
    if line.more:
        found.append((f" {line.more}", "more"))
    size = picture.sizes[number]
    if width < _NARROW or first is not None or not size.bytes:
        return _fitted(found, width)
    numbers = (
        f"{short_number(size.parameters) if size.parameters else '':>10}{short_bytes(size.bytes):>{_COLUMNS - 10}}"
    )
    return [*_fitted(found, width - _COLUMNS, pad=True), (numbers, "size")]


def _fitted(found: list[Segment], width: int, pad: bool = False) -> list[Segment]:
    """Segments cut to a width, with a mark where something was cut."""
    kept: list[Segment] = []
    left = width
    for text, style in found:
        if len(text) > left:
            kept.append(((text[: left - 1] + "…")[:left], style))
            left = 0
            break
        kept.append((text, style))
        left -= len(text)
    return [*kept, (" " * left, "tree")] if pad and left else kept


def heading(picture: Picture, width: int) -> list[Segment]:
    """What the columns at the right are."""
    if width < _NARROW or not picture.sizes[0].bytes:
        return []
    return [(" " * (width - _COLUMNS), "tree"), (f"{'parameters':>10}{'bytes':>{_COLUMNS - 10}}", "size")]
