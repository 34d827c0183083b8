# SPDX-License-Identifier: Apache-2.0
"""Shared and cyclic references are kept: inside the function, in its result, across arguments."""

import pytest

import graftax
import oracle
import zoo
from zoo import Box, Data, Node, Registered, Slotted, f32

SHAREABLE = {
    "list": lambda: [f32(1)],
    "dict": lambda: {"w": f32(1)},
    "object": lambda: Box(w=f32(1)),
    "slotted": lambda: Slotted(a=f32(1)),
    "dataclass": lambda: Data(f32(1)),
    "registered": lambda: Registered(f32(1), f32(2)),
    "list_without_arrays": lambda: [1],
    "object_without_arrays": lambda: Box(n=1),
    "set": lambda: {1, 2},
    "bytearray": lambda: bytearray(b"a"),
}
kinds = pytest.mark.parametrize("build", SHAREABLE.values(), ids=SHAREABLE)


@pytest.mark.quick(0)
@kinds
def test_sharing_across_arguments_is_seen_inside(build):
    f = graftax.jit(lambda a, b, *, c: (a is b, a is c))
    x = build()
    assert f(x, x, c=x) == (True, True)
    assert f(x, build(), c=x) == (False, True)
    assert f(x, x, c=build()) == (True, False)
    assert f(x, x, c=x) == (True, True)
    assert f.cache_info().traces == 3


@pytest.mark.quick(0)
@kinds
def test_sharing_inside_one_argument_is_seen_inside(build):
    f = graftax.jit(lambda g: g["a"] is g["b"][0])
    x = build()
    for _ in range(2):
        assert f({"a": x, "b": [x]}) is True
        assert f({"a": x, "b": [build()]}) is False


@kinds
def test_a_returned_argument_is_the_callers_own(build):
    f = graftax.jit(lambda x, y: [y, x, (x, {"x": x})])
    for _ in range(2):
        x, y = build(), build()
        out = f(x, y)
        assert out[0] is y and out[1] is x and out[2][0] is x and out[2][1]["x"] is x


def test_a_returned_part_is_the_callers_own():
    f = graftax.jit(lambda g: (g.left["inner"], g.right))
    for _ in range(2):
        g = Box(left={"inner": [f32(1)]}, right=Data(f32(2)))
        inner, right = f(g)
        assert inner is g.left["inner"] and right is g.right


def test_a_returned_argument_is_not_the_first_callers_equal_one():
    f = graftax.jit(lambda config: config)
    first, second = Box(n=1), Box(n=1)
    assert f(first) is first
    assert f(second) is second
    assert f.cache_info().traces == 1


def test_results_share_what_the_function_shared():
    @graftax.jit
    def f(x):
        new = [x + 1]
        return {"a": new, "b": (new, new)}

    for _ in range(2):
        out = f(f32(1))
        assert out["a"] is out["b"][0] is out["b"][1]


def test_a_change_through_one_reference_is_seen_through_the_other():
    @graftax.jit
    def f(a, b):
        a.append(b[0] * 2)
        return b[-1] + len(b)

    x = [f32(3)]
    assert f(x, x).tolist() == [8.0]
    assert f([f32(3)], [f32(3)]).tolist() == [4.0]
    assert len(x) == 2


def test_the_seed_example_shared_list_in_two_keys():
    x = [1, 2]
    y1 = {"a": x, "b": x}
    leaves, graphdef = graftax.flatten(y1)
    y2 = graftax.unflatten(graphdef, leaves)
    assert y2["a"] is y2["b"]
    y2["a"][0] = 3
    assert y2 == {"a": [3, 2], "b": [3, 2]}


@pytest.mark.parametrize(
    "name", [name for name in zoo.NAMES if name.startswith(("shared", "cyclic", "two", "parent", "doubly"))]
)
def test_the_graph_inside_is_the_graph_outside(name):
    build = dict(zoo.ZOO)[name]
    wanted = oracle.flatten(build())[1]
    f = graftax.jit(lambda x: [repr(record) for record in oracle.flatten(x)[1]])
    for _ in range(2):
        assert f(build()) == [repr(record) for record in wanted]


def test_a_parent_and_its_child():
    @graftax.jit
    def grow(node):
        assert node.children[0].parent is node
        node.children.append(Node(node.value * 2))
        node.children[-1].parent = node
        return node.children[-1]

    root = zoo.parent_and_child()
    for count in (3, 4):
        child = grow(root)
        assert len(root.children) == count
        assert root.children[-1] is child and child.parent is root


def test_a_cycle_made_inside_closes_outside():
    @graftax.jit
    def f(box):
        box.me = [box]

    for _ in range(2):
        box = Box(w=f32(1))
        f(box)
        assert box.me[0] is box


def test_a_cycle_through_a_tuple():
    @graftax.jit
    def f(t):
        assert t[0][0][0] is t[0]
        return t

    for _ in range(2):
        t = zoo.cyclic_tuple()
        out = f(t)
        assert out[0] is t[0] and out[0][0][0] is t[0]


def test_handed_over_objects_are_the_callers_own_inside():
    config = Box(n=2, inner=[1, Box(k=3)])
    kept = {}

    @graftax.jit
    def f(c, x):
        return x * c.n, c is kept["config"], c.inner is kept["inner"], c.inner[1] is kept["deep"]

    kept.update(config=config, inner=config.inner, deep=config.inner[1])
    for _ in range(2):
        assert f(config, f32(2))[1:] == (True, True, True)


def test_sentinels_keep_their_identity():
    default = zoo.SENTINEL

    @graftax.jit
    def f(x, y=default):
        return x if y is default else x + y

    assert f(f32(1)).tolist() == [1.0]
    assert f(f32(1), zoo.SENTINEL).tolist() == [1.0]
    assert f(f32(1), f32(1)).tolist() == [2.0]


def test_one_array_in_two_places_and_two_equal_arrays_share_a_trace():
    f = graftax.jit(lambda x, y: x + y)
    x = f32(1)
    f(x, x)
    f(x, f32(1))
    assert f.cache_info().traces == 1


def test_a_dag_of_forty_levels():
    x = leaf = [f32(1)]
    for _ in range(40):
        x = [x, x]

    @graftax.jit
    def f(x):
        while isinstance(x[0], list):
            assert x[0] is x[1]
            x = x[0]
        x[0] = x[0] + 1
        return x

    assert f(x) is leaf
    assert leaf[0].tolist() == [2.0]
