# SPDX-License-Identifier: Apache-2.0
"""Depth, size, cycles, and states that no treedef has."""

import operator
import pickle
import random
import textwrap
from collections import OrderedDict

import jax
import pytest

import graftax.tree
from sizes import sized
from tree_nodes import Data, Module, Pair, module, node
from watchdog import isolated, python

tree = graftax.tree


# ── depth and size ──


def deep(n, wrap):
    value = 1
    for i in range(n):
        value = wrap(value, i)
    return value


LEVELS = sized(100_000, 20_000)
WRAPS = {
    "list": lambda v, i: [v],
    "tuple": lambda v, i: (i, v),
    "dict": lambda v, i: {"b": i, "a": v},
    "mixed": lambda v, i: ([v, i], {"a": v}, Data(v, 0), Pair(v, 1), OrderedDict(z=v), module(v))[i % 6],
    "module": lambda v, i: module(v),
}


@pytest.mark.quick(1)
@isolated()
@pytest.mark.parametrize("kind", WRAPS)
def test_a_hundred_thousand_levels(kind):
    n = LEVELS
    value = deep(n, WRAPS[kind])
    leaves, treedef = tree.flatten(value)
    assert treedef.num_nodes == n + len(leaves)
    restored = treedef.unflatten(leaves)
    assert tree.structure(restored) == treedef and hash(tree.structure(restored)) == hash(treedef)
    assert tree.leaves(tree.map(lambda a, b: a is b, value, restored)) == [True] * len(leaves)
    assert len(repr(treedef)) > 2 * n
    assert pickle.loads(pickle.dumps(treedef)) == treedef
    assert treedef.compose(tree.structure([0])).num_leaves == len(leaves)
    assert tree.broadcast_prefix(7, value) == [7] * len(leaves)
    assert max(len(p) for p, _ in tree.leaves_with_path([deep(2000, WRAPS[kind])])) == 2001
    few = deep(300, WRAPS[kind])
    with pytest.raises(ValueError):
        tree.map(lambda a, b: a, [few, few], [few, deep(300, lambda v, i: WRAPS[kind](v, i) if i else [])])


@pytest.mark.quick(0)
@isolated()
@pytest.mark.parametrize("kind", WRAPS)
def test_treedefs_of_jax_and_back_two_thousand_levels_deep(kind):
    treedef = tree.structure(deep(2000, WRAPS[kind]))
    theirs = tree.to_jax(treedef)
    assert theirs.num_nodes == treedef.num_nodes and theirs.num_leaves == treedef.num_leaves
    assert tree.from_jax(theirs) == treedef
    assert tree.to_jax(tree.structure(deep(100, WRAPS[kind]))) == jax.tree.structure(deep(100, WRAPS[kind]))


@pytest.mark.quick(0)
@isolated()
def test_iterables_for_nodes_a_hundred_thousand_levels_deep():
    inputs = deep(LEVELS, lambda v, i: iter([v, i]))
    created = tree.structure(deep(LEVELS, WRAPS["dict"])).from_iterable_tree(inputs)
    assert tree.structure(created) == tree.structure(deep(LEVELS, WRAPS["dict"]))
    with pytest.raises(ValueError, match=r"an iterable of 1 for PyTreeDef\(\[\[\*\]\]\), got \[\]"):
        tree.structure(deep(LEVELS, WRAPS["list"])).from_iterable_tree(deep(LEVELS - 1, lambda v, i: [v] if i else []))


@pytest.mark.quick(0)
@isolated()
@pytest.mark.parametrize("kind", WRAPS)
def test_why_trees_do_not_match_a_hundred_thousand_levels_down(kind):
    wrap = WRAPS[kind]
    one, other = deep(LEVELS, wrap), deep(LEVELS, lambda v, i: wrap(v, i) if i else [1, 2, 3])
    with pytest.raises(ValueError, match=rf"\.\.\. {LEVELS - 21} more \.\.\. .*found list of length 3$") as error:
        tree.map(lambda a, b: a, one, other)
    assert len(str(error.value)) < 1000


@pytest.mark.quick(0)
@isolated()
def test_trees_that_differ_at_each_of_a_hundred_thousand_levels():
    one, other = (deep(LEVELS, lambda v, i, side=side: {"a": v, "b": side}) for side in ([1], 1))
    with pytest.raises(ValueError, match=f"and {LEVELS - 5} more places") as error:
        tree.map(lambda a, b: a, one, other)
    assert len(str(error.value)) < 3000


def test_a_treedef_in_a_form_that_is_not_its_own_is_refused():
    good = tree.structure([1, {"a": 2}, None])._records()
    assert tree.PyTreeDef._from_records(good) == tree.structure([1, {"a": 2}, None])
    for place, record in (
        (0, (None, 1)),
        (1, (None, 0)),
        (2, ((dict, ["a"]), 2)),
        (4, ((type(None), None), 1)),
        (0, 3),
    ):
        with pytest.raises(ValueError):
            tree.PyTreeDef._from_records([*good[:place], record, *good[place + 1 :]])
    for bad in ([], good[:-1], [*good, (None, 1)]):
        with pytest.raises(ValueError, match="not a pickled tree structure"):
            tree.PyTreeDef._from_records(bad)


@pytest.mark.quick(0)
@isolated()
def test_a_million_leaves():
    n = sized(1_000_000, 100_000)
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


@pytest.mark.quick(0)
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
    pool = [
        0,
        1,
        2,
        7,
        -1,
        2**31,
        2**40,
        None,
        (),
        ("a",),
        ("a", "b"),
        int,
        list,
        dict,
        Data,
        Module,
        Pair,
        OrderedDict,
        "x",
        [],
    ]
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
            created = tree.PyTreeDef._from_state([tuple(record) for record in bad])
            repr(created), created == treedef, created.children(), created.num_nodes
            if created.num_leaves < 100:
                created.unflatten(range(created.num_leaves))
        except Exception:  # some of a library's own, from node data that are none of its
            refused += 1
    assert refused > 1000
    for bad in ([], [()], [3], [(0, 0, None, None)], [(0, 2, None, None)], [(2, 1, list, None)], None, [(0, 1)]):
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            tree.PyTreeDef._from_state(bad)


@pytest.mark.quick(0)
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
