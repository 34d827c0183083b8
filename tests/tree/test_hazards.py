# SPDX-License-Identifier: Apache-2.0
"""User code that does what it should not while a tree is walked or built."""

import contextlib
import gc
import pickle
import sys
from collections import OrderedDict, defaultdict

import jax
import pytest

import graftax.tree
from tree_nodes import Data, Key, Module, Pair, module, node

pytestmark = pytest.mark.quick(8)  # a case takes milliseconds

tree = graftax.tree


# ── user code that changes what is walked ──

CHANGES = {
    "list cleared": (lambda n: [1, n, 2, [3]], lambda t: t.clear(), [1, "own", 2, 3]),
    "list grown": (lambda n: [1, n, 2], lambda t: t.extend(range(10_000)), [1, "own", 2]),
    "list reversed": (lambda n: [1, n, [2]], lambda t: t.reverse(), [1, "own", 2]),
    "dict cleared": (lambda n: {"a": 1, "b": n, "c": [2]}, lambda t: t.clear(), [1, "own", 2]),
    "dict grown": (lambda n: {"a": 1, "b": n, "c": [2]}, lambda t: t.update(dict.fromkeys(range(999))), [1, "own", 2]),
    "unsorted dict cleared": (lambda n: {"c": [1], "b": n, "a": 2}, lambda t: t.clear(), [2, "own", 1]),
    "OrderedDict cleared": (lambda n: OrderedDict(c=[1], b=n, a=2), lambda t: t.clear(), [1, "own", 2]),
    "defaultdict cleared": (lambda n: defaultdict(int, a=1, b=n, c=[2]), lambda t: t.clear(), [1, "own", 2]),
    "attributes deleted": (lambda n: Data([n, 1]), lambda t: vars(t).clear(), ["own", 1]),
    "module emptied": (lambda n: module([n, 1]), lambda t: vars(t).clear(), ["own", 1]),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("by", ["flatten", "is_leaf"])
def test_a_container_that_changes_while_it_is_walked_gives_what_it_had(name, by):
    make, change, expected = CHANGES[name]
    for ask in (tree.flatten, tree.flatten_with_path):
        contents = node((lambda n: change(outer)) if by == "flatten" else None)("own")
        outer = make(contents)
        is_leaf = (lambda v: change(outer) if v is contents else None) if by == "is_leaf" else None
        leaves, treedef = ask(outer, is_leaf)
        if ask is tree.flatten_with_path:
            leaves = [leaf for _, leaf in leaves]
        assert leaves == expected
        assert tree.leaves(treedef.unflatten(leaves)) == expected
        assert repr(treedef) and hash(treedef) == hash(treedef)


def test_a_container_that_changes_while_it_is_matched():
    for make, change, _ in CHANGES.values():
        contents = node(lambda n: change(outer))("own")
        outer = make(node()("own"))
        treedef = tree.structure(make(0))
        outer = make(contents)
        n = treedef.num_leaves
        assert len(treedef.flatten_up_to(outer)) == n
        gc.collect()


@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda items: defaultdict(int, items)])
@pytest.mark.parametrize(
    "change", [lambda d: d.clear(), lambda d: d.update({Key(i): i for i in range(500)}), lambda d: d.popitem()]
)
def test_a_dict_that_its_keys_change_is_read_or_refused(kind, change):
    armed = []

    def run():
        if armed:
            armed.clear()
            change(d)

    for ask in (tree.leaves, lambda d: treedef.flatten_up_to(d), lambda d: treedef == tree.structure(d)):
        d = kind([(Key(i, run), i) for i in (3, 1, 2)])
        treedef = tree.structure(d)
        armed.append(1)
        with contextlib.suppress(RuntimeError, ValueError, KeyError):
            ask(d)
        armed.clear()
        assert tree.leaves(kind([(Key(1), 5)])) == [5]


def test_leaves_that_go_while_a_tree_is_built():
    for make in (
        lambda: [node(None, lambda data, c: leaves.clear())(0), [1, 2], 3],
        lambda: {Key(1, lambda: leaves.clear()): [0, 1], Key(2): (2, 3)},
        lambda: OrderedDict([(Key(1, lambda: leaves.clear()), [0, 1]), (Key(2), (2, 3))]),
    ):
        leaves = []
        treedef = tree.structure(make())
        leaves = [object() for _ in range(treedef.num_leaves)]
        inputs = list(leaves)
        weak = [id(v) for v in inputs]
        del inputs
        result = tree.leaves(treedef.unflatten(leaves), lambda v: v is None)
        assert [id(v) for v in result if v is not None] == weak[-len([v for v in result if v is not None]) :] or leaves
    leaves = [object() for _ in range(1000)]
    treedef = tree.structure([0] * 1000)
    count = treedef.walk(lambda c, data: len(c), lambda v: leaves.clear(), leaves)
    assert count == 1000 and not leaves


def test_an_instance_whose_property_changes_it():
    class Fields:
        def __init__(self):
            self.a, self.c = [1], 3

        @property
        def b(self):
            vars(self).clear()
            gc.collect()
            return 2

    jax.tree_util.register_dataclass(Fields, ["a", "b", "c"], [])
    with pytest.raises(AttributeError):
        tree.leaves(Fields())
    with pytest.raises(AttributeError):
        tree.structure([0]).flatten_up_to([Fields()]) and tree.leaves([Fields()])


def test_a_class_that_changes_while_it_is_read():
    class Fields:
        def __init__(self):
            self.a, self.c = [1], 3

        @property
        def b(self):
            Fields.changed = getattr(Fields, "changed", 0) + 1
            tree.leaves(other)
            return 2

    jax.tree_util.register_dataclass(Fields, ["a", "b", "c"], [])
    other = node()(1)
    for _ in range(50):
        assert tree.leaves([Fields(), Fields()]) == [1, 2, 3] * 2
        assert tree.structure([Fields()]).flatten_up_to([Fields()]) == [1, 2, 3]


# ── errors half way ──


def test_an_error_half_way_leaves_nothing_behind():
    def fail(*args):
        raise KeyError("half way")

    opens, builds = node(fail), node(None, fail)
    leaf = type("Leaf", (), {})()
    before = sys.getrefcount(leaf)
    big: object = [[leaf] * 10, {"a": (leaf, Data(leaf, leaf))}, Module(leaf, leaf)]
    held = sys.getrefcount(leaf)
    treedef = tree.structure([big, builds(leaf), big])
    for _ in range(200):
        for run in (
            lambda: tree.leaves([big, opens(leaf), big]),
            lambda: tree.leaves_with_path([big, opens(leaf), big]),
            lambda: tree.map(lambda v: v, [big, builds(leaf), big]),
            lambda: treedef.unflatten([leaf] * treedef.num_leaves),
            lambda: tree.map(fail, big),
            lambda: tree.leaves([big, big], lambda v: v is leaf and fail()),
        ):
            with pytest.raises(KeyError):
                run()
        with pytest.raises(ValueError):
            tree.map(lambda *a: a, [big, 1], [big, [leaf], 2])
        with pytest.raises(ValueError):
            treedef.unflatten([leaf] * 3)
    treedef = run = None
    assert sys.getrefcount(leaf) == held
    big = None
    gc.collect()
    assert sys.getrefcount(leaf) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_is_no_exception_comes_out_too(error):
    def stop(*args):
        raise error

    for run in (
        lambda: tree.leaves([node(stop)(1)]),
        lambda: tree.map(stop, [1]),
        lambda: tree.leaves([1], stop),
        lambda: tree.map(lambda v: v, node(None, stop)(1)),
        lambda: tree.leaves({Key(1, stop_once): 1, Key(2): 2}),
        lambda: tree.structure(node()(data=Key(1, stop_once))) == tree.structure(node()(data=Key(1))) or stop(),
    ):
        stop_once = lambda: None
        with pytest.raises(error):
            if "stop_once" in run.__code__.co_freevars:
                keys = {Key(1): 1, Key(2): 2}
                for key in keys:
                    key.run = stop
                tree.leaves(keys)
            else:
                run()
    assert tree.leaves([1, (2,)]) == [1, 2]


def test_the_recursion_limit_is_as_before_after_many_errors():
    def fail(n):
        raise KeyError

    def depth(n=0):
        try:
            return depth(n + 1)
        except RecursionError:
            return n

    nested = node(fail)()
    for _ in range(20):
        nested = [nested]
    before = depth()
    for _ in range(5000):
        with pytest.raises(KeyError):
            tree.leaves(nested)
    assert depth() == before


# ── re-entrance ──


def test_user_code_may_walk_trees_itself():
    everything = {"b": [1, (2, None)], "a": Data(3, "n"), "c": Module([4], 5), "d": Pair(6, OrderedDict(z=7))}

    def all_of_it(*args):
        leaves, treedef = tree.flatten(everything)
        assert tree.leaves(tree.unflatten(treedef, leaves)) == leaves == [3, 1, 2, 4, 6, 7]
        assert len(tree.leaves_with_path(everything)) == 6
        assert tree.map(lambda v, w: v + w, everything, everything)["c"].x == [8]
        hash(treedef), repr(treedef), pickle.dumps(treedef)

    class Aux:
        def __eq__(self, other):
            all_of_it()
            return True

        def __hash__(self):
            all_of_it()
            return 1

        def __repr__(self):
            all_of_it()
            return "Aux"

    cls = node(all_of_it, lambda data, c: all_of_it() or [*c])
    value = [1, cls(2, cls(3, data=Aux()), data=Aux()), {"k": 4}]
    is_leaf = lambda v: all_of_it()
    assert tree.leaves(value, is_leaf) == [1, 2, 3, 4]
    assert tree.map(lambda v: all_of_it() or v, value, is_leaf=is_leaf) == [1, [2, [3]], {"k": 4}]
    assert tree.structure(value) == tree.structure(value)
    assert hash(tree.structure(value)) == hash(tree.structure(value))
    assert "Aux" in repr(tree.structure(value))
    assert len(tree.leaves_with_path(value)) == 4
    keys = {Key(2, all_of_it): 1, Key(1, all_of_it): 2}
    assert tree.leaves(keys) == [2, 1]


def test_a_flatten_that_flattens_itself_ends_in_a_recursion_error():
    cls = node(lambda n: tree.leaves(n))
    for _ in range(3):
        with pytest.raises(RecursionError):
            tree.leaves([cls(1)])
    assert tree.leaves([1]) == [1]
