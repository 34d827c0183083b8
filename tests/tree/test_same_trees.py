# SPDX-License-Identifier: Apache-2.0
"""Every kind of tree gives with `graftax.tree` what it gives with `jax.tree`, in every question that can be asked."""

import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import os
import time
import types
from collections import OrderedDict, defaultdict
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import chex
import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import graftax.tree
from beside import laws

pytestmark = pytest.mark.quick(8)  # a case takes milliseconds

T = TypeVar("T")
Pair = collections.namedtuple("Pair", ["left", "right"])


class Point(NamedTuple):
    x: Any
    y: Any = 3


class Empty(NamedTuple):
    pass


class Tagged(Pair):
    """A subclass of a named tuple, with room for attributes."""

    def __new__(cls, left, right):
        created = super().__new__(cls, left, right)
        created.tag = "made"
        return created


class Plain(Pair):
    __slots__ = ()


class Loose(Pair):
    """No `__new__` of its own, and an instance dictionary."""


class Typed(NamedTuple, Generic[T]):
    value: T


class Watched(type(Pair)):
    made: ClassVar[list[Any]] = []

    def __call__(cls, *args, **kwargs):
        Watched.made.append(args)
        return super().__call__(*args, **kwargs)


class OfMetaclass(Pair, metaclass=Watched):
    pass


class Renamed(tuple):
    _fields = ("first",)

    def __new__(cls, *values):
        return super().__new__(cls, values)


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Text(str):
    pass


class Numbers(list):
    pass


class Table(dict):
    pass


class Triple(tuple):
    pass


class Ordered(OrderedDict):
    pass


class Defaults(defaultdict):
    pass


@jax.tree_util.register_pytree_node_class
class Node:
    def __init__(self, a, b, name="n"):
        self.a, self.b, self.name = a, b, name

    def tree_flatten(self):
        return [self.a, self.b], self.name

    @classmethod
    def tree_unflatten(cls, name, children):
        return cls(*children, name)


@jax.tree_util.register_pytree_node_class
class Lazy(Node):
    def tree_flatten(self):
        return (v for v in (self.a, self.b)), {"name": self.name}

    @classmethod
    def tree_unflatten(cls, data, children):
        return cls(*children, data["name"])


@jax.tree_util.register_pytree_with_keys_class
class Keyed(Node):
    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey
        return ((key("a"), self.a), ("own key", self.b)), self.name


class Numbered(Node):
    """Its key path entries are of the class that JAX gives to children without keys."""


def _numbered(n):
    key = jax.tree_util.FlattenedIndexKey
    return [(key(7), n.a), (key(3), n.b)], n.name


jax.tree_util.register_pytree_with_keys(Numbered, _numbered, lambda name, c: Numbered(*c, name))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Setting:
    name: str


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Data:
    w: Any
    b: Any = None
    name: str = dataclasses.field(default="layer", metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    n: int = dataclasses.field(default=1, metadata=dict(static=True))
    w: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Derived(Data):
    extra: Any = dataclasses.field(default_factory=list)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["items"], meta_fields=[])
@dataclasses.dataclass
class Sorted:
    """Every call of `__init__` does something."""

    items: Any
    count: int = dataclasses.field(init=False, default=0)

    def __post_init__(self):
        self.count = 1


class Attributes:
    """No dataclass: fields are given by name."""

    def __init__(self, x, y):
        self.y, self.x = y, x


jax.tree_util.register_dataclass(Attributes, ["x"], ["y"])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Nothing:
    pass


class Linear(eqx.Module):
    weight: Any
    bias: Any = None
    size: int = eqx.field(static=True, default=3)
    act: Any = jax.nn.relu

    def __call__(self, x):
        return x


class Wrapped(eqx.Module):
    inner: Any
    name: str = eqx.field(static=True)
    missing: Any = eqx.field()
    unset: int = eqx.field(static=True)


def incomplete():
    tree = object.__new__(Wrapped)
    object.__setattr__(tree, "inner", [1, 2])
    object.__setattr__(tree, "name", "w")
    return tree


class OfModules(eqx.Module):
    f: Any
    layers: list[Linear]


@flax.struct.dataclass
class Struct:
    params: Any
    step: int = flax.struct.field(pytree_node=False, default=0)


@chex.dataclass
class Chex:
    a: Any
    b: Any


class Net(nnx.Module):
    def __init__(self):
        self.layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        self.n = 4


x, y = jnp.arange(3.0), np.arange(2)
NAN = float("nan")
made = eqx.nn.MLP(2, 2, 4, 2, key=jax.random.key(0))
norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")
shared = eqx.nn.Shared((made, made), lambda p: p[0].layers[0].weight, lambda p: p[1].layers[0].weight)
net = Net()
optimiser = optax.chain(optax.clip(1.0), optax.adamw(1e-3))
masked = optax.masked(optax.sgd(0.1), {"a": True, "b": False})


def deep(n):
    tree: Any = 1
    for i in range(n):
        tree = [tree] if i % 2 else (tree, i)
    return tree


def moved():
    d = OrderedDict([("b", 1), ("a", 2), ("c", 3)])
    d.move_to_end("b")
    return d


def tagged():
    t = Loose(1, 2)
    t.more = 5  # no part of the tree
    return t


TREES = {
    "leaf": lambda: 1,
    "none": lambda: None,
    "text": lambda: "abc",
    "array": lambda: x,
    "numpy": lambda: y,
    "object": lambda: jnp.sin,
    "empty list": lambda: [],
    "empty tuple": lambda: (),
    "empty dict": dict,
    "list": lambda: [1, "a", None, x],
    "tuple": lambda: (1,),
    "two": lambda: (1, 2),
    "nested": lambda: [(1, {"a": [2, None]}), {}, [[]], ((), (3,))],
    "leaves after nodes": lambda: [1, 2, [3], 4, 5, (), 6, {"z": 7, "a": 8}],
    "shared": lambda: [shared_list, shared_list],
    "deep": lambda: deep(300),
    "dict": lambda: {"b": 1, "a": {"d": 2, "c": 3}},
    "dict of ints": lambda: {3: 1, -1: 2, 10**30: 3, -(10**40): 4, 2**63: 5, 2**63 - 1: 6},
    "dict of bools": lambda: {True: 1, False: 2},
    "dict of bool and int": lambda: {True: 1, 0: 2, 5: 3},
    "dict of numbers": lambda: {1.5: 1, 1: 2, True + 1: 3, -np.inf: 4},
    "dict of one nan": lambda: {NAN: 1},
    "dict of a number and nan": lambda: {1.0: 1, NAN: 4},
    "dict of tuples": lambda: {(2, "a"): 1, (1, "b"): 2, (1,): 3},
    "dict of bytes": lambda: {b"b": 1, b"a": 2},
    "dict of text subclass": lambda: {Text("b"): 1, Text("a"): 2},
    "dict of text and subclass": lambda: {"c": 0, Text("b"): 1, "a": 2},
    "dict of IntEnum": lambda: {Level.HIGH: 1, Level.LOW: 2},
    "dict of IntEnum and int": lambda: {Level.HIGH: 1, 0: 2},
    "dict of dates": lambda: {datetime.date(2020, 1, 2): 1, datetime.date(2020, 1, 1): 2},
    "dict of decimals": lambda: {decimal.Decimal(2): 1, decimal.Decimal(1): 2},
    "dict of frozensets": lambda: {frozenset({1, 2}): 1, frozenset({1}): 2},
    "dict of one enum": lambda: {Colour.RED: 1},
    "dict of one none": lambda: {None: 1},
    "dict of surrogates": lambda: {"\udc80": 1, "é": 2, "z": 3, "\U0001f600": 4, "": 5, "a\0b": 6},
    "dict of many": lambda: {f"k{i * 7919 % 1000}": i for i in range(1000)},
    "OrderedDict": lambda: OrderedDict([("b", 1), ("a", [2])]),
    "OrderedDict moved": moved,
    "OrderedDict mixed": lambda: OrderedDict([(1, 1), ("a", 2), (None, 3)]),
    "OrderedDict empty": OrderedDict,
    "defaultdict": lambda: defaultdict(list, {"b": 1, "a": [2]}),
    "defaultdict of none": lambda: defaultdict(None, {2: 1}),
    "defaultdict empty": lambda: defaultdict(int),
    "namedtuple": lambda: Pair(1, [2]),
    "NamedTuple": lambda: Point(1),
    "NamedTuple empty": Empty,
    "NamedTuple generic": lambda: Typed(1),
    "namedtuple own new": lambda: Tagged(1, 2),
    "namedtuple slots": lambda: Plain(1, [2]),
    "namedtuple attributes": tagged,
    "namedtuple of metaclass": lambda: OfMetaclass(1, 2),
    "tuple with _fields": lambda: Renamed(1),
    "list subclass": lambda: leaf_values[0],
    "dict subclass": lambda: [leaf_values[1]],
    "tuple subclass": lambda: [leaf_values[2]],
    "OrderedDict subclass": lambda: [leaf_values[3]],
    "defaultdict subclass": lambda: [leaf_values[4]],
    "other containers": lambda: [*others],
    "structseq": lambda: [struct_time, stat],
    "Partial": lambda: jax.tree_util.Partial(print, 1, [2], end=3),
    "Partial nested": lambda: jax.tree_util.Partial(partial_of_function, x, k={"a": 1}),
    "Partial bare": lambda: jax.tree_util.Partial(print),
    "functools.partial": lambda: [partial_of_function],
    "registered": lambda: Node(1, [2, None]),
    "registered lazy": lambda: Lazy(1, [2, None]),
    "registered with keys": lambda: Keyed(1, [2, None]),
    "registered with numbers": lambda: [Numbered(1, [2, None]), Numbered(Numbered(1, 2), 3)],
    "static": lambda: [Setting("a"), 1, Setting("b")],
    "dataclass": lambda: Data([1, 2], {"b": 3}, "other"),
    "dataclass slots": lambda: Slots(w=[1, 2], n=7),
    "dataclass derived": lambda: Derived(1, 2, "d", [3]),
    "dataclass post init": lambda: Sorted([1]),
    "dataclass empty": Nothing,
    "no dataclass": lambda: Attributes([1], "static"),
    "dataclasses": lambda: [Data(1, 2), Data(3, Slots(w=4)), 5, Data(None)],
    "equinox": lambda: Linear(x, [1, 2]),
    "equinox modules": lambda: OfModules(jnp.sin, [Linear(x), Linear(y, 1, 4)]),
    "equinox missing": incomplete,
    "equinox complete": lambda: [Wrapped(1, "a", 2, 3), incomplete()],
    "equinox mlp": lambda: made,
    "equinox method": lambda: [made.layers[0].__call__],
    "equinox state": lambda: [state],
    "equinox norm": lambda: norm,
    "equinox shared": lambda: shared,
    "equinox partial": lambda: eqx.Partial(jnp.add, x, y=2),
    "equinox jit": lambda: [eqx.filter_jit(made.layers[0])],
    "flax struct": lambda: Struct([1, 2], 3),
    "chex": lambda: Chex(a=1, b=[2]),
    "nnx module": lambda: nnx_parts[2],
    "nnx state": lambda: nnx_parts[1],
    "nnx graphdef": lambda: [nnx_parts[0], 1],
    "nnx variable": lambda: net.layer.kernel,
    "optax": lambda: optimiser_state,
    "optax masked": lambda: masked_state,
    "mapping proxy": lambda: [proxy],
}

shared_list = [1, 2]
leaf_values = [Numbers([1]), Table(a=1), Triple((1, 2)), Ordered(a=1), Defaults(int, a=1)]
others = [{1, 2}, frozenset({1}), collections.deque([1]), collections.Counter("a"), range(3), b"ab", bytearray(b"a")]
struct_time, stat = time.struct_time(range(9)), os.stat("/")
partial_of_function = functools.partial(print, 1, sep="-")
nnx_parts = [*nnx.split(net), net]
optimiser_state = optimiser.init({"w": x, "b": [x]})
masked_state = masked.init({"a": x, "b": x})
proxy = types.MappingProxyType({"a": 1})


@pytest.mark.parametrize("name", TREES)
def test_every_question_has_the_same_answer(name: str):
    laws(TREES[name])


def test_a_metaclass_sees_every_named_tuple_that_is_built():
    Watched.made.clear()
    graftax.tree.map(lambda v: v + 1, OfMetaclass(1, 2))
    assert Watched.made == [(1, 2), (2, 3)]
