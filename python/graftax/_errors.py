# SPDX-License-Identifier: Apache-2.0
"""Every exception and message of graftax, each with its remedy."""

from __future__ import annotations

import pickle
import re
from collections.abc import Sequence


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
    """A change that the options forbid, or that cannot be brought back to the caller."""


class RecompileWarning(UserWarning):
    """A static value changes on most calls, and each change compiles anew."""


class CapturedArrayWarning(UserWarning):
    """A big NumPy array that the function captures is copied on every call."""


class LostChangeWarning(UserWarning):
    """A by-value call changed an argument, and the change is dropped."""


def at_path(error: BaseException, path: str) -> BaseException:
    """Puts the key path into `error`: into the message of ours, as a note on anybody else's."""
    if isinstance(error, GraftaxError) and not getattr(error, "_has_path", False):
        error.args = (f"{path}: {error.args[0]}", *error.args[1:])
        error._has_path = True  # type: ignore[attr-defined]
    elif not isinstance(error, GraftaxError):
        error.add_note(f"graftax was walking {path}")
    return error


def rename_leaves(error: BaseException, paths: Sequence[str]) -> None:
    """Rewrites `leaves[3]`, JAX's name for a flat argument, to that leaf's key path."""
    if error.args and isinstance(error.args[0], str) and "leaves[" in error.args[0]:
        text = re.sub(
            r"\bleaves\[(\d+)\]",
            lambda m: paths[int(m[1])] if int(m[1]) < len(paths) else m[0],
            error.args[0],
        )
        error.args = (text, *error.args[1:])


MUTATION_FORBIDDEN = (
    "{name} changed {paths}, and mutation='error' forbids that. Return the new value instead, or use "
    "mutation='propagate' (the change comes back to the caller) or 'discard'."
)
CHANGE_LOST = (
    "{name} changed {paths}, but works by value: the change is dropped and not part of the result. "
    "Return the changed object, or use graftax.jit, which brings changes back."
)
GLOBAL_ASSIGNED = (
    "{name} assigns the global {names}. A compiled call cannot repeat an assignment to a module's globals: keep the "
    "value in a list, a dict or an object and change that, or return it."
)
GENERATOR = (
    "{name} is a {what}: its body runs after the call has returned, where nothing can be traced. Compile a plain "
    "function and call it from the {what}."
)
CHANGED_BEHIND = (
    "{name} was traced, and meanwhile {path} was changed from outside the traced copy, most likely by a helper that "
    "reaches it through its own globals or closure. Pass it to the function as an argument."
)
STATIC_CHANGES = (
    "{name} compiles anew because {path} keeps changing (last values: {values}); {count} versions so far. Python "
    "numbers are static: to compile once, trace it with jit(..., dynamic={path!r}), pass graftax.Dynamic(value), or "
    "make it a jax.Array."
)
DONATED_AND_KEPT = (
    "{name} is asked to donate {donated}, but {kept} is the same array and is kept. Donate both (it is then passed "
    "once), pass a copy (jnp.copy) for one of them, or donate neither."
)
DELETED = (
    "{path} holds an array that was deleted, so {name} cannot run ({error}). Most likely an earlier call took it as a "
    "donated argument: use what that call returned or wrote back, or do not donate it."
)
BIG_CAPTURED = (
    "{name} captures the NumPy array {path} ({size} MB), which is copied on every call, so that changing it is seen. "
    "Make it a jax.Array once: jnp.asarray(...)."
)
CLASS_GONE = "this GraphDef holds {value!r} at {path}, which cannot be pickled: {error}"
