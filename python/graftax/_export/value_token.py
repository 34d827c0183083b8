# SPDX-License-Identifier: Apache-2.0
"""What tells a value that code reads from another one in every process: what it holds, down to functions it calls."""

from __future__ import annotations

import abc
import enum
import functools
import hashlib
import importlib
import pickle
import sys
import types
import weakref
from typing import Any, cast

import jax
import numpy as np

from graftax._base.missing import MISSING
from graftax._capture.bytecode import is_users_scope
from graftax._export.digest import Nameless, token

_MOST = 10_000  # parts of one value
_PLAIN = (bool, int, float, complex, str, bytes, type(None), types.CodeType)
_CONTAINERS = (tuple, list, frozenset, set, dict, types.MappingProxyType)


def value_token(value: Any) -> str:
    """A text that equal values share in every process. Where nothing tells, it is the class alone."""
    try:
        text = _Tokens().of(value)
    except Nameless:
        return f"a {type(value).__module__}.{type(value).__qualname__}"
    return text if len(text) < 200 else f"{type(value).__qualname__} {hashlib.sha256(text.encode()).hexdigest()}"


class _Tokens:
    """The tokens of one value and all that it holds; what is met again is a number."""

    def __init__(self) -> None:
        self._met: dict[int, tuple[int, Any]] = {}

    def of(self, value: Any) -> str:
        """Raises Nameless where nothing tells the value."""
        if value is MISSING or type(value) in _PLAIN:
            return token(value)
        library = library_name(value)
        if library is not None:
            return library
        if id(value) in self._met:
            return f"#{self._met[id(value)][0]}"
        if len(self._met) >= _MOST:
            raise Nameless
        self._met[id(value)] = len(self._met), value
        return self._of_object(value)

    def _of_object(self, value: Any) -> str:
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, enum.Enum):
            return f"enum {token(type(value))}.{value.name} {self._part(value._value_)}"
        if isinstance(value, type):
            return f"{token(value)} {self._registered(value)}"
        if isinstance(value, types.ModuleType):
            return token(value)
        if isinstance(value, (staticmethod, classmethod)):
            return f"{type(value).__name__} {self.of(value.__func__)}"
        if isinstance(value, property):
            return f"property {self._all(value.fget, value.fset, value.fdel)}"
        if isinstance(value, types.MethodType):
            return f"method {self._all(value.__func__, value.__self__)}"
        if isinstance(value, tuple) and type(value) is not tuple:
            return f"{token(type(value))} {self._all(*cast('tuple[Any, ...]', value))}"
        if type(value) in _CONTAINERS:  # sets by their order, which code may see: of texts it differs between processes
            parts = list(value.items()) if isinstance(value, (dict, types.MappingProxyType)) else list(value)
            return f"{type(value).__name__} {self._all(*parts)}"
        if isinstance(value, functools.partial):
            held = cast("functools.partial[Any]", value)
            return f"partial {self._all(held.func, held.args, held.keywords)}"
        if isinstance(value, (jax.Array, np.ndarray)):
            if isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
                value = jax.random.key_data(value)
            host = np.asarray(value)
            return f"array {host.dtype} {host.shape} {hashlib.sha256(np.ascontiguousarray(host).tobytes()).hexdigest()}"
        return self._reduced(value)

    def _reduced(self, value: Any) -> str:
        """Of any other object: what pickle would write of it, part by part; of a wrapper, what it wraps."""
        wrapped = getattr(value, "__wrapped__", None)
        if isinstance(wrapped, types.FunctionType):
            held = {key: part for key, part in vars(value).items() if not key.startswith("__")}
            return f"{token(type(value))} around {self._all(wrapped, held)}"
        try:
            reduced = value.__reduce_ex__(4)
        except Exception:  # what is in it is not to be had
            reduced = None
        if reduced is None or isinstance(reduced, str):
            try:
                return token(value)
            except (Nameless, pickle.PicklingError, TypeError, AttributeError, ValueError):
                raise Nameless from None
        return f"made {self._all(*(list(part) if hasattr(part, '__next__') else part for part in reduced[:5]))}"

    def _function(self, value: types.FunctionType) -> str:
        cells = [_content(cell) for cell in value.__closure__ or ()]
        parts = self._all(value.__defaults__, value.__kwdefaults__, *cells)
        return f"function {value.__qualname__} {token(value.__code__)} {parts}"

    def _registered(self, cls: type) -> str:
        """Of an abstract class, the classes that were registered with it."""
        if not isinstance(cls, abc.ABCMeta):
            return ""
        try:
            registry = cast(Any, importlib.import_module("_abc"))._get_dump(cls)[0]
            known = [ref() if isinstance(ref, weakref.ref) else ref for ref in registry]
        except (ImportError, AttributeError, TypeError):
            return ""
        return " ".join(sorted(token(one) for one in known if isinstance(one, type)))

    def _part(self, value: Any) -> str:
        """A part without a name counts by its class."""
        try:
            return self.of(value)
        except Nameless:
            return f"a {type(value).__module__}.{type(value).__qualname__}"

    def _all(self, *values: Any) -> str:
        return f"({', '.join(map(self._part, values))})"


def library_name(value: Any) -> str | None:
    """The name of what a library's module holds under its own name, which goes with the version."""
    if not isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)) and not callable(value):
        return None
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    scope = getattr(sys.modules.get(module), "__dict__", None) if isinstance(module, str) else None
    if scope is None or not isinstance(name, str) or is_users_scope(scope):
        return None
    at: Any = scope
    try:
        for part in name.split("."):
            at = at[part] if at is scope else vars(at)[part]
    except (KeyError, TypeError):
        return None
    return f"name {module}.{name}" if at is value else None


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING
