# SPDX-License-Identifier: Apache-2.0
"""User code that does what it should not while a tree is walked or built; threads, the collector, size and depth."""

import dataclasses
import gc
import itertools
import operator
import pickle
import random
import sys
import textwrap
import threading
import tracemalloc
import weakref
from collections import OrderedDict, defaultdict, namedtuple

import equinox as eqx
import jax
import pytest

import graftax.tree
from hazards.watchdog import isolated, python

tree = graftax.tree
Pair = namedtuple("Pair", ["left", "right"])


def node(flatten=None, unflatten=None, bases=()):
    """A new registered class: flatten(children) is run first, unflatten(data, children) last."""

    class Node(*bases):
        def __init__(self, *children, data=None):
            self.children, self.data = children, data

    def opened(n):
        if flatten:
            flatten(n)
        return n.children, n.data

    jax.tree_util.register_pytree_node(Node, opened, unflatten or (lambda data, c: Node(*c, data=data)))
    return Node


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Data:
    x: object
    n: object = dataclasses.field(default=0, metadata={"static": True})


class Module(eqx.Module):
    x: object
    n: object = eqx.field(static=True, default=0)


def module(x):
    """A module whose making walks no tree."""
    made = object.__new__(Module)
    object.__setattr__(made, "x", x)
    object.__setattr__(made, "n", 0)
    return made


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
        inside = node((lambda n: change(outer)) if by == "flatten" else None)("own")
        outer = make(inside)
        is_leaf = (lambda v: change(outer) if v is inside else None) if by == "is_leaf" else None
        leaves, treedef = ask(outer, is_leaf)
        if ask is tree.flatten_with_path:
            leaves = [leaf for _, leaf in leaves]
        assert leaves == expected
        assert tree.leaves(treedef.unflatten(leaves)) == expected
        assert repr(treedef) and hash(treedef) == hash(treedef)


def test_a_container_that_changes_while_it_is_matched():
    for make, change, _ in CHANGES.values():
        inside = node(lambda n: change(outer))("own")
        outer = make(node()("own"))
        treedef = tree.structure(make(0))
        outer = make(inside)
        n = treedef.num_leaves
        assert len(treedef.flatten_up_to(outer)) == n
        gc.collect()


class Key:
    """Compares as its number does, and runs something first."""

    def __init__(self, number, run=lambda: None):
        self.number, self.run = number, run

    def __hash__(self):
        self.run()
        return self.number

    def __eq__(self, other):
        self.run()
        return isinstance(other, Key) and self.number == other.number

    def __lt__(self, other):
        self.run()
        return self.number < other.number


@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda items: defaultdict(int, items)])
@pytest.mark.parametrize("change", [lambda d: d.clear(), lambda d: d.update({Key(i): i for i in range(500)}), lambda d: d.popitem()])
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
        try:
            ask(d)
        except (RuntimeError, ValueError, KeyError):
            pass
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
        given = list(leaves)
        weak = [id(v) for v in given]
        del given
        out = tree.leaves(treedef.unflatten(leaves), lambda v: v is None)
        assert [id(v) for v in out if v is not None] == weak[-len([v for v in out if v is not None]) :] or leaves
    leaves = [object() for _ in range(1000)]
    treedef = tree.structure([0] * 1000)
    seen = treedef.walk(lambda c, data: len(c), lambda v: leaves.clear(), leaves)
    assert seen == 1000 and not leaves


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
    big = [[leaf] * 10, {"a": (leaf, Data(leaf, leaf))}, Module(leaf, leaf)]
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
    del treedef, run
    assert sys.getrefcount(leaf) == held
    del big
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

    nested = node(fail)()
    for _ in range(20):
        nested = [nested]
    for _ in range(5000):
        with pytest.raises(KeyError):
            tree.leaves(nested)

    def depth(n):
        return 0 if n == 0 else 1 + depth(n - 1)

    assert depth(sys.getrecursionlimit() - 200)


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


# ── threads ──


@isolated()
def test_eight_threads_walk_build_and_register():
    barrier = threading.Barrier(8)
    errors = []
    sys.setswitchinterval(1e-5)

    def work(seed):
        random_ = random.Random(seed)
        barrier.wait()
        try:
            for i in range(60):
                late = type("Late", (), {"__init__": lambda self, *c: setattr(self, "c", c)})
                assert len(tree.leaves([late(1, 2), shared])) == 1 + 6
                jax.tree_util.register_pytree_node(late, lambda n: (n.c, None), lambda data, c, late=late: late(*c))
                keys = [f"k{random_.randrange(300)}" for _ in range(9)]
                value = [late(1, [2]), shared, Data(i, seed), Module(i, i % 3), dict.fromkeys(keys, i), Key(i)]
                leaves, treedef = tree.flatten(value)
                assert len(leaves) == 2 + 6 + 2 + len(set(keys)) + 1
                again = treedef.unflatten(leaves)
                assert tree.structure(again) == treedef and hash(tree.structure(again)) == hash(treedef)
                paths = tree.leaves_with_path({Key(2, gc_now): value, Key(1): i})
                assert [v for _, v in paths] == [i, *leaves]
                assert tree.map(lambda a, b: a is b, value, again)[1] == tree.map(lambda v: True, shared)
                assert pickle.loads(pickle.dumps(tree.structure(shared))) == tree.structure(shared)
        except BaseException as error:
            errors.append(error)

    def gc_now():
        if random.random() < 0.02:
            gc.collect()

    shared = {"b": [1, (2, None)], "a": Pair(3, Data(4)), "c": OrderedDict(x=5, y=6)}
    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


@isolated()
def test_a_list_and_a_dict_that_another_thread_changes():
    value = {"a": list(range(50)), "b": {str(i): [i] for i in range(50)}, "c": node(lambda n: None)(1)}
    stop = threading.Event()
    sys.setswitchinterval(1e-6)

    def change():
        while not stop.is_set():
            value["a"].append(0)
            value["b"].pop("7", None)
            value["b"]["7"] = []
            if len(value["a"]) > 500:
                value["a"].clear()

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(2000):
            leaves, treedef = tree.flatten(value, lambda v: None)
            assert len(leaves) == treedef.num_leaves
            assert tree.leaves(treedef.unflatten(leaves)) == leaves
            assert len(tree.leaves_with_path(value)) >= 50
    finally:
        stop.set()
        thread.join()


# ── the collector ──


def test_the_collector_runs_anywhere():
    collect = lambda *a: None if gc.collect(1) else None
    cls = node(collect, lambda data, c: collect() or list(c))
    keys = {Key(2, collect): [1], Key(1, collect): cls(2, [3], data=Key(5, collect))}
    assert tree.leaves(keys, collect) == [2, 3, 1]
    assert list(tree.map(lambda v: collect() or v, keys).values()) == [[2, [3]], [1]]
    assert tree.structure(keys) == tree.structure(keys)
    assert hash(tree.structure(keys)) == hash(tree.structure(keys))
    assert [v for _, v in tree.leaves_with_path(keys)] == [2, 3, 1]


def test_the_collector_shows_no_structure_that_is_not_complete():
    def look(*args):
        for obj in gc.get_objects():
            if type(obj) is tree.PyTreeDef:
                repr(obj), obj.num_nodes, obj.node_data(), obj.children(), obj == obj, hash(obj)
                assert tree.structure(obj.unflatten([0] * obj.num_leaves)).num_leaves == obj.num_leaves

    building = lambda data, c: [*c]
    cls = node(look, building)
    value = [1, (2, {"a": cls(3), "b": 4}), 5]
    tree.map(lambda v: look() or v, value)
    tree.map_with_path(lambda p, v, w: look() or v, value, value)
    tree.flatten_with_path(value)


def test_a_treedef_in_a_cycle_is_collected():
    class Holder:
        pass

    holder = Holder()
    cls = node()
    holder.treedef = tree.structure([cls(1, data=holder), 2])
    both_ways = tree.structure({"a": cls(data=[])})
    both_ways.node_data()
    cell = []
    looped = tree.structure(cls(1, data=cell))
    cell.append(looped)
    gone = weakref.ref(holder), weakref.ref(holder.treedef), weakref.ref(looped)
    del holder, looped, cell
    gc.collect()
    assert [r() for r in gone] == [None] * 3


def test_a_type_dies_with_the_last_treedef_that_names_it():
    def classes():
        yield node(), lambda cls: cls(1, [2])
        yield namedtuple("Short", ["a"]), lambda cls: cls(1)
        yield type("Leaf", (), {}), lambda cls: [cls()]

    for cls, make in itertools.chain.from_iterable(classes() for _ in range(3)):
        treedef = tree.structure(make(cls))
        registered = cls.__name__ == "Node"  # JAX keeps those for ever
        gone = weakref.ref(cls)
        repr(treedef)
        del cls, make
        gc.collect()
        if treedef.num_nodes > 2 or not registered:
            assert repr(treedef)
        assert registered or gone() is not None or "Short" not in repr(treedef)
        assert treedef.unflatten(list(range(treedef.num_leaves))) is not None
        del treedef
        gc.collect()
        assert registered or gone() is None
    for i in range(500):  # addresses come again
        cls = namedtuple(f"N{i % 7}", ["a", "b"][: 1 + i % 2]) if i % 3 else type(f"L{i}", (), {})
        value = cls(*range(1 + i % 2)) if i % 3 else cls()
        assert len(tree.leaves([value])) == (1 + i % 2 if i % 3 else 1)


@pytest.mark.parametrize("error", [KeyError, TypeError, RecursionError])
def test_data_that_cannot_be_hashed_or_compared(error):
    class Aux:
        def __init__(self, where):
            self.where = where

        def __eq__(self, other):
            if self.where == "eq":
                raise error("from ==")
            return True

        def __hash__(self):
            raise error("from hash")

    cls = node()
    treedef = tree.structure([cls(1, data=Aux("eq")), 2])
    same = tree.structure([cls(1, data=Aux("hash")), 2])
    for _ in range(100):
        with pytest.raises(ValueError) as caught:
            treedef == tree.structure([cls(1, data=Aux("eq")), 2])  # noqa: B015
        assert type(caught.value.__cause__) is error
        assert same == tree.structure([cls(1, data=Aux("hash")), 2])
        if error is TypeError:  # what `__hash__ = None` raises
            assert hash(same) == hash(treedef)
            assert {same: 1}[same] == 1
        else:
            with pytest.raises(error):
                hash(same)
    assert treedef.unflatten([1, 2])[1] == 2


# ── leaks ──


def test_nothing_is_left_after_many_calls():
    cls = node()
    value = {"b": [1.5, (2, None)], "a": Data([3.5], "n"), "c": Module((4,)), "d": cls(Pair(5, OrderedDict(z=6)))}
    treedef = tree.structure(value)
    theirs = jax.tree.structure(value)

    def everything():
        leaves, own = tree.flatten(value)
        tree.unflatten(own, leaves), tree.map(lambda v, w: v, value, value), tree.leaves_with_path(value)
        tree.map_with_path(lambda p, v: p, value), own.children(), own.compose(own), repr(own), hash(own), own == treedef
        pickle.loads(pickle.dumps(tree.structure(value["c"]))), tree.from_jax(theirs), tree.to_jax(own), own.flatten_up_to(value)
        tree.broadcast_prefix([0], [value]), tree.transpose(tree.structure([0, 0]), own, [value, value])
        own.walk(lambda c, d: c, None, leaves), own.node_data(), tree.all_leaves(leaves)
        for wrong in (lambda: own.unflatten([1]), lambda: tree.map(max, value, [1]), lambda: tree.leaves({1: 1, "a": 2})):
            with pytest.raises(ValueError):
                wrong()

    for _ in range(20):
        everything()
    gc.collect()
    tracemalloc.start()
    try:
        everything()
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(100):
            everything()
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 100 * 64  # less than one small object a round
    finally:
        tracemalloc.stop()


# ── depth and size ──


def deep(n, wrap):
    value = 1
    for i in range(n):
        value = wrap(value, i)
    return value


WRAPS = {
    "list": lambda v, i: [v],
    "tuple": lambda v, i: (i, v),
    "dict": lambda v, i: {"b": i, "a": v},
    "mixed": lambda v, i: ([v, i], {"a": v}, Data(v, 0), Pair(v, 1), OrderedDict(z=v), module(v))[i % 6],
    "module": lambda v, i: module(v),
}


@isolated()
@pytest.mark.parametrize("kind", WRAPS)
def test_a_hundred_thousand_levels(kind):
    n = 100_000
    value = deep(n, WRAPS[kind])
    leaves, treedef = tree.flatten(value)
    assert treedef.num_nodes == n + len(leaves)
    again = treedef.unflatten(leaves)
    assert tree.structure(again) == treedef and hash(tree.structure(again)) == hash(treedef)
    assert tree.leaves(tree.map(lambda a, b: a is b, value, again)) == [True] * len(leaves)
    assert len(repr(treedef)) > 2 * n
    assert pickle.loads(pickle.dumps(treedef)) == treedef
    assert treedef.compose(tree.structure([0])).num_leaves == len(leaves)
    assert tree.broadcast_prefix(7, value) == [7] * len(leaves)
    assert max(len(p) for p, _ in tree.leaves_with_path([deep(2000, WRAPS[kind])])) == 2001
    few = deep(300, WRAPS[kind])
    with pytest.raises(ValueError):
        tree.map(lambda a, b: a, [few, few], [few, deep(300, lambda v, i: WRAPS[kind](v, i) if i else [])])


@isolated()
def test_a_million_leaves():
    n = 1_000_000
    leaves = list(range(n))
    assert len(tree.leaves_with_path(leaves)) == n
    for value in (leaves, tuple(leaves), dict.fromkeys(leaves, 0), [[v] for v in range(n // 2)] + leaves[: n // 2]):
        flat, treedef = tree.flatten(value)
        assert len(flat) == treedef.num_leaves == n
        assert treedef.unflatten(flat) == value
        assert tree.map(lambda v: v, value) == value
    assert tree.reduce(operator.add, leaves, 0) == n * (n - 1) // 2


def cycles():
    a = [1]
    a.append(a)
    yield a
    b = {"a": 1}
    b["b"] = (b,)
    yield b
    c = Data(1)
    c.x = [c]
    yield c
    d = [None]
    e = d
    for _ in range(3000):
        e[0] = [None]
        e = e[0]
    e[0] = d
    yield d
    f = node()(1)
    f.children = ({"k": f},)
    yield f
    yield [1, {"z": a}]


@isolated()
def test_a_cycle_is_an_error_that_says_so():
    for value in cycles():
        for run in (
            lambda: tree.leaves(value),
            lambda: tree.structure(value),
            lambda: tree.leaves_with_path(value),
            lambda: tree.map(lambda v: v, value),
            lambda: tree.leaves(value, lambda v: False),
        ):
            for _ in range(3):
                with pytest.raises(RecursionError, match="contains itself"):
                    run()
    assert tree.leaves([1]) == [1]


@isolated()
def test_flatten_functions_that_make_nodes_without_end():
    cls = node()

    for children in (lambda n: [type(n)()], lambda n: [[{"a": type(n)()}]], lambda n: [cls(type(n)())]):
        endless = type("Endless", (), {})
        jax.tree_util.register_pytree_node(endless, lambda n: (children(n), None), lambda *a: None)
        for run in (tree.leaves, tree.leaves_with_path, tree.structure):
            for value in (endless(), [1, cls(endless())]):
                with pytest.raises(RecursionError, match="without end"):
                    run(value)


def test_a_deep_tree_whose_flatten_functions_make_lists_has_an_end():
    class Link:
        def __init__(self, rest):
            self.rest = rest

    jax.tree_util.register_pytree_node(Link, lambda n: ([[n.rest], (1, [n.rest])], None), lambda *a: None)
    jax.tree_util.register_pytree_node(Copy := type("Copy", (Link,), {}), lambda n: ([[n.rest]], None), lambda *a: None)
    assert tree.leaves(deep(10_000, lambda v, i: Copy(v))) == [1]
    assert len(tree.leaves(deep(8, lambda v, i: Link(v)))) == 2 * 2**8 - 1


# ── what is pickled, and JAX's registry ──


def test_malformed_states_are_refused():
    rng = random.Random(0)
    treedef = tree.structure([1, {"a": Data(2), "b": (3, 4)}, Pair(5, OrderedDict(z=6)), Module(7), None])
    state = treedef.__reduce__()[1][0]
    pool = [0, 1, 2, 7, -1, 2**31, 2**40, None, (), ("a",), ("a", "b"), int, list, dict, Data, Module, Pair, OrderedDict, "x", []]
    refused = 0
    for _ in range(5000):
        bad = [list(record) for record in state]
        for _ in range(rng.randint(1, 3)):
            record = rng.choice(bad)
            record[rng.randrange(4)] = rng.choice(pool)
        if rng.random() < 0.3:
            del bad[rng.randrange(len(bad))]
        if rng.random() < 0.1:
            bad.append([0, 1, None, None])
        try:
            made = tree.PyTreeDef._from_state([tuple(record) for record in bad])
            repr(made), made == treedef, made.children(), made.num_nodes
            if made.num_leaves < 100:
                made.unflatten(range(made.num_leaves))
        except Exception:  # some of a library's own, from node data that are none of its
            refused += 1
    assert refused > 1000
    for bad in ([], [()], [3], [(0, 0, None, None)], [(0, 2, None, None)], [(2, 1, list, None)], None, [(0, 1)]):
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            tree.PyTreeDef._from_state(bad)


def test_a_registry_that_cannot_be_read():
    code = """
        import collections, sys
        import jax, jax._src.tree_util as t
        t._registry = collections.UserDict(t._registry)
        import dataclasses, pickle
        import graftax.tree as tree
        from beside import laws
        from collections import OrderedDict, defaultdict, namedtuple
        Pair = namedtuple("Pair", "a b")
        @jax.tree_util.register_dataclass
        @dataclasses.dataclass
        class Data:
            x: object
            n: object = dataclasses.field(default=0, metadata={"static": True})
        class Late:
            def __init__(self, *c): self.c = c
        late = Late(1, [2])
        make = lambda: [1, {"b": (2, None), "a": Data([3], "n")}, Pair(4, OrderedDict(z=5)), defaultdict(int, k=6), ()]
        laws(make)
        treedef = tree.structure(make())
        for _ in range(1000):
            assert tree.leaves([late]) == [late] and tree.leaves(treedef.unflatten(range(6))) == [*range(6)]
        jax.tree_util.register_pytree_node(Late, lambda n: (n.c, None), lambda d, c: Late(*c))
        assert tree.leaves([late]) == [1, 2]
        laws(lambda: [late, make()])
        print("survived")
    """
    assert python(textwrap.dedent(code)).endswith("survived\n")
