# SPDX-License-Identifier: Apache-2.0
"""Hides frames of this package in tracebacks, as JAX hides its own, and names operands in errors.

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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import jax

from graftax._base.errors import GraftaxError
from graftax._jax import compat

OPERANDS = "Of its operands, {operands}."
NOT_OPENED_BY_JAX = (
    "JAX's own transforms do not open {cls}: those of graftax do, such as graftax.grad in place of jax.grad."
)

F = TypeVar("F", bound=Callable[..., Any])

# This package, JAX, and libraries that JAX calls. `_hidden` asks JAX, which hides only some of its own files.
_JAX = Path(str(jax.__file__)).parent
_FOLDERS = (Path(__file__).parents[1], _JAX, _JAX.with_name("jaxlib"), _JAX.with_name("opt_einsum"))
HIDDEN_FOLDERS = tuple(str(folder) + os.sep for folder in _FOLDERS)

_FULL = os.environ.get("GRAFTAX_TRACEBACK", "") == "full"
_MAX_OPERANDS = 4  # how many operands an error names
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
    if not _FULL:
        compat.hide_frames(HIDDEN_FOLDERS[0])


def boundary(function: F) -> F:
    """Decorates a public function: its tracebacks show only frames of the user's code below the call."""
    if _FULL:
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
    mode = "off" if _FULL else compat.filtering_mode()
    if mode == "off" or mode == "remove_frames":  # the latter shows all frames as the error's cause
        return
    current: BaseException | None = error
    for _ in range(_MAX_CHAIN):
        if current is None or current.__traceback__ is None:
            break
        if mode == "tracebackhide":
            for frame, _ in traceback.walk_tb(current.__traceback__):
                if _hidden(frame.f_code.co_filename):
                    frame.f_locals["__tracebackhide__"] = True
        else:
            current.__traceback__ = _without_hidden(current.__traceback__)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def _without_hidden(tb: types.TracebackType) -> types.TracebackType | None:
    entries: list[types.TracebackType] = []
    entry: types.TracebackType | None = tb
    while entry is not None:
        if not _hidden(entry.tb_frame.f_code.co_filename):
            entries.append(entry)
        entry = entry.tb_next
    following: types.TracebackType | None = None
    for visible in reversed(entries):
        following = types.TracebackType(following, visible.tb_frame, visible.tb_lasti, visible.tb_lineno)
    return following


@functools.lru_cache(maxsize=4096)
def _hidden(filename: str) -> bool:
    return compat.is_hidden_file(filename)


# ---- operands


def name_operands(error: BaseException, leaves: Sequence[Any], names: Callable[[], Sequence[str]]) -> None:
    """Adds a note to an error of a JAX function: the key paths of those operands that are leaves of the trace.

    If the operand is an object of a class that JAX does not open, the note says what to call instead.

    Args:
        error: raised by the traced function.
        leaves: the tracers that it was traced with.
        names: gives their key paths.
    """
    if _FULL or isinstance(error, GraftaxError) or getattr(error, "_names_operands", False):
        return
    refused = compat.refused_class(error)
    if refused is not None:
        error.add_note(NOT_OPENED_BY_JAX.format(cls=refused.rpartition(".")[2]))
        error._names_operands = True  # type: ignore[attr-defined]
        return
    number = {id(leaf): i for i, leaf in enumerate(leaves)}
    numbers = list(dict.fromkeys(number[id(x)] for x in _operands(error) if id(x) in number))[:_MAX_OPERANDS]
    if not numbers:
        return
    paths = names()
    texts = [f"{paths[i]} is {_type_text(leaves[i])}" for i in numbers]
    error.add_note(OPERANDS.format(operands=" and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))))
    error._names_operands = True  # type: ignore[attr-defined]  # nested transforms: the inner one adds the note


def _operands(error: BaseException) -> Iterator[Any]:
    """The arguments of the JAX function that the user's code called and that raised, and items of its containers."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    called: types.FrameType | None = None
    for frame in reversed(frames):
        if not frame.f_code.co_filename.startswith(HIDDEN_FOLDERS):
            break
        called = frame
    if called is None:
        return
    code, values = called.f_code, called.f_locals
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)  # *args, **kwargs
    for name in code.co_varnames[:count]:
        value = values.get(name)
        parts: Any = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        for part in (value, *cast("Sequence[Any]", parts)):
            yield part
            if isinstance(part, (list, tuple)):
                yield from cast("Sequence[Any]", part)


def _type_text(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"
