# SPDX-License-Identifier: Apache-2.0
"""The functions of `jax.tree` and `jax.tree_util`: every argument, every error."""

import inspect
import itertools
import operator
from collections import OrderedDict, defaultdict, namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax.tree
from beside import JAX, OURS, both

pytestmark = pytest.mark.quick(8)  # a case takes milliseconds

Pair = namedtuple("Pair", ["left", "right"])
TREE = {"b": [1, (2, None)], "a": Pair(3, {"x": 4})}


def test_every_public_name_of_jax_is_there():
    names = {n for m in (jax.tree, jax.tree_util) for n in vars(m) if not n.startswith("_")}
    assert names <= set(vars(graftax.tree))


@pytest.mark.quick(100)
@pytest.mark.parametrize(
    "name", [n for n in vars(JAX) if n in ("static",) or inspect.isfunction(vars(jax.tree).get(n))]
)
def test_names_without_prefix_are_those_with_prefix(name):
    assert name == "static" or getattr(OURS, name) is getattr(OURS, f"tree_{name}")


PARAMETERS = {
    "tree_all": ["tree"],
    "tree_broadcast": ["prefix_tree", "full_tree", "is_leaf"],
    "tree_flatten": ["tree", "is_leaf"],
    "tree_flatten_with_path": ["tree", "is_leaf", "is_leaf_takes_path"],
    "tree_leaves": ["tree", "is_leaf"],
    "tree_leaves_with_path": ["tree", "is_leaf", "is_leaf_takes_path"],
    "tree_structure": ["tree", "is_leaf"],
}
VALUES = {"tree": TREE, "prefix_tree": 1, "full_tree": TREE, "is_leaf": None, "is_leaf_takes_path": False}


@pytest.mark.quick(100)
@pytest.mark.parametrize("name", PARAMETERS)
def test_arguments_may_be_given_by_name_or_place(name):
    names = PARAMETERS[name]
    for n in range(len(names) + 1):
        inputs = [VALUES[k] for k in names[:n]]
        rest = {k: VALUES[k] for k in names[n:]}
        both(lambda t: getattr(t, name)(*inputs, **rest))


def test_arguments_by_name_of_the_other_functions():
    both(lambda t: t.tree_map(f=lambda v: v + 1, tree=TREE, is_leaf=None))
    both(lambda t: t.tree_map_with_path(f=lambda p, v: (p, v), tree=TREE, is_leaf=None, is_leaf_takes_path=False))
    both(lambda t: t.tree_reduce(function=operator.add, tree=TREE, initializer=5, is_leaf=None), 15)
    both(lambda t: t.tree_reduce_associative(operation=operator.add, tree=TREE, identity=0, is_leaf=None), 10)
    both(lambda t: t.tree_unflatten(treedef=t.tree_structure(TREE), leaves=range(4)))
    both(lambda t: t.all_leaves(iterable=[1], is_leaf=None), True)
    both(lambda t: t.tree_transpose(outer_treedef=t.structure([0]), inner_treedef=None, pytree_to_transpose=[(1, 2)]))
    both(lambda t: t.treedef_tuple(treedefs=[t.structure(0)]))
    both(lambda t: t.treedef_children(treedef=t.structure([0, []])))
    both(lambda t: t.treedef_is_leaf(treedef=t.structure(0)))


@pytest.mark.parametrize(
    "program",
    [
        lambda t: t.tree_map(),
        lambda t: t.tree_map(len),
        lambda t: t.tree_leaves(),
        lambda t: t.tree_leaves(1, None, None),
        lambda t: t.tree_leaves(1, unknown=None),
        lambda t: t.tree_all([1], lambda v: True),
        lambda t: t.tree_reduce_associative(operator.add, [1], 0),
        lambda t: t.tree_leaves([1], is_leaf=3),
        lambda t: t.tree_flatten_with_path([1], is_leaf=3),
        lambda t: t.tree_map(3, [1]),
        lambda t: t.tree_unflatten(t.tree_structure([1]), 3),
        lambda t: t.all_leaves(3),
        lambda t: t.PyTreeDef(),
    ],
)
def test_wrong_arguments_are_a_type_error(program):
    both(program, TypeError)


# ── is_leaf ──


@pytest.mark.parametrize("answer", [True, False, None])
def test_is_leaf_says_bool_or_none(answer):
    both(lambda t: t.tree_flatten(TREE, lambda v: answer))
    both(lambda t: t.tree_flatten_with_path(TREE, lambda v: answer))
    both(lambda t: t.tree_flatten_with_path(TREE, lambda p, v: answer, True))
    both(lambda t: t.tree_map(str, TREE, is_leaf=lambda v: answer))
    both(lambda t: t.tree_all(TREE, is_leaf=lambda v: answer))
    both(lambda t: t.tree_reduce(lambda a, b: [a, b], TREE, is_leaf=lambda v: answer))
    both(lambda t: t.all_leaves([TREE], lambda v: answer))


@pytest.mark.parametrize("answer", [0, 1, [], "yes", np.True_, np.False_, jnp.array(True)], ids=repr)
def test_is_leaf_that_says_anything_else_is_an_error(answer):
    both(lambda t: t.tree_flatten([1, [2]], lambda v: answer), ValueError)
    both(lambda t: t.tree_leaves_with_path([1, [2]], lambda v: answer), ValueError)
    both(lambda t: t.tree_map_with_path(print, [1], is_leaf=lambda p, v: answer, is_leaf_takes_path=True), ValueError)


@pytest.mark.parametrize("error", [KeyError, StopIteration, RuntimeError])
def test_what_is_leaf_raises_comes_out(error):
    def stop(*args):
        raise error("from is_leaf")

    both(lambda t: t.tree_flatten([1], stop), error)
    both(lambda t: t.tree_map(len, 1, is_leaf=stop), error)
    both(lambda t: t.tree_leaves_with_path([1], stop, True), error)


def test_is_leaf_is_asked_of_every_value_from_above_in_order():
    tree = {"b": [1, (2, None)], "a": Pair(3, ())}

    def asked(t):
        recorded = []
        t.tree_leaves(tree, lambda v: recorded.append(v))
        return recorded

    both(asked, [tree, Pair(3, ()), 3, (), [1, (2, None)], 1, (2, None), 2, None])

    def asked_with_path(t):
        recorded = []
        t.tree_leaves_with_path(tree, lambda p, v: recorded.append((p, v)), True)
        return recorded

    both(asked_with_path)


def test_is_leaf_with_path_stops_by_path():
    stop = lambda path, v: len(path) == 1
    both(lambda t: t.tree_flatten_with_path(TREE, is_leaf=stop, is_leaf_takes_path=True))
    both(lambda t: t.tree_leaves_with_path(TREE, stop, True))
    both(lambda t: t.tree_map_with_path(lambda p, v: [p, v], TREE, is_leaf=stop, is_leaf_takes_path=True))
    both(lambda t: t.tree_leaves_with_path(TREE, None, True))


def test_is_leaf_makes_none_and_containers_leaves():
    is_none, is_tuple = lambda v: v is None, lambda v: isinstance(v, tuple)
    for is_leaf in (is_none, is_tuple, lambda v: v == [], lambda v: v is TREE):
        both(lambda t: t.tree_flatten([TREE, None, [], ()], is_leaf))
        both(lambda t: t.tree_map(lambda v: "leaf", [TREE, None, [], ()], is_leaf=is_leaf))
    both(lambda t: t.tree_map(lambda *a: a, [1, None], [2, 3], is_leaf=is_none), [(1, 2), (None, 3)])
    both(lambda t: t.all_leaves([(1, 2), 3], is_tuple), True)
    both(lambda t: t.all_leaves([(1, 2), [3]], is_tuple), False)


# ── map ──


def test_map_takes_what_stands_in_the_place_of_leaves():
    both(lambda t: t.tree_map(lambda *a: a, [1, (2,)], [3, (4,)], [[5], ({"a": 6},)]))
    both(lambda t: t.tree_map(lambda *a: a, 1, [2], None, {"b": 1, "a": 2}))
    both(lambda t: t.tree_map(lambda *a: a, {"b": 1, "a": 2}, {"a": 3, "b": 4}))
    both(lambda t: t.tree_map(lambda *a: a, OrderedDict(b=1, a=2), OrderedDict(b=3, a=4)))
    both(lambda t: t.tree_map(lambda v: None, [1, 2]), [None, None])
    both(lambda t: t.tree_map_with_path(lambda *a: a, {"b": 1, "a": [2]}, {"a": [3], "b": (4,)}))


MISMATCHES = {
    "leaf for list": ([1], 2),
    "list for tuple": ([1], (1,)),
    "shorter": ([1, 2], [1]),
    "longer": ([1], [1, 2]),
    "none for leaf inside": ([1, [2]], [1, None]),
    "leaf for none": ([None], [1]),
    "none for list": ([1], None),
    "other keys": ({"a": 1}, {"b": 1}),
    "more keys": ({"a": 1}, {"a": 1, "b": 1}),
    "fewer keys": ({"a": 1, "b": 2}, {"a": 1}),
    "keys that cannot be sorted": ({"a": 1, "b": 2}, {"a": 1, 2: 1}),
    "dict for OrderedDict": (OrderedDict(a=1), {"a": 1}),
    "OrderedDict for dict": ({"a": 1}, OrderedDict(a=1)),
    "other order": (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
    "other factory": (defaultdict(int, a=1), defaultdict(list, a=1)),
    "tuple for namedtuple": (Pair(1, 2), (1, 2)),
    "namedtuple for tuple": ((1, 2), Pair(1, 2)),
    "subclass of list": ([1], type("Numbers", (list,), {})([1])),
    "deep": ({"a": [1, (2, {"b": 3})]}, {"a": [1, (2, {"c": 3})]}),
    "empty": ((), []),
    "partial of another function": (jax.tree_util.Partial(len, 1), jax.tree_util.Partial(sum, 1)),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_trees_that_do_not_match_are_a_value_error(name):
    tree, other = MISMATCHES[name]
    both(lambda t: t.tree_map(lambda *a: a, tree, other), ValueError)
    both(lambda t: t.tree_map(lambda *a: a, tree, tree, other), ValueError)
    both(lambda t: t.tree_map_with_path(lambda *a: a, tree, other), ValueError)
    both(lambda t: t.structure(tree).flatten_up_to(other), ValueError)
    both(lambda t: t.tree_broadcast(tree, other), ValueError)
    both(lambda t: t.broadcast_prefix(tree, other), ValueError)
    if name != "keys that cannot be sorted":
        both(lambda t: t.structure(tree) == t.structure(other), False)
        both(lambda t: t.structure(tree) != t.structure(other), True)


def test_a_mismatch_names_its_path():
    error = both(lambda t: t.tree_map(lambda *a: a, {"a": [1, (2, {"b": 3})]}, {"a": [1, (2, {"c": 3})]}))
    assert "['a'][1][1]" in str(error) and "missing 'b'" in str(error) and "not expected 'c'" in str(error)


def test_what_f_raises_comes_out():
    def fail(v):
        raise KeyError(v)

    both(lambda t: t.tree_map(fail, [1]), KeyError)
    both(lambda t: t.tree_map_with_path(lambda p, v: fail(v), [1]), KeyError)
    both(lambda t: t.tree_reduce(lambda a, b: fail(b), [1, 2]), KeyError)


def test_map_calls_f_in_the_order_of_the_leaves():
    def calls(t):
        recorded = []
        t.tree_map(lambda v: recorded.append(v), {"b": [1, 2], "a": (3, [4])})
        return recorded

    both(calls, [3, 4, 1, 2])


# ── unflatten ──


@pytest.mark.parametrize("tree", [1, None, [], [1], {"b": 1, "a": (2, [3])}, [[], None, 1]], ids=repr)
def test_unflatten_takes_any_iterable_of_just_the_right_number(tree):
    n = len(jax.tree.leaves(tree))
    for leaves in (range(n), list(range(n)), tuple(range(n)), dict.fromkeys(range(n)), "abcdef"[:n], np.arange(n)):
        both(lambda t: t.tree_unflatten(t.structure(tree), leaves))
    both(lambda t: t.tree_unflatten(t.structure(tree), iter(range(n))))
    both(lambda t: t.tree_unflatten(t.structure(tree), (v for v in range(n))))
    both(lambda t: t.tree_unflatten(t.structure(tree), [[v] for v in range(n)]))  # nodes as leaves
    for wrong in {n + 1, n + 5, *range(n)}:
        both(lambda t: t.tree_unflatten(t.structure(tree), range(wrong)), ValueError)
        both(lambda t: t.structure(tree).unflatten([0] * wrong), ValueError)
        both(lambda t: t.structure(tree).unflatten(iter([0] * wrong)), ValueError)


def test_an_iterable_that_raises_half_way():
    def leaves():
        yield 1
        raise KeyError("half way")

    both(lambda t: t.tree_unflatten(t.structure([1, 2]), leaves()), KeyError)


# ── broadcast ──


@pytest.mark.parametrize(
    ("prefix", "full"),
    [
        (1, [2, {"a": 3}]),
        ([1, 2], [[3, 4], (5, None)]),
        (None, None),
        ((), ()),
        ({"b": 1, "a": (2, 3)}, {"a": ([4, 5], 6), "b": {}}),
        ([None, 1], [None, [2, 3]]),
        (Pair(1, 2), Pair([3], 4)),
    ],
    ids=repr,
)
def test_a_prefix_is_repeated(prefix, full):
    both(lambda t: t.broadcast_prefix(prefix, full))
    both(lambda t: t.tree_broadcast(prefix, full))
    both(lambda t: t.broadcast(prefix, full, is_leaf=lambda v: v is None))


def test_none_in_a_prefix_is_a_leaf_where_it_is_said_to_be():
    both(lambda t: t.broadcast_prefix([None, 1], [[2, 3], 4]), ValueError)
    both(lambda t: t.broadcast_prefix([None, 1], [[2, 3], 4], is_leaf=lambda v: v is None), [None, None, 1])
    both(lambda t: t.broadcast_prefix([(1, 2), 3], [[4, 5], 6], lambda v: isinstance(v, tuple)))


# ── reduce, all, all_leaves ──


def test_reduce():
    tree = {"b": [1, 2], "a": (3, None)}
    both(lambda t: t.tree_reduce(lambda a, b: [a, b], tree), [[3, 1], 2])
    both(lambda t: t.tree_reduce(lambda a, b: [a, b], tree, "start"))
    both(lambda t: t.tree_reduce(lambda a, b: [a, b], tree, None))
    both(lambda t: t.tree_reduce(operator.add, [], 7), 7)
    both(lambda t: t.tree_reduce(operator.add, []), TypeError)
    both(lambda t: t.tree_reduce(operator.add, 5), 5)
    both(lambda t: t.tree_reduce(operator.add, [[1], [2]], [], lambda v: v in ([1], [2])), [1, 2])


@pytest.mark.parametrize("n", range(12))
def test_associative_reduction_has_the_shape_that_jax_gives_it(n):
    both(lambda t: t.tree_reduce_associative(lambda a, b: (a, b), list(range(n)), identity="none"))
    both(lambda t: t.reduce_associative(lambda a, b: (a, b), list(range(n))), None if n else TypeError)


def test_all():
    for tree in ([], [1, 2], [1, 0], {"a": None}, None, 0, [[0], 1]):
        both(lambda t: t.tree_all(tree))
    both(lambda t: t.tree_all([[0], 1], is_leaf=lambda v: v == [0]), True)
    both(lambda t: t.tree_all([jnp.arange(2)]), ValueError)


def test_all_leaves():
    for items in ([], [1, "a", jnp.zeros(1)], [None], [1, []], [()], [jax.tree_util.Partial(len)], range(3), "text"):
        both(lambda t: t.all_leaves(items))
        both(lambda t: t.all_leaves(items, lambda v: v is None))
    both(lambda t: t.all_leaves(iter([1, 2])), True)
    both(lambda t: t.all_leaves({"a": []}), True)


# ── transpose ──


@pytest.mark.parametrize(
    ("outer", "inner", "tree"),
    [
        ([0, 0], (0, 0), [(1, 2), (3, 4)]),
        ([0, 0], None, [(1, 2), (3, 4)]),
        ({"b": 0, "a": 0}, [0, [0]], {"b": [1, [2]], "a": [3, [4]]}),
        (Pair(0, 0), {"x": 0}, Pair({"x": 1}, {"x": 2})),
        (0, [0, 0], [1, 2]),
        ([0, 0], 0, [1, 2]),
        ([0], (), [()]),
        ((0, None, 0), [0], ([1], None, [2])),
        ([0, 0], [0], [1, 2]),
    ],
    ids=repr,
)
def test_transpose(outer, inner, tree):
    both(lambda t: t.tree_transpose(t.structure(outer), inner if inner is None else t.structure(inner), tree))


def test_transpose_of_what_is_no_tree_of_trees():
    both(lambda t: t.tree_transpose(t.structure([0, 0]), t.structure((0, 0)), [1, 2, 3]), TypeError)
    both(lambda t: t.tree_transpose(t.structure([0, 0]), None, [(1, 2), (3,)]), TypeError)
    both(lambda t: t.tree_transpose(t.structure([0, 0]), None, [1]), ValueError)
    both(lambda t: t.tree_transpose(t.structure(()), None, ()), IndexError)


# ── one level ──


def test_one_level_of_a_leaf_is_an_error():
    both(lambda t: t.flatten_one_level(1), ValueError)
    both(lambda t: t.flatten_one_level_with_keys("text"), ValueError)


@pytest.mark.parametrize("cls", [int, str, list, tuple, dict, type(None), Pair, OrderedDict, defaultdict, object, set])
def test_is_tree_node(cls):
    both(lambda t: t.is_tree_node(cls))


# ── static ──


def test_static_marks_a_field():
    def made(t, **kwargs):
        field = t.static(**kwargs)
        return field.metadata.copy(), field.default, field.init, field.kw_only, field.repr

    both(lambda t: made(t))
    both(lambda t: made(t, default=3, init=False, repr=False, kw_only=True))
    both(lambda t: made(t, metadata=None))
    both(lambda t: made(t, metadata={"more": 1}))
    both(lambda t: made(t, metadata={"static": False}))
    both(lambda t: t.static(3), TypeError)


# ── arrays and tracers ──


def test_tracers_are_leaves_under_every_transform():
    def program(t):
        def f(tree):
            leaves, treedef = t.tree_flatten(tree)
            doubled = t.tree_map(lambda v, w: v + w, tree, t.tree_unflatten(treedef, leaves))
            return t.tree_reduce(operator.add, doubled), t.tree_map(lambda v: v * 2.0, doubled)

        tree = {"b": [jnp.ones(3), jnp.zeros(3)], "a": (jnp.arange(3.0),)}
        return (
            jax.jit(f)(tree),
            jax.vmap(f)(tree),
            jax.grad(lambda v: f(v)[0].sum())(tree),
            jax.eval_shape(f, tree)[0].shape,
            jax.jvp(f, (tree,), (tree,)),
        )

    both(program)


def test_leaves_keep_their_identity():
    leaves = [object(), jnp.zeros(1), [], "text"]
    tree = {"a": leaves[0], "b": (leaves[1], {"c": leaves[3]})}
    result = graftax.tree.unflatten(graftax.tree.structure(tree), graftax.tree.leaves(tree))
    assert all(a is b for a, b in zip(graftax.tree.leaves(result), graftax.tree.leaves(tree), strict=True))
    assert list(itertools.chain(graftax.tree.leaves(tree))) == [leaves[0], leaves[1], leaves[3]]
