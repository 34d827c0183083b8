# SPDX-License-Identifier: Apache-2.0
"""The pickle of a GraphDef and of an Outcome. What has no pickle is named by its path."""

from __future__ import annotations

import functools
import importlib
import inspect
import io
import pickle
import sys
import types
from collections.abc import Iterator
from typing import Any

import jax

from graftax import _core
from graftax._base.errors import UnpicklableError
from graftax._base.key_path import keystr
from graftax._graph.structure import Structure

CLASS_GONE = "this {what} holds {value!r} at {path}, which cannot be pickled: {error}"

_MOST_WRAPPERS = 8  # around one function
_NAMELESS = (
    types.FunctionType,
    types.CellType,
    types.MethodType,
    types.MappingProxyType,
)  # by the names of their kinds


def reduce_graphdef(graphdef: _core.GraphDef) -> tuple[Any, ...]:
    """The pickle of a GraphDef; names the path of what cannot be pickled."""
    return (graphdef_from_state, (picklable(graphdef, "GraphDef"),))


def reduce_outcome(outcome: _core.Outcome) -> tuple[Any, ...]:
    """The pickle of an Outcome; names the path of what cannot be pickled."""
    return (outcome_from_state, (picklable(outcome, "result"),))


class ByName:
    """Stands in a pickle for an object that its module and qualified name lead to, such as `jax.nn.relu`.

    Its class may have no pickle, or one that makes a copy.
    """

    def __init__(self, module: str, name: str) -> None:
        self.place = (module, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_find, self.place)


def _find(module: str, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))


class _Pickler(pickle.Pickler):
    """Pickles devices too: each by its platform and number, which another process has as well."""

    def reducer_override(self, obj: Any) -> Any:
        return (_device, (obj.platform, obj.id)) if isinstance(obj, jax.Device) else NotImplemented


def _device(platform: str, number: int) -> Any:
    known = {device.id: device for device in jax.devices(platform)}
    if number not in known:
        raise pickle.UnpicklingError(f"the pickle means device {number} of platform {platform}, and there is none")
    return known[number]


def dumps(value: Any, protocol: int | None = None) -> bytes:
    """`pickle.dumps` of what may hold devices, such as a mesh or a sharding."""
    file = io.BytesIO()
    _Pickler(file, protocol).dump(value)
    return file.getvalue()


class _Imported:
    """Stands in a pickle for a module."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return (importlib.import_module, (self.name,))


class _Pickled:
    """Stands in a pickle for what `dumps` has made bytes of."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def __reduce__(self) -> tuple[Any, ...]:
        return (pickle.loads, (self.content,))


JITTED: Any = type(jax.jit(int))
OF_DEVICES = (jax.Device, jax.sharding.Mesh, jax.sharding.Sharding, jax.ShapeDtypeStruct)


def named(value: Any, sentinels: Sentinels | None = None) -> Any:
    """`value`, or what stands for it in a pickle. Calls for many values share their `sentinels`."""
    if isinstance(value, OF_DEVICES):
        return _Pickled(dumps(value))
    if isinstance(value, types.ModuleType) and sys.modules.get(value.__name__) is value:
        return _Imported(value.__name__)
    if type(value) is object:  # a sentinel, which pickle would make another one of
        return (sentinels or Sentinels()).name(value)
    if isinstance(value, types.FunctionType):
        return _in_wrapper(value) or value
    if isinstance(value, inspect.Signature):
        return _in_object(value)
    if isinstance(value, (type, *_NAMELESS)) or not isinstance(getattr(value, "__dict__", None), dict):
        return value  # pickle does it itself
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", getattr(value, "__name__", None))
    if not isinstance(module, str) or not isinstance(name, str):
        return value
    try:
        if _find(module, name) is value:
            return ByName(module, name)
    except (ImportError, AttributeError):
        return _in_object(value)
    # `fast = jax.jit(slow)` goes by the name of what it wraps, and stands beside it.
    variables = vars(sys.modules[module]).items() if isinstance(value, JITTED) else ()
    return next((ByName(module, name) for name, held in variables if held is value), _in_object(value))


def _in_object(value: Any) -> Any:
    """What leads to a part of an object in a module, as a function of `equinox.filter_jit` is one; else the value."""
    if isinstance(value, (JITTED, inspect.Signature)):
        for module, prefix, scope in _scopes():
            for key, held in list(scope.items()):
                inside = None if isinstance(held, (type, types.ModuleType)) else getattr(held, "__dict__", None)
                for attribute, part in inside.items() if type(inside) is dict else ():
                    if part is value:
                        return ByName(module, f"{prefix}{key}.{attribute}")
    return value


def _in_wrapper(function: types.FunctionType) -> ByName | None:
    """What leads to a function in a wrapper that goes by its name, as a decorator of Equinox leaves one."""
    module, name = function.__module__, function.__qualname__
    try:
        found = _find(module, name)
    except (ImportError, AttributeError, TypeError):  # a local one
        return None
    for _ in range(_MOST_WRAPPERS):
        if found is function or isinstance(found, (type, types.ModuleType)):
            return None
        inside = getattr(found, "__dict__", {})
        for attribute in ("__wrapped__", *inside):
            if inside.get(attribute, None if attribute in inside else getattr(found, attribute, None)) is function:
                return ByName(module, f"{name}.{attribute}")
        found, name = getattr(found, "__wrapped__", None), f"{name}.__wrapped__"
    return None


class Sentinels:
    """Names of the instances of `object` that modules and their classes have, found by one look at all (30 ms)."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[object, ByName]] | None = None

    def name(self, value: object) -> Any:
        """What leads to an object from a module, or from a class of one; the object itself where nothing does."""
        if self._found is None:
            self._found = {}
            for module, prefix, scope in _scopes():
                for key, held in list(scope.items()):
                    if type(held) is object:
                        self._found.setdefault(id(held), (held, ByName(module, f"{prefix}{key}")))
        return self._found.get(id(value), (None, value))[1]


def _scopes() -> Iterator[tuple[str, str, Any]]:
    modules: list[tuple[str, Any]] = [(name, getattr(mod, "__dict__", {})) for name, mod in list(sys.modules.items())]
    for module, scope in modules:
        yield module, "", scope
    for module, scope in modules:
        for name, cls in list(scope.items()):
            if isinstance(cls, type) and getattr(cls, "__module__", None) == module:
                yield module, f"{name}.", vars(cls)


def _with_names(state: tuple[Any, ...]) -> tuple[Any, ...]:
    """The state of a program with `ByName` in its statics."""
    sentinels = Sentinels()
    statics = tuple((how, named(value, sentinels), *rest) for how, value, *rest in state[5])
    return (*state[:5], statics, *state[6:])


def picklable(program: _core.GraphDef | _core.Outcome, what: str) -> tuple[Any, ...]:
    state = program._state()  # pyright: ignore[reportPrivateUsage]
    state = _with_names(state) if isinstance(program, _core.GraphDef) else (state[0], _with_names(state[1]), *state[2:])
    try:
        pickle.dumps(state)
    except Exception:
        structure = Structure(program)
        for row in structure.rows:
            of_node = row.type if row.type not in _NAMELESS else None
            for part in (of_node, row.value):
                try:
                    pickle.dumps(named(part))
                except Exception as error:
                    where = keystr(structure.place(row)[1])
                    message = CLASS_GONE.format(what=what, value=part, path=where or "the root", error=error)
                    raise UnpicklableError(message) from error
        raise
    return state


def graphdef_from_state(state: object) -> _core.GraphDef:
    """Unpickles a GraphDef. Every index is checked: a damaged state raises ValueError."""
    return _core.GraphDef._from_state(state)  # pyright: ignore[reportPrivateUsage]


def outcome_from_state(state: object) -> _core.Outcome:
    """What a pickled Outcome is loaded through."""
    return _core.Outcome._from_state(state)  # pyright: ignore[reportPrivateUsage]
