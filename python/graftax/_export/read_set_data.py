# SPDX-License-Identifier: Apache-2.0
"""The read set of a function as plain data: the name of each read in another process, and a token of its value.

Only the process that traced knows what helpers read. So the read set is saved with the programs: the process that loads
them compares the same values, has the same roots, and notices later changes as if it had traced.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from graftax._base.errors import GraftaxError
from graftax._capture.bytecode import names_of
from graftax._capture.code_owner import is_users, is_users_class, is_users_code, is_users_scope
from graftax._capture.constant_values import OF_KEYS
from graftax._capture.function_attributes import attribute_names
from graftax._capture.origin import Origin
from graftax._capture.reachable_code import ReachableCode
from graftax._capture.read_set import ReadSet
from graftax._export.holder_names import Holder, holder_of, resolve, value_at
from graftax._export.value_token import registered_text, value_token
from graftax._graph.pickling import JITTED

_HELD = ("origins", "bindings", "functions", "attributes", "cells", "classes", "abstract", "names", "subclasses")
# Its hash shows the seed of hashes (PYTHONHASHSEED), which Python does not tell.
_TEXT = "of graftax"

NOT_FOUND_ELSEWHERE = (
    "{name} cannot be saved: its program depends on {what}, which another process cannot find by the name of a module. "
    "Define it at the top of a module."
)

HELD_BY_LIBRARY = (
    "{name} cannot be saved: its program depends on {what}, which it reads through the standard library, and another "
    "process cannot find that by the name of a module. Read it outside of {name} and pass it as an argument."
)


def as_data(reads: ReadSet, name: str, function: types.FunctionType) -> dict[str, Any]:
    """The read set of a function of this name, with what functions can read that JAX may have traced before.

    Raises:
        GraftaxError: if part of it has no name.
    """
    data = _as_data(reads, name, function)
    unheard = _of_unheard_code(reads, function)
    if unheard is not None:
        _merge(data, _as_data(unheard, name, function))
    return data


def _merge(data: dict[str, Any], unheard: dict[str, Any]) -> None:
    """Adds what code reads that has not run. The program has no input for these origins: their values are compared."""
    for holder, key, _ in unheard.pop("origins"):
        owner = resolve(holder)
        if key is None:
            unheard["functions"].append((holder, value_token(owner)))
        else:
            unheard["bindings"].append((holder, key, _token_of_binding(owner, key)))
    for kind, addition in unheard.items():
        if isinstance(addition, list):
            data[kind] += [item for item in addition if item not in data[kind]]
        elif isinstance(addition, dict):
            data[kind].update(addition)
        elif data[kind] is None:
            data[kind] = addition


class _FindsJitted(ReachableCode):
    """Collects the functions jitted by JAX that code can call."""

    def __init__(self) -> None:
        super().__init__()
        self.jitted: list[Any] = []

    def add(self, value: Any) -> None:
        if type(value) is JITTED:
            self.jitted.append(value.__wrapped__)
        else:
            super().add(value)


def _of_unheard_code(reads: ReadSet, function: types.FunctionType) -> ReadSet | None:
    """What code can read that JAX jits by itself and that did not run: JAX takes a trace that it has of it already."""
    finding, reachable, reads_of_unheard = _FindsJitted(), ReachableCode(), ReadSet()
    finding.add(function)
    # Going over the codes is what collects the functions.
    for _ in finding.codes():
        pass
    for jitted in finding.jitted:
        reachable.add(jitted)
    heard = _codes(reads, function)
    unheard = [(code, scope) for code, scope in reachable.codes() if code not in heard and is_users_code(code, scope)]
    for code, scope in unheard:
        # Only the code and its globals are known here, so the function that stands for it has empty cells.
        empty = tuple(types.CellType() for _ in code.co_freevars)
        reads_of_unheard.add(code, scope, types.FunctionType(code, scope, closure=empty), stays=False)
    return reads_of_unheard if unheard else None


def _as_data(reads: ReadSet, name: str, function: types.FunctionType) -> dict[str, Any]:
    # An id is another number in each process, and the program may depend on it.
    if reads.builtins.of_ids:
        raise GraftaxError(NOT_FOUND_ELSEWHERE.format(name=name, what="the id() of an object"))
    for origin in reads.names.origins:
        if origin.holder is reads.library.held:
            raise GraftaxError(HELD_BY_LIBRARY.format(name=name, what=origin.name))
    bindings: list[tuple[Holder, str]] = []
    bound_names: dict[int, tuple[Holder, Any]] = {}  # by the id of a value: a name that it is bound to, and the value
    for owner, key in reads.names.bindings:
        # `attributes` below names those of a function, `imported` modules, and `classes` what descriptors hold.
        if key == OF_KEYS or reads.library.text(owner) is not None:
            continue
        holder = reads.names.keywords.get(id(owner), owner)
        # What a library reads is the same as long as its version is.
        if _is_users(holder):
            bindings.append((_holder(holder, name, {}), key))
            value = value_at(holder, key)
            bound_names[id(value)] = (*bindings[-1][0], key), value
    # A class or function without a name of its own may be found by a name that the code reads.
    find_holder = functools.partial(_holder, name=name, bound_names=bound_names, module=function.__module__)
    cells = [
        (find_holder(function), _variable(function, cell))
        for cell, function in list(reads.names.cells.values())
        if _is_users(function)
    ]
    functions = [f for f in list(reads.names.functions.values()) if _is_users(f)]
    packages = {module.__name__.partition(".")[0] for module in reads.attributes.modules.values()}
    return {
        "origins": [(find_holder(origin.holder), origin.name, origin.assigned) for origin in reads.names.origins],
        "bindings": [(holder, key, _token_of_binding(resolve(holder), key)) for holder, key in bindings],
        "functions": [(find_holder(function), value_token(function)) for function in functions],
        "attributes": list(_attributes(reads, find_holder)),
        "cells": [(holder, key, value_token(_cell(resolve(holder), key).cell_contents)) for holder, key in cells],
        "hidden": sorted(reads.names.hidden),
        "assigned": sorted(reads.names.assigned_own),
        "imported": [(m, key, value_token(vars(sys.modules[m])[key])) for m, key in _imported(reads, function)],
        "hash": hash(_TEXT) if _asks_for_hashes(reads, function) else None,
        "classes": [(find_holder(cls), value_token(cls)) for cls in list(reads.attributes.classes) if _is_users(cls)],
        "abstract": [(find_holder(cls), registered_text(cls)) for cls, _ in reads.abstract_classes.pairs],
        "names": list(_names(reads, find_holder)),
        "subclasses": [(find_holder(cls), _subclasses_of(cls)) for cls in reads.attributes.parents() if _is_users(cls)],
        "versions": {name: version_of(name) for name in sorted(packages)},
    }


def _token_of_binding(holder: Any, name: str) -> str:
    # Under such a name a library keeps sets that nobody goes over in their order, as `__abstractmethods__`.
    is_of_library = isinstance(holder, type) and name.startswith("__")
    return value_token(value_at(holder, name), in_order=not is_of_library)


def modules_of(data: dict[str, Any]) -> set[str]:
    """The modules that hold what a read set names."""
    # Names and subclasses are asked of classes and functions, whose modules are found with what leads to these.
    reads = [read for kind in _HELD if kind not in ("names", "subclasses") for read in data[kind]]
    return {holder[0] for holder, *_ in reads} | {module for module, *_ in data["imported"]}


def key_of_data(data: dict[str, Any]) -> str:
    """The same text for equal read sets, whatever the order in which names were met. The order of the roots counts."""
    texts: list[str] = []
    for name, value in sorted(data.items()):
        is_unordered = isinstance(value, list) and name != "origins"
        texts.append(f"{name} {sorted(map(repr, value)) if is_unordered else value!r}")  # pyright: ignore[reportUnknownArgumentType]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def _attributes(reads: ReadSet, find_holder: Callable[[Any], Holder]) -> Iterator[tuple[Holder, list[str]]]:
    """The functions whose attributes the code may read, with the names of their attributes."""
    for function in reads.named.functions():
        names = attribute_names(function)
        try:
            yield find_holder(function), names
        except GraftaxError:
            # A local function without attributes has nothing that another process would have to compare.
            if names:
                raise


def _names(reads: ReadSet, find_holder: Callable[[Any], Holder]) -> Iterator[tuple[Holder, tuple[str, ...]]]:
    """The classes and functions whose names the code may read, with these names."""
    for owner in filter(_is_users, reads.named_owners()):
        names = _names_of(owner)
        try:
            yield find_holder(owner), names
        except GraftaxError:
            # The names of a function that nobody has renamed are a part of its code, which is compared anyway.
            code = getattr(owner, "__code__", None)
            if code is None or names[:2] != (code.co_name, code.co_qualname):
                raise


def version_of(package: str) -> str | None:
    """The version of an installed package, or of a module with `__version__`."""
    try:
        return importlib.metadata.version(package)
    # A package may be imported from a folder, or its distribution may have another name.
    except importlib.metadata.PackageNotFoundError:
        return getattr(sys.modules.get(package), "__version__", None)


def _resolved(data: dict[str, Any]) -> dict[str, list[Any]]:
    """By kind, the objects of this process that saved data names, each with the token or text that was saved for it.

    Raises ImportError, AttributeError or KeyError for what is not there.
    """
    local = {kind: [(resolve(holder), *saved) for holder, *saved in data[kind]] for kind in _HELD}
    return local | {"imported": [(resolve((module, "")), *saved) for module, *saved in data["imported"]]}


def _differences(data: dict[str, Any], local: dict[str, list[Any]]) -> Iterator[str]:
    """What is different in this process, as texts."""
    if data["hash"] not in (None, hash(_TEXT)):
        yield "strings have different hashes in this process (PYTHONHASHSEED)"
    for package, saved in data["versions"].items():
        if (version := version_of(package)) != saved:
            yield f"{package} was {saved}, is {version}"
    for holder, name, saved in local["bindings"]:
        if _token_of_binding(holder, name) != saved:
            yield f"{Origin(holder, name).text()} is different"
    for scope, key, saved in local["imported"]:
        if value_token(value_at(scope, key)) != saved:
            yield f"{key}, which its code imports, is different"
    compared: list[tuple[str, Callable[[Any], Any], str]] = [
        ("functions", value_token, "function {} is different"),
        ("classes", value_token, "class {} is different, or has other classes registered"),
        ("abstract", registered_text, "class {} has other classes registered"),
        ("names", _names_of, "{} has another name or docstring"),
        ("subclasses", _subclasses_of, "class {} has other subclasses"),
        ("attributes", attribute_names, "function {} has other attributes"),
    ]
    for kind, describe, text in compared:
        for value, saved in local[kind]:
            if describe(value) != saved:
                yield text.format(value.__qualname__)
    for function, name, saved in local["cells"]:
        if value_token(_cell(function, name).cell_contents) != saved:
            yield f"{name}, a variable of {function.__qualname__}, is different"


def restore(data: dict[str, Any], reads: ReadSet) -> str | None:
    """Fills an empty read set with saved data. Returns the first difference to this process, or None."""
    return difference(data) or _fill(reads, _resolved(data), data["hidden"])


def difference(data: dict[str, Any]) -> str | None:
    """The first difference of this process from saved data, or None."""
    try:
        return next(_differences(data, _resolved(data)), None)
    except (ImportError, AttributeError, KeyError) as error:
        return f"something that its code reads is not there: {error}"


def _fill(reads: ReadSet, local: dict[str, list[Any]], hidden: Iterable[Any]) -> str | None:
    origins = [Origin(*origin) for origin in local["origins"]]
    order = {origin.what: i for i, origin in enumerate(origins)}
    if not {origin.what for origin in reads.names.origins} <= order.keys():
        return "its code reads other things"
    for origin in origins:
        if origin.assigned:
            reads.names.assign(origin)
        elif not any(existing.what == origin.what for existing in reads.names.origins):
            reads.names.add(origin)
    if {origin.what for origin in reads.names.origins} != order.keys():
        return "its code reads other things"
    # The structures of the file have their roots in this order.
    reads.names.origins.sort(key=lambda origin: order[origin.what])
    reads.names.hidden |= set(hidden)
    for holder, name, _ in local["bindings"]:
        # A function stands for the dict of its keyword defaults.
        if isinstance(holder, types.FunctionType):
            reads.names.note_keywords(holder)
        else:
            reads.names.bind(holder, name)
    for function, _ in local["functions"]:
        reads.names.functions.setdefault(id(function), function)
        reads.known.add(function.__code__, function.__globals__)
    for function, name, _ in local["cells"]:
        cell = _cell(function, name)
        reads.names.cells[id(cell)] = cell, function
    reads.attributes.classes.update(dict.fromkeys(cls for cls, _ in local["classes"]))
    reads.names.compared = None
    for function, _ in local["attributes"]:
        reads.note_function(function)
    reads.attributes.expect_questions(names=bool(local["names"]), subclasses=bool(local["subclasses"]))
    reads.abstract_classes.note(tuple(cls for cls, _ in local["abstract"]))
    return None


def _names_of(owner: Any) -> tuple[str, ...]:
    return owner.__name__, owner.__qualname__, repr(owner.__doc__), owner.__module__


def _subclasses_of(cls: type) -> list[str]:
    return [f"{subclass.__module__}.{subclass.__qualname__}" for subclass in type.__subclasses__(cls)]


def _is_users(holder: object) -> bool:
    if isinstance(holder, type):
        # The module of a class of C code may be a name that nobody imports.
        return is_users_class(holder) and holder.__module__ in sys.modules
    # Globals of no module: those of a function that was generated.
    if type(holder) is weakref.ref:
        function = holder()
        return function is not None and function.__code__.co_filename.startswith(("<string>", "<stdin>"))
    scope: Any = holder.__globals__ if isinstance(holder, types.FunctionType) else holder
    if not isinstance(scope, dict):
        return True
    # The standard library makes globals of this name for the `__new__` of each named tuple.
    if str(scope.get("__name__")).startswith("namedtuple_"):  # pyright: ignore[reportUnknownMemberType]
        return False
    return is_users_scope(scope)  # pyright: ignore[reportUnknownArgumentType]


def _holder(value: Any, name: str, bound_names: dict[int, tuple[Holder, Any]], module: str = "") -> Holder:
    if isinstance(value, dict):
        module_name = value.get("__name__")
        if isinstance(module_name, str) and module_name in sys.modules and vars(sys.modules[module_name]) is value:
            return module_name, ""
        raise GraftaxError(NOT_FOUND_ELSEWHERE.format(name=name, what="globals that are no module's"))
    modules = dict.fromkeys((getattr(value, "__module__", ""), module))
    holder = holder_of(value, bound_names, modules) if isinstance(value, (type, types.FunctionType)) else None
    if holder is None:
        noun = getattr(value, "__qualname__", "something of a closure")
        raise GraftaxError(NOT_FOUND_ELSEWHERE.format(name=name, what=noun))
    return holder


def _variable(function: types.FunctionType, cell: types.CellType) -> str:
    return function.__code__.co_freevars[[c is cell for c in function.__closure__ or ()].index(True)]


def _cell(function: types.FunctionType, name: str) -> types.CellType:
    return (function.__closure__ or ())[function.__code__.co_freevars.index(name)]


def _codes(reads: ReadSet, function: types.FunctionType) -> set[types.CodeType]:
    """The code that may have run: of the function itself, of what is part of the roots, of helpers."""
    functions = [*list(reads.names.functions.values()), function]
    return {*reads.known.codes(), *reads.of_graph.codes(), *(f.__code__ for f in functions)}


def _imported(reads: ReadSet, function: types.FunctionType) -> Iterator[tuple[str, str]]:
    """The names that code imports while it runs: (module, name)."""
    codes = _codes(reads, function)
    for code in codes:
        for name in set(names_of(code).imports.values()):
            # A relative import has no full name in the code: it is looked for among the modules that were met.
            if name.startswith("."):
                ends = [m for m in reads.attributes.modules.values() if m.__name__.endswith("." + name.lstrip("."))]
                name = ends[0].__name__ if ends else name
            module = sys.modules.get(name) or sys.modules.get(name.rpartition(".")[0])
            if module is not None and is_users_scope(vars(module)) and module.__name__ in sys.modules:
                yield from ((module.__name__, key) for key in sorted(set(code.co_names) & vars(module).keys()))


def _asks_for_hashes(reads: ReadSet, function: types.FunctionType) -> bool:
    """Does code ask for a hash by itself? What a `__hash__` gives, a dict or a set asks for, which do not show it."""
    return any(
        "hash" in code.co_names and code.co_name != "__hash__"
        for code in _codes(reads, function)
        if is_users(code.co_filename)
    )
