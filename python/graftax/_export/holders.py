# SPDX-License-Identifier: Apache-2.0
"""Where another process finds a module's dict, a class or a function: by names, and through what stands around it."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any, cast

from graftax._base.missing import MISSING
from graftax._capture.bytecode import in_class

# A module, and the qualified name of a class or function there; "" is the module itself. Or, third, a name of that.
# A part of the qualified name that begins with "@" is what a wrapper holds: `Model.size.@fget`, `helper.@__wrapped__`.
Holder = tuple[str, ...]

_INSIDE = ("__func__", "__wrapped__", "fget", "fset", "fdel", "func", "fun", "jvp", "fwd", "bwd")
_MOST_WRAPPERS = 8  # around one function


def inside(value: Any, name: str) -> Any:
    """What a wrapper holds under a name, or in a variable of its closure (`cell:name`). Raises LookupError."""
    if name.startswith("cell:"):
        function = cast("types.FunctionType", value)
        try:
            return (function.__closure__ or ())[function.__code__.co_freevars.index(name[5:])].cell_contents
        except (ValueError, AttributeError) as error:
            raise KeyError(name) from error
    found = getattr(value, name, None)
    if found is None:
        raise KeyError(name)
    return found


def _held(value: Any) -> Iterator[tuple[str, Any]]:
    """The names under which a wrapper may hold a function, and what is there."""
    if isinstance(value, (type, types.ModuleType)):
        return
    names = [name for name in _INSIDE if not isinstance(value, functools.partial) or name == "func"]
    if isinstance(value, types.FunctionType):
        names = ["__wrapped__", *(f"cell:{name}" for name in value.__code__.co_freevars)]
    for name in names:
        try:
            yield f"@{name}", inside(value, name)
        except Exception:  # a class that answers for every attribute
            continue


def within(start: Any, wanted: Any) -> str | None:
    """The names that lead from an object through wrappers to a function, as the end of a holder's name."""
    todo: list[tuple[str, Any]] = [("", start)]
    met = {id(start)}
    for _ in range(_MOST_WRAPPERS):
        following: list[tuple[str, Any]] = []
        for path, value in todo:
            if value is wanted:
                return path
            for name, held in _held(value):
                if id(held) not in met and (callable(held) or isinstance(held, (staticmethod, classmethod, property))):
                    met.add(id(held))
                    following.append((f"{path}.{name}", held))
        todo = following
    return None


def place_of(at: Any, bound: dict[int, tuple[Holder, Any]], modules: Iterable[str] = ()) -> Holder | None:
    """Where a class or a function is found: by its own name, in what has that name, or in what is bound to one.

    Args:
        bound: by id, values and the names that they are bound to.
        modules: whose names are looked through at the end.
    """
    module, name = at.__module__, at.__qualname__
    try:
        start = found((module, name))
    except (ImportError, AttributeError, KeyError, TypeError):
        start = None
    if start is not None and (path := within(start, at)) is not None:
        return module, name + path
    if id(at) in bound:
        return bound[id(at)][0]
    for holder, value in list(bound.values()):
        path = (
            within(value, at) if callable(value) or isinstance(value, (staticmethod, classmethod, property)) else None
        )
        if path is not None:
            return _with_path(holder, path)
    return next((holder for name in modules if (holder := _in_module(name, at)) is not None), None)


def _in_module(module: str, at: Any) -> Holder | None:
    """Where a module, or a class in it, has a function under a name that is not its own, or in a wrapper there."""
    scope = dict(vars(sys.modules[module])) if module in sys.modules else {}
    classes = [value for value in scope.values() if isinstance(value, type) and value.__module__ == module]
    for name, held in [("", scope), *((cls.__qualname__, dict(vars(cls))) for cls in classes)]:
        for key, value in held.items():
            if callable(value) or isinstance(value, (staticmethod, classmethod, property)):
                path = within(value, at)
                if path is not None:
                    return (module, name, key + path) if not name else (module, f"{name}.{key}{path}")
    return None


def _with_path(holder: Holder, path: str) -> Holder:
    """A bound name, which is the third of a holder, with the rest of the way in it."""
    *first, name = holder
    return (*first, name + path)


def found(holder: Holder) -> Any:
    """The dict of a module, a class or a function, by where it is found. Raises what an import raises, and KeyError."""
    module, name, *attribute = holder
    if module not in sys.modules:
        __import__(module)
    at: Any = sys.modules[module]
    if name:
        for part in name.split("."):
            at = inside(at, part[1:]) if part.startswith("@") else vars(at)[part]
    elif not attribute:
        return vars(at)
    if attribute:
        first, *rest = attribute[0].split(".@")
        at = value_at(vars(at) if isinstance(at, types.ModuleType) else at, first)
        for part in rest:
            at = inside(at, part)
    return at


def value_at(holder: Any, name: str) -> Any:
    """What a binding has: of a module's dict, of a class, or of the keyword defaults of a function."""
    if isinstance(holder, type):
        return in_class(holder, name)[1]
    if isinstance(holder, types.FunctionType):
        return (holder.__kwdefaults__ or {}).get(name, MISSING)
    return holder.get(name, MISSING)
