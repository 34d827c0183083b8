# SPDX-License-Identifier: Apache-2.0
"""`jit(..., progress=True)`: what a first call is doing, and how long each part took."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from graftax import _core
from graftax._jax.compat import compile_stage, on_compile_stages
from graftax._jit.check import Checked
from graftax._jit.jitted import Jitted

P = ParamSpec("P")
R = TypeVar("R")

Tell = Callable[[str, float], Any]  # a part that is done, and its seconds

NEXT = {"recorded": "tracing", "traced": "lowering", "lowered": "compiling"}

_MOST_WAITING = 16  # calls in one thread that are in each other, or that failed on their way
_waiting = threading.local()
_listening = threading.Lock()
_listens = False


class Reported(Jitted[P, R]):
    """A jitted function that says what a call does which compiles."""

    def _entry(
        self,
        roots: tuple[Any, ...],
        layout: tuple[Any, ...],
        context: Any,
        opened: _core.Opened,
        binding: _core.Binding,
    ) -> tuple[_core.Entry, _core.Recording]:
        misses, begin = self._table.misses, time.perf_counter()
        progress = self._options.progress
        report = _Report(self._plan.name, progress if callable(progress) else _Printed(self._plan.name))
        entry, recording = super()._entry(roots, layout, context, opened, binding)
        if self._table.misses != misses:  # else it is known, and compiled
            report.wait()
            report.done("recorded", time.perf_counter() - begin)
        return entry, recording


class ReportedCheck(Reported[P, R], Checked[P, R]):
    """Both: it is compared with the plain function, and says what it does."""


class _Report:
    """One call that compiles, from the end of its recording on."""

    def __init__(self, name: str, tell: Any) -> None:
        self._name, self._tell = name, cast(Tell, tell)

    def wait(self) -> None:
        """JAX says when it has traced, lowered and compiled this function in this thread."""
        _listen()
        self._during = sys.exception()
        reports: list[_Report] = _waiting.__dict__.setdefault("reports", [])
        reports.append(self)
        del reports[:-_MOST_WAITING]

    def is_of(self, name: str) -> bool:
        return name == self._name

    def has_failed(self) -> bool:
        """JAX tells of a trace that has raised, too: while the error is on its way."""
        return sys.exception() is not self._during

    def done(self, stage: str, seconds: float) -> None:
        self._tell(stage, seconds)


def _listen() -> None:
    global _listens
    with _listening:
        if not _listens:
            on_compile_stages(_stage)
            _listens = True


def _stage(event: str, seconds: float, **about: Any) -> None:
    """Called by JAX at the end of each part of each compilation, of whatever function."""
    reports: list[_Report] = _waiting.__dict__.get("reports", [])
    found = compile_stage(event, about) if reports else None
    if found is None:
        return
    stage, name = found
    for i in reversed(range(len(reports))):
        if reports[i].is_of(name):
            report = reports[i]
            failed = report.has_failed()
            if failed or stage == "compiled":
                del reports[i:]
            report.done("failed" if failed else stage, seconds)
            return


class _Printed:
    """A line for each part on the standard error; on a terminal, what is going on stands there meanwhile."""

    def __init__(self, name: str) -> None:
        self._name, self._all = name, 0.0

    def __call__(self, stage: str, seconds: float) -> None:
        self._all += seconds
        following = NEXT.get(stage)
        whole = f"; {self._all:.2f} s in all" if stage == "compiled" else ""
        live = sys.stderr.isatty()
        text = f"{self._name}: {stage} {'after' if stage == 'failed' else 'in'} {seconds:.2f} s{whole}"
        print(f"\r\x1b[K{text}" if live else text, file=sys.stderr)
        if live and following:
            print(f"{self._name}: {following} …", end="", file=sys.stderr, flush=True)
