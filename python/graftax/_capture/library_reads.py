# SPDX-License-Identifier: Apache-2.0
"""What the standard library reads for its callers, and the user can change: no code of the user's names it.

A function such as `inspect.signature` is recognized when it runs under a trace, a descriptor such as a
`cached_property` when it is found in a class, and a logger when code names it or asks for its level.
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
import threading
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
from graftax._capture.caches_after_traces import attributes_of
from graftax._capture.code_owner import NEVER, is_in_package, is_never_asked, is_users
from graftax._capture.constant_values import cells_of
from graftax._capture.origin import Origin


class Held:
    """Holds an object of the caller's, and is a root in its place.

    Nothing below it is an array, so it is passed through: a trace gets the caller's object itself.
    """

    def __init__(self, value: object) -> None:
        self.value = value


class LibraryReads(NamedTuple):
    """What one call of a function reads. `held` are objects that may change, by the names that messages use."""

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
    """Makes a dict of attributes keep its values itself: watchers are not told of values that the object keeps."""
    # A key that is no text does not fit into the object, so the interpreter moves the values into the dict.
    attributes[_NO_NAME] = None
    del attributes[_NO_NAME]


_NO_NAME = object()


# ---- functions of the standard library: each of these gets the function that runs, and its first argument


def _of_module(_: object, name: object) -> LibraryReads:
    """`importlib.import_module(name)`"""
    return module_read(name) if isinstance(name, str) and not name.startswith(".") else LibraryReads()


def module_read(name: str) -> LibraryReads:
    """A module that is found by its name."""
    module = sys.modules.get(name)
    is_module = isinstance(module, types.ModuleType)
    return LibraryReads([("sys.modules", sys.modules, name)], module=module if is_module else None)


def _of_fields(_: object, obj: object) -> LibraryReads:
    """`dataclasses.fields(obj)`"""
    cls: type = obj if isinstance(obj, type) else type(obj)
    fields = in_mro(cls, "__dataclass_fields__")
    if not isinstance(fields, dict):
        return LibraryReads()
    name = f"{cls.__qualname__}.__dataclass_fields__"
    # Fields hold their defaults, which may have arrays. Then only what a user can put into a field is a root.
    if can_be_root(Held(fields)):
        return LibraryReads(held=[(name, fields)])
    return LibraryReads(held=[(f"{name}[{key!r}].metadata", field.metadata) for key, field in fields.items()])


def annotations_of(function: types.FunctionType) -> LibraryReads:
    """The table of a function's annotations."""
    return LibraryReads(held=[(f"{function.__qualname__}.__annotations__", function.__annotations__)])


def _of_signature(_: object, obj: object) -> LibraryReads:
    """`inspect.signature(obj)` and what else reads signatures or annotations."""
    held: list[tuple[str, Any]] = []
    functions: list[types.FunctionType] = []
    for called in _unwrapped(obj):
        if isinstance(called, type):
            # `typing.get_type_hints` goes through the bases, each of which has a table of its own.
            tables = [(base, _annotations_in(base)) for base in called.__mro__]
            held += [(f"{base.__qualname__}.__annotations__", table) for base, table in tables if table is not None]
        elif isinstance(called, types.FunctionType):
            functions.append(called)
            held += annotations_of(called).held
    return LibraryReads(held=held, functions=functions)


def annotations_of_class(cls: type) -> LibraryReads:
    """The table of the annotations of a class itself."""
    table = _annotations_in(cls)
    return LibraryReads(held=[] if table is None else [(f"{cls.__qualname__}.__annotations__", table)])


def _annotations_in(cls: type) -> dict[str, Any] | None:
    """The table of a class itself. From Python 3.14 on it is made when it is first asked for."""
    if "__annotations__" not in vars(cls):
        with contextlib.suppress(Exception):  # a name in an annotation may not be defined yet
            getattr(cls, "__annotations__", None)
    return vars(cls).get(name_of_annotations(cls))


def name_of_annotations(cls: type) -> str:
    """Under which name a class has the table of its annotations, if it has one by now."""
    is_made_by_python = "__annotations__" not in vars(cls) and "__annotations_cache__" in vars(cls)
    return "__annotations_cache__" if is_made_by_python else "__annotations__"


def _unwrapped(obj: object) -> Iterator[Any]:
    """The object, and what it calls or wraps, as `inspect.signature` goes through it."""
    for _ in range(100):  # a `__wrapped__` may lead back to itself
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
    """The registry of a function of `functools.singledispatch`; nothing of another function."""
    return _of_dispatch(function, None) if function.__code__ is _DISPATCHER.__code__ else LibraryReads()


def _of_logger(_: object, logger: object) -> LibraryReads:
    """`logger.getEffectiveLevel()`"""
    return levels_of(logger) if isinstance(logger, logging.Logger) else LibraryReads()


def levels_of(logger: logging.Logger) -> LibraryReads:
    """What decides for which levels a logger is enabled."""
    manager = vars(logger.manager)
    bindings: list[tuple[str, dict[Any, Any], Any]] = [("logging", manager, "_disable")]
    ancestor: logging.Logger | None = logger
    while ancestor is not None:
        # A logger without a level of its own has that of its parent.
        bindings += [(f"logger {ancestor.name}", vars(ancestor), name) for name in ("level", "disabled", "parent")]
        ancestor = ancestor.parent
    return LibraryReads(bindings)


def _of_copy(_: object, obj: object) -> LibraryReads:
    """`copy.copy(obj)`"""
    # A function that is registered there for the class makes the copy.
    return LibraryReads([("copyreg.dispatch_table", copyreg.dispatch_table, type(obj))])


_DISPATCHER: Any = functools.singledispatch(len)


def _codes() -> dict[types.CodeType, Callable[[Any, Any], LibraryReads]]:
    """The functions of the standard library that are recognized, by their code."""
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
    """Is it code of the user's that calls a function of the standard library? Asked when that begins to run."""
    # Through other functions of the standard library, but not through JAX or NumPy, which call it for themselves.
    # The frame of the function itself is not there yet: what calls `enter` is the frame that calls the function.
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and is_never_asked(frame.f_code.co_filename):
        if is_in_package(frame.f_code.co_filename, *NEVER):
            return False
        frame = frame.f_back
    return frame is not None and is_users(frame.f_code.co_filename)


# ---- descriptors in classes


def parts_of(obj: object, name: str) -> LibraryReads:
    """The attributes of an object of a library that is not a root, such as the `func` of a `cached_property`."""
    attributes = attributes_of(obj) or {}
    functions = [value for value in attributes.values() if isinstance(value, types.FunctionType)]
    held = [held for function in functions for held in registry_of(function).held]
    return LibraryReads([(name, attributes, attribute) for attribute in attributes if type(attribute) is str], held)


def _are_imported(names: Names, scope: dict[str, Any]) -> bool:
    """Are all modules there that code imports, and what it imports from them?"""
    modules = {name: sys.modules.get(absolute_name(module, scope)) for name, module in names.imports.items()}
    if None in modules.values():
        return False
    imported_names = [(vars(modules[chain[0]]), chain[1]) for chain in names.chains if chain[0].startswith("from ")]
    return all(name in module or "__getattr__" in module for module, name in imported_names)


class _Body(threading.local):
    """The body that runs in this thread: others may trace the same function at once."""

    def __init__(self) -> None:
        # By name, what was held in this run of it, and in its earlier ones, where this run has not come to it yet.
        self.held: dict[str, list[object]] = {}
        self.expected: dict[str, list[object]] = {}


class LibraryState:
    """What the code of a library read under the traces of one function."""

    def __init__(self) -> None:
        self.held: dict[str, Held] = {}
        self._body = _Body()
        self._made_anew: set[str] = set()  # names of what each trace makes for itself
        self._to_import: list[str] = []
        self._were_imported: set[str] = set()
        self._importing: list[tuple[types.CodeType, dict[str, Any], Callable[[], Any]]] = []
        self._watched = {id(sys.modules): ("sys.modules", sys.modules)}

    def hold(self, name: str, value: object) -> Origin | None:
        """Gives the origin of an object that was not held yet, if it can be a root, and is older than the trace."""
        held = Held(value)
        if any(other.value is value for other in self.held.values()):
            self._come_to(name, value)
            return None
        # No watcher tells which classes a trace makes. But a body that runs again comes to the same object again, or
        # to another one of that name if it has made it.
        if name in self._body.expected:
            self._made_anew.add(name)
        # And nothing rebuilds a held object, so an array in it would be no input of the program.
        if name in self._made_anew or not can_be_root(held):
            return None
        self._body.held.setdefault(name, []).append(value)
        name = f"{name} ({len(self.held)})" if name in self.held else name
        self.held[name] = held
        return Origin(self.held, name)

    def _come_to(self, name: str, value: object) -> None:
        expected = [other for other in self._body.expected.pop(name, ()) if other is not value]
        if expected:
            self._body.expected[name] = expected

    def begin_body(self) -> None:
        """The body of a call runs, perhaps again."""
        for name, values in self._body.held.items():
            self._body.expected.setdefault(name, []).extend(values)
        self._body.held = {}

    def end_body(self) -> None:
        """The body of this call does not run again."""
        self._body.held, self._body.expected = {}, {}

    def imports(self, code: types.CodeType, scope: dict[str, Any]) -> bool:
        """Does the import of a module begin with this code? Its arrays would be tracers, so plain Python imports it."""
        if code.co_name != "<module>" or (name := scope.get("__name__", "")) in self._were_imported:
            return False
        if getattr(sys.modules.get(name), "__dict__", None) is not scope:
            return False
        self._to_import.append(name)
        self._were_imported.add(name)
        return True

    def import_modules(self) -> list[str]:
        """Imports the modules that traces began to import, and gives their names."""
        names, self._to_import = self._to_import, []
        for name in names:
            # The call may be within a trace of JAX's, where arrays of the module would be tracers, too.
            # If it fails, the code of the next trace imports the module itself, and gets the error.
            with contextlib.suppress(Exception), jax.ensure_compile_time_eval():
                importlib.import_module(name)
        return names

    def note_imports(self, code: types.CodeType, scope: dict[str, Any], function: object, names: Names) -> None:
        """Notes code that imports a module which is not there yet: what it names in it is known once it has run."""
        if not _are_imported(names, scope):
            # By a weak reference: nothing that a read set notes keeps functions of the user's alive.
            is_function = isinstance(function, types.FunctionType)
            self._importing.append((code, scope, weakref.ref(function) if is_function else lambda: None))

    def imported(self) -> list[tuple[types.CodeType, dict[str, Any], Callable[[], Any]]]:
        """(code, globals, what gives the function) of the noted code whose modules are there by now."""
        has_imported = [_are_imported(names_of(code), scope) for code, scope, _ in self._importing]
        pairs = list(zip(self._importing, has_imported, strict=True))
        self._importing = [importing for importing, is_done in pairs if not is_done]
        return [importing for importing, is_done in pairs if is_done]

    def watch(self, text: str, holder: dict[Any, Any], is_of_object: bool = True) -> None:
        """Notes a dict of which keys are bindings, and what messages call it."""
        if id(holder) not in self._watched:
            self._watched[id(holder)] = text, holder
            if is_of_object and holder is not copyreg.dispatch_table:  # which is no object's, but a module's
                watch_attributes(holder)

    def text(self, holder: object) -> str | None:
        """What messages call a dict of which keys are bindings; None of another value."""
        text, watched = self._watched.get(id(holder), ("", None))
        return text if watched is holder else None
