# SPDX-License-Identifier: Apache-2.0
"""Pickles of GraphDefs and Outcomes. Errors name the path of a value that cannot be pickled."""

from __future__ import annotations

import functools
import importlib
import inspect
import io
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.extend.core import Primitive

from graftax import _core
from graftax._base.errors import UnpicklableError
from graftax._base.key_path import keystr
from graftax._graph.structure import Structure

_MAX_WRAPPERS = 8  # around a function
# Types of nodes that pickle cannot find by name: the state of a structure has the names of their kinds instead.
NAMELESS = (types.FunctionType, types.CellType, types.MethodType, types.MappingProxyType)


def reduce_graphdef(graphdef: _core.GraphDef) -> tuple[object, ...]:
    """`__reduce__` of a GraphDef."""
    return (graphdef_from_state, (picklable(graphdef, "GraphDef"),))


def reduce_outcome(outcome: _core.Outcome) -> tuple[object, ...]:
    """`__reduce__` of an Outcome."""
    return (outcome_from_state, (picklable(outcome, "result"),))


class _Call:
    """Pickles a value as a call that gives it."""

    def __init__(self, function: Callable[..., Any], *args: object) -> None:
        self._function, self.args = function, args

    def __reduce__(self) -> tuple[object, ...]:
        return (self._function, self.args)


class ByName(_Call):
    """Pickles an object such as `jax.nn.relu` by its module and qualified name.

    The object's own pickle may not exist, or may make a copy.
    """

    def __init__(self, module: str, name: str) -> None:
        super().__init__(_find, module, name)


def _find(module: str, name: str) -> object:
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))


class _Pickler(pickle.Pickler):
    """Pickles devices too, by platform and id, which are the same in another process."""

    def reducer_override(self, obj: Any) -> Any:
        return (_device, (obj.platform, obj.id)) if isinstance(obj, jax.Device) else NotImplemented


def _device(platform: str, number: int) -> Any:
    devices = {device.id: device for device in jax.devices(platform)}
    if number not in devices:
        raise pickle.UnpicklingError(f"the pickle refers to device {number} of platform {platform}, which is not here")
    return devices[number]


def dumps(value: object, protocol: int | None = None) -> bytes:
    """`pickle.dumps` for values that may hold devices, such as a mesh or a sharding."""
    file = io.BytesIO()
    _Pickler(file, protocol).dump(value)
    return file.getvalue()


JITTED: Any = type(jax.jit(int))
TYPES_WITH_DEVICES = (jax.Device, jax.sharding.Mesh, jax.sharding.Sharding, jax.ShapeDtypeStruct)


def name_for_pickle(value: object, sentinels: Sentinels | None = None) -> Any:
    """A value to pickle instead of this one, or the value itself. Calls for many values share their `sentinels`."""
    # Devices have no pickle of their own, and are pickled by number within these.
    if isinstance(value, TYPES_WITH_DEVICES):
        return _Call(pickle.loads, dumps(value))
    if isinstance(value, types.ModuleType) and sys.modules.get(value.__name__) is value:
        return _Call(importlib.import_module, value.__name__)
    if _is_sentinel(value):
        return (sentinels or Sentinels()).name(value)
    if isinstance(value, types.FunctionType):
        return _name_in_wrapper(value) or value
    if isinstance(value, inspect.Signature):
        return _name_in_object(value)
    if isinstance(value, (type, *NAMELESS)) or not isinstance(getattr(value, "__dict__", None), dict):
        return value  # pickle handles these itself
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", getattr(value, "__name__", None))
    if not isinstance(module, str) or not isinstance(name, str):
        return value
    # An object that is found by its own name, such as `jax.nn.relu`, which is a jitted function.
    try:
        if _find(module, name) is value:
            return ByName(module, name)
    except (ImportError, AttributeError):
        return _name_in_object(value)
    # `fast = jax.jit(slow)` has the name of `slow`, but is itself another variable of the same module.
    variables = list(vars(sys.modules[module]).items()) if isinstance(value, JITTED) else ()
    variable_name = next((name for name, variable in variables if variable is value), None)
    return _name_in_object(value) if variable_name is None else ByName(module, variable_name)


def _name_in_object(value: Any) -> Any:
    """The name of a value within an object of a module, as in `equinox.filter_jit`; the value if there is none."""
    if isinstance(value, (JITTED, inspect.Signature)):
        for module, prefix, scope in _scopes():
            for key, variable in list(scope.items()):
                attributes = (
                    None if isinstance(variable, (type, types.ModuleType)) else getattr(variable, "__dict__", None)
                )
                for attribute, part in attributes.items() if type(attributes) is dict else ():
                    if part is value:
                        return ByName(module, f"{prefix}{key}.{attribute}")
    return value


def _name_in_wrapper(function: types.FunctionType) -> ByName | None:
    """The name of a function within the wrapper that has replaced it, as decorators of Equinox do."""
    module, name = function.__module__, function.__qualname__
    try:
        wrapper = _find(module, name)
    except (ImportError, AttributeError, TypeError):  # a local function
        return None
    # A wrapper may be wrapped again: each `__wrapped__` is searched.
    for _ in range(_MAX_WRAPPERS):
        if wrapper is function or isinstance(wrapper, (type, types.ModuleType)):
            return None
        attributes = getattr(wrapper, "__dict__", {})
        for attribute in ("__wrapped__", *attributes):
            value = attributes[attribute] if attribute in attributes else getattr(wrapper, attribute, None)
            if value is function:
                return ByName(module, f"{name}.{attribute}")
        wrapper, name = getattr(wrapper, "__wrapped__", None), f"{name}.__wrapped__"
    return None


class Sentinels:
    """Names of the sentinels in modules and their classes. The first use scans all modules (30 ms)."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[object, ByName]] | None = None

    def name(self, value: object) -> Any:
        """The name of an object in a module or in a class of one; the object itself if it has none."""
        # Sentinels are rare: the modules are scanned only when the first one is met.
        if self._by_id is None:
            self._by_id = {}
            for module, prefix, scope in _scopes():
                for key, variable in list(scope.items()):
                    if _is_sentinel(variable):
                        self._by_id.setdefault(id(variable), (variable, ByName(module, f"{prefix}{key}")))
        return self._by_id.get(id(value), (None, value))[1]


def _is_sentinel(value: object) -> bool:
    """Is the object itself what counts? Pickle would copy it: an instance of `object`, or what JAX knows rules of."""
    return type(value) is object or isinstance(value, Primitive)


def _scopes() -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    modules: list[tuple[str, Any]] = [(name, getattr(mod, "__dict__", {})) for name, mod in list(sys.modules.items())]
    # Module variables come before class attributes, so that a name is as short as possible.
    for module, scope in modules:
        yield module, "", scope
    for module, scope in modules:
        for name, cls in list(scope.items()):
            if isinstance(cls, type) and getattr(cls, "__module__", None) == module:
                yield module, f"{name}.", vars(cls)


def _name_statics(state: tuple[Any, ...]) -> tuple[object, ...]:
    """The state of a program, with statics replaced by what is pickled instead of them."""
    sentinels = Sentinels()
    statics = tuple((comparison, name_for_pickle(value, sentinels), *fields) for comparison, value, *fields in state[5])
    return (*state[:5], statics, *state[6:])


def picklable(program: _core.GraphDef | _core.Outcome, title: str) -> tuple[Any, ...]:
    """The state of a GraphDef or an Outcome as `pickle` can write it.

    Raises:
        UnpicklableError: names the path of a value that cannot be pickled.
    """
    state = program._state()  # pyright: ignore[reportPrivateUsage]
    state = (
        _name_statics(state) if isinstance(program, _core.GraphDef) else (state[0], _name_statics(state[1]), *state[2:])
    )
    try:
        pickle.dumps(state)
    # Pickle does not say which part fails, so each is tried by itself for its path.
    except Exception:
        structure = Structure(program)
        for row in structure.rows:
            cls = row.type if row.type not in NAMELESS else None
            for part in (cls, row.value):
                try:
                    pickle.dumps(name_for_pickle(part))
                except Exception as error:
                    path = keystr(structure.root_path(row)[1]) or "the root"
                    message = f"this {title} holds {part!r} at {path}, which cannot be pickled: {error}"
                    raise UnpicklableError(message) from error
        raise
    return state


def graphdef_from_state(state: object) -> _core.GraphDef:
    """Unpickles a GraphDef. Every index is checked: a damaged state raises ValueError."""
    return _core.GraphDef._from_state(state)  # pyright: ignore[reportPrivateUsage]


def outcome_from_state(state: object) -> _core.Outcome:
    return _core.Outcome._from_state(state)  # pyright: ignore[reportPrivateUsage]
