# SPDX-License-Identifier: Apache-2.0
"""The exceptions of graftax and helpers for their messages. Each message is defined beside its `raise`."""

from __future__ import annotations

import pickle
import re
from collections.abc import Sequence


class GraftaxError(Exception):
    """Base of every error that graftax raises itself."""


class UnsupportedValueError(GraftaxError, TypeError):
    """A value cannot be part of a compiled program: it has hidden state, or holds arrays where none are allowed."""


class StructureError(GraftaxError, ValueError):
    """An object graph or a structure cannot be walked, rebuilt or matched."""


class ConcurrentChangeError(GraftaxError, RuntimeError):
    """An object was changed while it was walked or while the function was traced."""


class UnpicklableError(GraftaxError, pickle.PicklingError):
    """Something that is to be saved contains a value that cannot be pickled."""


class MutationError(GraftaxError, RuntimeError):
    """A change is forbidden by the options, or cannot be applied to the caller's objects."""


class IgnoredValueError(GraftaxError, RuntimeError):
    """A compiled function looked inside a value that `ignore=` leaves out."""


class CheckError(GraftaxError, AssertionError):
    """With `jit(check=True)`: the compiled function did not do what the plain one does."""


class RecompileWarning(UserWarning):
    """A function is compiled again and again for the same cause, such as a value that changes on most calls."""


class CapturedArrayWarning(UserWarning):
    """A large NumPy array that the function captures is copied on every call."""


class LostChangeWarning(UserWarning):
    """A change is lost: `filter_jit` works by value, or a NumPy array is changed in place that others may hold."""


class MissedDonationWarning(UserWarning):
    """With `donate="auto"`, more than 100 MB are kept because something else refers to them. Off by default."""


class RecordedCallWarning(UserWarning):
    """A call of a function of `graftax.record` went wrong, and a file with it was written, or could not be."""


class UntiedWarning(UserWarning):
    """Objects or arrays that are shared in the caller's objects became separate copies."""


class SharedGradientWarning(UserWarning):
    """A gradient counts uses of an object outside of the argument that is differentiated; `jax.grad` does not."""


class ImpureCallWarning(UserWarning):
    """The traced function makes a call that a compiled program cannot repeat: time, random numbers, print, files."""


class UnknownInterpreterWarning(RuntimeWarning):
    """graftax does not know this interpreter, so compiled functions do not notice all changes to what they read."""


def type_name(value: object) -> str:
    """The name of a value's type, for messages."""
    # The class of JAX's arrays is private: users know it as `jax.Array`.
    name = type(value).__qualname__
    return "Array" if name == "ArrayImpl" else name


def a_type(value: object) -> str:
    """The type name with its article: `a list`, `an Array`."""
    name = type_name(value)
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def some(texts: Sequence[str], max_shown: int = 6, total: int | None = None) -> str:
    """The first few texts, joined, and the number of those that are left out."""
    shown, total = texts[:max_shown], len(texts) if total is None else total
    return ", ".join(shown) + (f" and {total - len(shown)} more" if total > len(shown) else "")


def at_path(error: BaseException, path: str) -> BaseException:
    """Adds the key path to `error`: to the message of a GraftaxError, as a note to any other."""
    # An enclosing walk must not add its own path to an error that has one.
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
    "Return the changed object, or use graftax.jit, which applies changes."
)
