# SPDX-License-Identifier: Apache-2.0
"""Reports the progress of a compiled loop to a progress bar or to a function."""

from __future__ import annotations

import functools
import importlib.util
import threading
from collections.abc import Callable
from typing import Any

import jax

NO_RICH = "progress= shows a bar with the rich package: pip install graftax[show], or pass a function of (done, steps)."
WRONG_PROGRESS = "{name}: progress= takes True, a title or a function of (done, steps), not {actual}."


Progress = bool | str | Callable[[int, int], Any] | None

# Of one loop: each report is a host callback, and a loop may have millions of steps.
_MAX_REPORTS = 100


def reporter(progress: Progress, name: str, num_steps: int) -> Callable[[Any], None] | None:
    """A function of the traced step index that reports how many steps are done; None if nothing is reported."""
    if not progress or not num_steps:
        return None
    callback = progress if callable(progress) else _Bar(name if progress is True else _title(progress, name)).update
    # Rounded up, so that there are at most so many reports.
    interval = -(-num_steps // _MAX_REPORTS)
    counting = _ReportCounter(callback, num_steps, interval)

    def report(index: Any) -> None:
        # The host counts reports itself: a reversed scan counts `index` down, and callbacks may overtake each other.
        due = ((index + 1) % interval == 0) | (index == num_steps - 1)
        jax.lax.cond(due, lambda: jax.debug.callback(counting.count, index), lambda: None)

    return report


def _title(progress: object, name: str) -> str:
    if not isinstance(progress, str):
        raise TypeError(WRONG_PROGRESS.format(name=name, actual=type(progress).__qualname__))
    return progress


class _ReportCounter:
    """Counts the reports of one run, and starts again with the next."""

    def __init__(self, callback: Callable[[int, int], object], num_steps: int, interval: int) -> None:
        self._callback, self._num_steps, self._interval = callback, num_steps, interval
        self._reports, self._report_count = -(-num_steps // interval), 0
        self._lock = threading.Lock()

    def count(self, index: object) -> None:
        del index
        with self._lock:
            self._report_count += 1
            steps_done = min(self._report_count * self._interval, self._num_steps)
            if self._report_count == self._reports:
                self._report_count = 0
        self._callback(steps_done, self._num_steps)


class _Bar:
    """A progress bar of the `rich` package. It appears with the first report, and stops after the last one."""

    def __init__(self, title: str) -> None:
        try:
            from rich.console import Console
            from rich.progress import Progress as RichProgress
        except ImportError as error:
            raise ImportError(NO_RICH) from error
        # In a notebook rich draws by ipywidgets; without them, only a warning would appear.
        is_text = Console().is_jupyter and importlib.util.find_spec("ipywidgets") is None
        console = Console(force_jupyter=False, force_terminal=True) if is_text else None
        self._make, self._title = functools.partial(RichProgress, console=console), title
        self._shown: tuple[Any, Any] | None = None

    def update(self, steps_done: int, num_steps: int) -> None:
        if self._shown is None:
            bar = self._make()
            self._shown = bar, bar.add_task(self._title, total=num_steps)
            bar.start()
        bar, task = self._shown
        bar.update(task, completed=steps_done)
        if steps_done >= num_steps:
            # In a notebook, stop() leaves the bar as it was drawn last.
            bar.refresh()
            bar.stop()
            self._shown = None
