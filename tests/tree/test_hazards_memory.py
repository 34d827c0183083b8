# SPDX-License-Identifier: Apache-2.0
"""Threads, the collector, types that die, and what is left after many calls."""

import gc
import itertools
import pickle
import random
import sys
import threading
import weakref
from collections import OrderedDict, namedtuple

import jax
import pytest

import graftax.tree
from tree_nodes import Data, Key, Module, Pair, node
from watchdog import isolated

tree = graftax.tree


# ── threads ──


@pytest.mark.quick(0)
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
                restored = treedef.unflatten(leaves)
                assert tree.structure(restored) == treedef and hash(tree.structure(restored)) == hash(treedef)
                paths = tree.leaves_with_path({Key(2, gc_now): value, Key(1): i})
                assert [v for _, v in paths] == [i, *leaves]
                assert tree.map(lambda a, b: a is b, value, restored)[1] == tree.map(lambda v: True, shared)
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


@pytest.mark.quick(0)
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
    collect = lambda *a: [None, gc.collect(1)][0]
    cls = node(collect, lambda data, c: collect() or list(c))
    keys = {Key(2, collect): [1], Key(1, collect): cls(2, [3], data=Key(5, collect))}
    assert tree.leaves(keys, collect) == [2, 3, 1]
    assert list(tree.map(lambda v: collect() or v, keys).values()) == [[2, [3]], [1]]
    assert tree.structure(keys) == tree.structure(keys)
    assert hash(tree.structure(keys)) == hash(tree.structure(keys))
    assert [v for _, v in tree.leaves_with_path(keys)] == [2, 3, 1]


def test_the_collector_shows_no_structure_that_is_not_complete():
    before = [obj for obj in gc.get_objects() if type(obj) is tree.PyTreeDef]

    def look(*args):
        for obj in gc.get_objects():
            if type(obj) is tree.PyTreeDef and all(obj is not old for old in before):
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
        (
            tree.map_with_path(lambda p, v: p, value),
            own.children(),
            own.compose(own),
            repr(own),
            hash(own),
            own == treedef,
        )
        (
            own.__reduce__()[0](*own.__reduce__()[1]),
            tree.from_jax(theirs),
            tree.to_jax(own),
            own.flatten_up_to(value),
        )
        tree.broadcast_prefix([0], [value]), tree.transpose(tree.structure([0, 0]), own, [value, value])
        own.walk(lambda c, d: c, None, leaves), own.node_data(), tree.all_leaves(leaves)
        for wrong in (
            lambda: own.unflatten([1]),
            lambda: tree.map(max, value, [1]),
            lambda: tree.leaves({1: 1, "a": 2}),
        ):
            with pytest.raises(ValueError):
                wrong()

    grown = []
    for _ in range(8):  # tables of the interpreter grow now and then, a leak grows in every batch
        before = sys.getallocatedblocks()
        for _ in range(60):
            everything()
        gc.collect()
        grown.append(sys.getallocatedblocks() - before)
    assert min(grown[2:]) < 60, grown  # one block a round
