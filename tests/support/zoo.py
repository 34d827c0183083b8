# SPDX-License-Identifier: Apache-2.0
"""One list of sample graphs. A new kind of node joins ``ZOO`` and meets every law."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
import types
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

# ── classes ──


class Point(NamedTuple):
    x: Any
    y: Any


Pair = namedtuple("Pair", ["left", "right"])


class Tagged(Point):
    """A namedtuple with room for attributes."""


class Stack(list[Any]):
    def top(self) -> Any:
        return self[-1]


class Table(dict[Any, Any]):
    def size(self) -> int:
        return len(self)


class Ring(deque[Any]):
    def head(self) -> Any:
        return self[0]


class Registry(OrderedDict[Any, Any]):
    def names(self) -> list[Any]:
        return list(self)


class Triple(tuple[Any, ...]):
    __slots__ = ()


class Box:
    """A plain object: attributes in ``__dict__``."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def total(self) -> Any:
        return sum(self.__dict__.values())


class Slotted:
    __slots__ = ("a", "b", "c")

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    def first(self) -> Any:
        return self.a


class Both(Slotted):
    """Slots from the base, ``__dict__`` of its own."""


class Private:
    __slots__ = ("__secret", "__weakref__")

    def __init__(self, secret: Any) -> None:
        self.__secret = secret

    def reveal(self) -> Any:
        return self.__secret


class Counter:
    """A plain object whose ``__init__`` must not run again."""

    def __init__(self, start: int, weight: Any) -> None:
        self.n = start + 1
        self.weight = weight

    def step(self) -> None:
        self.n += 1


class Node:
    """A tree node with a way back to its parent."""

    def __init__(self, value: Any, parent: Node | None = None) -> None:
        self.value = value
        self.parent = parent
        self.children: list[Node] = []
        if parent is not None:
            parent.children.append(self)


@dataclasses.dataclass
class Data:
    a: Any
    b: Any = 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Any
    b: Any = 1


@dataclasses.dataclass(slots=True)
class SlottedData:
    a: Any
    b: Any = 1


@dataclasses.dataclass(frozen=True, slots=True)
class SlottedFrozen:
    a: Any
    b: Any = 1


@jax.tree_util.register_pytree_node_class
class Registered:
    """Registered by hand: two children and one piece of aux data."""

    def __init__(self, a: Any, b: Any, name: str = "r") -> None:
        self.a = a
        self.b = b
        self.name = name

    def tree_flatten(self) -> tuple[tuple[Any, Any], str]:
        return (self.a, self.b), self.name

    @classmethod
    def tree_unflatten(cls, name: str, children: tuple[Any, Any]) -> Registered:
        new = object.__new__(cls)
        new.a, new.b = children
        new.name = name
        return new


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class RegisteredData:
    weight: Any
    bias: Any
    size: int = dataclasses.field(default=3, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RegisteredFrozen:
    weight: Any
    size: int = dataclasses.field(default=3, metadata={"static": True})


class Affine(eqx.Module):
    weight: Any
    bias: Any
    name: str = eqx.field(static=True, default="affine")


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    ONE = 1


SENTINEL = object()


# ── arrays ──


def f32(*values: float) -> jax.Array:
    return jnp.asarray(np.array(values, np.float32))


def i32(*values: int) -> jax.Array:
    return jnp.asarray(np.array(values, np.int32))


def scalar(value: float = 1.0) -> jax.Array:
    return jnp.asarray(np.float32(value))


# ── builders ──


def shared_list() -> Any:
    x = [f32(1, 2), i32(3)]
    return {"a": x, "b": x}


def shared_dict() -> Any:
    x = {"w": f32(1, 2)}
    return [x, (x, x)]


def shared_object() -> Any:
    x = Box(w=f32(1, 2), n=3)
    return Box(left=x, right=x, both=[x, x])


def shared_array_free_object() -> Any:
    config = Box(sizes=[1, 2], name="net")
    return {"first": config, "w": f32(1), "second": config}


def shared_slotted() -> Any:
    x = Slotted(a=f32(1))
    return (x, [x])


def shared_registered() -> Any:
    x = Registered(f32(1), [f32(2)])
    return [x, {"x": x}]


def shared_tuple() -> Any:
    x = (f32(1), "x")
    return [x, x]


def shared_below_immutable() -> Any:
    x = [f32(1)]
    return Affine(weight=x, bias=(x, Frozen(x)))


def shared_sets() -> Any:
    x, y = {1, 2}, bytearray(b"ab")
    return [x, y, {"x": x, "y": y}, f32(1)]


def cyclic_list() -> Any:
    x: list[Any] = [1, f32(2)]
    x.append(x)
    return x


def cyclic_dict() -> Any:
    x: dict[str, Any] = {"w": f32(1)}
    x["self"] = x
    return x


def cyclic_object() -> Any:
    x = Box(w=f32(1))
    x.me = x
    return x


def cyclic_array_free_object() -> Any:
    x = Box(name="loop")
    x.me = [x]
    return x


def cyclic_slotted() -> Any:
    x = Slotted(a=f32(1))
    x.b = {"back": x}
    return x


def cyclic_deque() -> Any:
    x: deque[Any] = deque([f32(1)], maxlen=4)
    x.append(x)
    return x


def cyclic_tuple() -> Any:
    t: tuple[list[Any]] = ([],)
    t[0].append(t)
    return t


def cyclic_tuple_with_arrays() -> Any:
    t: tuple[Any, ...] = ([f32(1)], f32(2), "end")
    t[0].append(t)
    return t


def cyclic_frozen() -> Any:
    x = Frozen([f32(1)], f32(2))
    x.a.append(x)
    return x


def cyclic_module() -> Any:
    x = Affine(weight=[f32(1)], bias=f32(2))
    x.weight.append(x)
    return x


def cyclic_registered() -> Any:
    x = Registered([f32(1)], f32(2))
    x.a.append(x)
    return x


def two_lists_in_a_cycle() -> Any:
    x: list[Any] = [f32(1)]
    y: list[Any] = [x, f32(2)]
    x.append(y)
    return {"x": x, "y": y}


def parent_and_child() -> Any:
    root = Node(f32(1))
    child = Node(f32(2), root)
    Node(f32(3), child)
    Node(f32(4), root)
    return root


def doubly_linked() -> Any:
    nodes = [Box(value=f32(i)) for i in range(4)]
    for left, right in itertools.pairwise(nodes):
        left.next, right.prev = right, left
    return nodes[0]


def tagged() -> Any:
    x = Tagged(f32(1), 2)
    x.note = [f32(3)]
    return x


def list_subclass() -> Any:
    x = Stack([f32(1), 2])
    x.name = "stack"
    x.extra = f32(3)
    return x


def dict_subclass() -> Any:
    x = Table(b=f32(1), a=2)
    x.extra = [f32(3)]
    return x


def deque_subclass() -> Any:
    x = Ring([f32(1), 2], 5)
    x.extra = f32(3)
    return x


def ordered_subclass() -> Any:
    x = Registry(b=f32(1), a=2)
    x.extra = f32(3)
    return x


def moved_ordered_dict() -> Any:
    x = OrderedDict(a=f32(1), b=f32(2), c=3)
    x.move_to_end("a")
    return x


def default_dict() -> Any:
    x: defaultdict[str, list[Any]] = defaultdict(list)
    x["b"].append(f32(1))
    x["a"].append(2)
    return x


def both() -> Any:
    x = Both(b=f32(1), a=2)
    x.extra = f32(3)
    return x


def unset_attribute() -> Any:
    x = Data(f32(1), 2)
    del x.b
    return x


def statics() -> list[Any]:
    return [
        *(1, True, 1.0, math.nan, 0.0, -0.0, math.inf, 1j, complex(0.0, -0.0), 10**30),
        *("text", b"bytes", None, ..., Color.RED, Level.ONE, SENTINEL),
        *(frozenset({1, 2}), range(3), slice(1, None, 2)),
        *(int, Box, math, types, np.dtype("float32"), math.sin, scalar),
    ]


def linear() -> Any:
    return eqx.nn.Linear(2, 3, key=jax.random.key(0))


ZOO: list[tuple[str, Callable[[], Any]]] = [
    # leaves
    ("array", lambda: f32(1, 2)),
    ("scalar_array", lambda: scalar(3.0)),
    ("zero_size_array", lambda: jnp.zeros((0, 3))),
    ("typed_key", lambda: jax.random.key(1)),
    ("typed_keys", lambda: [jax.random.split(jax.random.key(1), 2), f32(1)]),
    ("numpy_array", lambda: [np.arange(3, dtype=np.float32), np.ones((), bool), np.float32(2), np.int8(1)]),
    ("bfloat16", lambda: jnp.ones(2, jnp.bfloat16)),
    ("complex", lambda: jnp.ones(2, jnp.complex64)),
    ("none", lambda: None),
    ("int", lambda: 3),
    ("statics", statics),
    ("statics_beside_arrays", lambda: [[value, f32(1)] for value in statics()]),
    ("set", lambda: [{1, 2}, f32(1), set()]),
    ("set_alone", lambda: {"a", "b"}),
    ("bytearray", lambda: [bytearray(b"abc"), f32(1)]),
    ("string_array", lambda: [np.array(["a", "bc"]), f32(1)]),
    # builtin containers
    ("list", lambda: [f32(1), [f32(2), [f32(3)]]]),
    ("tuple", lambda: (f32(1), (f32(2), "x"), ())),
    ("dict", lambda: {"b": f32(1), "a": {"d": f32(2), "c": 3}}),
    ("nested", lambda: {"layers": [{"w": f32(1, 2), "b": f32(0)}, {"w": f32(3), "b": None}], "n": (2, "x")}),
    ("empty", lambda: [[], {}, (), None, OrderedDict(), deque(), set(), defaultdict(int)]),
    ("empty_list", list),
    ("empty_dict", dict),
    ("empty_tuple", tuple),
    ("ordered_dict", lambda: OrderedDict(b=f32(1), a=f32(2))),
    ("moved_ordered_dict", moved_ordered_dict),
    ("default_dict", default_dict),
    ("default_dict_without_factory", lambda: defaultdict(None, a=f32(1))),
    ("deque", lambda: deque([f32(1), 2])),
    ("deque_maxlen", lambda: deque([f32(1), [f32(2)]], maxlen=3)),
    ("namedtuple", lambda: [Point(f32(1), 2), Pair(f32(3), [4])]),
    ("namedtuple_with_attributes", tagged),
    ("tuple_subclass", lambda: Triple([f32(1), 2, "x"])),
    ("list_subclass", list_subclass),
    ("dict_subclass", dict_subclass),
    ("deque_subclass", deque_subclass),
    ("ordered_subclass", ordered_subclass),
    (
        "mixed_keys",
        lambda: {1: f32(1), "a": f32(2), None: 3, (1, "x"): f32(4), 2.5: 5, b"k": 6, Color.RED: 7},
    ),
    ("nan_key", lambda: {math.nan: f32(1), "a": 2}),
    ("int_keys_out_of_order", lambda: {3: f32(3), 1: f32(1), 2: f32(2)}),
    # objects
    ("object", lambda: Box(w=f32(1), n=2, inner=Box(b=f32(3)))),
    ("object_without_arrays", lambda: Box(sizes=[1, 2], name="x")),
    ("object_without_arrays_beside_array", lambda: [Box(sizes=[1, {"k": (2,)}]), f32(1)]),
    ("slotted", lambda: Slotted(c=f32(1), a=2)),
    ("slots_and_dict", both),
    ("private_slot", lambda: Private([f32(1)])),
    ("init_has_effects", lambda: Counter(1, f32(2))),
    ("dataclass", lambda: Data(f32(1), [2])),
    ("dataclass_unset", unset_attribute),
    ("frozen_dataclass", lambda: Frozen(f32(1), [f32(2)])),
    ("slots_dataclass", lambda: SlottedData(f32(1), {"x": 2})),
    ("frozen_slots_dataclass", lambda: SlottedFrozen(f32(1), 2)),
    ("registered", lambda: Registered(f32(1), [f32(2)], name="mine")),
    ("registered_dataclass", lambda: RegisteredData(f32(1), [f32(2)], size=4)),
    ("registered_frozen_dataclass", lambda: RegisteredFrozen(f32(1), size=4)),
    ("equinox_module", lambda: Affine(f32(1), {"b": f32(2)}, name="mine")),
    ("equinox_linear", linear),
    ("equinox_in_object", lambda: Box(model=Affine(f32(1), None), opt=[f32(0)])),
    # shared references
    ("shared_list", shared_list),
    ("shared_dict", shared_dict),
    ("shared_object", shared_object),
    ("shared_array_free_object", shared_array_free_object),
    ("shared_slotted", shared_slotted),
    ("shared_registered", shared_registered),
    ("shared_tuple", shared_tuple),
    ("shared_below_immutable", shared_below_immutable),
    ("shared_sets", shared_sets),
    # cycles
    ("cyclic_list", cyclic_list),
    ("cyclic_dict", cyclic_dict),
    ("cyclic_object", cyclic_object),
    ("cyclic_array_free_object", cyclic_array_free_object),
    ("cyclic_slotted", cyclic_slotted),
    ("cyclic_deque", cyclic_deque),
    ("cyclic_tuple", cyclic_tuple),
    ("cyclic_tuple_with_arrays", cyclic_tuple_with_arrays),
    ("cyclic_frozen", cyclic_frozen),
    ("cyclic_module", cyclic_module),
    ("cyclic_registered", cyclic_registered),
    ("two_lists_in_a_cycle", two_lists_in_a_cycle),
    ("parent_and_child", parent_and_child),
    ("doubly_linked", doubly_linked),
]

NAMES = [name for name, _ in ZOO]
BUILDERS = [build for _, build in ZOO]
