# SPDX-License-Identifier: Apache-2.0
"""Handles: arguments that stand for other objects, such as packed state. A function gets the objects inside.

Handles are opened and closed only here. A `HandleClass` defines how, so a call need not know the kinds of handles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from graftax import _core

R = TypeVar("R")


class HandleClass(NamedTuple):
    """How the handles of one class are used."""

    # arguments -> (arguments with the objects inside instead of handles, state for `close`).
    open: Callable[[Sequence[Any]], tuple[list[Any], Any]]
    # (state from `open`, result, name of the function, may handles be used up?): writes changes back into the handles.
    close: Callable[[Any, object, str, bool], None]
    is_donated: Callable[[Any], bool]  # may a call reuse the memory of this handle?
    donated_field: str  # the attribute of a handle that holds this memory
    static_fields: frozenset[str]  # these attributes of a handle are static; the walk opens it like any object


class HandleLayout:
    """Base class of a handle's aux data: the structure inside, compared by equality."""

    __slots__ = ()

    graphdef: _core.GraphDef

    @property
    def shapes(self) -> dict[tuple[Any, ...], str]:
        """By key path, the shapes and dtypes of the arrays that the handle keeps in buffers."""
        return {}


# Each class is added beside its definition, so that this module and the parts below need not import it.
HANDLE_CLASSES: dict[type, HandleClass] = {}


def is_handle(value: object) -> bool:
    return type(value) in HANDLE_CLASSES


def is_donated(root: object) -> bool:
    """May a call reuse the memory of this argument?"""
    handle_class = HANDLE_CLASSES.get(type(root))
    return handle_class is not None and handle_class.is_donated(root)


def is_donated_place(root: object, path: Sequence[Any]) -> bool:
    """Is the array at this key path below an argument donated with it?"""
    return is_donated(root) and getattr(path[0], "name", None) == HANDLE_CLASSES[type(root)].donated_field


def with_handles(call: Callable[[list[Any]], R], values: Sequence[Any], name: str, uses_up: bool) -> R:
    """Runs `call` with handles replaced by the objects inside them, and writes changes back into the handles."""
    arguments, opened = list(values), list[tuple[HandleClass, Any]]()
    # Once for each class, with all arguments: a handle that is passed twice is one object inside, too.
    for handle_class in {HANDLE_CLASSES[type(value)] for value in values if type(value) in HANDLE_CLASSES}:
        arguments, state = handle_class.open(arguments)
        opened.append((handle_class, state))
    result = call(arguments)
    for handle_class, state in opened:
        handle_class.close(state, result, name, uses_up)
    return result


def run_inside(name: str, handle: object, run: Callable[[Any], R]) -> R:
    """Runs `run` on the object inside a handle, outside of a call, and writes changes back. The handle stays usable."""
    return with_handles(lambda arguments: run(*arguments), [handle], name, uses_up=False)
