# SPDX-License-Identifier: Apache-2.0
"""`python -m graftax run`: a script as it is, with graftax's `jit` in place of the one that it was written for."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from graftax.replace import install, summary


def run(script: str, arguments: Sequence[str]) -> int:
    """Runs a script with its arguments. Returns the exit status of the command; the script's own exits pass."""
    if not Path(script).is_file():
        print(f"graftax run: there is no file {script}", file=sys.stderr)
        return 2
    install()
    sys.argv[:] = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        print(summary(), file=sys.stderr)
    return 0
