# SPDX-License-Identifier: Apache-2.0
"""What only Python knows of a type: asked once per type by the core, which caches the answer."""

from __future__ import annotations

import array
import asyncio
import concurrent.futures
import datetime
import decimal
import dis
import enum
import fractions
import functools
import gc
import hashlib
import importlib
import inspect
import io
import logging
import multiprocessing.process
import pathlib
import pickle
import queue
import random
import socket
import sys
import threading
import types
import uuid
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterator
from typing import Any, NamedTuple, ParamSpec, TypeVar, TypeVarTuple, cast

import jax
import jax.core
import jax.custom_batching
import jax.extend.core
import numpy as np
from jax import tree_util

from . import _core, interop, statics
from ._compat import (
    data_fields,
    is_registered_static,
    ref_types,
    tree_functions,
    treedef_of_node,
    typed_array_types,
)
from ._errors import UnpicklableError, UnsupportedValueError
from ._handles import HandleLayout, handle_classes
from ._structure import Structure
from .marks import Dynamic, Static

CLASS_GONE = "this {what} holds {value!r} at {path}, which cannot be pickled: {error}"

C = TypeVar("C", bound=type)


class Description(NamedTuple):
    """How the core is to treat one type.

    Roles: array, ref, numpy, shape, identity, equal, reduce, context, refused, registered, node, value, dynamic.
    A context value says where the program is running: it is no part of the key, and a new one is made wherever what
    holds it is rebuilt.
    """

    role: str
    frozen: bool = True  # role reduce: the same object is the same value
    handed: bool = False  # handed over as itself where no array is below
    static_fields: Container[str] | None = None
    reduce: Callable[..., Any] | None = None  # role reduce: the plain value to compare; role context: makes a new one
    reason: str = ""  # role refused: why, and the way out
    sentinel: bool = False  # an instance without fields counts by identity
    order: tuple[str, ...] | None = None  # of fields; registered classes and named tuples: names of the items
    absent: Any = None  # a field with this value counts as not there
    expires: bool = False  # the one change it knows marks it as used up: by value nothing is lost with that
    by_name: bool = False  # role node: the order of its attributes says nothing, they go by name


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

# A new one for every call is what plain Python gives; nobody can make it again.
_MUTABLE_OPAQUE = (
    type(threading.Lock()),
    type(threading.RLock()),
    threading.Condition,
    threading.Event,
    threading.Semaphore,
    threading.Barrier,
    threading.Thread,
    queue.Queue,
)

# Never entered, whatever their fields hold: they stand for something outside the program.
_OPAQUE = (
    *_MUTABLE_OPAQUE,
    logging.Logger,
    logging.Handler,
    logging.LoggerAdapter,
    threading.local,
    concurrent.futures.Executor,
    concurrent.futures.Future,
    socket.socket,
    asyncio.AbstractEventLoop,
    multiprocessing.process.BaseProcess,
    inspect.Signature,
    inspect.Parameter,
    jax.custom_jvp,
    jax.custom_vjp,
    jax.extend.core.Jaxpr,
    jax.extend.core.ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]
    TypeVar,
    ParamSpec,
    TypeVarTuple,
    staticmethod,
    classmethod,
    property,
    _core.GraphDef,
    _core.Caller,
    HandleLayout,
    jax.custom_batching.custom_vmap,
)

_BY_EQUALITY = (np.dtype, jax.sharding.Mesh, jax.sharding.Sharding, jax.sharding.PartitionSpec)

_NUMPY = (np.ndarray, np.memmap, np.recarray, *typed_array_types)
_SUBCLASS_OF_ARRAY = (
    "inside a compiled program it would be a plain array, without what the subclass adds. "
    "Pass numpy.asarray(...) of it."
)
_HIDDEN_STATE = "it hides state that a compiled program cannot replay. "
_REFUSED: tuple[tuple[tuple[type, ...], str], ...] = (
    ((random.Random,), _HIDDEN_STATE + "Use jax.random with an explicit key."),
    (
        (np.random.Generator, np.random.RandomState, np.random.BitGenerator),
        _HIDDEN_STATE + "Use jax.random with an explicit key.",
    ),
    ((io.IOBase,), _HIDDEN_STATE + "Read the data first and pass that."),
    (
        (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType),
        _HIDDEN_STATE + "Turn it into a list first.",
    ),
    ((memoryview,), "it shows memory that others may change. Pass bytes(...) or numpy.asarray(...) of it."),
    ((np.matrix,), "inside a compiled program its operators would be those of an array. Use numpy.asarray."),
    ((np.ma.MaskedArray,), "jax.numpy ignores the mask. Pass the data and the mask as two arrays."),
)


def describe(obj: Any, solid: type) -> Description:
    """Says how the core is to treat the type of `obj`.

    Args:
        obj: the first instance met of a type.
        solid: the nearest base class that no class statement made.
    """
    cls = type(obj)
    if cls in _STATIC_CLASSES:
        by_value = cls.__eq__ is not object.__eq__ and cls.__hash__ is not None
        return Description("equal" if by_value else "identity")
    if cls in by_fields:
        return by_fields[cls]
    adapted = interop.describe(cls)
    if adapted is not None:
        return adapted
    if isinstance(obj, (type, types.ModuleType, enum.Enum)):
        return Description("identity")
    if isinstance(obj, ref_types):
        return Description("ref")
    if issubclass(cls, jax.core.Tracer) or isinstance(obj, jax.Array):
        return Description("array")
    if cls in handle_classes():  # whatever JAX knows it as
        return Description("node", frozen=False, static_fields=handle_classes()[cls].static_fields)
    if issubclass(cls, Dynamic):
        return Description("dynamic", frozen=False, handed=True)
    if issubclass(cls, Static):
        return Description("node", frozen=False, handed=True, static_fields=frozenset({"value"}))
    for types_refused, reason in _REFUSED:
        if isinstance(obj, types_refused):
            return Description("refused", reason=reason)
    if isinstance(obj, (np.ndarray, np.generic)):
        if isinstance(obj, np.ndarray) and cls not in _NUMPY:
            return Description("refused", reason=_SUBCLASS_OF_ARRAY)
        return Description("numpy", frozen=not isinstance(obj, np.ndarray), reduce=statics.numpy_value)
    if isinstance(obj, jax.ShapeDtypeStruct):
        return Description("shape")
    if isinstance(obj, _BY_EQUALITY):
        return Description("equal")
    is_namedtuple = solid is tuple and hasattr(cls, "_fields")  # a node for JAX without being registered
    if not is_namedtuple and not tree_util.all_leaves([obj]) and not is_registered_static(cls):
        return Description("registered", is_frozen(cls), order=names_of_children(cls))
    if isinstance(obj, _OPAQUE):
        return Description("identity")
    if isinstance(obj, tree_util.PyTreeDef):
        return Description("reduce", reduce=statics.treedef_value)
    if isinstance(obj, BaseException):
        if solid.__basicsize__ == BaseException.__basicsize__:
            return Description("node", frozen=False, handed=True)
        return Description("reduce", frozen=False, reduce=statics.exception_value)
    reduce = statics.REDUCE.get(solid) or (statics.known_value if isinstance(obj, _BY_PICKLE) else None)
    if reduce is None and statics.is_structseq(cls):
        reduce = statics.structseq_value
    if reduce is not None:
        has_state = cls is not solid and (
            cls.__dictoffset__ != 0 or any(vars(c).get("__slots__") for c in cls.__mro__[:-1])
        )
        if has_state and cls.__module__ not in _STDLIB:
            return Description("value", handed=True, frozen=False, reduce=reduce)
        return Description("reduce", frozen=False, reduce=reduce)
    if isinstance(obj, Iterator):
        return Description("refused", reason=_HIDDEN_STATE + "Turn it into a list first.")
    if solid in _NODES and cls is not object:
        fields_only = solid is object
        sentinel = fields_only and not _has_methods(cls)
        order = item_names(cls) if is_namedtuple else None
        return Description("node", is_frozen(cls), handed=fields_only, sentinel=sentinel, order=order)
    if cls.__eq__ is not object.__eq__ and cls.__hash__ is not None and cls.__hash__ is not object.__hash__:
        return Description("equal")
    return Description("identity")


def names_of_children(cls: type) -> tuple[str, ...] | None:
    """Which attributes the children of a registered class are, as `register` or JAX was told; None where unknown."""
    functions = tree_functions(cls)
    fields = None if cls in child_names or functions is None else data_fields(functions[0])
    return child_names.get(cls) if fields is None else fields[0]


def item_names(cls: type) -> tuple[str, ...]:
    """The names of the items of a named tuple."""
    names: Any = getattr(cls, "_fields", ())
    return names if isinstance(names, tuple) and all(type(name) is str for name in names) else ()


_STATIC_CLASSES: weakref.WeakSet[type] = weakref.WeakSet()
# What was given to `register`: classes without a flatten, and the names of the children of those with one.
by_fields: weakref.WeakKeyDictionary[type, Description] = weakref.WeakKeyDictionary()
child_names: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()
layouts: weakref.WeakKeyDictionary[type, Callable[[tuple[str, ...]], Any]] = weakref.WeakKeyDictionary()


def register_static(cls: C) -> C:
    """Makes every instance of a class one static value, which is never opened.

    Instances are compared with the class's own `__eq__` and `__hash__`, or by identity where it has none; a change in
    place is not seen. The class is registered with JAX too (`jax.tree_util.register_static`). A decorator.

    Args:
        cls: a class that is not registered with JAX yet.

    Returns:
        the class.

    Raises:
        ValueError: where the class is registered with JAX already.
        TypeError: where it is no class.
    """
    if not isinstance(cast("object", cls), type):
        raise TypeError(f"register_static expects a class, got {cls!r}. For one value, use graftax.Static(value).")
    tree_util.register_static(cls)
    _STATIC_CLASSES.add(cls)
    _core.forget_kind(cls)
    return cls


def is_frozen(cls: type) -> bool:
    parameters = getattr(cls, "__dataclass_params__", None)
    if parameters is not None and parameters.frozen:
        return True
    return "__attrs_attrs__" in vars(cls) and getattr(cls.__setattr__, "__name__", "") == "_frozen_setattrs"


def _has_methods(cls: type) -> bool:
    ignored = {"__module__", "__doc__", "__dict__", "__weakref__", "__slots__", "__repr__", "__reduce__"}
    ignored |= {"__qualname__", "__firstlineno__", "__static_attributes__", "__annotations__", "__match_args__"}
    ignored |= {"__annotate__", "__annotate_func__", "__annotations_cache__", "__init__", "__new__", "__bool__"}
    return any(name not in ignored for base in cls.__mro__[:-1] for name in vars(base))


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
    weakref.ref,
}
_NAMELESS = (types.FunctionType, types.CellType, types.MethodType, types.MappingProxyType)  # written by kind
_STDLIB = ("datetime", "decimal", "fractions", "pathlib", "pathlib._local", "uuid", "zoneinfo")


def numpy_role(dtype: np.dtype[Any]) -> bool | str:
    """True for a dtype that is traced, False for one that is static by value, a message for one that is refused."""
    if dtype.kind in "USMm" or dtype == jax.dtypes.float0:
        return False
    if dtype.hasobject or dtype.fields is not None:
        return f"a NumPy array of dtype {dtype} cannot be traced. Pass its columns or elements one by one."
    if not dtype.isnative:
        order = dtype.byteorder
        return f"a NumPy array of byte order {order!r} cannot be traced. Use a.astype(a.dtype.newbyteorder('='))."
    if dtype.kind in "fc" and dtype.itemsize > (8 if dtype.kind == "f" else 16):
        return f"JAX has no type for a NumPy array of dtype {dtype}. Use a.astype(numpy.float64)."
    if dtype.kind in "biufc" or jax.numpy.issubdtype(dtype, jax.numpy.number):
        return True
    return f"a NumPy array of dtype {dtype} cannot be traced."


def check_opaque(obj: Any, is_output: bool) -> None:
    """Refuses an opaque value that hides arrays: they would be constants for ever, or tracers that outlive a trace."""
    if isinstance(obj, (type, types.ModuleType)) or type(obj) in _STATIC_CLASSES:
        return
    if is_output and _reaches_tracer(obj, depth=6):
        raise UnsupportedValueError(
            f"this {type(obj).__qualname__} holds a traced array and would outlive its trace. "
            "Return the array by itself, and build the rest from it outside."
        )
    if is_output and (type(obj) is object or isinstance(obj, _MUTABLE_OPAQUE)) and not is_module_level(obj):
        raise UnsupportedValueError(
            f"this {type(obj).__qualname__} was made inside the function, where it would be one object for all calls. "
            "Make it outside, and pass it or put it into the result there."
        )
    attributes = getattr(obj, "__dict__", None)
    if isinstance(attributes, dict):
        for name, value in attributes.items():  # pyright: ignore[reportUnknownVariableType]
            if isinstance(value, jax.Array):
                raise UnsupportedValueError(
                    f"{type(obj).__qualname__} cannot be opened, but its attribute {name!r} is an array. "
                    "Register the class with jax.tree_util.register_pytree_node, or pass the array by itself."
                )


def is_module_level(obj: Any) -> bool:
    """Is the object a name of a module or a class, like the sentinels that libraries compare with `is`?"""
    return any(
        isinstance(holder, dict) and ("__name__" in holder or "__module__" in holder)
        for holder in gc.get_referrers(obj)
    )


def _reaches_tracer(obj: Any, depth: int) -> bool:
    """Looks a few references deep, through whatever the garbage collector sees."""
    seen: set[int] = set()
    level: list[Any] = [obj]
    for _ in range(depth):
        below: list[Any] = []
        for part in level:
            for child in gc.get_referents(part):
                if isinstance(child, jax.core.Tracer):
                    return True
                is_scope = isinstance(part, types.FunctionType) and child is part.__globals__
                if is_scope or id(child) in seen or isinstance(child, _NO_TRACERS):
                    continue
                seen.add(id(child))
                below.append(child)
        level = below[:_MOST_SEEN]
    return False


_NO_TRACERS = (type, types.ModuleType, types.CodeType, str, bytes, int, float)
_MOST_SEEN = 2000  # objects a level


_LEAF = tree_util.tree_structure(0)


def is_leaf(value: object) -> bool:
    """Does JAX count this value as a leaf?"""
    return tree_util.all_leaves([value])


def one_level_treedef(cls: type, aux: Any, children: int) -> Any:
    """JAX's treedef of one registered node over `children` leaves: what its registered unflatten is called through."""
    return treedef_of_node(tree_util.default_registry, (cls, aux), [_LEAF] * children)


class NoneKey:
    """The key path entry of a dict's key None, where JAX's own `DictKey` (before 0.10) takes no None."""

    key = None

    def __str__(self) -> str:
        return "[None]"

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NoneKey)

    def __hash__(self) -> int:
        return hash(NoneKey)


def dict_key(key: Any) -> Any:
    """The key path entry of a dict's key."""
    try:
        return tree_util.DictKey(key)
    except TypeError:
        return NoneKey()


def reduce_graphdef(graphdef: _core.GraphDef) -> tuple[Any, ...]:
    """The pickle of a GraphDef; names the path of what cannot be pickled."""
    return (graphdef_from_state, (_picklable(graphdef, "GraphDef"),))


def reduce_outcome(outcome: _core.Outcome) -> tuple[Any, ...]:
    """The pickle of an Outcome; names the path of what cannot be pickled."""
    return (outcome_from_state, (_picklable(outcome, "result"),))


class _ByName:
    """Stands in a pickle for an object that its module and qualified name lead to, such as `jax.nn.relu`.

    Its class may have no pickle, or one that makes a copy.
    """

    def __init__(self, module: str, name: str) -> None:
        self.place = (module, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_find, self.place)


def _find(module: str, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))


def _named(value: Any) -> Any:
    """`value`, or what stands for it in a pickle."""
    if isinstance(value, (type, *_NAMELESS)) or not isinstance(getattr(value, "__dict__", None), dict):
        return value  # pickle does it itself
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return value
    try:
        return _ByName(module, name) if _find(module, name) is value else value
    except (ImportError, AttributeError):
        return value


def _with_names(state: tuple[Any, ...]) -> tuple[Any, ...]:
    """The state of a program with `_ByName` in its statics."""
    statics = tuple((how, _named(value), *rest) for how, value, *rest in state[5])
    return (*state[:5], statics, *state[6:])


def _picklable(program: _core.GraphDef | _core.Outcome, what: str) -> tuple[Any, ...]:
    state = program._state()  # pyright: ignore[reportPrivateUsage]
    state = _with_names(state) if isinstance(program, _core.GraphDef) else (state[0], _with_names(state[1]), *state[2:])
    try:
        pickle.dumps(state)
    except Exception:
        structure = Structure(program)
        for row in structure.rows:
            named = row.type if row.type not in _NAMELESS else None
            for part in (named, row.value):
                try:
                    pickle.dumps(_named(part))
                except Exception as error:
                    where = tree_util.keystr(structure.place(row)[1])
                    message = CLASS_GONE.format(what=what, value=part, path=where or "the root", error=error)
                    raise UnpicklableError(message) from error
        raise
    return state


def fingerprint(graphdef: _core.GraphDef) -> str:
    """A text of 64 hexadecimal digits that equal structures share in every process.

    Classes, functions and modules count by qualified name, other statics by value; one that has neither raises.
    """
    digest = hashlib.sha256()
    for row in graphdef.rows():
        place = (row.root, row.parent, str(row.entry), row.target, row.leaf)
        digest.update(repr((place, row.op.name, _stable(row.type), _stable(row.value))).encode())
    return digest.hexdigest()


def _stable(value: Any) -> str:
    if type(value) in statics.PLAIN:
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return f"name {value.__module__}.{value.__qualname__}"
    if isinstance(value, (list, tuple)):
        parts = [_stable(v) for v in cast("list[Any]", value)]
        # The list is what a set holds: it has no order.
        return f"{type(value).__name__} {sorted(parts) if isinstance(value, list) else parts}"
    if isinstance(value, tree_util.PyTreeDef):
        return f"treedef {value}"
    if isinstance(value, frozenset):
        return f"frozenset {sorted(map(_stable, cast('frozenset[Any]', value)))}"
    if isinstance(value, enum.Enum):
        return f"enum {_stable(type(value))}.{value.name}"
    named = _named(value)
    if isinstance(named, _ByName):
        return "name {}.{}".format(*named.place)
    return f"{_stable(type(value))} {pickle.dumps(value, protocol=4)!r}"


def named_function(function: types.FunctionType) -> types.FunctionType | None:
    """The function of the same code that the module and the qualified name of `function` lead to."""
    found: Any = sys.modules.get(function.__module__ or "")
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    found = getattr(found, "_function", found) if isinstance(found, _core.Caller) else found
    same = isinstance(found, types.FunctionType) and found.__code__ == function.__code__
    return found if same and found.__globals__ is function.__globals__ else None


_WRITERS: weakref.WeakKeyDictionary[types.CodeType, bool] = weakref.WeakKeyDictionary()


def writes_its_cells(function: types.FunctionType) -> bool:
    """Does the function's code, or code nested in it, assign a variable of an enclosing function (`nonlocal`)?"""
    code = function.__code__
    found = _WRITERS.get(code)
    if found is None:
        found = _WRITERS[code] = _writes(code, set(code.co_freevars))
    return found


def _writes(code: types.CodeType, names: set[str]) -> bool:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("STORE_DEREF", "DELETE_DEREF") and instruction.argval in names:
            return True
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return any(_writes(c, names & set(c.co_freevars)) for c in inner)


def graphdef_from_state(state: object) -> _core.GraphDef:
    """Unpickles a GraphDef. Every index is checked: a damaged state raises ValueError."""
    return _core.GraphDef._from_state(state)  # pyright: ignore[reportPrivateUsage]


def outcome_from_state(state: object) -> _core.Outcome:
    """What a pickled Outcome is loaded through."""
    return _core.Outcome._from_state(state)  # pyright: ignore[reportPrivateUsage]


def graphdef_children(graphdef: _core.GraphDef) -> list[_core.GraphDef]:
    """The GraphDef of each child of the root, as if the child had been flattened by itself."""
    leaf = np.float32(0)  # any dynamic leaf will do: structures do not tell them apart
    obj = _core.unflatten(graphdef, [leaf] * graphdef.num_leaves)
    return [_core.flatten(child)[1] for child in _core.children(obj)]
