# SPDX-License-Identifier: Apache-2.0
"""`jit(..., progress=True)`: what a first call is doing, and how long each part took."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from graftax._jax.compilation import compile_stage, listen_to_compile_stages

ProgressCallback = Callable[[str, float], Any]  # (stage that has finished, seconds)

NEXT_STAGE = {"recorded": "tracing", "traced": "lowering", "lowered": "compiling"}

_MAX_REPORTS = 16  # nested or failed calls of one thread


class _Thread(threading.local):
    def __init__(self) -> None:
        self.reports: list[_Report] = []  # of the calls that compile, the innermost last


_thread = _Thread()


def report_stages(name: str, progress: object, recorded: float) -> None:
    """Reports the stages of a call whose recording took `recorded` seconds, and which now compiles."""
    # JAX announces when it has traced, lowered and compiled a function in this thread.
    listen_to_compile_stages(_stage)
    report = _Report(name, progress if callable(progress) else _PrintProgress(name))
    _thread.reports.append(report)
    # Calls that JAX did not compile after all, such as those within another trace, leave their reports behind.
    del _thread.reports[:-_MAX_REPORTS]
    report.finish_stage("recorded", recorded)


class _Report:
    """The progress of one compiling call, from the end of its recording on."""

    def __init__(self, name: str, callback: ProgressCallback) -> None:
        self.name, self.finish_stage = name, callback
        self._handled = sys.exception()  # the caller may be in an `except` clause

    def has_failed(self) -> bool:
        """JAX also announces a trace that has raised, while the exception propagates."""
        return sys.exception() is not self._handled


def report_reused(name: str) -> None:
    """Ends the report of the call of this thread that was traced last: its program is compiled already."""
    report = take_report(name)
    if report is not None:
        report.finish_stage("reused", 0.0)


def take_report(name: str) -> _Report | None:
    """Takes the report of the call of this thread that was lowered last, which another thread will compile."""
    reports = _thread.reports
    return reports.pop() if reports and reports[-1].name == name else None


def hand_over_report(report: _Report | None) -> None:
    """Lets this thread go on with the report of a call of another thread."""
    _thread.reports = [] if report is None else [report]


def _stage(event: str, seconds: float, **metadata: object) -> None:
    """JAX calls this at the end of each stage of every compilation in the process."""
    reports = _thread.reports
    finished = compile_stage(event, metadata) if reports else None
    if finished is None:
        return
    stage, name = finished
    # The innermost call of that name: a jitted function may call itself or others while it is traced. Reports above it
    # belong to calls that ended without a last stage, such as failed ones.
    for i in reversed(range(len(reports))):
        if reports[i].name == name:
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
        total = f"; {self._total:.2f} s in all" if stage in ("compiled", "reused") else ""
        live = sys.stderr.isatty()
        text = f"{self._name}: {stage} {'after' if stage == 'failed' else 'in'} {seconds:.2f} s{total}"
        # The line of the running stage is cleared and written over, which only a terminal can do.
        print(f"\r\x1b[K{text}" if live else text, file=sys.stderr)
        if live and next_stage:
            print(f"{self._name}: {next_stage} …", end="", file=sys.stderr, flush=True)
