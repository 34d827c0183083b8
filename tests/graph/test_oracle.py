# SPDX-License-Identifier: Apache-2.0
"""The oracle can pass and can fail."""

import math
from collections import OrderedDict, defaultdict, deque

import numpy as np
import pytest

import oracle
import zoo
from zoo import Box, Data, Level, Slotted, f32, i32

pytestmark = pytest.mark.quick(8)  # a case takes milliseconds


@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_two_builds_are_the_same_graph(build):
    assert oracle.difference(build(), build()) is None


@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_a_deep_copy_is_the_same_graph_of_new_nodes(build):
    graph, memo = build(), {}
    copy = oracle.deep_copy(graph, memo=memo)
    assert oracle.difference(graph, copy) is None
    assert not {id(x) for x in oracle.reachable(graph)[0]} & {id(x) for x in oracle.reachable(copy)[0]}
    pairs = [pair for pair in memo.values() if oracle.is_mutable(pair[0])]
    assert oracle.same_graph(graph, copy, pairs)


def test_zoo_names_are_unique_and_graphs_differ():
    assert len(set(zoo.NAMES)) == len(zoo.ZOO)
    graphs = [build() for build in zoo.BUILDERS]
    for i, left in enumerate(graphs):
        for right in graphs[i + 1 :]:
            assert not oracle.same_graph(left, right)


def shared():
    x = [1]
    return [x, x]


def loop(length):
    x = [1]
    inner = x
    for _ in range(length - 1):
        inner = [inner]
    x.append(inner)
    return x


UNEQUAL = [
    (1, True),
    (1, 1.0),
    (1, Level.ONE),
    (0.0, -0.0),
    (complex(0.0, 0.0), complex(0.0, -0.0)),
    (None, ()),
    ([1], (1,)),
    ((1, (2, True)), (1, (2, 1))),
    (frozenset({1}), frozenset({True})),
    ("a", b"a"),
    (object(), object()),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ({1: 0}, {True: 0}),
    ({"a": 1}, OrderedDict(a=1)),
    (defaultdict(int), defaultdict(list)),
    (deque([1], 2), deque([1], 3)),
    ({1, 2}, {1, 3}),
    (bytearray(b"a"), bytearray(b"b")),
    (Box(a=1, b=2), Box(b=2, a=1)),
    (Box(a=1), Data(1)),
    (Slotted(a=1), Slotted(b=1)),
    (f32(1), f32(2)),
    (f32(1), i32(1)),
    (f32(1), f32(1, 1)),
    (f32(0.0), f32(-0.0)),
    (f32(1), np.ones(1, np.float32)),
    (f32(1), 1.0),
    (shared(), [[1], [1]]),
    ([[1], [1]], shared()),
    (loop(1), loop(2)),
    (loop(2), loop(3)),
    (zoo.cyclic_tuple(), ([()],)),
]


@pytest.mark.parametrize("pair", UNEQUAL, ids=range(len(UNEQUAL)))
def test_unequal_graphs_are_told_apart(pair):
    assert not oracle.same_graph(*pair)
    assert oracle.difference(*pair)


def test_nan_is_itself_and_immutable_nodes_have_no_identity():
    spine = (f32(1), "x")
    assert oracle.same_graph([math.nan, spine, spine], [float("nan"), (f32(1), "x"), (f32(1), "x")])


def test_given_identities_must_stand_in_the_same_places():
    a, b, c, d = [1], [1], [1], [1]
    assert oracle.same_graph([a, b], [c, d], [(a, c), (b, d)])
    assert not oracle.same_graph([a, b], [d, c], [(a, c), (b, d)])
    assert not oracle.same_graph([a], [[1]], [(a, c)])


def test_flatten_gives_leaves_in_order_and_back_references():
    first, second = f32(1), f32(2)
    x = [first]
    leaves, records = oracle.flatten({"a": x, "b": (second, x)})
    assert [leaf is want for leaf, want in zip(leaves, [first, second], strict=True)] == [True, True]
    assert records[-1] == ("ref", 1)


def test_flatten_ends_on_every_zoo_graph():
    for build in zoo.BUILDERS:
        leaves, records = oracle.flatten(build())
        assert records.count("leaf") == len(leaves)
