# SPDX-License-Identifier: Apache-2.0
"""May a call have effects outside of the program, which a second run would repeat although nobody hears of them?

An `atexit.register`, a setting of NumPy or a metrics logger has. Each call is taken to have some, unless it calls code
that is watched itself, a function that only computes values, or JAX. What the user's code does to objects is undone.
"""

from __future__ import annotations

import dis
import enum
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from graftax import _core
from graftax._capture.bytecode import Names
from graftax._capture.code_owner import (
    HEAP_TYPE,
    MODULE_OF,
    is_never_asked,
    is_open_scope,
    is_users_class,
    is_users_scope,
)
from graftax._graph.structure import Op

# Modules whose functions and classes only compute values.
_OF_VALUES = frozenset((
    *("__future__", "_abc", "_bisect", "_collections", "_functools", "_heapq", "_operator", "_struct", "_weakref"),
    *("abc", "array", "base64", "bisect", "builtins", "cmath", "collections", "contextlib", "copy", "dataclasses"),
    *("enum", "fractions", "functools", "hashlib", "heapq", "inspect", "itertools", "json", "keyword", "math"),
    *("numbers", "operator", "re", "reprlib", "statistics", "string", "struct", "textwrap", "types", "typing"),
    *("unicodedata", "weakref", "zlib"),
    *("graftax", "jax", "jaxlib", "ml_dtypes", "numpy", "opt_einsum", "scipy"),
))  # fmt: skip
_HAVE_EFFECTS = (exec, eval, compile, __import__, __build_class__, open, input, print, weakref.proxy)  # or run any code
_READ = (getattr, hasattr, isinstance, issubclass, callable, id, hash, repr, dir)  # these leave a module as it is
_CALL_LATER = (weakref.ref, weakref.finalize)  # these call a function when an object is gone
_CHANGE = frozenset({"config", "monitoring", "profiler", "distributed"})  # parts of the names of modules of JAX
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]
_CACHED: Any = type(functools.cache(len))
_DESCRIPTORS = (
    *(types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType),
    *(types.MethodWrapperType, types.GetSetDescriptorType, types.MemberDescriptorType),
)
# Each of these is judged for itself, by what it is or calls.
_CALL_OTHERS = (types.FunctionType, types.MethodType, functools.partial, _CACHED, *_DESCRIPTORS)


def calls_others(function: object, first: object) -> bool:
    """May this call have such an effect? Finding that out runs no code of the user's.

    Args:
        first: the first argument of the call, which code in C may call.
    """
    function = _unbound(function)
    return _may_have_effects(function, first) or (
        callable(first) and type(function) is not types.FunctionType and _may_have_effects(first, None)
    )


def is_lasting_judgement(function: object, first: object) -> bool:
    """Does `calls_others` say the same of each call of this function with a first argument of this class?"""
    if type(_unbound(function)) is types.FunctionType or not callable(first):
        return True
    if type(first) is types.BuiltinFunctionType:
        return type(getattr(first, "__self__", None)) is types.ModuleType
    return type(first) not in _CALL_OTHERS


def _unbound(function: Any) -> Any:
    """The function of a method."""
    while type(function) is types.MethodType:
        function = function.__func__
    return function


def _may_have_effects(function: Any, first: object) -> bool:
    """May a call of this function, without those that its arguments lead to, have such an effect?"""
    while type(function) in (functools.partial, types.MethodType):
        function = function.func if type(function) is functools.partial else function.__func__
    kind = type(function)
    # In Python: code that is not JAX's or the standard library's is watched itself.
    if kind is types.FunctionType:
        module = function.__globals__.get("__name__")  # a wrapper has the `__module__` of what it wraps
        return is_never_asked(function.__code__.co_filename) and _is_of_others(module, function.__name__)
    # A class: making an instance.
    if issubclass(kind, type):
        if (issubclass(function, type) and type(first) is str) or issubclass(function, _CALL_LATER):
            return True  # makes a class, or has something called later
        # An instance that goes has its `__del__` called, which no call in the code shows.
        return any("__del__" in vars(base) for base in type.mro(function)) or _is_others_class(function)
    # A second run would find the result in the cache, and not call the function again.
    if kind is _CACHED:
        wrapped = function.__wrapped__
        return type(wrapped) is types.FunctionType and not is_never_asked(wrapped.__code__.co_filename)
    # In C: a function of a module, or a method of an object. `setattr` and the like may change a module.
    if kind is types.BuiltinFunctionType:
        if any(function is builtin for builtin in _HAVE_EFFECTS):
            return True
        if issubclass(type(first), types.ModuleType) and not any(function is builtin for builtin in _READ):
            return True
        owner = function.__self__
        if owner is None or type(owner) is types.ModuleType:
            return _is_of_others(function.__module__, function.__name__)
        return _is_others_class(owner if issubclass(type(owner), type) else type(owner))
    return _is_others_class(function.__objclass__ if kind in _DESCRIPTORS else kind)


def _is_others_class(cls: type) -> bool:
    """Is it a class of a module that does more than compute values, and whose methods are not watched as they run?"""
    module = MODULE_OF.__get__(cls)
    if not _is_of_others(module, ""):
        return False
    loaded = sys.modules.get(module)
    return not (cls.__flags__ & HEAP_TYPE and (loaded is None or is_open_scope(vars(loaded))))


def _is_of_others(module: object, name: str) -> bool:
    """Does a function of this name belong to a module that does more than compute values?"""
    package, _, submodules = module.partition(".") if type(module) is str else ("builtins", "", "")
    # JAX and NumPy compute values, except where they change settings, print, or draw random numbers.
    if package == "jax":
        return name.startswith(("register", "print")) or not _CHANGE.isdisjoint(submodules.split("."))
    if package == "numpy":
        return name.startswith(("set", "show", "info")) or "random" in submodules
    return package not in _OF_VALUES


def names_others(names: Names, value_of: Callable[[tuple[str, ...]], object]) -> bool:
    """Does code of the user's name a module of the standard library that does more than compute values?

    Or does it set an attribute of a library's module, of an object of such a module (`logger.disabled = True`), or of a
    member of an enum?

    Args:
        value_of: gives what a chain of names leads to, or the first object on its way that is not a module.
    """
    for first, *attributes in names.chains:
        module = value_of((first,))
        # To store an attribute is no call that could be heard.
        if not names.stored_attributes.isdisjoint(attributes):
            changed = type(value_of((first, *attributes)))
            if _is_others_class(changed) or issubclass(changed, enum.EnumType):
                return True
        if type(module) is types.ModuleType:
            package = module.__name__.partition(".")[0]
            if package in sys.stdlib_module_names and package not in _OF_VALUES:
                return True
            if not names.stored_attributes.isdisjoint(attributes[:1]) and not is_users_scope(vars(module)):
                return True
    return False


def attributes_of_others(rows: Iterable[_core.Row]) -> set[str]:
    """The attributes of objects in a graph of which a trace has no copies: what it stores there is seen at once."""
    values = (row.value for row in rows if row.op is Op.static)
    objects = [value for value in values if type(value).__dictoffset__ and _is_others_class(type(value))]
    return {name for obj in objects for name in object.__getattribute__(obj, "__dict__")}


def loads_modules(imported: Iterable[tuple[str, str]], package: str) -> bool:
    """Does one of these import statements, of code in this package, run the code of a module that is not loaded yet?

    Args:
        imported: (the module, with the dots of a relative import; the name that is imported from it, or "").
    """
    for name, imported_name in imported:
        dots = len(name) - len(name.lstrip("."))
        parents = package.split(".") if dots else []
        module = sys.modules.get(".".join(filter(None, [*parents[: len(parents) - dots + 1], name[dots:]])))
        if module is None or (imported_name and imported_name not in vars(module)):
            return True
    return False


def keeps_state(code: types.CodeType) -> bool:
    """Does code of an installed package assign its globals, or count how often it is traced?"""
    # "max_traces": a wrapper of `chex.assert_max_traces` fails when it is traced once more.
    return "max_traces" in code.co_qualname or _STORE_GLOBAL in code.co_code[::2]


def holds_opaque_objects(rows: Iterable[_core.Row]) -> bool:
    """Is there an object of a user's class among the static values? What a trace does to it is not undone."""
    values = (row.value for row in rows if row.op is Op.static)
    return any(is_users_class(type(value)) and not issubclass(type(value), (enum.Enum, type)) for value in values)
