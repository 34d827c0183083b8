# SPDX-License-Identifier: Apache-2.0
"""`graftax.show`: object graphs and compiled functions, to look at."""

from __future__ import annotations

from typing import Any

from graftax._jax.tracebacks import boundary
from graftax._jit.jitted import Jitted
from graftax._show.call import call_picture
from graftax._show.diff import diff_picture
from graftax._show.format import type_text
from graftax._show.picture import Picture, marked_by
from graftax._show.result import Shown

NO_CALL = (
    "show() takes further arguments only after a jitted function, as those of a call, and was given "
    "{given}. Write show(graftax.jit(f), *args), or show one object, or a list of several."
)

_LINES = 60


class _Show:
    """Shows an object graph with types, sizes, and each shared object once.

    The result displays itself at the prompt and in a notebook. `print(graftax.show(x))` prints plain text, the result's
    `print()` has colors on a terminal. `html(path)` writes a page with a search, `svg(path)` a drawing of a small
    graph. `show.diff(a, b)` shows where two graphs differ. No numbers are read from arrays, except with `values`.

    Args:
        obj: any object; or a jitted function, followed by its arguments, to see what a call would trace, share, donate,
            forward and write back. That traces the function, but does not run it.
        *args, **kwargs: the arguments of the jitted function.
        depth: the number of levels of the text; None for as many as `lines` allow.
        lines: the maximal number of lines of the text; None for the whole graph.
        values: also shows a few numbers of each array, which copies them from their devices.
        mark: a dict from a word to show beside a part to a pattern, a type or a predicate, as in `graftax.find`:
            `{"frozen": "layers[0].**"}`.

    Raises:
        TypeError: if further arguments follow something other than a jitted function.

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
        picture = Picture(shown_object, title=title, values=values, marks=marks, show_internals=lines is None)
        return Shown(picture, [], depth, lines)

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
        """Shows where two object graphs differ. `graftax.diff` returns the same differences as a list.

        Args:
            left, right: the graphs.
            rtol, atol, sharing: as in `graftax.diff`.
            lines: the maximal number of lines of the text; None for the whole graph.
        """
        picture, notes = diff_picture(left, right, {"rtol": rtol, "atol": atol, "sharing": sharing})
        return Shown(picture, notes, None, lines)


show = _Show()
