# SPDX-License-Identifier: Apache-2.0
"""Names by which another process finds a module's dict, a class or a function, also inside of wrappers."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any, cast

from graftax._base.missing import MISSING
from graftax._capture.constant_values import in_class

# (module, qualified name of a class or a function in it or "" for the module itself[, name of an attribute]). A part of
# the qualified name that begins with "@" unwraps: `Model.size.@fget`, `helper.@__wrapped__`.
Holder = tuple[str, ...]

_WRAPPED_ATTRIBUTES = ("__func__", "__wrapped__", "fget", "fset", "fdel", "func", "fun", "jvp", "fwd", "bwd")
_MAX_WRAPPERS = 8  # around one function


def unwrap(value: object, name: str) -> Any:
    """The attribute of a wrapper, or the variable of its closure (`cell:name`). Raises KeyError if it has none."""
    if name.startswith("cell:"):
        function = cast("types.FunctionType", value)
        try:
            return (function.__closure__ or ())[function.__code__.co_freevars.index(name[5:])].cell_contents
        # Another version of the wrapper may lack the variable, or be no function. An empty cell is a ValueError, too.
        except (ValueError, AttributeError) as error:
            raise KeyError(name) from error
    wrapped = getattr(value, name, None)
    if wrapped is None:
        raise KeyError(name)
    return wrapped


def _wrapped_values(value: object) -> Iterator[tuple[str, Any]]:
    """The attributes and closure variables in which a wrapper may hold a function, with their values."""
    if isinstance(value, (type, types.ModuleType)):
        return
    names = [name for name in _WRAPPED_ATTRIBUTES if not isinstance(value, functools.partial) or name == "func"]
    if isinstance(value, types.FunctionType):
        names = ["__wrapped__", *(f"cell:{name}" for name in value.__code__.co_freevars)]
    for name in names:
        # `getattr` may run any code: some classes answer for every attribute.
        with contextlib.suppress(Exception):
            yield f"@{name}", unwrap(value, name)


def _may_wrap(value: object) -> bool:
    # A class method and a property cannot be called, and hold a function.
    return callable(value) or isinstance(value, (classmethod, property))


def path_through_wrappers(start: object, function: object) -> str | None:
    """The path from an object through wrappers to a function, to be appended to the object's name."""
    level: list[tuple[str, Any]] = [("", start)]
    visited = {id(start)}
    # Level by level, so that the shortest path is found.
    for _ in range(_MAX_WRAPPERS):
        next_level: list[tuple[str, Any]] = []
        for path, value in level:
            if value is function:
                return path
            for name, wrapped in _wrapped_values(value):
                if id(wrapped) not in visited and _may_wrap(wrapped):
                    visited.add(id(wrapped))
                    next_level.append((f"{path}.{name}", wrapped))
        level = next_level
    return None


def holder_of(target: Any, bound_names: dict[int, tuple[Holder, Any]], modules: Iterable[str]) -> Holder | None:
    """The holder of a class or a function: its own name, a path through the wrapper of that name, or a bound name.

    Args:
        bound_names: by the id of a value, a name that it is bound to, and the value.
        modules: searched last, name by name.
    """
    module, name = target.__module__, target.__qualname__
    # The own name first. It may lead to a decorated function, which has this one inside.
    try:
        start = resolve((module, name))
    except (ImportError, AttributeError, KeyError, TypeError):
        start = None
    if start is not None and (path := path_through_wrappers(start, target)) is not None:
        return module, name + path
    if id(target) in bound_names:
        return bound_names[id(target)][0]
    for holder, value in list(bound_names.values()):
        path = path_through_wrappers(value, target) if _may_wrap(value) else None
        if path is not None:
            return (*holder[:-1], holder[-1] + path)
    return next((holder for name in modules if (holder := _in_module(name, target)) is not None), None)


def _in_module(module: str, function: object) -> Holder | None:
    """The holder of a function that a module, or a class in it, has under another name or in a wrapper."""
    scope = dict(vars(sys.modules[module])) if module in sys.modules else {}
    classes = [value for value in scope.values() if isinstance(value, type) and value.__module__ == module]
    for name, attributes in [("", scope), *((cls.__qualname__, dict(vars(cls))) for cls in classes)]:
        for key, value in attributes.items():
            path = path_through_wrappers(value, function) if _may_wrap(value) else None
            if path is not None:
                return (module, f"{name}.{key}{path}") if name else (module, "", key + path)
    return None


def resolve(holder: Holder) -> Any:
    """The dict of a module, the class or the function of a holder. Raises errors of its import, and KeyError."""
    module, name, *attribute = holder
    if module not in sys.modules:
        __import__(module)
    value: Any = sys.modules[module]
    if name:
        for step in name.split("."):
            value = unwrap(value, step[1:]) if step.startswith("@") else _attribute(value, step)
    elif not attribute:
        return vars(value)
    if attribute:
        key, *wrappers = attribute[0].split(".@")
        value = value_at(vars(value) if isinstance(value, types.ModuleType) else value, key)
        for wrapper in wrappers:
            value = unwrap(value, wrapper)
    return value


def _attribute(value: object, name: str) -> Any:
    """An attribute of a class or a module as it is; of a module also one that its `__getattr__` imports on demand."""
    # Not by `getattr`, which would unwrap a static method and bind a class method.
    is_on_demand = isinstance(value, types.ModuleType) and name not in vars(value)
    return getattr(value, name) if is_on_demand else vars(value)[name]


def value_at(holder: Any, name: str) -> Any:
    """The value of a name in a module's dict, in a class, or in the keyword defaults of a function."""
    if isinstance(holder, type):
        return in_class(holder, name)[1]
    if isinstance(holder, types.FunctionType):
        return (holder.__kwdefaults__ or {}).get(name, MISSING)
    return holder.get(name, MISSING)
