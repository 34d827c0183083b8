# SPDX-License-Identifier: Apache-2.0
"""Where a loop is: a bar, or a function that is told, from inside of a compiled loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax

NO_RICH = "progress= shows a bar with the rich package: pip install graftax[show], or pass a function of (done, steps)."
WRONG_PROGRESS = "{name}: progress= takes True, a title or a function of (done, steps), not {given}."


Progress = bool | str | Callable[[int, int], Any] | None


_TIMES = 100


def reporter(progress: Progress, name: str, steps: int) -> Callable[[Any], None] | None:
    """A function of the step's number, a traced one, that says after it how many steps are done."""
    if not progress or not steps:
        return None
    tell = progress if callable(progress) else _Bar(name if progress is True else _title(progress, name)).update
    every = -(-steps // _TIMES)
    counting = _Counting(tell, steps, every)

    def report(index: Any) -> None:
        # Counted here, not read from `index`: a reversed scan counts down, and callbacks may overtake each other.
        due = ((index + 1) % every == 0) | (index == steps - 1)
        jax.lax.cond(due, lambda: jax.debug.callback(counting.one, index), lambda: None)

    return report


def _title(progress: Any, name: str) -> str:
    if not isinstance(progress, str):
        raise TypeError(WRONG_PROGRESS.format(name=name, given=type(progress).__qualname__))
    return progress


class _Counting:
    """Counts the reports of one run, and starts again with the next."""

    def __init__(self, tell: Callable[[int, int], Any], steps: int, every: int) -> None:
        self._tell, self._steps, self._every = tell, steps, every
        self._reports, self._done = -(-steps // every), 0
        self._lock = threading.Lock()

    def one(self, index: Any) -> None:
        del index
        with self._lock:
            self._done += 1
            done = self._steps if self._done == self._reports else min(self._done * self._every, self._steps)
            if self._done == self._reports:
                self._done = 0
        self._tell(done, self._steps)


class _Bar:
    """A bar of the `rich` package. It is shown from the first report on and taken down after the last one."""

    def __init__(self, title: str) -> None:
        try:
            from rich.progress import Progress as RichProgress
        except ImportError as error:
            raise ImportError(NO_RICH) from error
        self._make, self._title = RichProgress, title
        self._shown: tuple[Any, Any] | None = None

    def update(self, done: int, steps: int) -> None:
        if self._shown is None:
            bar = self._make()
            self._shown = bar, bar.add_task(self._title, total=steps)
            bar.start()
        bar, task = self._shown
        bar.update(task, completed=done)
        if done >= steps:
            bar.stop()
            self._shown = None
