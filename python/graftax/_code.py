# SPDX-License-Identifier: Apache-2.0
"""Code, as the read set sees it: whose it is, what it names, and which values behind names can change by themselves."""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import site
import sys
import sysconfig
import types
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import _core


class Missing:
    """Stands for a parameter without default, or a global that is not there."""

    def __repr__(self) -> str:
        return "missing"


MISSING = Missing()


# ---- whose code is it?

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE


def _library_folders() -> tuple[str, ...]:
    paths = [sysconfig.get_paths()[k] for k in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [*site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).parent)]
    return tuple(sorted({path.rstrip("/") + "/" for path in paths}))


_LIBRARIES = _library_folders()
_NEVER = ("jax", "jaxlib", "numpy", "graftax", "ml_dtypes", "scipy", "opt_einsum")


@functools.cache
def is_users(filename: str) -> bool:
    """Is this file the user's own, rather than the standard library's or an installed package's?"""
    return not filename.startswith(("<frozen", *_LIBRARIES))


@functools.cache
def is_never_asked(filename: str) -> bool:
    """Code of JAX and the standard library: what it reads is not the user's to change."""
    if not filename.startswith(("<frozen", *_LIBRARIES)):
        return False
    packages = [f"{folder}{name}/" for folder in _LIBRARIES if "-packages" in folder for name in _NEVER]
    installed = any("-packages/" in folder and filename.startswith(folder) for folder in _LIBRARIES)
    return not installed or filename.startswith((str(Path(__file__).parent), *packages))


def is_users_scope(scope: dict[str, Any]) -> bool:
    filename = scope.get("__file__")
    if not isinstance(filename, str):
        return scope.get("__name__") not in sys.builtin_module_names
    return is_users(filename)


def is_users_code(code: types.CodeType, scope: dict[str, Any]) -> bool:
    """Code that has no file of its own (made from a text) is whose its globals are."""
    filename = code.co_filename
    if filename.startswith("<"):
        written = filename.startswith(("<string>", "<stdin>", "<ipython", "<doctest"))  # else a library made it
        of_module = "__name__" in scope and not filename.startswith("<@")
        return (written or of_module) and is_users_scope(scope)
    return is_users(filename)


def is_generated(code: types.CodeType) -> bool:
    """A method that `dataclasses` wrote: its state is the class's."""
    return code.co_filename == "<string>" and code.co_qualname.startswith("__create_fn__")


# Asked by containers of keys at moments of their own, by graftax too: what they read counts as a binding.
ASKED_ANY_TIME = ("__hash__", "__eq__")


def is_users_class(cls: type) -> bool:
    if not cls.__flags__ & _HEAP_TYPE:  # not made by a class statement
        return False
    module = sys.modules.get(cls.__module__)
    return module is None or is_users_scope(vars(module))


# ---- what code names


class Names(NamedTuple):
    """What one code object names."""

    chains: tuple[tuple[str, ...], ...]  # (global or free variable or imported module, attribute, attribute, ...)
    imports: dict[str, str]  # local variable -> module
    stored: tuple[str, ...]  # globals that it assigns or deletes
    attributes: frozenset[str]


_NAMES: weakref.WeakKeyDictionary[types.CodeType, Names] = weakref.WeakKeyDictionary()


def names_of(code: types.CodeType) -> Names:
    found = _NAMES.get(code)
    if found is None:
        found = _NAMES[code] = _scan(code)
    return found


def _scan(code: types.CodeType) -> Names:
    chains: dict[tuple[str, ...], None] = {}
    imports: dict[str, str] = {}
    stored: dict[str, None] = {}
    attributes: set[str] = set()
    chain: tuple[str, ...] = ()
    module = ""
    for at in dis.get_instructions(code):
        op = at.opname
        if op in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(at.argval)
            chain = (*chain, at.argval) if chain else ()
            if chain:
                chains[chain] = None
            continue
        if op == "CACHE":
            continue
        chain = ()
        if op in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF"):
            chain = (at.argval,)
            chains[chain] = None
        elif "LOAD_FAST" in op:  # one instruction may load or store two
            names = at.argval if isinstance(at.argval, tuple) else (at.argval,)
            if op.startswith("STORE_FAST") and module:
                imports[names[0]] = module.partition(".")[0] if module.startswith(f"{names[0]}.") else module
                module = ""
            chain = (names[-1],) if names[-1] in imports else ()
        elif op in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            stored[at.argval] = None
        elif op == "IMPORT_NAME":
            module = at.argval
        elif op == "IMPORT_FROM":
            imports.setdefault(f"from {module}", module)
            chains[f"from {module}", at.argval] = None
        elif op == "STORE_FAST" and module:
            imports[at.argval] = module.partition(".")[0] if module.startswith(f"{at.argval}.") else module
            module = ""
    longest = tuple(c for c in chains if len(c) > 1 or not any(d[: len(c)] == c for d in chains if len(d) > len(c)))
    return Names(longest, imports, tuple(stored), frozenset(attributes))


def only_in(code: types.CodeType, hosts: set[types.CodeType]) -> set[str]:
    """The variables and globals of a function that are read or assigned by these functions in it alone."""
    own: set[str] = set()
    theirs: set[str] = set()
    todo = [(code, False)]
    while todo:
        part, in_host = todo.pop()
        in_host |= part in hosts
        (theirs if in_host else own).update(at.argval for at in dis.get_instructions(part) if at.opname in _NAMED)
        todo += [(constant, in_host) for constant in part.co_consts if isinstance(constant, types.CodeType)]
    return theirs - own


_NAMED = frozenset(
    f"{what}_{where}" for what in ("LOAD", "STORE", "DELETE") for where in ("DEREF", "CLASSDEREF", "GLOBAL", "NAME")
) | {"LOAD_FROM_DICT_OR_DEREF", "LOAD_FROM_DICT_OR_GLOBALS"}
_PLAIN = (bool, int, float, complex, str, bytes, type(None), types.EllipsisType, types.NotImplementedType, range, slice)
_PLAIN_TYPES = frozenset(_PLAIN)
_BOUND = (
    types.ModuleType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.CodeType,
    enum.Enum,
    np.dtype,
    np.ufunc,
    property,
    staticmethod,
    classmethod,
    functools.cached_property,
    type,
)


def is_constant(value: Any) -> bool:
    """Can this value not change by itself? Then its binding is watched, and it is no root."""
    cls = type(value)
    if cls in _PLAIN or isinstance(value, _BOUND) or value is MISSING:
        return True
    if cls in (tuple, frozenset):
        return _PLAIN_TYPES.issuperset(map(type, value)) or all(map(is_constant, value))
    if cls is types.MethodType:
        return is_constant(value.__self__)
    if isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
        owner = value.__self__
        return owner is None or _is_name_of_module(value, owner) or is_constant(owner)
    if cls is types.FunctionType or isinstance(value, _core.Caller):
        return True  # what it holds is met when it runs
    return _core.is_opaque(value) or _is_sentinel(value) or _is_frozen(value)


def _is_name_of_module(method: Any, owner: object) -> bool:
    """Is this a function of a library, which happens to be a method of an object of its own? (`random.random`)"""
    module = sys.modules.get(type(owner).__module__)
    return module is not None and getattr(module, method.__name__, None) is method


def can_be_equal(value: Any) -> bool:
    """Is this a constant that is compared by what it holds, so that another one may be the same?"""
    return isinstance(value, tuple | frozenset) or _is_frozen(value)


def _is_frozen(value: Any) -> bool:
    """A frozen dataclass of constants: a config."""
    cls: Any = type(value)
    parameters = vars(cls).get("__dataclass_params__")
    if parameters is None or not parameters.frozen or not hasattr(value, "__dict__"):
        return False
    names = {field.name for field in dataclasses.fields(value)}
    return names == vars(value).keys() and all(map(is_constant, vars(value).values()))


def _is_sentinel(value: Any) -> bool:
    """An instance of a library's class that holds nothing."""
    cls = type(value)
    holds = cls.__basicsize__ > object.__basicsize__ + 16 or cls.__itemsize__ or getattr(value, "__dict__", None)
    hidden = _core.kind_info(cls)[0] == "refused"
    return not holds and not hidden and not is_users_class(cls) and bool(cls.__flags__ & _HEAP_TYPE)


def has_state(function: types.FunctionType) -> bool:
    """Does a function hold what can change by itself, or change its variables of an enclosing call?"""
    contents = [cell.cell_contents for cell in function.__closure__ or () if not is_empty(cell)]
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return not all(map(is_constant, [*contents, *defaults])) or bool(contents and _writes_cell(function))


def is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def _writes_cell(function: types.FunctionType) -> bool:
    return any(
        at.opname == "STORE_DEREF" and at.argval in function.__code__.co_freevars
        for at in dis.get_instructions(function.__code__)
    )


def cells_of(function: Any) -> dict[str, Any]:
    if not isinstance(function, types.FunctionType) or not function.__closure__:
        return {}
    pairs = zip(function.__code__.co_freevars, function.__closure__, strict=False)
    return {name: cell.cell_contents for name, cell in pairs if not is_empty(cell)}


def in_class(cls: type, name: str) -> tuple[type | None, Any]:
    for base in cls.__mro__:
        if name in vars(base):
            return base, vars(base)[name]
    return None, MISSING
