# SPDX-License-Identifier: Apache-2.0
"""Handles: arguments that stand for other objects. A function is given the objects inside; here alone they are opened.

A kind of handle says in a `HandleClass` how; nothing else in a call knows which kinds there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from graftax import _core

R = TypeVar("R")


class HandleClass(NamedTuple):
    """How the handles of one class are used."""

    # Arguments, to the same with the objects inside in place of handles, and what `close` is to know.
    open: Callable[[Sequence[Any]], tuple[list[Any], Any]]
    # (what `open` gave, the result, the name of the function, may the result use handles up?): changes go back.
    close: Callable[[Any, object, str, bool], None]
    # (name, handle, run): `run` on the object inside, outside of a call; what changed goes back.
    run_inside: Callable[[str, Any, Callable[[Any], Any]], Any]
    is_donated: Callable[[Any], bool]  # may a call use the memory of this one?
    is_donated_place: Callable[[Sequence[Any]], bool]  # does this key path, from a handle on, lead to such memory?
    static_fields: frozenset[str]  # these attributes of a handle are static; the walk opens it like any object


class HandleLayout:
    """Base class of the static part of a handle: what is inside, compared by equality."""

    __slots__ = ()

    graphdef: _core.GraphDef

    @property
    def shapes(self) -> dict[tuple[Any, ...], str]:
        """By key path, the shapes and dtypes of the arrays that the handle keeps in buffers."""
        return {}


_CLASSES: dict[type, HandleClass] = {}


def add_handle_class(cls: type, how: HandleClass) -> None:
    _CLASSES[cls] = how


def handle_classes() -> dict[type, HandleClass]:
    return _CLASSES


def is_handle(value: object) -> bool:
    return type(value) in _CLASSES


def is_donated(root: object) -> bool:
    """May a call use the memory of what this argument holds?"""
    how = _CLASSES.get(type(root))
    return how is not None and how.is_donated(root)


def is_donated_place(root: object, path: Sequence[Any]) -> bool:
    """Is the array at this key path below an argument donated with it?"""
    return is_donated(root) and _CLASSES[type(root)].is_donated_place(path)


def with_handles(call: Callable[[list[Any]], R], values: Sequence[Any], name: str, uses_up: bool) -> R:
    """`call` on these arguments, with the object inside in place of each handle; changes go back into handles."""
    given, opened = list(values), list[tuple[HandleClass, Any]]()
    for how in {_CLASSES[type(value)] for value in values if type(value) in _CLASSES}:
        given, of_class = how.open(given)
        opened.append((how, of_class))
    result = call(given)
    for how, of_class in opened:
        how.close(of_class, result, name, uses_up)
    return result


def run_inside(name: str, handle: object, run: Callable[[Any], R]) -> R:
    """A transform's call on a handle: `run` is given the object inside."""
    return _CLASSES[type(handle)].run_inside(name, handle, run)
