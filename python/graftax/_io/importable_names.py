# SPDX-License-Identifier: Apache-2.0
"""Names of classes and functions in a file: `module:qualname`. Reading a name imports and calls nothing.

A name is resolved only to an object that was passed to `load` (in `like` or `classes=`), to a class that is registered
as a part of graphs, or to one of a library that graftax knows.
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
from graftax._base.class_lookup import in_mro
from graftax._base.trace_markers import Dynamic, Static
from graftax._graph.module import Module
from graftax._graph.path import Graph
from graftax._graph.types.describe import by_fields, static_classes
from graftax._jax.tree_registry import is_tree_node

MISSING: Any = object()

# Built-in types of nodes, by name. Some of them cannot be imported by their names.
BUILTIN: dict[str, type] = {
    f"{cls.__module__}:{cls.__qualname__}": cls
    for cls in (list, tuple, dict, set, frozenset, bytearray, array.array, types.SimpleNamespace, types.FunctionType)
    + (collections.OrderedDict, collections.defaultdict, collections.deque, functools.partial, weakref.ref)
    + (types.MethodType, types.CellType, types.MappingProxyType, np.ndarray)
} | {"graftax:Static": Static, "graftax:Dynamic": Dynamic}
_PLAIN = (int, float, bool, complex, str, bytes, object, type(None), type(...))
PLAIN: dict[str, type] = {f"{cls.__module__}:{cls.__qualname__}": cls for cls in _PLAIN}


class NameTable:
    """The names in a file, numbered in the order of their first use."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, value: object) -> int:
        return self.numbers.setdefault(full_name(value), len(self.numbers))


def full_name(value: Any) -> str:
    """The name in a file. A public object of graftax has its public name, whichever module defines it."""
    module, name = value.__module__, value.__qualname__
    # Modules of graftax can then be moved without making files unreadable.
    if module.startswith("graftax.") and vars(sys.modules["graftax"]).get(name) is value:
        module = "graftax"
    return f"{module}:{name}"


def has_name(value: Any) -> bool:
    """Is the object found by its own module and qualified name?"""
    try:
        module, name = value.__module__, value.__qualname__
    except Exception:  # a class that answers for every attribute
        return False
    return type(module) is str and type(name) is str and find_loaded(module, name) is value


def find_loaded(module: str, qualname: str) -> Any:
    """The object of a name in the loaded modules; MISSING if there is none. Runs no user code."""
    scope: Any = sys.modules.get(module, MISSING)
    if not isinstance(scope, types.ModuleType):
        return MISSING
    for part in qualname.split("."):
        # Attributes are read from dicts alone: neither a module's nor a class's `__getattr__` runs.
        names = types.ModuleType.__getattribute__(scope, "__dict__") if isinstance(scope, types.ModuleType) else None
        if names is None and isinstance(scope, type):
            names = type.__getattribute__(scope, "__dict__")
        if names is None or part not in names:
            return MISSING
        scope = names[part]
    return scope


class NameResolver:
    """Resolves the names of a file to objects that are allowed there.

    Args:
        like: the objects in `like`, by name.
        classes: classes, functions, and patterns of `module.name`; or "dict", which loads objects of unknown classes
            as dicts.
    """

    def __init__(self, like: Mapping[str, Any], classes: Any) -> None:
        self.as_dicts = isinstance(classes, str) and classes == "dict"
        entries = () if self.as_dicts else (classes,) if isinstance(classes, (str, type)) else tuple(classes)
        self._patterns = [text for text in cast("Iterable[Any]", entries) if isinstance(text, str)]
        self._objects: dict[str, Any] = {**like}
        for value in entries:
            if not isinstance(value, str):
                self._objects[full_name(value)] = value
        self.unknown: dict[str, None] = {}

    def resolve_class(self, name: str) -> Any:
        """The class of a node; MISSING, which is noted, if the name is not allowed."""
        value = self._find(name, BUILTIN)
        return value if isinstance(value, type) else self.note_missing(name)

    def resolve(self, name: str) -> Any:
        """A class, a function or another object saved by name; MISSING, which is noted, if the name is not allowed."""
        value = self._find(name, PLAIN, BUILTIN)
        return self.note_missing(name) if value is MISSING else value

    def resolve_module(self, name: str) -> Any:
        value = self._objects.get(f"{name}:", MISSING)  # `names_in` adds modules without a qualified name
        if value is MISSING and self._is_listed(name):
            value = sys.modules.get(name, MISSING)
        return self.note_missing(name) if value is MISSING else value

    def _find(self, name: str, *builtin: Mapping[str, type]) -> object:
        # What the user passed comes first, then built-in types, then registered classes.
        for objects in (self._objects, *builtin):
            if name in objects:
                return objects[name]
        module, _, qualname = name.partition(":")
        value = find_loaded(module, qualname)
        if value is MISSING:
            return MISSING
        if self._is_listed(f"{module}.{qualname}"):
            return value
        # Without a pattern, only registered classes are allowed, and functions that cannot do harm.
        if isinstance(value, type):
            return value if is_known_class(value) else MISSING
        packages = [name for name in interop.ADAPTERS if name in sys.modules]
        is_of_library = any(module == name or module.startswith(f"{name}.") for name in packages)
        return value if is_of_library or is_arithmetic(value) else MISSING

    def _is_listed(self, name: str) -> bool:
        """Does a pattern in `classes=` match the name, or a module or class that contains it?"""
        return any(fnmatch.fnmatchcase(name, p) or fnmatch.fnmatchcase(name, f"{p}.*") for p in self._patterns)

    def note_missing(self, name: str) -> Any:
        """Notes that a name is not known, for the error that lists all of them."""
        self.unknown[name] = None
        return MISSING


def is_arithmetic(value: object) -> bool:
    """Is it a public function of JAX on arrays that does not read or write files?"""
    name = getattr(value, "__name__", "")
    public = any(vars(module).get(name) is value for module in (jax.nn, jax.lax, jax.numpy))
    return public and name not in ("save", "savez", "load", "fromfile")


def is_known_class(cls: type) -> bool:
    """Is it a registered class, or one whose instances can only be values?"""
    if cls in by_fields or cls in static_classes or issubclass(cls, (Module, np.generic)) or is_tree_node(cls):
        return True
    # Named tuples are built by `tuple.__new__`, which runs no code of theirs.
    if issubclass(cls, tuple) and isinstance(in_mro(cls, "_fields"), tuple):
        return True
    if cls.__module__ == "jax.numpy" or issubclass(cls, enum.Enum):
        return True
    return interop.describe(cls) is not None


def names_in(graph: Graph) -> dict[str, Any]:
    """The classes, functions and modules in a graph, by name."""
    objects: dict[str, Any] = {}
    for row in graph.rows:
        value = row.value
        # A file names the class of a node, and a value by itself or by its class. A function is a node that has a name.
        is_named = row.is_leaf or isinstance(value, types.FunctionType)
        values: Iterable[Any] = (value, type(value)) if is_named else (type(value),)
        for value_or_class in values:
            if isinstance(value_or_class, types.ModuleType):
                objects[f"{value_or_class.__name__}:"] = value_or_class
            elif isinstance(value_or_class, (type, types.FunctionType, types.BuiltinFunctionType)) or has_name(
                value_or_class
            ):
                objects.setdefault(full_name(value_or_class), value_or_class)
    return objects
