# SPDX-License-Identifier: Apache-2.0
"""`describe`: how the core is to treat a type. The core asks once for each type and caches the answer."""

from __future__ import annotations

import array
import asyncio
import concurrent.futures
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import logging
import multiprocessing.process
import operator
import pathlib
import socket
import sys
import threading
import types
import uuid
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar, TypeVarTuple

import jax
import jax.core
import jax.custom_batching
import jax.extend.core
import numpy as np
from jax import tree_util
from jax.extend.core import Primitive

from graftax import _core, interop
from graftax._base.class_lookup import in_mro
from graftax._base.errors import UnsupportedValueError
from graftax._base.handles import HANDLE_CLASSES, HandleLayout
from graftax._base.trace_markers import Dynamic, Static
from graftax._base.type_record import Description
from graftax._graph.types import static_values
from graftax._graph.types.ignored import Ignored
from graftax._graph.types.observers import is_observer
from graftax._graph.types.unsupported import IN_C, ITERATOR, hides_state, why_refused
from graftax._jax.arrays import ref_types, typed_array_types
from graftax._jax.tree_registry import data_fields, is_registered_static, tree_functions

_BY_PICKLE = (
    datetime.date,
    datetime.time,
    datetime.timedelta,
    datetime.tzinfo,
    decimal.Decimal,
    fractions.Fraction,
    uuid.UUID,
    pathlib.PurePath,
)

# Opaque values that a function may create anew in each call, which a compiled one cannot.
MUTABLE_OPAQUE = (
    type(threading.Lock()),
    type(threading.RLock()),
    threading.Condition,
    threading.Event,
    threading.Semaphore,
    threading.Barrier,
    threading.Thread,
)

LAZY_IMPORT: type[Any] | None = getattr(types, "LazyImportType", None)  # Python 3.15

# Never traversed, whatever their fields hold: they represent something outside of the program.
_OPAQUE = (
    *MUTABLE_OPAQUE,
    logging.Logger,
    logging.Handler,
    logging.LoggerAdapter,
    concurrent.futures.Executor,
    concurrent.futures.Future,
    socket.socket,
    asyncio.AbstractEventLoop,
    multiprocessing.process.BaseProcess,
    jax.custom_jvp,
    jax.custom_vjp,
    TypeVar,
    ParamSpec,
    TypeVarTuple,
    staticmethod,
    classmethod,
    property,
    _core.GraphDef,
    HandleLayout,
    jax.custom_batching.custom_vmap,
    Primitive,  # whose rules JAX finds by the object itself
    *([LAZY_IMPORT] if LAZY_IMPORT is not None else []),  # a lazy import that fails
)

# A class of the user's that derives from one of these has attributes of its own.
_OPAQUE_BASES = (
    threading.Thread,
    logging.Handler,
    logging.LoggerAdapter,
    concurrent.futures.Executor,
    multiprocessing.process.BaseProcess,
    property,
    staticmethod,
    classmethod,
)

# The roles of the classes of symbolic numbers. `_capture.numbers` registers them: it stands above this package.
_SYMBOLS: dict[type, str] = {}

_BY_EQUALITY = (
    np.dtype,
    jax.sharding.AbstractMesh,
    jax.sharding.Mesh,
    jax.sharding.PartitionSpec,
    jax.sharding.Sharding,
)

_NUMPY = (np.ndarray, np.memmap, np.recarray, *typed_array_types)
_HIDDEN_SLOT = (
    "{cls} has no descriptor for its slot {name!r}, so a change of its value could not be noticed. Leave "
    "the descriptor in the class."
)
_SUBCLASS_OF_ARRAY = (
    "inside a compiled program it would be a plain array, without what the subclass adds. "
    "Pass numpy.asarray(...) of it."
)


def register_symbol(base: type, role: str) -> None:
    """Sets the role of a class of symbolic numbers and its subclasses. A subclass is registered before its base."""
    _SYMBOLS[base] = role


def is_symbol(value: object) -> bool:
    """Is it a symbolic number: a Python number or a NumPy scalar that may differ in the next call?"""
    return issubclass(type(value), tuple(_SYMBOLS))


def plain(value: Any) -> Any:
    """The current value of a symbolic number, which becomes part of the key; any other value as it is."""
    return value.pinned() if is_symbol(value) else value


class Symbolic:
    """The number of running traces with symbolic numbers, in all threads: structures may hold symbols meanwhile."""

    running = 0


def describe(obj: object, solid: type) -> Description:
    """Tells the core how to treat the type of `obj`. The order of the tests matters: the special before the general.

    Args:
        obj: the first instance of a type that the core meets.
        solid: the nearest base class that is not made by a class statement.
    """
    for group in (_declared, _array_or_name, _value_of_jax, _opaque_value, _opened_by_core):
        if (description := group(obj, type(obj), solid)) is not None:
            return description
    return Description("refused", reason=IN_C, opaque=True) if hides_state(obj, solid) else Description("identity")


def _declared(obj: object, cls: type, solid: type) -> Description | None:
    """What the user or a library has said of a class."""
    # First, because `isinstance` reads the `__class__` of an object, and a placeholder raises whatever is read of it.
    if cls is Ignored:
        return Description("ignored")
    # What the user has registered decides before anything that graftax knows of a type.
    if cls in static_classes:
        by_value = cls.__eq__ is not object.__eq__ and cls.__hash__ is not None
        return Description("equal" if by_value else "identity")
    if cls in by_fields:
        return by_fields[cls]
    if is_observer(cls):
        return Description("identity")
    return interop.describe(cls)


def _array_or_name(obj: object, cls: type, solid: type) -> Description | None:
    """Arrays, graftax's own objects, and what counts by its identity because it has a name: classes, modules, enums."""
    # Classes, modules and members of enums count by identity; a member with state has attributes to compare.
    if isinstance(obj, (type, types.ModuleType)):
        return Description("identity")
    if isinstance(obj, enum.Enum):
        return _OPENED_MEMBER if solid is object and _has_state(type(obj)) else Description("identity")
    if issubclass(cls, jax.core.Tracer):  # that of a jax.Ref as well: the answer holds for the whole class
        return Description("array")
    if isinstance(obj, ref_types):
        return Description("ref")
    if isinstance(obj, jax.Array):
        return Description("array")
    # graftax's own classes. A handle of packed state is registered with JAX, but here it is a mutable node.
    if cls in HANDLE_CLASSES:
        return Description("node", frozen=False, static_fields=HANDLE_CLASSES[cls].static_fields)
    if (symbol := next((role for base, role in _SYMBOLS.items() if issubclass(cls, base)), None)) is not None:
        return Description(symbol)
    if issubclass(cls, Dynamic):
        return Description("dynamic", frozen=False, handed=True)
    if issubclass(cls, Static):
        return Description("node", frozen=False, handed=True, static_fields=frozenset({"value"}))
    return None


def _value_of_jax(obj: object, cls: type, solid: type) -> Description | None:
    """NumPy's arrays, what JAX opens or compares, and what holds a state that no copy would have."""
    if reason := why_refused(obj):
        return Description("refused", reason=reason)
    if isinstance(obj, (np.ndarray, np.generic)):
        if isinstance(obj, np.ndarray) and cls not in _NUMPY:
            return Description("refused", reason=_SUBCLASS_OF_ARRAY)
        return Description("numpy", frozen=not isinstance(obj, np.ndarray), reduce=static_values.numpy_value)
    if isinstance(obj, jax.ShapeDtypeStruct):
        return Description("shape")
    if isinstance(obj, _BY_EQUALITY):
        return Description("equal")
    # What is registered with JAX. A named tuple is a node for JAX without that, and its items have names here.
    if not _is_named_tuple(cls, solid) and not tree_util.all_leaves([obj]) and not is_registered_static(cls):
        return Description("registered", is_frozen(cls), order=names_of_children(cls))
    # A jitted function is itself, unless it is bound to an object.
    if issubclass(cls, _core.Caller):
        return Description("bound jit", handed=True)
    # A closed jaxpr holds constants, which are its children.
    if isinstance(obj, jax.extend.core.ClosedJaxpr):  # pyright: ignore[reportPrivateImportUsage]
        return Description("jaxpr")
    return None


def _opaque_value(obj: object, cls: type, solid: type) -> Description | None:
    """Objects that are compared by their identity, or by a plain value that they are reduced to."""
    # A thread, a handler or the like. Those of the standard library are opaque; a user's subclass adds attributes.
    if isinstance(obj, _OPAQUE_BASES) and cls.__module__.partition(".")[0] not in sys.stdlib_module_names:
        return _OPENED
    if isinstance(obj, (*_OPAQUE, jax.extend.core.Jaxpr)):
        return Description("identity")
    if isinstance(obj, tree_util.PyTreeDef):
        return Description("reduce", reduce=static_values.treedef_value)
    # Exceptions written in Python have the layout of a built-in one; those written in C may keep anything.
    if isinstance(obj, BaseException):
        if any(issubclass(solid, c) and solid.__basicsize__ == c.__basicsize__ for c in EXCEPTIONS):
            return Description("node", frozen=False, handed=True)
        return Description("reduce", frozen=False, reduce=static_values.exception_value)
    # Values that are compared by a plain value.
    reduce = static_values.REDUCE.get(solid) or (static_values.known_value if isinstance(obj, _BY_PICKLE) else None)
    if reduce is None and static_values.is_structseq(cls):
        reduce = static_values.structseq_value
    if reduce is not None:
        # A subclass may add attributes to a date or a number: then these are compared too.
        has_state = cls is not solid and (
            cls.__dictoffset__ != 0 or any(vars(c).get("__slots__") for c in cls.__mro__[:-1])
        )
        if has_state and cls.__module__ not in _STDLIB:
            return Description("value", handed=True, frozen=False, reduce=reduce)
        return Description("reduce", frozen=False, reduce=reduce)
    return None


def _opened_by_core(obj: object, cls: type, solid: type) -> Description | None:
    """Containers and plain objects; of others, what the class says about equal instances."""
    if (name := _hidden_slot(cls)) is not None:
        raise UnsupportedValueError(_HIDDEN_SLOT.format(cls=cls.__qualname__, name=name))
    if solid in _NODES and cls is not object:
        fields_only = solid in (object, threading.local)
        # An object without methods and state is a mark, which is compared by identity.
        sentinel = solid is object and not _has_methods(cls)
        order = item_names(cls) if _is_named_tuple(cls, solid) else None
        own_equality = fields_only and _defines_equality(cls)
        return Description(
            "node", is_frozen(cls), handed=fields_only, sentinel=sentinel, own_equality=own_equality, order=order
        )
    # One that a class statement made was a node: its position is in its attributes.
    if isinstance(obj, Iterator):
        return Description("refused", reason=ITERATOR)
    # The class says itself when two instances are equal.
    if cls.__eq__ is not object.__eq__ and cls.__hash__ not in (None, object.__hash__):
        return Description("equal")
    return None


def _is_named_tuple(cls: type, solid: type) -> bool:
    return solid is tuple and hasattr(cls, "_fields")


def names_of_children(cls: type) -> tuple[str, ...] | None:
    """The names of the children of a registered class, as given to `register` or JAX; None where unknown."""
    functions = tree_functions(cls)
    fields = None if cls in child_names or functions is None else data_fields(functions[0])
    return child_names.get(cls) if fields is None else fields[0]


def item_names(cls: type) -> tuple[str, ...]:
    """The names of the items of a named tuple; empty for another class, or if `_fields` is something else."""
    names: Any = in_mro(cls, "_fields")
    return names if isinstance(names, tuple) and all(type(name) is str for name in names) else ()


# Classes registered by `register_static`.
static_classes: weakref.WeakSet[type] = weakref.WeakSet()
# Classes registered by `register`: those without a flatten, and the names of the children of those with one.
by_fields: weakref.WeakKeyDictionary[type, Description] = weakref.WeakKeyDictionary()
child_names: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()
schemas: weakref.WeakKeyDictionary[type, Callable[[tuple[str, ...]], Any]] = weakref.WeakKeyDictionary()


def is_frozen(cls: type) -> bool:
    """Do dataclasses or attrs refuse to assign the fields of an instance?"""
    parameters = in_mro(cls, "__dataclass_params__")
    if parameters is not None and parameters.frozen:
        return True
    # attrs has no public way to ask.
    return "__attrs_attrs__" in vars(cls) and getattr(cls.__setattr__, "__name__", "") == "_frozen_setattrs"


def _defines_equality(cls: type) -> bool:
    """Does a class statement spell both methods? Those that dataclasses and attrs write compare all fields anyway."""
    codes = [getattr(getattr(cls, name), "__code__", None) for name in ("__eq__", "__hash__")]
    return all(code is not None and not code.co_filename.startswith(("<string>", "<attrs")) for code in codes)


def _nothing(obj: object) -> tuple[()]:
    del obj
    return ()


# Always the caller's own object; its attributes are compared, and what is set there is brought back.
_OPENED = Description("value", frozen=False, handed=True, reduce=_nothing)
_OPENED_MEMBER = dataclasses.replace(_OPENED, unique=True, reduce=operator.attrgetter("_name_"))


def _has_state(cls: type[enum.Enum]) -> bool:
    """Does a member of an enum hold what can change by itself, or attributes of its own?"""
    plain = (*static_values.PLAIN, type, types.FunctionType, enum.Enum)
    values = [value for m in cls for value in (m.value if type(m.value) is tuple else (m.value,))]
    return not all(isinstance(v, plain) for v in values) or any(not k.startswith("_") for m in cls for k in vars(m))


def _hidden_slot(cls: type) -> str | None:
    """A slot whose descriptor is not in the class any more: its value cannot be read. None if all are there."""
    for base in cls.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots if isinstance(slots, (tuple, list)) else ():
            # Python mangles the name of a private slot, as that of any private attribute.
            private = name.startswith("__") and not name.endswith("__")
            own_name = f"_{base.__name__.lstrip('_')}{name}" if private else name
            if own_name not in ("__dict__", "__weakref__") and own_name not in vars(base):
                return name
    return None


def _has_methods(cls: type) -> bool:
    # What every class has, and what a sentinel's class may define: how it is made, printed and pickled, and its truth.
    ignored = {"__module__", "__doc__", "__dict__", "__weakref__", "__slots__", "__repr__", "__reduce__"}
    ignored |= {"__qualname__", "__firstlineno__", "__static_attributes__", "__annotations__", "__match_args__"}
    ignored |= {"__annotate__", "__annotate_func__", "__annotations_cache__", "__init__", "__new__", "__bool__"}
    return any(name not in ignored for base in cls.__mro__[:-1] for name in vars(base))


# Exceptions that the core opens have the layout of one of these, with these fields besides args, cause and context.
EXCEPTIONS: dict[type[BaseException], tuple[str, ...]] = {
    BaseException: (),
    OSError: ("errno", "strerror", "filename", "filename2", "characters_written"),
    ImportError: ("msg", "name", "path", "name_from"),
    NameError: ("name",),
    AttributeError: ("obj", "name"),
    **dict.fromkeys(
        (UnicodeEncodeError, UnicodeDecodeError, UnicodeTranslateError),
        ("encoding", "object", "start", "end", "reason"),
    ),
    SystemExit: ("code",),
    StopIteration: ("value",),
}
_NODES = {
    object,
    list,
    tuple,
    dict,
    set,
    frozenset,
    bytearray,
    array.array,
    types.SimpleNamespace,
    OrderedDict,
    defaultdict,
    deque,
    functools.partial,
    threading.local,
    weakref.ref,
}
_STDLIB = ("datetime", "decimal", "fractions", "pathlib", "pathlib._local", "uuid", "zoneinfo")


def numpy_role(dtype: np.dtype[Any]) -> bool | str:
    """True for a dtype that is traced, False for one that is static, a message for one that is refused."""
    if dtype.kind in "USMm" or dtype == jax.dtypes.float0:
        return False
    if dtype.hasobject or dtype.fields is not None:
        return f"a NumPy array of dtype {dtype} cannot be traced. Pass its columns or elements one by one."
    # Each refusal says how to convert the array.
    if not dtype.isnative:
        order = dtype.byteorder
        return f"a NumPy array of byte order {order!r} cannot be traced. Use a.astype(a.dtype.newbyteorder('='))."
    if dtype.kind in "fc" and dtype.itemsize > (8 if dtype.kind == "f" else 16):
        return f"JAX has no type for a NumPy array of dtype {dtype}. Use a.astype(numpy.float64)."
    if dtype.kind in "biufc" or jax.numpy.issubdtype(dtype, jax.numpy.number):
        return True
    return f"a NumPy array of dtype {dtype} cannot be traced."
