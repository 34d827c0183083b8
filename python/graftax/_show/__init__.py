# SPDX-License-Identifier: Apache-2.0
"""`graftax.show`: object graphs and compiled functions, to look at."""

from __future__ import annotations

from typing import Any

from graftax._jax.tracebacks import boundary
from graftax._jit.jitted import Jitted
from graftax._show.call import call_picture
from graftax._show.diff import diff_picture
from graftax._show.format import type_text
from graftax._show.model import Picture, marked_by
from graftax._show.result import Shown

NO_CALL = (
    "show() takes further arguments behind a jitted function alone, which they are for, and was given {given}. Write "
    "show(graftax.jit(f), *args), or show one object, or a list of several."
)

_LINES = 60


class _Show:
    """Shows an object graph: the parts of every class, each shared object once, and sizes.

    The result draws itself at the prompt and in a notebook. `print` prints it plain, its `print()` with colors on a
    terminal. `html(path)` makes a page that can be searched, `svg(path)` a drawing of a small graph.
    `show.diff(a, b)` shows where two graphs differ. No numbers are read from arrays.

    Args:
        obj: any object; or a jitted function, followed by its arguments, to see what a call would trace, share, donate,
            forward and write back. That traces the function, and runs nothing.
        *args, **kwargs: of the jitted function.
        depth: how many levels of the text; None: as many as `lines` allow.
        lines: the most lines of the text; None: as many as it takes, with nothing left out.
        values: shows a few numbers of each array, too, which copies them from their devices.
        mark: words beside places: `{"frozen": "layers[0].**"}`, each with what `graftax.find` takes.

    Example:
        >>> class Layer:
        ...     def __init__(self, n):
        ...         self.w, self.name = jnp.ones((n, n)), "dense"
        >>> layer = Layer(2)
        >>> print(graftax.show({"first": layer, "last": layer, "rate": 0.1}).text(width=60))
        dict of 3
        ├─ 'first': Layer  #1
        │  ├─ w: float32[2, 2]
        │  ╰─ name: 'dense'
        ├─ 'last': Layer  → #1 ['first']
        ╰─ 'rate': 0.1
    """

    @boundary
    def __call__(
        self,
        obj: Any,
        /,
        *args: Any,
        depth: int | None = None,
        lines: int | None = _LINES,
        values: bool = False,
        mark: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Shown:
        if isinstance(obj, Jitted) and (args or kwargs):
            picture, notes = call_picture(obj, args, kwargs, values)
            return Shown(picture, notes, depth, lines)
        if args or kwargs:
            raise TypeError(NO_CALL.format(given=type_text(obj)))
        title = f"graftax.jit of {type_text(obj.__wrapped__)}" if isinstance(obj, Jitted) else None
        marks = marked_by(mark) if mark else None
        shown_object = obj.__wrapped__ if isinstance(obj, Jitted) else obj
        return Shown(
            Picture(shown_object, title=title, values=values, marks=marks, show_internals=lines is None),
            [],
            depth,
            lines,
        )

    @boundary
    def diff(
        self,
        left: Any,
        right: Any,
        /,
        *,
        rtol: float = 0.0,
        atol: float = 0.0,
        sharing: bool = True,
        lines: int | None = _LINES,
    ) -> Shown:
        """Shows where two object graphs differ; `graftax.diff` lists the same.

        Args:
            one, other, rtol, atol, sharing: as in `graftax.diff`.
            lines: so long may the text be; None: as long as it takes.
        """
        picture, notes = diff_picture(left, right, {"rtol": rtol, "atol": atol, "sharing": sharing})
        return Shown(picture, notes, None, lines)


show = _Show()
