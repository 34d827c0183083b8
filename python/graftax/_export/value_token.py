# SPDX-License-Identifier: Apache-2.0
"""Texts that identify a value by its contents in every process, down to the functions that it calls."""

from __future__ import annotations

import abc
import enum
import functools
import hashlib
import pickle
import sys
import types
from typing import Any, cast

import jax
import numpy as np

from graftax._base.missing import MISSING
from graftax._capture.abstract_classes import registered_classes
from graftax._capture.code_owner import is_users_class, is_users_scope
from graftax._capture.constant_values import content
from graftax._export.structure_digest import Nameless, token
from graftax._jax.arrays import without_key
from graftax._jax.tree_registry import tree_functions
from graftax._jit.jitted import Jitted

_MAX_PARTS = 10_000  # parts of one value
_PLAIN = (bool, int, float, complex, str, bytes, type(None), types.CodeType)
_TREE_METHODS = ("tree_flatten", "tree_unflatten", "tree_flatten_with_keys")
_CONTAINERS = (tuple, list, frozenset, set, dict, types.MappingProxyType)


def value_token(value: object, in_order: bool = True) -> str:
    """A text that equal values share in every process. It is the class alone for a value that cannot be described.

    Args:
        in_order: the order of a set counts.
    """
    try:
        text = _Tokens(in_order=in_order).token_of(value)
    except Nameless:
        return f"a {type(value).__module__}.{type(value).__qualname__}"
    return text if len(text) < 200 else f"{type(value).__qualname__} {hashlib.sha256(text.encode()).hexdigest()}"


def content_token(value: object) -> tuple[str, list[Any]]:
    """A text that only values of equal content share, and the objects in it.

    Raises:
        Nameless: for a value that cannot be described, or that has such a part.
    """
    tokens = _Tokens(is_strict=True)
    return hashlib.sha256(tokens.token_of(value).encode()).hexdigest(), [part for _, part in tokens.visited.values()]


class _Tokens:
    """The tokens of one value and all its parts. An object that occurs again is a number.

    Args:
        is_strict: a part without a token is an error, and not its class alone.
        in_order: the order of a set counts.
    """

    def __init__(self, is_strict: bool = False, in_order: bool = True) -> None:
        self.visited: dict[int, tuple[int, Any]] = {}
        self._is_strict, self._in_order = is_strict, in_order

    def token_of(self, value: object) -> str:
        """The token of a value. Raises Nameless if there is none."""
        if value is MISSING or type(value) in _PLAIN:
            return token(value)
        library = library_name(value)
        if library is not None:
            return library
        if id(value) in self.visited:
            return f"#{self.visited[id(value)][0]}"
        if len(self.visited) >= _MAX_PARTS:
            raise Nameless
        # The value is kept, so that no other gets its id meanwhile. Numbered before its parts: a cycle leads back here.
        self.visited[id(value)] = len(self.visited), value
        return self._of_object(value)

    def _of_object(self, value: Any) -> str:
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, enum.Enum):
            return f"enum {token(type(value))}.{value.name} {self._part(value._value_)}"
        if isinstance(value, type):
            made_of = [f"{c.__module__}.{c.__qualname__}" for c in (type(value), *value.__mro__)]
            return f"{token(value)} {made_of} {registered_text(value)} {self._as_tree(value)}"
        if isinstance(value, types.ModuleType):
            return token(value)
        if isinstance(value, (staticmethod, classmethod)):
            return f"{type(value).__name__} {self.token_of(value.__func__)}"
        if isinstance(value, property):
            return f"property {self._tokens_of(value.fget, value.fset, value.fdel)}"
        if isinstance(value, types.MethodType):
            return f"method {self._tokens_of(value.__func__, value.__self__)}"
        if isinstance(value, tuple) and type(value) is not tuple:
            return f"{token(type(value))} {self._tokens_of(*cast('tuple[Any, ...]', value))}"
        # Sets count in their order, which code may see. Of texts it is another one in each process.
        if type(value) in _CONTAINERS:
            parts = list(value.items()) if isinstance(value, (dict, types.MappingProxyType)) else list(value)
            if isinstance(value, (set, frozenset)) and not self._in_order:
                parts.sort(key=repr)
            return f"{type(value).__name__} {self._tokens_of(*parts)}"
        if isinstance(value, functools.partial):
            wrapped_partial = cast("functools.partial[Any]", value)
            return f"partial {self._tokens_of(wrapped_partial.func, wrapped_partial.args, wrapped_partial.keywords)}"
        if isinstance(value, (jax.Array, np.ndarray)):
            host = np.asarray(without_key(value))
            return f"array {host.dtype} {host.shape} {hashlib.sha256(np.ascontiguousarray(host).tobytes()).hexdigest()}"
        # Not what it has compiled so far, which is in attributes that begin with an underscore.
        if isinstance(value, Jitted):
            attributes = {name: attribute for name, attribute in vars(value).items() if not name.startswith("_")}
            parts = self._tokens_of(value._function, value._prefix, attributes)
            return f"{token(type(value))} {value._options.of_program()} of {parts}"
        return self._reduced(value)

    def _reduced(self, value: Any) -> str:
        """The token of any other object: the parts that pickle would write, or the function in a wrapper."""
        wrapped = getattr(value, "__wrapped__", None)
        if isinstance(wrapped, types.FunctionType):
            attributes = {key: attribute for key, attribute in vars(value).items() if not key.startswith("__")}
            return f"{token(type(value))} around {self._tokens_of(wrapped, attributes)}"
        # This is user code, which may refuse.
        try:
            reduced = value.__reduce_ex__(4)
        except Exception:
            reduced = None
        if reduced is None or isinstance(reduced, str):
            try:
                return token(value)
            except (Nameless, pickle.PicklingError, TypeError, AttributeError, ValueError):
                raise Nameless from None
        return f"made {self._tokens_of(*(list(item) if hasattr(item, '__next__') else item for item in reduced[:5]))}"

    def _function(self, value: types.FunctionType) -> str:
        cells = [content(cell) for cell in value.__closure__ or ()]
        parts = self._tokens_of(value.__defaults__, value.__kwdefaults__, *cells)
        return f"function {value.__qualname__} {token(value.__code__)} {parts}"

    def _as_tree(self, cls: type) -> str:
        """How a class is taken apart and put together again as a pytree: traced code sees what that gives."""
        functions = tree_functions(cls)
        if functions is None:
            return ""
        methods = [vars(base)[name] for name in _TREE_METHODS for base in cls.__mro__ if name in vars(base)]
        return self._tokens_of(*functions, *methods)

    def _part(self, value: object) -> str:
        """The token of a part of the value, or its class if it has none."""
        try:
            return self.token_of(value)
        except Nameless:
            if self._is_strict:
                raise
            return f"a {type(value).__module__}.{type(value).__qualname__}"

    def _tokens_of(self, *values: object) -> str:
        return f"({', '.join(map(self._part, values))})"


def registered_text(cls: type) -> str:
    """The user's classes registered with an abstract class, which decide what `isinstance` answers."""
    # The registry holds weak references; classes of libraries are the same as long as their versions are.
    registered = registered_classes(cls) if isinstance(cls, abc.ABCMeta) else ()
    if not isinstance(registered, frozenset):
        return ""
    classes = [reference() for reference in registered]
    return " ".join(sorted({token(cls) for cls in classes if cls is not None and is_users_class(cls)}))


def library_name(value: Any) -> str | None:
    """The name of an object that a library's module has under the object's own name; the version says the rest."""
    if not callable(value):
        return None
    # The module is read through its dictionary alone: a `__getattr__` of it could import something.
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    scope = getattr(sys.modules.get(module), "__dict__", None) if isinstance(module, str) else None
    if scope is None or not isinstance(name, str) or is_users_scope(scope):
        return None
    current: Any = scope
    try:
        for step in name.split("."):
            current = current[step] if current is scope else vars(current)[step]
    except (KeyError, TypeError):
        return None
    return f"name {module}.{name}" if current is value else None
