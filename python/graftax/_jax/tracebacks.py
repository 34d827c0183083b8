# SPDX-License-Identifier: Apache-2.0
"""Hides frames of this package in tracebacks, as JAX hides its own.

JAX filters tracebacks that pass its functions, and is told to hide this package as well. Frames between the user's call
and the first function of JAX remain: a `boundary` removes these. `GRAFTAX_TRACEBACK=full`, read at import, keeps all
frames of this package; JAX's setting `jax_traceback_filtering` decides for both how frames are hidden.
"""

from __future__ import annotations

import functools
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

# This package, JAX, and libraries that JAX calls. `is_hidden_file` asks JAX, which hides only some of its own files.
_JAX = Path(str(jax.__file__)).parent
_FOLDERS = (Path(__file__).parents[1], _JAX, _JAX.with_name("jaxlib"), _JAX.with_name("opt_einsum"))
HIDDEN_FOLDERS = tuple(str(folder) + os.sep for folder in _FOLDERS)

FULL = os.environ.get("GRAFTAX_TRACEBACK", "") == "full"
_MAX_CHAIN = 64  # errors in a chain of causes


def caller_level() -> int:
    """The `stacklevel` with which a warning names the first frame that is neither JAX's nor of this package."""
    return _users_frame()[1]


def call_site() -> tuple[str, int]:
    """(file, line) of the running call: the first frame that is neither JAX's nor of this package."""
    frame, _ = _users_frame()
    return ("?", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def _users_frame() -> tuple[types.FrameType | None, int]:
    """The first frame that is neither JAX's nor of this package, and its level: 1 is whoever called our caller."""
    frame: types.FrameType | None = sys._getframe(2)
    level = 1
    while frame is not None and frame.f_code.co_filename.startswith(HIDDEN_FOLDERS):
        frame, level = frame.f_back, level + 1
    return frame, level


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
        # IPython and pytest leave out frames with this local.
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
    # An error may be its own cause by a detour, so the chain need not end.
    for _ in range(_MAX_CHAIN):
        if current is None or current.__traceback__ is None:
            break
        if mode == "tracebackhide":  # IPython leaves out frames that have this local
            for frame, _ in traceback.walk_tb(current.__traceback__):
                if is_hidden_file(frame.f_code.co_filename):
                    frame.f_locals["__tracebackhide__"] = True
            current.__traceback__ = _without_own_end(current.__traceback__)
        else:
            entries = _entries(current.__traceback__)
            current.__traceback__ = _chained([entry for entry in entries if not is_hidden_file(_file(entry))])
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


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
    # From the last entry on: the next one is given when an entry is made.
    following: types.TracebackType | None = None
    for entry in reversed(entries):
        following = types.TracebackType(following, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return following
