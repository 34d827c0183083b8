# SPDX-License-Identifier: Apache-2.0
"""Hides frames of this package in tracebacks, as JAX hides its own.

JAX filters tracebacks that pass its functions, and is told to hide this package as well. Frames between the user's call
and the first function of JAX remain: a `boundary` removes these. `GRAFTAX_TRACEBACK=full`, read at import, keeps all
frames of this package; JAX's setting `jax_traceback_filtering` decides for both how frames are hidden.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import jax

from graftax._jax.frame_filter import filtering_mode, hide_frames, is_hidden_file

F = TypeVar("F", bound=Callable[..., Any])

# This package, JAX, and libraries that JAX calls. `_hidden` asks JAX, which hides only some of its own files.
_JAX = Path(str(jax.__file__)).parent
_FOLDERS = (Path(__file__).parents[1], _JAX, _JAX.with_name("jaxlib"), _JAX.with_name("opt_einsum"))
HIDDEN_FOLDERS = tuple(str(folder) + os.sep for folder in _FOLDERS)

FULL = os.environ.get("GRAFTAX_TRACEBACK", "") == "full"
_MAX_CHAIN = 64  # errors in a chain of causes


def caller_level() -> int:
    """The `stacklevel` with which a warning names the first frame that is neither JAX's nor of this package."""
    level = 1
    while (frame := _frame(level)) is not None and frame.f_code.co_filename.startswith(HIDDEN_FOLDERS):
        level += 1
    return level


def _frame(depth: int) -> types.FrameType | None:
    try:
        return sys._getframe(depth + 1)
    except ValueError:
        return None


def call_site() -> tuple[str, int]:
    """(file, line) of the running call: the first frame that is neither JAX's nor of this package."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(HIDDEN_FOLDERS):
        frame = frame.f_back
    return ("?", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def setup() -> None:
    """Tells JAX to hide the frames of this package."""
    if not FULL:
        hide_frames(HIDDEN_FOLDERS[0])


def boundary(function: F) -> F:
    """Decorates a public function: its tracebacks show only frames of the user's code below the call."""
    if FULL:
        return function

    @functools.wraps(function)
    def reraise(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            return function(*args, **kwargs)
        except Exception as error:
            hide(error)
            raise

    return cast(F, reraise)


def hide(error: BaseException) -> None:
    """Removes hidden frames from the tracebacks of an error and of its causes."""
    mode = "off" if FULL else filtering_mode()
    if mode == "off" or mode == "remove_frames":  # the latter shows all frames as the error's cause
        return
    current: BaseException | None = error
    for _ in range(_MAX_CHAIN):
        if current is None or current.__traceback__ is None:
            break
        if mode == "tracebackhide":  # IPython leaves out frames that have this local
            for frame, _ in traceback.walk_tb(current.__traceback__):
                if _hidden(frame.f_code.co_filename):
                    frame.f_locals["__tracebackhide__"] = True
            current.__traceback__ = _without_own_end(current.__traceback__)
        else:
            current.__traceback__ = _without_hidden(current.__traceback__)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def _without_hidden(tb: types.TracebackType) -> types.TracebackType | None:
    return _chained([entry for entry in _entries(tb) if not _hidden(_file(entry))])


def _without_own_end(tb: types.TracebackType) -> types.TracebackType | None:
    """IPython shows the last frame even if it is hidden: in an error that graftax raises, that has to be the user's."""
    entries = _entries(tb)
    if not entries or not _file(entries[-1]).startswith(HIDDEN_FOLDERS[0]):
        return tb
    while entries and _file(entries[-1]).startswith(HIDDEN_FOLDERS):
        entries.pop()
    return _chained(entries)


def _file(entry: types.TracebackType) -> str:
    return entry.tb_frame.f_code.co_filename


def _entries(tb: types.TracebackType | None) -> list[types.TracebackType]:
    entries: list[types.TracebackType] = []
    while tb is not None:
        entries.append(tb)
        tb = tb.tb_next
    return entries


def _chained(entries: list[types.TracebackType]) -> types.TracebackType | None:
    following: types.TracebackType | None = None
    for entry in reversed(entries):
        following = types.TracebackType(following, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return following


@functools.lru_cache(maxsize=4096)
def _hidden(filename: str) -> bool:
    return is_hidden_file(filename)
