# SPDX-License-Identifier: Apache-2.0
"""What a function's code reads, as plain data: where it is found in another process, and what tells its value.

No process but that of a trace knows what helpers read. With the programs goes where the reads are found, so that the
process that loads them compares the same values, has the same roots, and notices later changes as if it had traced.
"""

from __future__ import annotations

import functools
import importlib.metadata
import pickle
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

from graftax._base.errors import GraftaxError
from graftax._base.missing import MISSING
from graftax._capture.bytecode import OF_KEYS, in_class, is_users_class, is_users_scope
from graftax._capture.function_attributes import attribute_names
from graftax._capture.origin import Origin
from graftax._capture.read_set import ReadSet
from graftax._export.digest import Nameless, token

NOT_FOUND_ELSEWHERE = (
    "{name} cannot be saved: its program depends on {what}, which another process cannot find by the name of a module. "
    "Define it at the top of a module."
)

# A module, and the qualified name of a class or function there; "" is the module itself. Or, third, a name of that.
Holder = tuple[str, ...]


def as_data(reads: ReadSet, name: str) -> dict[str, Any]:
    """The read set of a function of this name.

    Raises:
        GraftaxError: where part of it is found by no name.
    """
    if reads.builtins.of_ids:
        raise GraftaxError(NOT_FOUND_ELSEWHERE.format(name=name, what="the id() of an object"))
    bindings: list[tuple[Holder, str]] = []
    bound: dict[int, Holder] = {}  # functions, by a name that they are bound to
    for at, key in reads._bindings:  # pyright: ignore[reportPrivateUsage]
        if key == OF_KEYS:  # of the attributes of a function, which `attributes` below names
            continue
        holder = reads._keywords.get(id(at), at)  # pyright: ignore[reportPrivateUsage]
        if _is_users(holder):  # what a library reads goes with its version
            bindings.append((_holder(holder, name, {}), key))
            bound[id(_value(holder, key))] = *bindings[-1][0], key
    holder_of = functools.partial(_holder, name=name, bound=bound)
    cells = [
        (holder_of(function), _variable(function, cell))
        for cell, function in list(reads._cells.values())  # pyright: ignore[reportPrivateUsage]
        if _is_users(function)
    ]
    functions = [f for f in list(reads._functions.values()) if _is_users(f)]  # pyright: ignore[reportPrivateUsage]
    packages = {module.__name__.partition(".")[0] for module in reads.modules.values()}
    return {
        "origins": [(holder_of(origin.holder), origin.name, origin.assigned) for origin in reads.origins],
        "bindings": [(holder, key, binding_token(_value(found(holder), key))) for holder, key in bindings],
        "functions": [(holder_of(function), binding_token(function)) for function in functions],
        "attributes": [(holder, names) for holder, names in _attributes(reads, name, bound)],
        "cells": [(holder, key, binding_token(_cell(found(holder), key).cell_contents)) for holder, key in cells],
        "hidden": sorted(reads.hidden),
        "assigned": sorted(reads.assigned_own),
        "classes": [holder_of(cls) for cls in list(reads._classes) if _is_users(cls)],  # pyright: ignore[reportPrivateUsage]
        "versions": {name: version_of(name) for name in sorted(packages)},
    }


def _attributes(reads: ReadSet, name: str, bound: dict[int, Holder]) -> Iterator[tuple[Holder, list[str]]]:
    """The functions that code may ask for attributes, and which attributes they have."""
    for function in reads.named.functions():
        names = attribute_names(function)
        try:
            yield _holder(function, name, bound), names
        except GraftaxError:
            if names:
                raise


def version_of(package: str) -> str | None:
    """Of an installed package, or of a module that has one."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return getattr(sys.modules.get(package), "__version__", None)


def restore(data: dict[str, Any], reads: ReadSet) -> str | None:
    """Gives a fresh read set what the saved one had. Answers what is not as it was, or None."""
    try:
        origins = [Origin(found(holder), name, assigned) for holder, name, assigned in data["origins"]]
        bindings = [(found(holder), name, was) for holder, name, was in data["bindings"]]
        functions = [(found(holder), was) for holder, was in data["functions"]]
        cells = [(found(holder), name, was) for holder, name, was in data["cells"]]
        classes = [found(holder) for holder in data["classes"]]
        named = [(found(holder), names) for holder, names in data["attributes"]]
    except (ImportError, AttributeError, KeyError) as error:
        return f"something that its code reads is not there: {error}"
    for package, was in data["versions"].items():
        if version_of(package) != was:
            return f"{package} was {was}, is {version_of(package)}"
    for holder, name, was in bindings:
        if binding_token(_value(holder, name)) != was:
            return f"{Origin(holder, name).text()} is another one"
    for function, was in functions:
        if binding_token(function) != was:
            return f"function {function.__qualname__} is another one"
    for function, names in named:
        if attribute_names(function) != names:
            return f"function {function.__qualname__} has other attributes"
    for function, name, was in cells:
        if binding_token(_cell(function, name).cell_contents) != was:
            return f"{name}, a variable of {function.__qualname__}, is another one"
    for origin in origins:
        if origin.assigned:
            reads.assign(origin)
        elif not any(known.what == origin.what for known in reads.origins):
            reads._add_origin(origin)  # pyright: ignore[reportPrivateUsage]
    order = {origin.what: i for i, origin in enumerate(origins)}
    if {origin.what for origin in reads.origins} != order.keys():
        return "its code reads other things"
    reads.origins.sort(key=lambda origin: order[origin.what])
    reads.hidden |= set(data["hidden"])
    _note(reads, bindings, functions, cells, classes)
    for function, _ in named:
        reads.note_function(function)
    return None


def _note(reads: Any, bindings: Any, functions: Any, cells: Any, classes: Any) -> None:
    for holder, name, _ in bindings:
        if (id(holder), name) not in reads._seen:
            reads._seen.add((id(holder), name))
            reads._bindings.append((holder, name))
    for function, _ in functions:
        reads._functions.setdefault(id(function), function)
        reads.known.add(function.__code__)
    for function, name, _ in cells:
        cell = _cell(function, name)
        reads._cells[id(cell)] = cell, function
    reads._classes.update(dict.fromkeys(classes))
    reads._reads = None


def found(holder: Holder) -> Any:
    """The dict of a module, a class or a function, by where it is found."""
    module, name, *attribute = holder
    if attribute:
        return _value(found((module, name)), attribute[0])
    if module not in sys.modules:
        __import__(module)
    if not name:
        return vars(sys.modules[module])
    at: Any = sys.modules[module]
    for part in name.split("."):
        at = vars(at)[part]
    return at


def _is_users(holder: Any) -> bool:
    if isinstance(holder, type):
        return is_users_class(holder) and holder.__module__ in sys.modules  # a class of C code may be nowhere
    if (
        type(holder) is weakref.ref
    ):  # the globals of a function that are no module's: those that a library has generated
        function = holder()
        return function is not None and function.__code__.co_filename.startswith(("<string>", "<stdin>"))
    scope: Any = holder.__globals__ if isinstance(holder, types.FunctionType) else holder
    if not isinstance(scope, dict):
        return True
    if str(scope.get("__name__")).startswith("namedtuple_"):  # pyright: ignore[reportUnknownMemberType]
        return False  # the standard library's, made for each named tuple
    return is_users_scope(scope)  # pyright: ignore[reportUnknownArgumentType]


def _holder(at: Any, name: str, bound: dict[int, Holder]) -> Holder:
    if isinstance(at, dict):
        module = at.get("__name__")
        if isinstance(module, str) and module in sys.modules and vars(sys.modules[module]) is at:
            return module, ""
        raise GraftaxError(NOT_FOUND_ELSEWHERE.format(name=name, what="globals that are no module's"))
    if isinstance(at, (type, types.FunctionType)):
        holder = at.__module__, at.__qualname__
        try:
            if found(holder) is at:
                return holder
        except (ImportError, AttributeError, KeyError, TypeError):
            pass
        if id(at) in bound:
            return bound[id(at)]
    raise GraftaxError(
        NOT_FOUND_ELSEWHERE.format(name=name, what=getattr(at, "__qualname__", "something of a closure"))
    )


def _value(holder: Any, name: str) -> Any:
    if isinstance(holder, type):
        return in_class(holder, name)[1]
    if isinstance(holder, types.FunctionType):
        return (holder.__kwdefaults__ or {}).get(name, MISSING)
    return holder.get(name, MISSING)


def _variable(function: types.FunctionType, cell: types.CellType) -> str:
    return function.__code__.co_freevars[[c is cell for c in function.__closure__ or ()].index(True)]


def _cell(function: types.FunctionType, name: str) -> types.CellType:
    return (function.__closure__ or ())[function.__code__.co_freevars.index(name)]


def binding_token(value: Any) -> str:
    """A function is another one where it is bound to another name, so it has its own as well as its code."""
    try:
        if isinstance(value, types.FunctionType):
            return f"function {value.__qualname__} {token(value)}"
        return token(value)
    except (Nameless, pickle.PicklingError, TypeError, AttributeError):  # one whose class tells enough
        return f"a {type(value).__module__}.{type(value).__qualname__}"
