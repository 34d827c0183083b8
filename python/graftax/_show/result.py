# SPDX-License-Identifier: Apache-2.0
"""What `graftax.show` returns: a picture as text, as a page, and as a drawing."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO, cast

from graftax._show.picture import Picture
from graftax._show.text import Lines, Segment, heading, segments

_STYLES = {
    "tree": "dim",
    "label": "bold",
    "node": "cyan",
    "array": "green",
    "value": "yellow",
    "ref": "magenta",
    "mark": "bold red",
    "size": "dim",
    "more": "dim italic",
}
_PIPED = 100  # columns, where there is no terminal


class Shown:
    """A picture of an object graph. `print` it, or let a notebook or the prompt show it.

    Args:
        picture: what is shown.
        notes: lines above the picture.
        depth, lines: the limits of the text, as in `graftax.show`.
    """

    def __init__(self, picture: Picture, notes: Sequence[str], depth: int | None, lines: int | None) -> None:
        self.picture, self.notes = picture, list(notes)
        self._depth, self._lines = depth, lines

    def text(self, *, width: int | None = None) -> str:
        """The picture as plain text.

        Args:
            width: in columns; None: that of the terminal, or 100 where there is none.
        """
        drawn = self._drawn(width or _width())
        return "\n".join("".join(text for text, _ in line).rstrip() for line in drawn)

    def _drawn(self, width: int) -> list[list[Segment]]:
        picture = self.picture
        chosen = Lines(picture, self._depth, self._lines).lines
        head = heading(picture, width)
        drawn = [[(line, "more")] for note in self.notes for line in textwrap.wrap(note, width)]
        return [*drawn, *([head] if head else []), *(segments(picture, line, width) for line in chosen)]

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        # The prompt of an interpreter prints the `repr`. Elsewhere it may go to a file, where colors disturb.
        return self.colored() if hasattr(sys, "ps1") and _is_terminal(sys.stdout) else self.text()

    def colored(self, *, width: int | None = None) -> str:
        """The text with colors for a terminal, made by `rich`; plain text if rich is not installed."""
        # rich is optional, and imported only where colors are wanted.
        if importlib.util.find_spec("rich") is None:
            return self.text(width=width)
        from rich.console import Console
        from rich.text import Text

        width = width or _width()
        lines = ([(text, _STYLES[style]) for text, style in line] for line in self._drawn(width))
        text = Text("\n").join(Text.assemble(*line) for line in lines)
        console = Console(width=width, force_terminal=True, highlight=False)
        with console.capture() as captured:
            console.print(text, soft_wrap=True, end="")
        return captured.get()

    def print(self, file: TextIO | None = None) -> None:
        """Prints the picture: with colors on a terminal, plain elsewhere."""
        file = file or sys.stdout
        print(self.colored() if _is_terminal(file) else self.text(), file=file)

    # ---- pages and drawings

    def html(self, path: str | os.PathLike[str] | None = None) -> str:
        """The picture as a self-contained HTML page, with rows to open and close, and a search.

        Args:
            path: a file that the page is written to.

        Returns:
            the page.
        """
        from graftax._show.html_page import page

        text = page(self.picture, self.notes)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def _repr_html_(self) -> str:
        from graftax._show.html_page import framed

        return framed(self.html())

    def svg(self, path: str | os.PathLike[str] | None = None) -> str:
        """The picture as an SVG drawing with a box for each object, for small graphs.

        Args:
            path: a file that the drawing is written to.

        Raises:
            ValueError: if the graph has more than 80 objects to draw.
        """
        from graftax._show.svg import drawing

        text = drawing(self.picture)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text


def _width() -> int:
    return max(shutil.get_terminal_size((_PIPED, 24)).columns, 20)


def _is_terminal(file: object) -> bool:
    if "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb":
        return False
    # What stands for a stream may have no `isatty`, and a closed one raises a ValueError.
    try:
        return cast("TextIO", file).isatty()
    except (AttributeError, ValueError):
        return False
