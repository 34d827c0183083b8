# SPDX-License-Identifier: Apache-2.0
"""Every exception and message of graftax, each with its remedy."""

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
    """A change that the options forbid, or that cannot be brought back to the caller."""


class CheckError(GraftaxError, AssertionError):
    """jit(check=True): the compiled function did something else than the plain one."""


class RecompileWarning(UserWarning):
    """A static value changes on most calls, and each change compiles anew."""


class CapturedArrayWarning(UserWarning):
    """A big NumPy array that the function captures is copied on every call."""


class LostChangeWarning(UserWarning):
    """A by-value call changed an argument, and the change is dropped."""


def type_name(value: Any) -> str:
    """The type of a value, as messages name it."""
    name = type(value).__qualname__
    return "Array" if name == "ArrayImpl" else name


def a_type(value: Any) -> str:
    """A value by its type: `a list`, `an Array`."""
    name = type_name(value)
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def some(texts: Sequence[str], most: int = 6, total: int | None = None) -> str:
    """The first few texts, and how many more there are."""
    shown, total = texts[:most], len(texts) if total is None else total
    return ", ".join(shown) + (f" and {total - len(shown)} more" if total > len(shown) else "")


def at_path(error: BaseException, path: str) -> BaseException:
    """Puts the key path into `error`: into the message of ours, as a note on anybody else's."""
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
NO_PATTERN = "{text!r} is no pattern: it makes no sense from {rest!r} on. Write layers[*].w or **.w"
EMPTY_PATTERN = "'' is no pattern: it is empty. Write layers[*].w, or '**', which covers everything"
STRUCTURE_CHANGES = (
    "{name} compiles anew on most calls: {count} structures in a row, each another than the one before. Between the "
    "last two:\n{differences}\nWhat is no array is compared, and a list that grows is a new structure each time: keep "
    "counters and logs outside of what the function is given, or make them jax.Arrays of a fixed shape."
)
STATIC_CHANGES = (
    "{name} compiles anew because {path} keeps changing (last values: {values}); {count} versions so far. Python "
    "numbers are static: to compile once, trace it with jit(..., dynamic={path!r}), pass graftax.Dynamic(value), or "
    "make it a jax.Array."
)
STATIC_CHANGES_IN_PACK = (
    "{name} compiles anew because {path} keeps changing (last values: {values}); {count} versions so far. Python "
    "numbers are static, in packed state too: to compile once, pack a jax.Array or graftax.Dynamic(value) there."
)
BIG_CAPTURED = (
    "{name} captures the NumPy array {path} ({size} MB), which is copied on every call, so that changing it is seen. "
    "Make it a jax.Array once: jnp.asarray(...)."
)
CLASS_GONE = "this {what} holds {value!r} at {path}, which cannot be pickled: {error}"
KEYWORD_ONLY = "{name}: keyword-only arguments have no position that a rule could be given: {error}"
NOT_AN_ENTRY = "{name}: {option} gives {entry!r} for {path}. Give {what} there, or a tree of them like the argument."
NO_ENTRY = (
    "{name}: {option} says nothing of {path}. Add an entry for it; the last of several patterns can be '**', which "
    "covers what no other does."
)
NO_TEXT = (
    "{name}: a dict for {option} as a whole has patterns of key paths as its keys, such as 'x' or '**.w', and "
    "{given!r} is none. For one entry an argument, give a tuple."
)
ENTRY_TOO_DEEP = "{name}: {option} has {entry!r} for {path}, which is an array. Give {what} there."
OTHER_PARTS = (
    "{name}: {option} has {entry!r} for {path}: that {found}, and {path} does not. Give {what} for all of it, or one "
    "for each of its parts."
)
PATTERN_UNUSED = (
    "{name}: the pattern {pattern!r} of {option} decides about no array: it covers none, or patterns before it cover "
    "them all (the first that covers a path counts). There is: {paths}. .w is an attribute, [w] a key."
)
TWO_ENTRIES = (
    "{name}: {one} and {other} are one array, in an object that is reached twice, and {option} gives {a} for the first "
    "place and {b} for the second. Give both places the same, or pass a copy of the object in one of them."
)
AMBIGUOUS_ENTRY = (
    "{name} puts a new array at {path}, where {option} could mean {entries}. Say which with an entry for that place, "
    "or return the array as part of the result."
)

TREE_MISMATCH = "{name}: the trees do not have the same structure.\n{places}"
NO_IDENTITY = "a tree without leaves cannot be reduced. Give identity=, the result for that."
NOT_TRANSPOSABLE = "the tree is not what the two structures say.\nfound    {found}\nexpected {expected}"
NOT_MUTABLE = (
    "{paths} cannot be written to: every object from the root (a {cls}) down to it is immutable. "
    "graftax.at(obj)[path].set(value) returns a copy with the new value."
)
INSIDE_ANOTHER = (
    "{path!r} lies in {other!r}, which is replaced as well: the one value would be lost. Set the two one after the "
    "other, or make the pattern mean one of them."
)
TWO_VALUES = (
    "{path!r} is given two values: it is one place, named twice or reached through a shared object. Name it once."
)
NO_POINTING = (
    "the function given to at() returned the value at {paths}, which stands in several places. To see which one is "
    "meant, it is called again with other objects there, and failed: {error}. Give it the path instead: "
    "at(obj)['layers[0].w']"
)
NO_PLACE = "nothing in this {cls} matches {where!r}. {near}"
WHERE_ELSEWHERE = (
    "the function given to at() must return parts of the object it is called with, nothing computed from them. It "
    "returned {found} that is no part of it. Give a path instead: at(obj)['layers[0].w']"
)
SET_COUNT = "set() takes a list or tuple with one value for each of the {places} places, got {given}."
NOT_SELECTED = "{spec} at {path!r} does not say whether a leaf is selected: give a bool, or a tree of bools."
NO_BOOL = "the tree of bools has nothing for {path!r}: give True or False for it, or one for all that contains it."
NO_SUCH_BOOL = "the tree of bools has an entry for {path!r}, and there is no such place."
OTHER_STRUCTURE = (
    "{name}: the graphs do not have the same structure at {path!r}: {one} in the first, {other} in another."
)
UNSHARED = (
    " jax.tree makes a tree, in which a shared object is several. For a map over each array once: leaves, graphdef = "
    "graftax.flatten(obj), then graftax.unflatten(graphdef, new_leaves)."
)
NO_TYPE = "{spec!r} cannot be asked with isinstance: give the class, {origin}, or a function of a leaf."
CHANGED_SINCE = (
    "{cls} changed while it was read, in another thread or in a function that was given a part of the graph."
)
REGISTERED_ALREADY = "{cls} is registered with JAX already: by a library, by a base class's decorator, or twice."
DATACLASS_ALREADY = (
    "{cls} is a dataclass already, as every subclass of graftax.Module: leave dataclass(slots=True) off, which would "
    "make it anew without what its fields are declared with. A class may write its own __slots__ and __init__."
)
REGISTERED_NAMES = "{cls} has no field {names}. It has {known}."
REGISTERED_ITEMS = (
    "{cls} holds items besides its attributes, which would be lost. "
    "Give register() flatten= and unflatten= that keep them."
)
REGISTERED_CHILDREN = (
    "register({cls}, flatten=..., names=...) names {wanted} children ({names}), and flatten gave {count}. "
    "Give a name for each child, or leave out names= where their number varies."
)
