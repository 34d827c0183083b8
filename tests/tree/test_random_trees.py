# SPDX-License-Identifier: Apache-2.0
"""Random trees of every kind of node: `graftax.tree` gives what `jax.tree` gives."""

import dataclasses
import functools
import pickle
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax.struct
import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import graftax.tree
from beside import both

Pair = namedtuple("Pair", ["left", "right"])
STATICS = ("relu", 3, None, (1, 2.0), False)


class Point(NamedTuple):
    x: Any
    y: Any = None
    z: Any = 0


class Tagged(Pair):
    def __new__(cls, left, right):
        return super().__new__(cls, left, right)


@jax.tree_util.register_pytree_node_class
class Node:
    def __init__(self, children, data):
        self.children, self.data = children, data

    def tree_flatten(self):
        return iter(self.children), self.data

    @classmethod
    def tree_unflatten(cls, data, children):
        return cls(list(children), data)


@jax.tree_util.register_pytree_with_keys_class
class Keyed(Node):
    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey(f"c{i}"), c) for i, c in enumerate(self.children)], self.data


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Setting:
    value: Any


def static(**kwargs):
    return dataclasses.field(metadata={"static": True}, **kwargs)


NUMBER: Any = static(default=0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Data:
    w: Any
    n: Any = NUMBER
    b: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    n: Any = NUMBER
    w: Any
    b: Any = None


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w", "b"], meta_fields=["n"], drop_fields=["cache"])
@dataclasses.dataclass
class Post(Data):
    cache: Any = None

    def __post_init__(self):
        self.cache = "made"


class Leaf(dict):
    """A leaf that can stand where the arguments of a Partial do."""


class Module(eqx.Module):
    w: Any
    n: Any = eqx.field(static=True)
    b: Any = None


class Child(Module):
    extra: Any = 1

    def _repr_pretty_(self, printer, cycle):
        printer.text(f"{type(self).__name__} with {sorted(vars(self))}")  # one without fields can be printed too


def partly(w):
    module = object.__new__(Child)
    object.__setattr__(module, "w", w)
    return module


@flax.struct.dataclass
class Struct:
    w: Any
    n: Any = flax.struct.field(pytree_node=False, default=0)
    b: Any = None


KEYS = [
    st.text(max_size=2),
    st.integers(),
    st.sampled_from([2**63, -(2**63), 2**64, 0, 1, -1]),
    st.booleans(),
    st.floats(allow_nan=False),
    st.tuples(st.integers(0, 2), st.text(max_size=1)),
    st.one_of(st.integers(-2, 2), st.booleans(), st.floats(-2, 2)),
    st.binary(max_size=2),
]
LEAVES = st.one_of(
    st.integers(),
    st.sampled_from(["a", 1.5, float("nan"), True, b"b", len, Pair, {1, 2}, np.arange(2), object(), Ellipsis]),
    st.builds(type("Numbers", (list,), {}), st.just([1, [2]])),
    st.builds(type("Table", (dict,), {})),
)
EMPTY = st.sampled_from([None, (), [], {}, OrderedDict(), Node([], None), Setting(1), Setting("b")])
Make = Callable[[list[Any], Any, Any], Any]
MAKERS: list[Make] = [
    lambda c, s, keys: list(c),
    lambda c, s, keys: tuple(c),
    lambda c, s, keys: dict(zip(keys, c, strict=False)),
    lambda c, s, keys: OrderedDict(zip(keys, c, strict=False)),
    lambda c, s, keys: defaultdict((int, list, None)[len(c) % 3], zip(keys, c, strict=False)),
    lambda c, s, keys: Pair(c[0], c[-1]),
    lambda c, s, keys: Tagged(c[0], c[-1]),
    lambda c, s, keys: Point(*c[:3]),
    lambda c, s, keys: Node(c, s),
    lambda c, s, keys: Keyed(c, s),
    lambda c, s, keys: jax.tree_util.Partial(len, *c[1:], k=c[0]),
    lambda c, s, keys: Data(c[0], s, c[-1]),
    # With data of their own: to JAX two dataclasses of equal data and as many children are one.
    lambda c, s, keys: Slots(w=c[0], n=("slots", s), b=c[-1]),
    lambda c, s, keys: Post(c[0], ("post", s), c[-1]),
    lambda c, s, keys: Module(c[0], s, c[-1]),
    lambda c, s, keys: Child(c[0], s, c[-1]),
    lambda c, s, keys: partly(c[0]),
    lambda c, s, keys: Struct(c[0], ("struct", s), c[-1]),
]


@st.composite
def trees(draw: st.DrawFn, most: int = 8) -> Any:
    """A tree whose nodes are made one after the other of what is there: leaves and whole branches come again."""
    values = draw(st.lists(st.one_of(LEAVES, EMPTY), min_size=1, max_size=3))
    sizes = [1] * len(values)
    for _ in range(draw(st.integers(0, most))):
        picked = draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=4))
        if sum(sizes[i] for i in picked) > 60:
            continue
        keys = draw(st.lists(draw(st.sampled_from(KEYS)), min_size=len(picked), max_size=len(picked), unique=True))
        make = draw(st.sampled_from(MAKERS))
        values.append(make([values[i] for i in picked], draw(st.sampled_from(STATICS)), keys))
        sizes.append(sum(sizes[i] for i in picked))
    return values[-1]


def copy(tree: Any) -> Any:
    """New nodes around the same leaves."""
    return jax.tree.map(lambda v: v, tree)


@given(trees())
def test_leaves_structures_and_what_is_built_of_them(tree):
    both(lambda t: t.flatten(tree))
    both(lambda t: t.flatten(tree, lambda v: v is None))
    both(lambda t: t.unflatten(t.structure(tree), t.leaves(tree)))
    both(lambda t: t.structure(tree).unflatten((v, i) for i, v in enumerate(t.leaves(tree))))
    both(lambda t: t.structure(tree).children())
    both(lambda t: t.all_leaves(t.leaves(tree)), True)
    both(lambda t: t.reduce_associative(lambda a, b: (a, b), tree, identity=None))
    theirs, ours = jax.tree.structure(tree), graftax.tree.structure(tree)
    assert graftax.tree.from_jax(theirs) == ours and hash(graftax.tree.from_jax(theirs)) == hash(ours)
    assert graftax.tree.to_jax(ours) == theirs


@given(trees())
def test_paths(tree):
    both(lambda t: t.flatten_with_path(tree))
    both(lambda t: [t.keystr(p) for p, _ in t.leaves_with_path(tree, lambda v: v is None)])
    both(lambda t: t.map_with_path(lambda p, v: (p, v), tree))
    both(lambda t: t.leaves_with_path(tree, lambda p, v: len(p) == 2, True))


@given(trees(), st.sampled_from([list, tuple, dict, type(None), Data, eqx.Module, Node, str]), st.integers(0, 9))
def test_is_leaf_is_asked_of_the_same_values(tree, cls, stop_at):
    def program(t):
        recorded = []
        is_leaf = lambda v: bool(recorded.append(v)) or len(recorded) == stop_at or isinstance(v, cls)
        return (
            t.flatten(tree, is_leaf),
            [type(v) for v in recorded],
            all(v is w for v, w in zip(recorded, recorded[:], strict=True)),
        )

    both(program)


@given(trees(), st.data())
def test_map_of_two_trees(tree, data):
    both(lambda t: t.map(lambda v: [v], tree))
    both(lambda t: t.map(lambda v, w: (v, w), tree, copy(tree)))
    leaves = [
        data.draw(st.sampled_from([0, None, [1, 2], {"k": (3,)}]))
        for _ in range(graftax.tree.structure(tree).num_leaves)
    ]
    deeper = graftax.tree.structure(tree).unflatten(leaves)
    both(lambda t: t.map(lambda v, w: (v, w), tree, deeper))
    both(lambda t: t.structure(tree).flatten_up_to(deeper))
    both(lambda t: t.broadcast(tree, deeper))


@given(trees(4), trees(4))
def test_structures_of_two_trees_are_equal_or_not(a, b):
    both(lambda t: t.structure(a) == t.structure(b))
    both(lambda t: t.structure(a) != t.structure(b))
    both(lambda t: t.structure([a, b]).compose(t.structure(b)))
    both(lambda t: t.map(lambda v, w: (v, w), a, b))
    both(lambda t: t.broadcast_prefix(a, b))
    x, y = graftax.tree.structure(a), graftax.tree.structure(b)
    assert x != y or hash(x) == hash(y) or x is y
    restored = graftax.tree.structure(copy(a))
    assert x == restored and hash(x) == hash(restored) and repr(x) == repr(restored)
    loaded = pickle.loads(pickle.dumps(x))
    assert loaded == x and hash(loaded) == hash(x)


@given(trees(), st.integers(0, 3))
def test_a_prefix_is_broadcast(tree, depth):
    stop = lambda p, v: len(p) >= depth
    prefix = jax.tree.map_with_path(lambda p, v: Leaf(), tree, is_leaf=stop, is_leaf_takes_path=True)
    both(lambda t: t.broadcast_prefix(prefix, tree))
    both(lambda t: t.broadcast(prefix, tree))
    both(lambda t: t.map(lambda v, w: (v, w), prefix, tree))
    both(lambda t: t.broadcast(None, tree, is_leaf=lambda v: v is None))


@given(trees(4), trees(3))
def test_transposing(outer, inner):
    n = len(jax.tree.leaves(outer))
    if n == 0:
        return
    tree = jax.tree.structure(outer).unflatten([copy(inner) for _ in range(n)])
    both(lambda t: t.transpose(t.structure(outer), t.structure(inner), tree))
    both(lambda t: t.transpose(t.structure(outer), None, tree))
    both(lambda t: t.structure(outer).compose(t.structure(inner)) == t.structure(tree), True)
