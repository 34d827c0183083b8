# SPDX-License-Identifier: Apache-2.0
"""Which values behind names can change by themselves, and what functions and classes hold."""

from __future__ import annotations

import dataclasses
import enum
import functools
import sys
import types
from typing import Any

import numpy as np

from graftax import _core
from graftax._base.class_lookup import in_mro
from graftax._base.missing import MISSING
from graftax._capture.bytecode import names_of
from graftax._capture.code_owner import HEAP_TYPE, is_users_class
from graftax._graph.types.describe import LAZY_IMPORT


def is_generated(code: types.CodeType, function: object) -> bool:
    """Is this a method that `dataclasses` made, without defaults or factories that can change by themselves?"""
    if code.co_filename != "<string>" or not code.co_qualname.startswith("__create_fn__"):
        return False
    return not isinstance(function, types.FunctionType) or not has_state(function)


_PLAIN = (bool, int, float, complex, str, bytes, type(None), types.EllipsisType, types.NotImplementedType, range, slice)
_PLAIN_TYPES = frozenset(_PLAIN)
_DESCRIPTORS = property, staticmethod, classmethod, functools.cached_property
_BOUND = (
    types.ModuleType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.CodeType,
    np.dtype,
    np.ufunc,
    *_DESCRIPTORS,
    type,
    *([LAZY_IMPORT] if LAZY_IMPORT is not None else []),  # from Python 3.15 on
)


def is_constant(value: Any) -> bool:
    """Can this value not change by itself? Then its binding is watched, and it is no root."""
    cls = type(value)
    # A member may have attributes of its own, which can change.
    if isinstance(value, enum.Enum):
        return _core.is_opaque(value)
    if cls in _PLAIN or isinstance(value, _BOUND) or value is MISSING:
        # A subclass of `property` that the user has written has attributes of its own, which may change.
        return not (isinstance(value, _DESCRIPTORS) and is_users_class(cls))
    if cls in (tuple, frozenset):
        items = tuple(value)
        # The core looks through a long tuple of numbers or texts at once.
        return _core.holds_only(items, _PLAIN_TYPES) or all(map(is_constant, items))
    if cls is types.MethodType:
        return is_constant(value.__self__)
    if isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
        owner = value.__self__
        # A method in C, such as `losses.append`, is a constant only if its object is one.
        return owner is None or _is_name_of_module(value, owner) or is_constant(owner)
    if cls is types.FunctionType:
        return True  # what it holds is noted when it runs in a trace
    if isinstance(value, _core.Caller):  # so is the function's, but not what it is bound to
        return all(map(is_constant, value._prefix))
    return _core.is_opaque(value) or _is_sentinel(value) or _is_frozen(value)


def _is_name_of_module(method: Any, owner: object) -> bool:
    """Is this a function of a library that is a method of an object behind it? (`random.random`)"""
    module = sys.modules.get(type(owner).__module__)
    return module is not None and getattr(module, method.__name__, None) is method


def can_be_equal(value: object) -> bool:
    """Is this a constant that is compared by what it holds, so that another one may be the same?"""
    return isinstance(value, tuple | frozenset) or _is_frozen(value)


def _is_frozen(value: Any) -> bool:
    """Is it a frozen dataclass of constants, as a config is?"""
    cls: Any = type(value)
    parameters = vars(cls).get("__dataclass_params__")
    if parameters is None or not parameters.frozen or not hasattr(value, "__dict__"):
        return False
    names = {field.name for field in dataclasses.fields(value)}
    # What else lies in its dict (a `cached_property`, say) is put there past `frozen`, so it is not frozen at all.
    return names == vars(value).keys() and all(map(is_constant, vars(value).values()))


def _is_sentinel(value: object) -> bool:
    """Is it an instance of a library's class that holds nothing, as a sentinel is?"""
    cls = type(value)
    # A class statement adds at most two pointers of 8 bytes, for the dict and the weak references.
    holds_data = cls.__basicsize__ > object.__basicsize__ + 16 or cls.__itemsize__ or getattr(value, "__dict__", None)
    # A file or a lock has its state in C, where nobody sees it: it is no sentinel, though it holds no attributes.
    is_refused = _core.kind_info(cls)[0] == "refused"
    return not holds_data and not is_refused and not is_users_class(cls) and bool(cls.__flags__ & HEAP_TYPE)


def has_state(function: types.FunctionType) -> bool:
    """Does a function hold what can change by itself, or change its variables of an enclosing call?"""
    contents = cells_of(function).values()
    return (
        has_defaults(function)
        or not all(map(is_constant, contents))
        or bool(contents and not names_of(function.__code__).assigned.isdisjoint(function.__code__.co_freevars))
    )


def has_defaults(function: types.FunctionType) -> bool:
    """Has it defaults that can change by themselves?"""
    return not all(map(is_constant, defaults_of(function)))


def defaults_of(function: object) -> tuple[Any, ...]:
    """The defaults of all parameters of a function; none of any other object."""
    if not isinstance(function, types.FunctionType):
        return ()
    return *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()


def is_empty(cell: types.CellType) -> bool:
    """Has the variable no value yet, or none any more?"""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def content(cell: types.CellType) -> Any:
    """What a cell holds; MISSING for an empty one."""
    return MISSING if is_empty(cell) else cell.cell_contents


def fill(cell: types.CellType, value: object) -> None:
    """Puts a value into a cell; MISSING empties it."""
    if value is not MISSING:
        cell.cell_contents = value
    elif not is_empty(cell):
        del cell.cell_contents


def cells_of(function: object) -> dict[str, Any]:
    """What a function has in its variables of an enclosing call, by name."""
    if not isinstance(function, types.FunctionType) or not function.__closure__:
        return {}
    pairs = zip(function.__code__.co_freevars, function.__closure__, strict=False)
    return {name: cell.cell_contents for name, cell in pairs if not is_empty(cell)}


# Names that the interpreter, `abc` or `typing` sets in classes by itself.
_OF_PYTHON = frozenset(
    ["__doc__", "__module__", "__qualname__", "__dict__", "__weakref__", "__annotations__", "__annotate__"]
    + ["__annotate_func__", "__annotations_cache__", "__static_attributes__", "__firstlineno__", "__orig_bases__"]
    + ["__abstractmethods__", "__parameters__", "__type_params__", "__slotnames__", "__signature__", "_abc_impl"]
)
OF_NAMES = "__dict__"  # as a binding of a class: which names it has, and which classes are above it
OF_KEYS = "*"  # as a binding of a dict: which keys it has
OWN_NAMES = frozenset(("__name__", "__qualname__", "__doc__", "__module__", "__annotations__"))  # of classes, functions
PARTS = frozenset(("__defaults__", "__kwdefaults__", "__closure__"))  # of a function alone, which may change


def in_class(cls: type, name: str) -> tuple[type | None, Any]:
    """(the class in the MRO that has this name, its value there); of `OF_NAMES`, all names of the class itself."""
    if name == OF_NAMES:
        return None, tuple(sorted(set(_core.class_names(cls)) - _OF_PYTHON))
    # The core reads past the stand-in that a running trace may have put into the class.
    for base in cls.__mro__:
        value = _core.class_attribute(base, name)
        if value is not MISSING:
            return base, value
    return None, MISSING


def overridden(cls: type, names: set[str]) -> set[str]:
    """Those of the names that a base from Python or a library has, too: the methods of that base ask for them.

    Private names are the base's own notes, as `_abc_impl` is.
    """
    bases = [base for base in cls.__mro__[:-1] if not is_users_class(base)]
    return {name for name in names.intersection(*[set[str]().union(*map(vars, bases))]) if not name.startswith("_")}


def is_looked_up(cls: type, name: str, value: object) -> bool:
    """Is it a method, or what Python itself looks up in a class of the user's?

    A table under a special name counts only where code asks for it.
    """
    if isinstance(value, (types.FunctionType, property, staticmethod, classmethod)) and is_constant(value):
        return True
    is_special = name.startswith("__") and name.endswith("__") and name not in _OF_PYTHON and name != "__hash__"
    return is_special and is_users_class(cls) and (is_constant(value) or callable(value) or is_bound_by(value))


def is_bound_by(value: object) -> bool:
    """Is this a descriptor from the interpreter or a library? Its binding is compared, what it holds is not a root."""
    if isinstance(value, types.MethodType | functools.partial) or (isinstance(value, _core.Caller) and value._prefix):
        return False  # they have `__get__` as functions have it, and may be bound to an object that code changes
    return in_mro(type(value), "__get__") is not None and not is_users_class(type(value))
