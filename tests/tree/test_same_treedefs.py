# SPDX-License-Identifier: Apache-2.0
"""What a treedef can be asked, and JAX's treedefs given to `graftax.tree`."""

import copy
import pickle
import unittest.mock
from collections import OrderedDict, defaultdict, namedtuple

import equinox as eqx
import jax
import pytest

import graftax.tree
from beside import both, same

pytestmark = pytest.mark.quick(8)  # a case takes milliseconds

Pair = namedtuple("Pair", ["left", "right"])


@jax.tree_util.register_pytree_node_class
class Node:
    def __init__(self, data, *children):
        self.data, self.children = data, children

    def tree_flatten(self):
        return self.children, self.data

    @classmethod
    def tree_unflatten(cls, data, children):
        return cls(data, *children)


class Linear(eqx.Module):
    weight: object
    size: int = eqx.field(static=True)


class Unhashable:
    __hash__ = None

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, Unhashable) and self.value == other.value


FACTORY = list
TREES = [
    1,
    None,
    (),
    [],
    {},
    [1],
    (1,),
    (1, 2),
    [1, 2],
    [[1], 2],
    [1, [2]],
    [[1, 2]],
    [None],
    [None, 1],
    {"a": 1},
    {"b": 1},
    {"a": 1, "b": 2},
    {"b": 1, "a": 2},
    {"a": [1]},
    {1: 1},
    {True: 1},
    {1.0: 1},
    {2: 1},
    OrderedDict(a=1, b=2),
    OrderedDict(b=2, a=1),
    OrderedDict(),
    defaultdict(FACTORY, a=1),
    defaultdict(int, a=1),
    Pair(1, 2),
    Pair([1], 2),
    Node("a", 1),
    Node("b", 1),
    Node("a", 1, 2),
    Node(("a", 1)),
    Node(("a", 1.0)),
    Node([1]),
    Node(Unhashable(1), 1),
    Node(Unhashable(2), 1),
    Node({1}, 1),
    Node(frozenset({1}), 1),
    Node(None),
    jax.tree_util.Partial(len, 1),
    jax.tree_util.Partial(len),
    jax.tree_util.Partial(sum, 1),
    Linear(1, 2),
    Linear(1, 3),
    Linear([1], 2),
]


@pytest.mark.parametrize("i", range(len(TREES)), ids=lambda i: repr(TREES[i])[:40])
def test_treedefs_are_equal_to_the_same_others_as_those_of_jax(i):
    for other in TREES:
        both(lambda t: t.structure(TREES[i]) == t.structure(other))
        both(lambda t: t.structure(TREES[i]) != t.structure(other))
        a, b = graftax.tree.structure(TREES[i]), graftax.tree.structure(other)
        before = a == b
        if before:
            assert hash(a) == hash(b) or "{1}" in f"{a}{b}"
        hash(a), hash(b)
        assert (a == b) is before, "equality depends on whether the hash was asked for"


@pytest.mark.parametrize("tree", TREES, ids=lambda v: repr(v)[:40])
def test_a_treedef_says_what_it_is(tree):
    both(lambda t: t.structure(tree))
    both(lambda t: str(t.structure(tree)) == repr(t.structure(tree)), True)
    both(lambda t: f"{t.structure([tree, {'k': tree}])}")
    both(lambda t: t.structure(tree).node_data())
    both(lambda t: t.structure(tree).children())
    both(lambda t: [t.structure([tree]).num_leaves, t.structure([tree]).num_nodes])
    both(lambda t: t.structure([1, 2]).compose(t.structure(tree)))
    both(lambda t: t.structure(tree).compose(t.structure([1, None])))
    both(lambda t: t.treedef_tuple(t.structure(v) for v in (tree, 1, [tree], 2, 3)))
    both(lambda t: t.treedef_tuple([t.structure(tree)]))
    both(lambda t: t.treedef_children(t.structure((tree, 1, 2, [tree]))))


def test_a_composed_treedef_builds_trees():
    def program(t):
        composed = t.structure([0, (0, None)]).compose(t.structure({"b": 0, "a": 0}))
        children = [c.num_leaves for c in composed.children()]
        return (
            composed.unflatten(range(4)),
            composed.flatten_up_to([{"a": 1, "b": 2}, ({"a": 3, "b": 4}, None)]),
            children,
        )

    both(program)
    both(lambda t: t.structure([0]).compose(t.structure(None)).unflatten([]))
    both(lambda t: t.structure([0]).compose(t.structure(None)) == t.structure([None]), True)
    both(lambda t: t.structure([0]).compose(3), TypeError)


def test_a_treedef_is_the_key_of_a_dict():
    table = {graftax.tree.structure(tree): i for i, tree in enumerate(TREES[:20])}
    assert len(table) == len({jax.tree.structure(tree) for tree in TREES[:20]})
    for tree in TREES[:20]:
        assert graftax.tree.structure(tree) in table
    assert graftax.tree.structure([[[]]]) not in table


def test_a_treedef_is_no_other_kind_of_value():
    treedef = graftax.tree.structure([1])
    assert treedef != [1] and treedef != "PyTreeDef([*])" and treedef is not None
    assert treedef != jax.tree.structure([1]) and (treedef == jax.tree.structure([1])) is False
    assert treedef == unittest.mock.ANY and (treedef != unittest.mock.ANY) is False
    both(lambda t: t.structure([1]) < t.structure([2]), TypeError)
    both(lambda t: setattr(t.structure([1]), "num_leaves", 3), AttributeError)


def test_a_treedef_is_a_leaf():
    for make in (graftax.tree.structure, jax.tree.structure):
        treedef = make([1])
        both(lambda t: t.leaves([treedef])[0] is treedef, True)


def test_walk_calls_from_below():
    def calls(t):
        nodes, leaves = [], []
        tree = {"b": [1, (2, None)], "a": Pair(3, OrderedDict(z=4))}
        f_node = lambda children, data: nodes.append((children, data)) or len(nodes)
        f_leaf = lambda v: leaves.append(v) or -v
        result = t.structure(tree).walk(f_node, f_leaf, t.leaves(tree))
        return nodes, leaves, result

    both(calls)
    both(lambda t: t.structure(1).walk(lambda *a: a, lambda v: [v], [3]))
    both(lambda t: t.structure([]).walk(lambda *a: a, lambda v: [v], []))
    both(lambda t: t.structure([1]).walk(lambda *a: a, lambda v: 1 // 0, [3]), ZeroDivisionError)
    both(lambda t: t.structure([1]).walk(lambda *a: 1 // 0, lambda v: v, [3]), ZeroDivisionError)
    both(lambda t: t.structure([1]).walk(lambda *a: a, lambda v: v, 3), TypeError)


def test_flatten_up_to():
    both(lambda t: t.structure([1, (2, None)]).flatten_up_to([[3], ({"a": 4}, None)]))
    both(lambda t: t.structure(1).flatten_up_to([1, 2]))
    both(lambda t: t.structure(None).flatten_up_to(None), [])
    both(lambda t: t.structure({"b": 1, "a": 2}).flatten_up_to({"a": [3], "b": 4}))
    both(lambda t: t.structure(Node("a", 1)).flatten_up_to(Node("a", [2])))
    both(lambda t: t.structure(Node("a", 1)).flatten_up_to(Node("b", [2])), ValueError)
    both(lambda t: t.structure(Node("a", 1)).flatten_up_to(Node("a", 1, 2)), ValueError)
    both(lambda t: t.structure(Linear(1, 2)).flatten_up_to(Linear([1], 3)), ValueError)
    both(lambda t: t.structure(Linear(1, 2)).flatten_up_to(Linear([1], 2)))
    both(lambda t: t.structure(defaultdict(int, a=1)).flatten_up_to(defaultdict(int, a=[1])))


def test_from_iterable_tree():
    both(lambda t: t.structure({"b": 1, "a": (1, 2)}).from_iterable_tree([iter([1, 2]), 2]))
    both(lambda t: t.structure([1, [2]]).from_iterable_tree((1, {2: 0})))
    both(lambda t: t.structure(1).from_iterable_tree([1]))
    both(lambda t: t.structure([None]).from_iterable_tree([()]))
    both(lambda t: t.structure([None]).from_iterable_tree([None]), TypeError)
    both(lambda t: t.structure([1, (2, 3)]).from_iterable_tree([1, [2]]), ValueError)
    both(lambda t: t.structure([1, (2, 3)]).from_iterable_tree([1, 2]), TypeError)


@pytest.mark.parametrize("tree", TREES, ids=lambda v: repr(v)[:40])
def test_a_treedef_is_made_of_its_parts(tree):
    def remade(t):
        treedef = t.structure(tree)
        return t.PyTreeDef.from_node_data_and_children(t.default_registry, treedef.node_data(), treedef.children())

    if hasattr(jax.tree_util.PyTreeDef, "from_node_data_and_children"):
        both(lambda t: remade(t) == t.structure(tree), True)
    same(jax.tree.structure(tree), remade(graftax.tree))


@pytest.mark.parametrize(
    ("data", "count"),
    [
        ((dict, ["a"]), 2),
        ((dict, None), 0),
        ((dict, 3), 0),
        ((OrderedDict, ("a",)), 0),
        ((OrderedDict, None), 0),
        ((defaultdict, ("a",)), 1),
        ((defaultdict, (int, ["a"])), 1),
        ((type(None), None), 1),
        ((int, None), 0),
        ((Linear, ()), 1),
        ((Linear, None), 1),
        (("list", None), 0),
        ((list,), 0),
        ([list, None], 0),
        (3, 0),
        (None, 1),
    ],
    ids=repr,
)
def test_parts_that_make_no_treedef_are_refused_at_once(data, count):
    leaf = graftax.tree.structure(0)
    with pytest.raises((ValueError, TypeError)):
        graftax.tree.PyTreeDef.from_node_data_and_children(None, data, [leaf] * count)


@pytest.mark.parametrize("tree", TREES, ids=lambda v: repr(v)[:40])
def test_a_treedef_can_be_copied_and_pickled(tree):
    treedef = graftax.tree.structure([tree, {"k": (tree, 1, 2)}])
    assert copy.copy(treedef) == treedef and repr(copy.copy(treedef)) == repr(treedef)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        loaded = pickle.loads(pickle.dumps(treedef, protocol))
        assert loaded == treedef and hash(loaded) == hash(treedef)
        assert repr(loaded.unflatten(range(treedef.num_leaves)))
    assert copy.deepcopy(treedef) == treedef


def test_a_pickled_treedef_of_containers_survives_where_that_of_jax_does():
    for tree in TREES[:26]:
        both(lambda t: pickle.loads(pickle.dumps(t.structure(tree))))
        both(lambda t: copy.deepcopy(t.structure(tree)))


def test_bytes_of_a_treedef_are_those_of_jax():
    for tree in (1, None, [1, (2, {"b": 3, "a": None})], {}, []):
        both(lambda t: t.structure(tree).serialize_using_proto())
        data = jax.tree.structure(tree).serialize_using_proto()
        both(lambda t: t.PyTreeDef.deserialize_using_proto(t.default_registry, data))
        both(lambda t: t.PyTreeDef.deserialize_using_proto(t.default_registry, data) == t.structure(tree), True)
    both(lambda t: t.structure(OrderedDict(a=1)).serialize_using_proto(), ValueError)
    both(lambda t: t.structure({1: 1}).serialize_using_proto())
    both(lambda t: t.PyTreeDef.deserialize_using_proto(t.default_registry, b"xx\xff"))


@pytest.mark.parametrize("tree", TREES, ids=lambda v: repr(v)[:40])
def test_functions_take_treedefs_of_jax(tree):
    theirs, ours = jax.tree.structure(tree), graftax.tree.structure(tree)
    n = ours.num_leaves
    same(jax.tree.unflatten(theirs, range(n)), graftax.tree.unflatten(theirs, range(n)))
    same(jax.tree.unflatten(graftax.tree.to_jax(ours), range(n)), graftax.tree.unflatten(ours, range(n)))
    same(jax.tree_util.treedef_children(theirs), graftax.tree.treedef_children(theirs))
    same(jax.tree_util.treedef_tuple([theirs, theirs]), graftax.tree.treedef_tuple([theirs, ours]))
    assert graftax.tree.treedef_is_leaf(theirs) == jax.tree_util.treedef_is_leaf(theirs)
    assert graftax.tree.structure([0, 0]).compose(theirs) == graftax.tree.structure([0, 0]).compose(ours)
    assert graftax.tree.from_jax(ours) is ours and graftax.tree.to_jax(theirs) is theirs
    if n:
        outer = jax.tree.structure([0, 0])
        same(jax.tree.transpose(outer, theirs, [tree, tree]), graftax.tree.transpose(outer, theirs, [tree, tree]))


@pytest.mark.parametrize("value", [3, None, "PyTreeDef(*)", [1]], ids=repr)
def test_what_is_no_treedef_is_a_type_error_that_names_it(value):
    for function in (
        lambda: graftax.tree.unflatten(value, []),
        lambda: graftax.tree.treedef_children(value),
        lambda: graftax.tree.treedef_is_leaf(value),
        lambda: graftax.tree.treedef_tuple([value]),
        lambda: graftax.tree.transpose(value, None, []),
        lambda: graftax.tree.from_jax(value),
        lambda: graftax.tree.to_jax(value),
    ):
        with pytest.raises(TypeError, match="expected a treedef, got"):
            function()
