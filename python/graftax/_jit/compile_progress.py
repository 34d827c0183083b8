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

ProgressCallback = Callable[[str, float], Any]  # (stage that has finished, seconds)

NEXT_STAGE = {"recorded": "tracing", "traced": "lowering", "lowered": "compiling"}

_MAX_REPORTS = 16  # nested or failed calls of one thread
_active_reports = threading.local()
_listen_lock = threading.Lock()
_is_listening = False


class ProgressJitted(Jitted[P, R]):
    """A jitted function that reports the stages of each call that compiles."""

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
        report = _Report(self._plan.name, progress if callable(progress) else _PrintProgress(self._plan.name))
        entry, recording = super()._entry(roots, layout, context, opened, binding)
        if self._table.misses != misses:  # otherwise the entry was compiled earlier
            report.start()
            report.finish_stage("recorded", time.perf_counter() - begin)
        return entry, recording


class ProgressChecked(ProgressJitted[P, R], Checked[P, R]):
    """`progress=` together with `check=True`."""


class _Report:
    """The progress of one compiling call, from the end of its recording on."""

    def __init__(self, name: str, callback: Any) -> None:
        self._name, self._callback = name, cast(ProgressCallback, callback)

    def start(self) -> None:
        """Waits for JAX's events: it announces when it has traced, lowered and compiled a function in this thread."""
        _listen()
        self._during = sys.exception()
        reports: list[_Report] = _active_reports.__dict__.setdefault("reports", [])
        reports.append(self)
        del reports[:-_MAX_REPORTS]

    def is_of(self, name: str) -> bool:
        return name == self._name

    def has_failed(self) -> bool:
        """JAX also announces a trace that has raised, while the exception propagates."""
        return sys.exception() is not self._during

    def finish_stage(self, stage: str, seconds: float) -> None:
        self._callback(stage, seconds)


def _listen() -> None:
    global _is_listening
    with _listen_lock:
        if not _is_listening:
            on_compile_stages(_stage)
            _is_listening = True


def _stage(event: str, seconds: float, **metadata: Any) -> None:
    """JAX calls this at the end of each stage of every compilation in the process."""
    reports: list[_Report] = _active_reports.__dict__.get("reports", [])
    finished = compile_stage(event, metadata) if reports else None
    if finished is None:
        return
    stage, name = finished
    # The innermost call of that name: a jitted function may call itself or others while it is traced.
    for i in reversed(range(len(reports))):
        if reports[i].is_of(name):
            report = reports[i]
            failed = report.has_failed()
            if failed or stage == "compiled":
                del reports[i:]
            report.finish_stage("failed" if failed else stage, seconds)
            return


class _PrintProgress:
    """Prints a line for each finished stage on standard error; a terminal also shows the stage that runs."""

    def __init__(self, name: str) -> None:
        self._name, self._total = name, 0.0

    def __call__(self, stage: str, seconds: float) -> None:
        self._total += seconds
        next_stage = NEXT_STAGE.get(stage)
        total = f"; {self._total:.2f} s in all" if stage == "compiled" else ""
        live = sys.stderr.isatty()
        text = f"{self._name}: {stage} {'after' if stage == 'failed' else 'in'} {seconds:.2f} s{total}"
        print(f"\r\x1b[K{text}" if live else text, file=sys.stderr)
        if live and next_stage:
            print(f"{self._name}: {next_stage} …", end="", file=sys.stderr, flush=True)
