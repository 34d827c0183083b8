# SPDX-License-Identifier: Apache-2.0
"""Tracebacks are the user's: frames of this package are hidden as JAX hides its own, and operands are named.

JAX filters what passes its own functions, so the package is among what it leaves out. What is left is between the
user's call and the first function of JAX: a `boundary` takes it out. `GRAFTAX_TRACEBACK=full`, read at import, keeps
all of this package's frames; JAX's setting `jax_traceback_filtering` decides for both how frames are hidden.
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
NOT_JAXS = "JAX's own transforms open no {cls}: those of graftax do, such as graftax.grad in place of jax.grad."

F = TypeVar("F", bound=Callable[..., Any])

# Folders of this package, of JAX, and of what JAX calls. JAX hides only some of its own files, and so does `_hidden`.
_JAX = Path(str(jax.__file__)).parent
_FOLDERS = (Path(__file__).parents[1], _JAX, _JAX.with_name("jaxlib"), _JAX.with_name("opt_einsum"))
INSIDE = tuple(str(folder) + os.sep for folder in _FOLDERS)

_FULL = os.environ.get("GRAFTAX_TRACEBACK", "") == "full"
_MOST = 4  # operands that are named
_DEEP = 64  # errors in a chain of causes


def caller_level() -> int:
    """The `stacklevel` with which a warning names the first frame that is neither JAX's nor of this package."""
    level = 1
    while (frame := _frame(level)) is not None and frame.f_code.co_filename.startswith(INSIDE):
        level += 1
    return level


def _frame(depth: int) -> types.FrameType | None:
    try:
        return sys._getframe(depth + 1)
    except ValueError:
        return None


def call_site() -> tuple[str, int]:
    """(file, line) of the call that is going on: the first frame that is neither JAX's nor of this package."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(INSIDE):
        frame = frame.f_back
    return ("?", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def setup() -> None:
    """Tells JAX which frames are no user's."""
    if not _FULL:
        compat.hide_frames(INSIDE[0])


def boundary(function: F) -> F:
    """A function that users call: what it raises shows no frame below their call but those of their own code."""
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
    """Takes hidden frames out of the tracebacks of an error and of those that it was raised from."""
    mode = "off" if _FULL else compat.filtering_mode()
    if mode == "off" or mode == "remove_frames":  # the latter shows all frames as the error's cause
        return
    last: BaseException | None = error
    for _ in range(_DEEP):
        if last is None or last.__traceback__ is None:
            break
        if mode == "tracebackhide":
            for frame, _ in traceback.walk_tb(last.__traceback__):
                if _hidden(frame.f_code.co_filename):
                    frame.f_locals["__tracebackhide__"] = True
        else:
            last.__traceback__ = _without_hidden(last.__traceback__)
        last = last.__cause__ or (None if last.__suppress_context__ else last.__context__)


def _without_hidden(tb: types.TracebackType) -> types.TracebackType | None:
    entries: list[types.TracebackType] = []
    at: types.TracebackType | None = tb
    while at is not None:
        if not _hidden(at.tb_frame.f_code.co_filename):
            entries.append(at)
        at = at.tb_next
    following: types.TracebackType | None = None
    for entry in reversed(entries):
        following = types.TracebackType(following, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return following


@functools.lru_cache(maxsize=4096)
def _hidden(filename: str) -> bool:
    return compat.is_hidden_file(filename)


# ---- operands


def name_operands(error: BaseException, leaves: Sequence[Any], names: Callable[[], Sequence[str]]) -> None:
    """Adds a line to an error of a function of JAX's: which of its operands are these leaves, by key path.

    Where the function was given an object of a class that JAX does not open, the line says what to call instead.

    Args:
        error: as it was raised in a function that was given the leaves.
        leaves: what the function was given in their place.
        names: the key paths of the leaves.
    """
    if _FULL or isinstance(error, GraftaxError) or getattr(error, "_names_operands", False):
        return
    refused = compat.refused_class(error)
    if refused is not None:
        error.add_note(NOT_JAXS.format(cls=refused.rpartition(".")[2]))
        error._names_operands = True  # type: ignore[attr-defined]
        return
    number = {id(leaf): i for i, leaf in enumerate(leaves)}
    found = list(dict.fromkeys(number[id(x)] for x in _operands(error) if id(x) in number))[:_MOST]
    if not found:
        return
    known = names()
    each = [f"{known[i]} is {_type_text(leaves[i])}" for i in found]
    error.add_note(OPERANDS.format(operands=" and ".join(filter(None, [", ".join(each[:-1]), each[-1]]))))
    error._names_operands = True  # type: ignore[attr-defined]  # of a transform within another, the inner one tells


def _operands(error: BaseException) -> Iterator[Any]:
    """What the user's code gave to the function of JAX's that raised, and what is in its lists and tuples."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    called: types.FrameType | None = None
    for frame in reversed(frames):
        if not frame.f_code.co_filename.startswith(INSIDE):
            break
        called = frame
    if called is None:
        return
    code, found = called.f_code, called.f_locals
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)  # *args, **kwargs
    for name in code.co_varnames[:count]:
        value = found.get(name)
        parts: Any = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        for part in (value, *cast("Sequence[Any]", parts)):
            yield part
            if isinstance(part, (list, tuple)):
                yield from cast("Sequence[Any]", part)


def _type_text(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"
