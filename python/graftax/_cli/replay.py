# SPDX-License-Identifier: Apache-2.0
"""`python -m graftax replay FILE`: the calls that `graftax.record` has kept, once more."""

from __future__ import annotations

import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

from graftax._base.size_text import count_text
from graftax._record.minimize import minimize as minimize_file
from graftax._record.replay import RecordedCalls
from graftax.errors import GraftaxError, ImpureCallWarning

ROUNDING = "note: without jit each operation rounds on its own, so the last digits of floating results may differ"


def replay(path: Path, plain: bool = False, where: bool = False) -> int:
    """Runs the calls of a file.

    Args:
        path: the file.
        plain: runs the function itself, without jit.
        where: names the operation that made the first nan or infinity of the last call.

    Returns:
        the exit status: 0 if all is as recorded, 1 if not, 2 if it cannot be run.
    """
    # The random numbers of the call are those of the recorded one, so a warning about them would mislead.
    warnings.simplefilter("ignore", ImpureCallWarning)
    try:
        recorded = RecordedCalls(path)
    except (GraftaxError, OSError) as error:
        print(f"graftax replay: {error}", file=sys.stderr)
        return 2
    header = recorded.header
    print(f"{header['name']}: {header['what']}; {count_text(len(recorded), 'recorded call')}")
    for note in recorded.notes:
        print(f"note: {note}")
    try:
        return _print_origin(recorded) if where else _run(recorded, plain)
    except GraftaxError as error:
        print(f"graftax replay: {error}", file=sys.stderr)
        return 2


def minimize(path: Path, script: Path | None, fails: Any, tolerance: float | None, timeout: float) -> int:
    """Writes the smallest part of the last call of a file that fails; returns the exit status: 0, or 2 if none does."""
    try:
        minimized = minimize_file(path, script, fails=fails, tolerance=tolerance, timeout=timeout)
    except (GraftaxError, OSError, ValueError) as error:
        print(f"graftax minimize: {error}", file=sys.stderr)
        return 2
    operations = ", ".join(minimized.operations)
    print(f"{minimized.path}: {operations}, of {minimized.equations} equations. {minimized.cause}")
    return 0


def _run(recorded: RecordedCalls, plain: bool) -> int:
    status = 0
    for number in range(len(recorded)):
        outcome = recorded.run(number, plain)
        status |= bool(outcome.differences)
        print(f"call {number + 1} of {len(recorded)}: {outcome}")
    if plain and status:
        print(ROUNDING)
    return status


def _print_origin(recorded: RecordedCalls) -> int:
    try:
        print(recorded.where())
    # What graftax itself says, `replay` prints. An exception of the function is shown at its own line.
    except GraftaxError:
        raise
    except Exception as error:
        traceback.print_exception(error, limit=-1)
    return 0
