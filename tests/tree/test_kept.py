# SPDX-License-Identifier: Apache-2.0
"""What is kept of the structures that came last shows in nothing but time."""

import dataclasses
import functools
import gc
import operator
import sys
import weakref
from collections import OrderedDict, defaultdict, namedtuple

import jax
import pytest
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey

from beside import OURS, both

pytestmark = pytest.mark.quick(8)  # a case takes milliseconds

Pair = namedtuple("Pair", ["left", "right"])


class Key:
    """Sorts and hashes as its number."""

    def __init__(self, number):
        self.number = number

    def __hash__(self):
        return hash(self.number)

    def __eq__(self, other):
        return self.number == getattr(other, "number", other)

    def __lt__(self, other):
        return self.number < other.number


def node(flatten, with_keys=None):
    class Node:
        def __init__(self, *children, data=None):
            self.children, self.data = children, data

    unflatten = lambda data, children: Node(*children, data=data)
    if with_keys is None:
        jax.tree_util.register_pytree_node(Node, flatten, unflatten)
    else:
        jax.tree_util.register_pytree_with_keys(Node, with_keys, unflatten, flatten)
    return Node


def three_times(tree):
    for _ in range(3):
        both(lambda t: t.tree_flatten(tree))
        both(lambda t: t.tree_flatten_with_path(tree))
        both(lambda t: t.map_with_path(lambda p, v: (p, v), tree))


@pytest.mark.parametrize(
    "trees",
    [
        lambda: [{1: "a", 2: "b"}, {True: "a", 2: "b"}, {1.0: "a", 2: "b"}, {1: "a", 2.0: "b"}],
        lambda: [{"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 1, "c": 2}, {"a": 1}],
        lambda: [{"ab": 1}, {"".join(["a", "b"]): 1}],
        lambda: [{Key(1): 1}, {Key(1): 1}, {Key(2): 1}],
        lambda: [OrderedDict(a=1, b=2), OrderedDict(b=1, a=2)],
        lambda: [defaultdict(list, a=1), defaultdict(int, a=1), defaultdict(None, a=1)],
        lambda: [[1, [2]], [[1], 2], [[1, 2]], [1, 2], (1, 2), Pair(1, 2), [1, (2,)]],
        lambda: [[None, 1], [1, None], None, 1, [], [[]]],
        lambda: [node(lambda n: (n.children, n.data))(1, 2, data=d) for d in (None, 1, True, 1.0, (1,), (True,), "a")],
        lambda: [node(lambda n: (n.children, n.data))(1, data=d) for d in ([1], [2], float("nan"), {"a": [1]})],
    ],
)
def test_structures_that_look_alike_are_told_apart(trees):
    created = trees()
    for tree in [*created, *reversed(created)]:
        three_times(tree)


def test_each_call_gives_a_list_of_its_own():
    tree = {"a": [1, 2]}
    for _ in range(4):
        pairs, _ = OURS.tree_flatten_with_path(tree)
        assert pairs == jax.tree_util.tree_flatten_with_path(tree)[0]
        pairs.clear()


def test_a_class_that_changes_gives_its_new_names():
    @functools.partial(jax.tree_util.register_dataclass, data_fields=["a", "b"], meta_fields=[])
    @dataclasses.dataclass
    class Record:
        a: int
        b: int

    tree = [Record(1, 2)]
    three_times(tree)
    Record.b = property(lambda self: "new")
    three_times(tree)


def test_many_structures_in_turn():
    trees = [[list(range(n % 7))] * (n % 5) + [{f"k{n % 3}": n}] for n in range(60)]
    for _ in range(3):
        for tree in trees:
            three_times(tree)


@pytest.mark.quick(0)
def test_paths_of_large_structures_go_when_others_come():
    key = "a key of " + str(object())
    before = sys.getrefcount(key)
    for _ in range(4):
        OURS.tree_flatten_with_path({key: 0, "z": [0] * 60_000})
    for n in range(5):
        for _ in range(3):
            OURS.tree_flatten_with_path({f"large {n}": [0] * (60_000 + n)})
    for n in range(9_000):  # the key path entries of other keys, and the orders of other dicts
        OURS.tree_flatten_with_path({f"{n}": 0, "z": 0})
    for n in range(200):
        OURS.tree_flatten({f"{key} {n}": 0, "z": 0})
    assert sys.getrefcount(key) <= before + 2


@pytest.mark.parametrize("kind", ["aux data", "key", "named tuple", "leaf"])
def test_nothing_is_kept_alive(kind):
    class Thing(Key):
        pass

    def tree(thing):
        if kind == "aux data":
            return [node(lambda n: (n.children, n.data))(1, data=(1, thing))]
        if kind == "key":
            return {thing: 1}
        if kind == "named tuple":
            return namedtuple("Held", ["a"])(1)
        return [thing]

    thing = Thing(1)
    value = tree(thing)
    gone = weakref.ref(type(value) if kind == "named tuple" else thing)
    for _ in range(4):
        OURS.tree_flatten(value)
        OURS.tree_flatten_with_path(value)
    del value, thing
    gc.collect()
    assert gone() is None


# ── who names the children ──


def numbered_first(node):
    """Numbers for the first objects, names for others."""
    entry = GetAttrKey if node.data else lambda name: FlattenedIndexKey(int(name[1:]))
    return [(entry(f"c{i}"), child) for i, child in enumerate(node.children)], node.data


def plainly(node):
    return node.children, node.data


def made_by(names):
    """Functions of one code."""

    def flatten(node):
        return numbered_first(node) if names else (node.children, node.data)

    return flatten


class Flatten:
    def __call__(self, node):
        return node.children, node.data


FLATTENS = {
    "function": plainly,
    "lambda": lambda n: (n.children, n.data),
    "generator of children": lambda n: ((c for c in n.children), n.data),
    "partial": functools.partial(lambda x, n: (n.children, n.data), 0),
    "callable": Flatten(),
    "method": Flatten().__call__,
    "in C": operator.attrgetter("children", "data"),
}


@pytest.mark.parametrize("flatten", FLATTENS.values(), ids=FLATTENS)
@pytest.mark.parametrize("names", [None, numbered_first, "calls flatten"], ids=["no names", "names", "calls flatten"])
@pytest.mark.parametrize("firsts", [lambda cls: [], lambda cls: [cls(1, 2)]], ids=["without children", "with"])
def test_names_are_those_that_jax_gives(flatten, names, firsts):
    with_keys = names
    if names == "calls flatten":

        def with_keys(node):
            flatten(node)
            return numbered_first(node)

    cls = node(flatten, with_keys)
    for tree in [*firsts(cls), cls(), cls(1, 2), [cls(1), cls(2, data=True)], cls(3, data="named"), cls(4)]:
        three_times(tree)
        both(lambda t: t.tree_leaves_with_path(tree, is_leaf=lambda v: v is None))
        both(
            lambda t: t.tree_map_with_path(
                lambda p, v: p, tree, is_leaf=lambda p, v: len(p) > 1, is_leaf_takes_path=True
            )
        )


def test_functions_of_one_code_and_methods_of_the_class():
    cls = node(made_by(False), made_by(True))
    for tree in [cls(1, 2, data="named"), cls(1), cls(2, data=True)]:
        three_times(tree)

    @jax.tree_util.register_pytree_with_keys_class
    class Methods:
        def __init__(self, *children, data=None):
            self.children, self.data = children, data

        def tree_flatten(self):
            return self.children, self.data

        def tree_flatten_with_keys(self):
            return numbered_first(self)

        @classmethod
        def tree_unflatten(cls, data, children):
            return cls(*children, data=data)

    @jax.tree_util.register_pytree_node_class
    class Fewer(Methods):
        pass

    for node_class in (Methods, Fewer):
        for tree in [node_class(1), node_class(2, data=True), [node_class(3, node_class(4, data="x"))]]:
            three_times(tree)


def test_each_object_is_flattened_once():
    recorded = []
    cls = node(lambda n: (recorded.append(n), (n.children, n.data))[1])
    tree = [cls(1), cls(2), cls(cls(3))]
    for _ in range(3):
        recorded.clear()
        OURS.tree_flatten_with_path(tree)
        assert len(recorded) == 4


def test_a_profiler_keeps_running():
    cls = node(lambda n: (n.children, n.data))
    calls = []
    sys.setprofile(lambda *args: calls.append(args[1]))
    try:
        OURS.tree_flatten_with_path(cls(1))
        installed = sys.getprofile()
    finally:
        sys.setprofile(None)
    assert installed is not None and "call" in calls
    three_times(cls(1))
    OURS.tree_flatten_with_path(node(plainly)(1))
    assert sys.getprofile() is None


def test_an_error_of_the_first_object_is_the_error():
    def flatten(node):
        raise KeyError("no children")

    cls = node(flatten)
    for _ in range(2):
        both(lambda t: t.tree_leaves_with_path(cls(1)), KeyError)
    assert sys.getprofile() is None
    assert DictKey("a") == OURS.DictKey("a")
