# SPDX-License-Identifier: Apache-2.0
"""Logs each compilation as it happens: `log_recompiles` and `GRAFTAX_EXPLAIN`."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, TextIO

from graftax._base.code_line import code_line
from graftax._explain.cause_texts import Cause
from graftax._explain.variant import Variant

ENVIRONMENT = "GRAFTAX_EXPLAIN"


class RecompileLog:
    """A log that `log_recompiles` started. `close()` ends it, and so does the end of a `with` block."""

    def __init__(self, file: TextIO | str | os.PathLike[str] | None) -> None:
        self._file = file
        if isinstance(file, (str, os.PathLike)):
            self._append(b"")  # raises here, and not in a later call, if it cannot be written
        _logs.append(self)

    def close(self) -> None:
        """Ends the log."""
        if self in _logs:
            _logs.remove(self)

    def __enter__(self) -> RecompileLog:
        return self

    def __exit__(
        self, exception_type: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def write(self, variant: Variant) -> None:
        """Adds a program to the log. graftax calls this for each program that is compiled."""
        if isinstance(self._file, (str, os.PathLike)):
            line = json.dumps(record(variant), separators=(",", ":")) + "\n"
            self._append(line.encode())
        else:
            print(describe(variant), file=self._file or sys.stderr, flush=True)

    def _append(self, line: bytes) -> None:
        # One appending write for each line, so that several processes can share the file.
        assert isinstance(self._file, (str, os.PathLike))
        handle = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, line)
        finally:
            os.close(handle)


_logs: list[RecompileLog] = []


def log_recompiles(file: TextIO | str | os.PathLike[str] | None = None) -> RecompileLog:
    """Reports each program as it is compiled: how long that took, which line called, and why it was needed.

    `GRAFTAX_EXPLAIN=1` in the environment does the same for a whole run, `GRAFTAX_EXPLAIN=trace.jsonl` writes a file.

    Args:
        file: an open file, by default standard error. Or a path: for each program, a line of JSON is appended to that
            file. `python -m graftax explain` turns it into a page. Several processes may write to one file.

    Returns:
        the log. `close()` ends it, and so does the end of a `with` block.

    Raises:
        OSError: if the file cannot be written.

    Example:
        >>> import io
        >>> said = io.StringIO()
        >>> with graftax.log_recompiles(said):
        ...     y = graftax.jit(lambda x: x * 2)(jnp.ones(3))
        >>> "the first call" in said.getvalue()
        True
    """
    return RecompileLog(file)


def compiled(variant: Variant) -> None:
    _from_environment()
    # Another thread may end a log meanwhile.
    for log in list(_logs):
        log.write(variant)


@functools.cache
def _from_environment() -> None:
    """Starts the log that the environment variable requests, once, at the first compilation."""
    setting = os.environ.get(ENVIRONMENT, "")
    if setting not in ("", "0"):
        RecompileLog(None if setting == "1" else setting)


def record(variant: Variant) -> dict[str, Any]:
    """A variant as data for JSON."""
    return {
        "function": variant.name,
        "number": variant.number,
        "when": round(variant.when, 6),
        "process": os.getpid(),
        "file": variant.where[0],
        "line": variant.where[1],
        "seconds": {stage: round(seconds, 6) for stage, seconds in variant.seconds.items()},
        "disk": variant.on_disk,
        "nearest": variant.nearest or None,
        "causes": [
            {"kind": c.kind, "path": c.path, "before": c.before, "now": c.now, "text": str(c), "remedy": c.remedy}
            for c in variant.causes
        ],
        "reused": variant.is_reused,
        "ahead": variant.is_ahead,
        **({"repeated": list(variant.repeated)} if variant.repeated else {}),
        **({"changed": list(variant.changed)} if variant.changed else {}),
    }


def headline(variant: Variant) -> str:
    """Seconds and the line of the call, as one line of text."""
    text = ", ".join(f"{stage} in {seconds:.2f} s" for stage, seconds in variant.seconds.items())
    if not text:
        was_ready = any(cause.kind in ("loaded", "disk", "shared") for cause in variant.causes)
        text = "nothing was compiled" if was_ready else "as a part of another program"
    text += ", and compiling in the background" * variant.is_compiling
    text += ", and the program that this came to was compiled already" * variant.is_reused
    file, line = variant.where
    return f"{variant.all_seconds:.2f} s ({text}), called at {code_line(file, line, folder=False)}"


def describe(variant: Variant) -> str:
    """A variant as a few lines of text: what was compiled, why, and what to do."""
    lines = [f"graftax: {variant.name} #{variant.number}: {headline(variant)}"]
    lines += cause_lines(variant.nearest, variant.causes, "  ")
    lines += [f"  {line}" for line in variant.notes]
    return "\n".join(lines)


def cause_lines(nearest: int, causes: Sequence[Cause], indent: str) -> list[str]:
    """Lines of text: the causes, then the remedy for each kind of cause."""
    if nearest and causes:
        lines = [f"{indent}unlike #{nearest}:"]
        lines += [f"{indent}  {cause}" for cause in causes]
    else:
        lines = [f"{indent}{cause}" for cause in causes]
    remedies = dict.fromkeys(cause.remedy for cause in causes if cause.remedy)
    return lines + [f"{indent}-> {remedy}" for remedy in remedies]
