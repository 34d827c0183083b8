# SPDX-License-Identifier: Apache-2.0
"""The exceptions of graftax and helpers for their messages. Each message is defined beside its `raise`."""

from __future__ import annotations

import pickle
import re
from collections.abc import Sequence
from typing import Any


class GraftaxError(Exception):
    """Base of every error that graftax raises itself."""


class UnsupportedValueError(GraftaxError, TypeError):
    """A value that cannot be part of a compiled program: hidden state, or arrays where none can be."""


class StructureError(GraftaxError, ValueError):
    """An object graph, or a structure, that cannot be walked, rebuilt or matched."""


class ConcurrentChangeError(GraftaxError, RuntimeError):
    """An object changed while it was walked."""


class UnpicklableError(GraftaxError, pickle.PicklingError):
    """A GraphDef that holds a static which cannot be pickled."""


class MutationError(GraftaxError, RuntimeError):
    """A change that the options forbid, or that cannot be applied to the caller's objects."""


class IgnoredValueError(GraftaxError, RuntimeError):
    """A compiled function looked inside a value that `ignore=` says it does not read."""


class CheckError(GraftaxError, AssertionError):
    """jit(check=True): the compiled function did something different from the plain one."""


class RecompileWarning(UserWarning):
    """A static value changes on most calls, and each change compiles again."""


class CapturedArrayWarning(UserWarning):
    """A large NumPy array that the function captures is copied on every call."""


class LostChangeWarning(UserWarning):
    """A change is dropped: a by-value call's, or that of a NumPy array which others may hold."""


class MissedDonationWarning(UserWarning):
    """A call with `donate="auto"` keeps more than 100 MB that somebody else holds. Off unless a filter turns it on."""


class UntiedWarning(UserWarning):
    """Objects or arrays that the caller shares come back as separate copies."""


class ImpureCallWarning(UserWarning):
    """The function that is traced calls what a compiled call cannot repeat: time, random numbers, print, files."""


class UnknownInterpreterWarning(RuntimeWarning):
    """This interpreter is not known: compiled functions do not notice everything that their code reads."""


def type_name(value: Any) -> str:
    """The name of a value's type, for messages."""
    name = type(value).__qualname__
    return "Array" if name == "ArrayImpl" else name


def a_type(value: Any) -> str:
    """The type name with its article: `a list`, `an Array`."""
    name = type_name(value)
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def some(texts: Sequence[str], most: int = 6, total: int | None = None) -> str:
    """The first few texts, joined, and the number of the others."""
    shown, total = texts[:most], len(texts) if total is None else total
    return ", ".join(shown) + (f" and {total - len(shown)} more" if total > len(shown) else "")


def at_path(error: BaseException, path: str) -> BaseException:
    """Adds the key path to `error`: to the message of a GraftaxError, as a note to any other."""
    if isinstance(error, GraftaxError) and not getattr(error, "_has_path", False):
        error.args = (f"{path}: {error.args[0]}", *error.args[1:])
        error._has_path = True  # type: ignore[attr-defined]
    elif not isinstance(error, GraftaxError):
        error.add_note(f"graftax was walking {path}")
    return error


def rename_leaves(error: BaseException, paths: Sequence[str], flat: str = "leaves") -> None:
    """Rewrites `leaves[3]`, JAX's name for a flat argument, to that leaf's key path."""
    if error.args and isinstance(error.args[0], str) and f"{flat}[" in error.args[0]:
        text = re.sub(
            rf"\b{re.escape(flat)}\[(\d+)\]",
            lambda m: paths[int(m[1])] if int(m[1]) < len(paths) else m[0],
            error.args[0],
        )
        error.args = (text, *error.args[1:])


CHANGE_LOST = (
    "{name} changed {paths}, but works by value: the change is dropped and not part of the result. "
    "Return the changed object, or use graftax.jit, which brings changes back."
)
