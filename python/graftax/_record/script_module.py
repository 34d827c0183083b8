# SPDX-License-Identifier: Apache-2.0
"""Loads the script of a recorded call as the main module: its statements before the one that made the call."""

from __future__ import annotations

import ast
import os
import sys
import threading
import types
from typing import Any

from graftax import _core
from graftax._base.errors import GraftaxError
from graftax._record.code_pickle import main_file

NO_SCRIPT = "the script {file}, which defines {name}, is not there: {error}"


def load_script(script: dict[str, Any], name: str) -> None:
    """Runs a script up to the statement that made the call, as `__main__`.

    What stands below `if __name__ == "__main__"` does not run, and neither does what comes after the call.

    Raises:
        GraftaxError: if the file cannot be read.
    """
    file, line = script["file"], script["line"]
    try:
        with open(file, "rb") as source:
            tree = ast.parse(source.read(), file)
    except (OSError, SyntaxError, ValueError) as error:
        raise GraftaxError(NO_SCRIPT.format(file=file, name=name, error=error)) from None
    # Without a line nobody knows where in the script the call was made, so all of it runs.
    before = [node for node in tree.body if line is None or (node.end_lineno or node.lineno) < line]
    tree.body = [node for node in before if not _asks_for_main(node)]
    module = types.ModuleType("__main__")
    module.__file__, module.__package__ = file, script["package"]
    sys.modules["__main__"] = module
    sys.argv[:] = script["argv"]
    if (folder := os.path.dirname(file)) not in sys.path:
        sys.path.insert(0, folder)
    exec(compile(tree, file, "exec", dont_inherit=True), vars(module))


_codes: list[types.CodeType] = []  # that of the script


def follow_script() -> None:
    """Lets recorded calls note the statement of the script that makes them, if a script runs."""
    frame = _script_frame() if main_file() is not None else None
    if frame is not None and frame.f_code not in _codes:
        _core.use_script(frame)
        _codes[:] = [frame.f_code]


def statement_line(offset: int) -> int | None:
    """The line of the script that has this offset in its code; None without a script."""
    ranges = _codes[0].co_lines() if _codes and offset >= 0 else ()
    return next((line for start, end, line in ranges if start <= offset < end), None)


def _script_frame() -> types.FrameType | None:
    """The frame of the script's top-level statements; None after the last one."""
    scope = vars(sys.modules["__main__"])
    frame: types.FrameType | None = sys._getframe()
    # A call of another thread counts for the statement that the main thread is at.
    if threading.current_thread() is not threading.main_thread():
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
    script_frame = None
    while frame is not None:
        if frame.f_globals is scope and frame.f_code.co_name == "<module>":
            script_frame = frame
        frame = frame.f_back
    return script_frame


def _asks_for_main(node: ast.stmt) -> bool:
    test = node.test if isinstance(node, ast.If) else None
    names = [node.id for node in ast.walk(test) if isinstance(node, ast.Name)] if test is not None else []
    return "__name__" in names
