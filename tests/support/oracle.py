# SPDX-License-Identifier: Apache-2.0
"""Object graphs in plain Python: the small, slow twin that the engine is tested against.

A graph is made of *nodes* (containers and objects), *arrays* (dynamic leaves) and *statics* (all the rest).
Mutable nodes have an identity; tuples, frozen objects and arrays have none.
"""

from __future__ import annotations

import array
import enum
import functools
import gc
import struct
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import default_registry

BUILTIN = (list, tuple, dict, deque, set, bytearray, array.array)
ATOMS = (
    *(bool, int, float, complex, str, bytes, type(None), type(...), range, slice, frozenset),
    *(enum.Enum, type, np.dtype, types.ModuleType, types.BuiltinFunctionType),
)
VALUES = (int, float, complex, str, bytes)  # what a class with attributes can be derived from
PARTS = (types.MethodType, weakref.ReferenceType, types.MappingProxyType)  # they hold others, and cannot change
TABLES = "__graftax_tables__"  # what is compiled for a function hangs on it and is no part of its value


# ── what a value is ──


def is_array(x: Any) -> bool:
    """A dynamic leaf: a JAX array, or a NumPy array or scalar of a dtype that JAX accepts."""
    if isinstance(x, jax.Array):
        return True
    return isinstance(x, np.ndarray | np.generic) and (
        jnp.issubdtype(x.dtype, np.number) or jnp.issubdtype(x.dtype, np.bool_)
    )


def is_node(x: Any) -> bool:
    if is_array(x) or isinstance(x, np.ndarray | np.generic):
        return False
    if isinstance(x, VALUES) and not isinstance(x, enum.Enum):
        return hasattr(x, "__dict__")
    if isinstance(x, ATOMS):
        return False
    if isinstance(x, (types.CellType, *PARTS)):
        return True
    return isinstance(x, BUILTIN) or hasattr(x, "__dict__") or bool(slot_names(type(x)))


def is_mutable(x: Any) -> bool:
    """A node with an identity of its own."""
    if not is_node(x) or isinstance(x, (tuple, eqx.Module, *PARTS)):
        return False
    params = getattr(type(x), "__dataclass_params__", None)
    return params is None or not params.frozen


# ── how a node opens ──


def slot_names(cls: type) -> list[str]:
    names: list[str] = []
    for base in reversed(cls.__mro__):
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                mangled = name.startswith("__") and not name.endswith("__")
                names.append(f"_{base.__name__.lstrip('_')}{name}" if mangled else name)
    return names


def fields(x: Any) -> list[tuple[str, Any]]:
    """Instance attributes in order: ``__dict__`` first, then the slots that are set."""
    if isinstance(x, PARTS):
        return []
    found = [(k, v) for k, v in vars(x).items() if k != TABLES] if hasattr(x, "__dict__") else []
    for name in slot_names(type(x)):
        try:
            found.append((name, object.__getattribute__(x, name)))
        except AttributeError:
            continue
    return found


def extras(x: Any) -> tuple[Any, ...]:
    """What a container is besides its children."""
    if isinstance(x, deque):
        return (x.maxlen,)
    if isinstance(x, defaultdict):
        return (x.default_factory,)
    if isinstance(x, set):
        return (frozenset(x),)
    if isinstance(x, bytearray):
        return (bytes(x),)
    if isinstance(x, types.FunctionType):
        return (x.__code__, x.__name__, x.__qualname__)
    if isinstance(x, array.array):
        return (x.typecode, x.tobytes())
    if isinstance(x, VALUES):
        return (next(base for base in VALUES if isinstance(x, base)), plain_value(x))
    return ()


def plain_value(x: Any) -> Any:
    """The value of an instance of a class derived from one of ``VALUES``."""
    for base in VALUES:
        if isinstance(x, base):
            return base.__getnewargs__(x)[0] if hasattr(base, "__getnewargs__") else base(x)
    raise AssertionError(x)


def children(x: Any) -> list[tuple[str, Any, Any]]:
    """Labelled children in walk order: (``item`` | ``key`` | ``attr``, label, child)."""
    found: list[tuple[str, Any, Any]] = []
    if isinstance(x, list | tuple | deque):
        found += [("item", i, child) for i, child in enumerate(x)]
    elif isinstance(x, dict):
        items = OrderedDict.items(x) if isinstance(x, OrderedDict) else dict.items(x)
        found += [("key", key, child) for key, child in items]
    elif isinstance(x, types.CellType):
        found += [("item", 0, cell_content(x))] if cell_content(x) is not EMPTY else []
    elif isinstance(x, types.FunctionType):
        found += [("attr", "__defaults__", x.__defaults__), ("attr", "__kwdefaults__", x.__kwdefaults__)]
        found += [("item", i, cell) for i, cell in enumerate(x.__closure__ or ())]
    elif isinstance(x, types.MethodType):
        found += [("attr", "__func__", x.__func__), ("attr", "__self__", x.__self__)]
    elif isinstance(x, functools.partial):
        found += [("attr", name, getattr(x, name)) for name in ("func", "args", "keywords")]
    elif isinstance(x, weakref.ReferenceType):
        found += [("attr", "referent", x())] if x() is not None else []
    elif isinstance(x, types.MappingProxyType):
        found += [("attr", "mapping", gc.get_referents(x)[0])]
    return found + [("attr", name, child) for name, child in fields(x)]


EMPTY = object()


def cell_content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return EMPTY


def leaf_children(x: Any) -> list[Any]:
    """Children in the order of the leaves: a type registered with JAX has the order of its own flatten."""
    if not isinstance(x, BUILTIN):
        try:
            opened = default_registry.flatten_one_level(x)
        except ValueError:  # older JAX raises where newer JAX returns None
            opened = None
        if opened is not None:
            return list(opened[0])
    return [child for _, _, child in children(x)]


# ── equality ──


def same_static(x: Any, y: Any) -> bool:
    """Same type and same value, at every depth: nan is itself, 0.0 is not -0.0, 1 is not True."""
    if x is y:
        return True
    if type(x) is not type(y):
        return False
    if isinstance(x, float):
        return (x != x and y != y) or struct.pack("d", x) == struct.pack("d", y)
    if isinstance(x, complex):
        return same_static(x.real, y.real) and same_static(x.imag, y.imag)
    if isinstance(x, tuple):
        return len(x) == len(y) and all(map(same_static, x, y))
    if isinstance(x, frozenset):
        return len(x) == len(y) and all(any(same_static(i, j) for j in y) for i in x)
    if isinstance(x, np.ndarray | np.generic):
        return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
    if isinstance(x, bool | int | str | bytes | range | slice | np.dtype):
        return bool(x == y)
    return False


def same_array(x: Any, y: Any) -> bool:
    if isinstance(x, jax.Array) and isinstance(y, jax.Array):
        if x.dtype != y.dtype or x.shape != y.shape:
            return False
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return same_array(jax.random.key_data(x), jax.random.key_data(y))
        return x.weak_type == y.weak_type and np.asarray(x).tobytes() == np.asarray(y).tobytes()
    return type(x) is type(y) and same_static(x, y)


def difference(a: Any, b: Any, identities: Iterable[tuple[Any, Any]] = ()) -> str | None:
    """Where two graphs first differ, in words; None where they are isomorphic.

    ``identities`` are pairs of nodes that must stand in the same places of the two graphs.
    """
    there: dict[int, Any] = {}
    back: dict[int, Any] = {}
    held: list[Any] = []
    for x, y in identities:
        there[id(x)], back[id(y)] = y, x
        held += [x, y]
    seen: set[tuple[int, int]] = set()
    todo: list[tuple[str, Any, Any]] = [("", a, b)]
    while todo:
        path, x, y = todo.pop()
        if is_array(x) or is_array(y):
            if not (is_array(x) and is_array(y) and same_array(x, y)):
                return f"{path}: array {short(x)} against {short(y)}"
            continue
        if not is_node(x) or not is_node(y):
            if is_node(x) or is_node(y) or not same_static(x, y):
                return f"{path}: static {short(x)} against {short(y)}"
            continue
        if type(x) is not type(y):
            return f"{path}: {type(x).__name__} against {type(y).__name__}"
        if is_mutable(x) and (there.setdefault(id(x), y) is not y or back.setdefault(id(y), x) is not x):
            return f"{path}: not the same node on both sides ({short(x)} against {short(y)})"
        if (id(x), id(y)) in seen:
            continue
        seen.add((id(x), id(y)))
        held += [x, y]
        if not same_static(extras(x), extras(y)):
            return f"{path}: {extras(x)} against {extras(y)}"
        left, right = children(x), children(y)
        names = tuple((kind, label) for kind, label, _ in left)
        if not same_static(names, tuple((kind, label) for kind, label, _ in right)):
            return f"{path}: children {names!r:.120} against {[entry[:2] for entry in right]!r:.120}"
        for (kind, label, i), (_, _, j) in zip(reversed(left), reversed(right), strict=True):
            todo.append((f"{path}.{label}" if kind == "attr" else f"{path}[{label!r}]", i, j))
    return None


def same_graph(a: Any, b: Any, identities: Iterable[tuple[Any, Any]] = ()) -> bool:
    """Whether two graphs agree in types, order, statics, arrays, sharing and cycles."""
    return difference(a, b, identities) is None


def short(x: Any) -> str:
    if is_node(x):  # the repr of a cyclic object may not end
        return f"{type(x).__name__} at {id(x):#x}"
    text = repr(x)
    return f"{type(x).__name__} {text if len(text) < 80 else text[:77] + '...'}"


# ── copy and flatten ──


def copy_leaf(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def deep_copy(x: Any, leaf: Callable[[Any], Any] = copy_leaf, memo: dict[int, tuple[Any, Any]] | None = None) -> Any:
    """A graph like ``x`` made of new nodes; ``leaf`` maps its arrays; ``memo`` receives (old, new) pairs."""
    memo = {} if memo is None else memo
    if is_array(x):
        return leaf(x)
    if not is_node(x):
        return x
    if id(x) in memo:
        return memo[id(x)][1]

    def again(child: Any) -> Any:
        return deep_copy(child, leaf, memo)

    cls = type(x)
    if isinstance(x, tuple):
        new = tuple.__new__(cls, [again(child) for child in x])
    elif isinstance(x, types.CellType):
        new = memo[id(x)] = (x, types.CellType())
        new = new[1]
        if cell_content(x) is not EMPTY:
            new.cell_contents = again(x.cell_contents)
        return new
    elif isinstance(x, types.FunctionType):
        cells = [memo.setdefault(id(cell), (cell, types.CellType()))[1] for cell in x.__closure__ or ()]
        new = types.FunctionType(x.__code__, x.__globals__, x.__name__, None, tuple(cells) or None)
        new.__qualname__ = x.__qualname__
        memo[id(x)] = (x, new)
        for old, fresh in zip(x.__closure__ or (), cells, strict=True):
            if cell_content(old) is not EMPTY and cell_content(fresh) is EMPTY:
                fresh.cell_contents = None  # a cycle finds it filled
                fresh.cell_contents = again(old.cell_contents)
        new.__defaults__, new.__kwdefaults__ = again(x.__defaults__), again(x.__kwdefaults__)
    elif isinstance(x, types.MethodType):
        return types.MethodType(again(x.__func__), again(x.__self__))
    elif isinstance(x, weakref.ReferenceType):
        return weakref.ref(again(x())) if x() is not None else x
    elif isinstance(x, types.MappingProxyType):
        return types.MappingProxyType(again(gc.get_referents(x)[0]))
    elif isinstance(x, functools.partial):
        new = cls(len)
        memo[id(x)] = (x, new)
        new.__setstate__((again(x.func), again(x.args), again(x.keywords), {}))
    elif isinstance(x, VALUES):
        new = cls(plain_value(x))
        memo[id(x)] = (x, new)
    elif isinstance(x, array.array):
        new = array.array(x.typecode, x.tobytes())
        memo[id(x)] = (x, new)
    else:
        new = cls.__new__(cls)
        memo[id(x)] = (x, new)  # before the children: a cycle comes back here
    if isinstance(x, list):
        list.extend(new, [again(child) for child in x])
    elif isinstance(x, deque):
        deque.__init__(new, [again(child) for child in x], x.maxlen)
    elif isinstance(x, dict):
        if isinstance(x, defaultdict):
            new.default_factory = x.default_factory
        put = OrderedDict.__setitem__ if isinstance(x, OrderedDict) else dict.__setitem__
        for _, key, child in children(x)[: len(x)]:
            put(new, key, again(child))
    elif isinstance(x, set):
        set.update(new, x)
    elif isinstance(x, bytearray):
        bytearray.extend(new, x)
    for name, child in fields(x):
        object.__setattr__(new, name, again(child))
    return new


def flatten(graph: Any) -> tuple[list[Any], list[Any]]:
    """(arrays in walk order, one record per thing met): a mutable node met again is a back-reference."""
    leaves: list[Any] = []
    records: list[Any] = []
    number: dict[int, int] = {}
    is_open: set[int] = set()

    def walk(x: Any) -> None:
        if is_array(x):
            leaves.append(x)
            records.append("leaf")
        elif not is_node(x):
            records.append(("static", x))
        elif id(x) in number and (is_mutable(x) or id(x) in is_open):
            records.append(("ref", number[id(x)]))
        else:
            number.setdefault(id(x), len(number))
            opened = leaf_children(x)
            records.append(("node", type(x), len(opened)))
            is_open.add(id(x))
            for child in opened:
                walk(child)
            is_open.discard(id(x))

    walk(graph)
    return leaves, records


def reachable(graph: Any) -> tuple[list[Any], list[Any]]:
    """(mutable nodes, arrays) of a graph, each node once, in walk order."""
    nodes: list[Any] = []
    arrays: list[Any] = []
    seen: dict[int, Any] = {}
    todo = [graph]
    while todo:
        x = todo.pop()
        if is_array(x):
            arrays.append(x)
        elif is_node(x) and id(x) not in seen:
            if is_mutable(x):  # others have no identity: met twice, they are opened twice
                seen[id(x)] = x
                nodes.append(x)
            todo += [child for _, _, child in reversed(children(x))]
    return nodes, arrays
