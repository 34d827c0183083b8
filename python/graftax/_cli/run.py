# SPDX-License-Identifier: Apache-2.0
"""`python -m graftax run`: a script as it is, with graftax's `jit` in place of its own, or watched with its own."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from graftax.replace import install, summary


def run(script: str, arguments: Sequence[str], watch: bool = False, report: Path | None = None) -> int:
    """Runs a script with its arguments. Returns the exit status of the command; the script's own exits pass.

    Args:
        script: its file.
        arguments: its arguments.
        watch: replaces nothing, and prints what graftax would change.
        report: a file for the page of it; implies `watch`.
    """
    if not Path(script).is_file():
        print(f"graftax run: there is no file {script}", file=sys.stderr)
        return 2
    if watch or report is not None:
        return _watch(script, arguments, report)
    install()
    try:
        _run(script, arguments)
    finally:
        print(summary(), file=sys.stderr)
    return 0


def _watch(script: str, arguments: Sequence[str], report: Path | None) -> int:
    from graftax._cli.watch import page, record
    from graftax._cli.watch.watched import Watch

    watch = Watch()
    watch.start()
    # The script may change the working directory.
    report = report and report.resolve()
    try:
        _run(script, arguments)
    # Also of a script that fails or exits: what it did until then is known.
    finally:
        watch.stop()
        print(record.summary(watch.records), file=sys.stderr)
        if report is not None:
            report.write_text(page.page(watch.records, Path(script).name), encoding="utf-8")
            print(f"graftax: {report}", file=sys.stderr)
    return 0


def _run(script: str, arguments: Sequence[str]) -> None:
    # As Python does for a script: its own arguments, and its folder in place of the current one.
    sys.argv[:] = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")
