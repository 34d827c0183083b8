# SPDX-License-Identifier: Apache-2.0
"""What code of the standard library reads that the user can change: no code of the user's names it.

A function such as `inspect.signature` is heard of when it runs under a trace, a descriptor such as a `cached_property`
when it is met in a class, and a logger when code names it or asks for its level.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import dataclasses
import functools
import importlib
import inspect
import logging
import sys
import types
import typing
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from graftax import _core
from graftax._base.class_lookup import in_mro
from graftax._base.errors import GraftaxError
from graftax._capture.bytecode import Names, absolute_name, names_of
from graftax._capture.caches_in_traces import attributes_of
from graftax._capture.code_owner import NEVER, is_in_package, is_never_asked, is_users
from graftax._capture.constant_values import cells_of
from graftax._capture.origin import Origin


class Held:
    """Holds an object of the caller's: what one without arrays leads to is the caller's own in a trace."""

    def __init__(self, value: object) -> None:
        self.value = value


class LibraryReads(NamedTuple):
    """What one call reads. `held` are objects that may change, by the name that messages have for them."""

    bindings: Sequence[tuple[str, dict[Any, Any], Any]] = ()  # what messages call a dict, the dict, and a key
    held: Sequence[tuple[str, Any]] = ()
    functions: Sequence[types.FunctionType] = ()
    module: types.ModuleType | None = None


def can_be_root(value: object) -> bool:
    """Can it be a root, with no array in it?"""
    try:
        return not _core.record((value,), ("held",))[0]
    except GraftaxError:
        return False


def watch_attributes(attributes: dict[Any, Any]) -> None:
    """Takes the values of an object's dict out of the object: watchers are not told of what is stored there."""
    attributes[_NO_NAME] = None
    del attributes[_NO_NAME]


_NO_NAME = object()


# ---- functions of the standard library


def _of_module(_: object, name: object) -> LibraryReads:
    """`importlib.import_module(name)`"""
    return module_read(name) if isinstance(name, str) and not name.startswith(".") else LibraryReads()


def module_read(name: str) -> LibraryReads:
    """A module that is found by its name."""
    module = sys.modules.get(name)
    known = module if isinstance(module, types.ModuleType) else None
    return LibraryReads([("sys.modules", sys.modules, name)], module=known)


def _of_fields(_: object, obj: object) -> LibraryReads:
    """`dataclasses.fields(obj)`"""
    cls: type = obj if isinstance(obj, type) else type(obj)
    fields = in_mro(cls, "__dataclass_fields__")
    if not isinstance(fields, dict):
        return LibraryReads()
    name = f"{cls.__qualname__}.__dataclass_fields__"
    if can_be_root(Held(fields)):
        return LibraryReads(held=[(name, fields)])
    return LibraryReads(held=[(f"{name}[{key!r}].metadata", field.metadata) for key, field in fields.items()])


def annotations_of(function: types.FunctionType) -> LibraryReads:
    table = function.__annotations__
    return LibraryReads(held=[(f"{function.__qualname__}.__annotations__", table)] if table else ())


def _of_signature(_: object, obj: object) -> LibraryReads:
    """What a signature, or a table of annotations, is made of."""
    held: list[tuple[str, Any]] = []
    functions: list[types.FunctionType] = []
    for part in _unwrapped(obj):
        if isinstance(part, type):
            tables = [(base, _annotations_in(base)) for base in part.__mro__]
            held += [(f"{base.__qualname__}.__annotations__", table) for base, table in tables if table]
        elif isinstance(part, types.FunctionType):
            functions.append(part)
            held += annotations_of(part).held
    return LibraryReads(held=held, functions=functions)


def _annotations_in(cls: type) -> dict[str, Any] | None:
    """The table of a class itself. From Python 3.14 on it is made when it is first asked for."""
    if "__annotations__" not in vars(cls):
        with contextlib.suppress(Exception):  # a name in it may not be there yet
            getattr(cls, "__annotations__", None)
    return vars(cls).get("__annotations__", vars(cls).get("__annotations_cache__"))


def _unwrapped(obj: object) -> Iterator[Any]:
    """The object, and what it calls or wraps."""
    for _ in range(100):
        yield obj
        if isinstance(obj, types.MethodType | staticmethod | classmethod):
            obj = obj.__func__
        elif isinstance(obj, functools.partial):
            obj = obj.func
        elif isinstance(obj, type):
            yield from (
                vars(base)[name] for base in obj.__mro__ for name in ("__init__", "__new__") if name in vars(base)
            )
            return
        elif isinstance(obj, types.FunctionType):
            if (wrapped := vars(obj).get("__wrapped__")) is None:
                return
            obj = wrapped
        else:
            obj = inspect.getattr_static(type(obj), "__call__", None)


def _of_dispatch(function: Any, _: object) -> LibraryReads:
    """A function of `functools.singledispatch`, or the one that looks a class up for it."""
    registry = cells_of(cells_of(function).get("dispatch", function)).get("registry")
    return LibraryReads(held=[(f"{function.__qualname__}.registry", registry)] if registry is not None else ())


def registry_of(function: types.FunctionType) -> LibraryReads:
    """What a function that code names is asked for, where it is one of `functools.singledispatch`."""
    return _of_dispatch(function, None) if function.__code__ is _DISPATCHER.__code__ else LibraryReads()


def _of_logger(_: object, logger: object) -> LibraryReads:
    """`logger.getEffectiveLevel()`"""
    return levels_of(logger) if isinstance(logger, logging.Logger) else LibraryReads()


def levels_of(logger: logging.Logger) -> LibraryReads:
    """What decides for which levels a logger is enabled."""
    manager = vars(logger.manager)
    bindings: list[tuple[str, dict[Any, Any], Any]] = [("logging", manager, "_disable")]
    each: logging.Logger | None = logger
    while each is not None:
        bindings += [(f"logger {each.name}", vars(each), name) for name in ("level", "disabled", "parent")]
        each = each.parent
    return LibraryReads(bindings)


def _of_copy(_: object, obj: object) -> LibraryReads:
    """`copy.copy(obj)`"""
    return LibraryReads([("copyreg.dispatch_table", copyreg.dispatch_table, type(obj))])


_DISPATCHER: Any = functools.singledispatch(len)


def _codes() -> dict[types.CodeType, Callable[[Any, Any], LibraryReads]]:
    of_function: list[tuple[Any, Callable[[Any, Any], LibraryReads]]] = [
        (importlib.import_module, _of_module),
        (dataclasses.fields, _of_fields),
        (inspect.signature, _of_signature),
        (inspect.getfullargspec, _of_signature),
        (inspect.get_annotations, _of_signature),
        (typing.get_type_hints, _of_signature),
        (_DISPATCHER, _of_dispatch),
        (_DISPATCHER.dispatch, _of_dispatch),
        (_DISPATCHER.register, _of_dispatch),
        (logging.Logger.isEnabledFor, _of_logger),
        (logging.Logger.getEffectiveLevel, _of_logger),
        (copy.copy, _of_copy),
        (copy.deepcopy, _of_copy),
    ]
    return {function.__code__: reads for function, reads in of_function}


OF_CODE = _codes()


def is_asked_by_user() -> bool:
    """Is it code of the user's that calls a function of the standard library? Asked where one begins to run."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and is_never_asked(frame.f_code.co_filename):
        if is_in_package(frame.f_code.co_filename, *NEVER):
            return False
        frame = frame.f_back
    return frame is not None and is_users(frame.f_code.co_filename)


# ---- descriptors in classes


def parts_of(obj: object, name: str) -> LibraryReads:
    """The attributes of an object of a library's that is no root, such as the `func` of a `cached_property`."""
    attributes = attributes_of(obj) or {}
    functions = [part for part in attributes.values() if isinstance(part, types.FunctionType)]
    held = [held for function in functions for held in registry_of(function).held]
    return LibraryReads([(name, attributes, attribute) for attribute in attributes if type(attribute) is str], held)


def _are_there(names: Names, scope: dict[str, Any]) -> bool:
    """Are all modules there that code imports, and what it imports from them?"""
    modules = {name: sys.modules.get(absolute_name(module, scope)) for name, module in names.imports.items()}
    if None in modules.values():
        return False
    asked = [(vars(modules[chain[0]]), chain[1]) for chain in names.chains if chain[0].startswith("from ")]
    return all(name in scope or "__getattr__" in scope for scope, name in asked)


def _scope_of(name: Any) -> dict[str, Any] | None:
    return getattr(sys.modules.get(name), "__dict__", None)


class LibraryState:
    """What the code of a library read under the traces of one function."""

    def __init__(self) -> None:
        self.held: dict[str, Held] = {}
        self._to_import: list[str] = []
        self._were_imported: set[str] = set()
        self._importing: list[tuple[types.CodeType, dict[str, Any], Callable[[], Any]]] = []
        self._watched = {id(sys.modules): ("sys.modules", sys.modules)}

    def hold(self, name: str, value: object) -> Origin | None:
        """Gives what makes a root of an object, where it can be one and is none yet."""
        held = Held(value)
        if any(known.value is value for known in self.held.values()) or not can_be_root(held):
            return None
        name = f"{name} ({len(self.held)})" if name in self.held else name
        self.held[name] = held
        return Origin(self.held, name)

    def imports(self, code: types.CodeType, scope: dict[str, Any]) -> bool:
        """Does the import of a module begin in a trace? Its arrays would be tracers: plain Python imports it first."""
        name = scope.get("__name__", "")
        if code.co_name != "<module>" or name in self._were_imported or _scope_of(name) is not scope:
            return False
        self._to_import.append(name)
        self._were_imported.add(name)
        return True

    def import_modules(self) -> list[str]:
        """Imports what traces began to import, and gives the names of that."""
        names, self._to_import = self._to_import, []
        for name in names:
            with contextlib.suppress(Exception), jax.ensure_compile_time_eval():  # the next trace meets the error
                importlib.import_module(name)
        return names

    def note_imports(self, code: types.CodeType, scope: dict[str, Any], function: object, names: Names) -> None:
        """Notes code of which a module is not imported yet: what it names there is known once it has run."""
        if not _are_there(names, scope):
            is_function = isinstance(function, types.FunctionType)
            self._importing.append((code, scope, weakref.ref(function) if is_function else lambda: None))

    def imported(self) -> list[tuple[types.CodeType, dict[str, Any], Callable[[], Any]]]:
        """That of it whose modules are there by now: code, globals, and what gives the function."""
        found = [each for each in self._importing if _are_there(names_of(each[0]), each[1])]
        self._importing = [each for each in self._importing if each not in found]
        return found

    def watch(self, text: str, holder: dict[Any, Any], is_of_object: bool = True) -> None:
        """Notes a dict of which keys are bindings, and what messages call it."""
        if id(holder) not in self._watched:
            self._watched[id(holder)] = text, holder
            if is_of_object and holder is not copyreg.dispatch_table:
                watch_attributes(holder)

    def text(self, holder: object) -> str | None:
        """What messages call a dict of which keys are bindings; None of another value."""
        text, watched = self._watched.get(id(holder), ("", None))
        return text if watched is holder else None
