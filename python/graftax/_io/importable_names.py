# SPDX-License-Identifier: Apache-2.0
"""Classes and functions in a file: `module:qualname`, and nothing else. Reading one imports and calls nothing.

A name leads to an object only where that was given to `load` (in `like`, in `classes=`), or where somebody has made the
class known as what graphs consist of: by registering it, or as a library that graftax knows.
"""

from __future__ import annotations

import array
import collections
import enum
import fnmatch
import functools
import sys
import types
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, cast

import jax
import jax.numpy
import numpy as np

from graftax import interop
from graftax._base.marks import Dynamic, Static
from graftax._graph.module import Module
from graftax._graph.path import Graph
from graftax._graph.types.describe import by_fields, static_classes
from graftax._jax.compat import is_tree_node

MISSING: Any = object()

# Types of nodes that have no class statement, by name: pickle knows no name for some of them.
BUILTIN: dict[str, type] = {
    f"{cls.__module__}:{cls.__qualname__}": cls
    for cls in (list, tuple, dict, set, frozenset, bytearray, array.array, types.SimpleNamespace, types.FunctionType)
    + (collections.OrderedDict, collections.defaultdict, collections.deque, functools.partial, weakref.ref)
    + (types.MethodType, types.CellType, types.MappingProxyType, np.ndarray)
} | {"graftax:Static": Static, "graftax:Dynamic": Dynamic}
_PLAIN = (int, float, bool, complex, str, bytes, object, type(None), type(...))
PLAIN: dict[str, type] = {f"{cls.__module__}:{cls.__qualname__}": cls for cls in _PLAIN}


class Names:
    """The names that a file uses, in the order in which they were met."""

    def __init__(self) -> None:
        self.all: dict[str, int] = {}

    def number(self, value: Any) -> int:
        return self.all.setdefault(full_name(value), len(self.all))


def full_name(value: Any) -> str:
    """What a file calls it. A public name of graftax stays, wherever the module is that it is written in."""
    module, name = value.__module__, value.__qualname__
    if module.startswith("graftax.") and vars(sys.modules["graftax"]).get(name) is value:
        module = "graftax"
    return f"{module}:{name}"


def has_name(value: Any) -> bool:
    """Does its name lead to it?"""
    try:
        module, name = value.__module__, value.__qualname__
    except Exception:  # a class that answers for every attribute
        return False
    return type(module) is str and type(name) is str and found(module, name) is value


def found(module: str, qualname: str) -> Any:
    """What is under a name in the modules that are loaded; MISSING where nothing is. Runs no code of anybody."""
    at: Any = sys.modules.get(module, MISSING)
    if not isinstance(at, types.ModuleType):
        return MISSING
    for part in qualname.split("."):
        names = types.ModuleType.__getattribute__(at, "__dict__") if isinstance(at, types.ModuleType) else None
        if names is None and isinstance(at, type):
            names = type.__getattribute__(at, "__dict__")
        if names is None or part not in names:
            return MISSING
        at = names[part]
    return at


class Known:
    """What the names of a file may lead to.

    Args:
        like: objects that are known because `like` has them.
        classes: classes, functions, and patterns of `module.name`; or "dict", which makes dicts of objects of unknown
            classes.
    """

    def __init__(self, like: Mapping[str, Any], classes: Any) -> None:
        self.as_dicts = isinstance(classes, str) and classes == "dict"
        given = () if self.as_dicts else (classes,) if isinstance(classes, (str, type)) else tuple(classes)
        self._patterns = [text for text in cast("Iterable[Any]", given) if isinstance(text, str)]
        self._known: dict[str, Any] = {**like}
        for value in given:
            if not isinstance(value, str):
                self._known[full_name(value)] = value
        self.unknown: dict[str, None] = {}

    def a_class(self, name: str) -> Any:
        """The class of a node; MISSING, and noted, where it is not known."""
        value = self._known.get(name, MISSING)
        if value is MISSING:
            value = BUILTIN.get(name, MISSING)
        if value is MISSING:
            value = self._allowed(name)
        return value if isinstance(value, type) else self.missing(name)

    def value(self, name: str) -> Any:
        """A class, a function or another object that counts by its name; MISSING, and noted, where it is not known."""
        value = self._known.get(name, MISSING)
        if value is MISSING:
            value = PLAIN.get(name, BUILTIN.get(name, MISSING))
        return self.missing(name) if value is MISSING and (value := self._allowed(name)) is MISSING else value

    def module(self, name: str) -> Any:
        value = self._known.get(f"{name}:", MISSING)
        if value is MISSING and self._is_given(name):
            value = sys.modules.get(name, MISSING)
        return self.missing(name) if value is MISSING else value

    def _allowed(self, name: str) -> Any:
        module, _, qualname = name.partition(":")
        value = found(module, qualname)
        if value is MISSING:
            return MISSING
        if self._is_given(f"{module}.{qualname}"):
            return value
        if isinstance(value, type):
            return value if is_known_class(value) else MISSING
        if is_arithmetic(value) or is_of(module, [name for name in interop.ADAPTERS if name in sys.modules]):
            return value
        return MISSING

    def _is_given(self, name: str) -> bool:
        """A pattern means what it spells, and all that is in it."""
        return any(fnmatch.fnmatchcase(name, p) or fnmatch.fnmatchcase(name, f"{p}.*") for p in self._patterns)

    def missing(self, name: str) -> Any:
        """Notes that something is not known."""
        self.unknown[name] = None
        return MISSING


def is_arithmetic(value: Any) -> bool:
    """Is it a public function of JAX on arrays, none that reads or writes files?"""
    name = getattr(value, "__name__", "")
    public = any(vars(module).get(name) is value for module in (jax.nn, jax.lax, jax.numpy))
    return public and name not in ("save", "savez", "load", "fromfile")


def is_of(module: str, packages: Iterable[str]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in packages)


def is_known_class(cls: type) -> bool:
    """Is it a class that somebody has registered, or one whose instances can only be values?"""
    if cls in by_fields or cls in static_classes or issubclass(cls, (Module, np.generic)) or is_tree_node(cls):
        return True
    if issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple):
        return True
    if cls.__module__ == "jax.numpy" or issubclass(cls, enum.Enum):
        return True
    return interop.describe(cls) is not None


def names_in(graph: Graph) -> dict[str, Any]:
    """The classes, functions and modules of objects, by name."""
    found: dict[str, Any] = {}
    for row in graph.rows:
        value = row.value
        values: Iterable[Any] = (value, type(value)) if row.is_leaf else (type(value),)
        if isinstance(value, types.FunctionType):
            values = (value, type(value))
        for known in values:
            if isinstance(known, types.ModuleType):
                found[f"{known.__name__}:"] = known
            elif isinstance(known, (type, types.FunctionType, types.BuiltinFunctionType)) or has_name(known):
                found.setdefault(f"{known.__module__}:{known.__qualname__}", known)
    return found
