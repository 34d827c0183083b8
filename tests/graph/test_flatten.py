# SPDX-License-Identifier: Apache-2.0
"""Laws of ``flatten`` and ``unflatten``."""

import gc
import sys
import weakref

import jax
import pytest
from hypothesis import given

import graftax
import oracle
import zoo
from sizes import sized
from strategies import graphs
from watchdog import isolated
from zoo import Box, f32

DEPTH = sized(100_000, 20_000)


@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_unflatten_undoes_flatten(build):
    graph = build()
    leaves, graphdef = graftax.flatten(graph)
    assert oracle.difference(graph, graftax.unflatten(graphdef, leaves)) is None
    assert oracle.difference(build(), graph) is None  # and the graph was only read


@given(graphs())
def test_unflatten_undoes_flatten_on_random_graphs(recipe):
    graph = recipe.build()  # with all nodes: a root may be a weak reference
    leaves, graphdef = graftax.flatten(graph)
    assert oracle.difference(graph, graftax.unflatten(graphdef, leaves)) is None


@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_leaves_are_the_arrays_in_walk_order(build):
    graph = build()
    leaves, _ = graftax.flatten(graph)
    wanted, _ = oracle.flatten(graph)
    assert isinstance(leaves, list)
    assert [id(leaf) for leaf in leaves] == [id(leaf) for leaf in wanted]


@given(graphs())
def test_leaves_of_random_graphs_are_the_arrays_in_walk_order(recipe):
    graph = recipe.build()  # with all nodes: a root may be a weak reference
    leaves, _ = graftax.flatten(graph)
    assert [id(leaf) for leaf in leaves] == [id(leaf) for leaf in oracle.flatten(graph)[0]]


@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_unflatten_makes_new_nodes(build):
    graph = build()
    leaves, graphdef = graftax.flatten(graph)
    first, second = graftax.unflatten(graphdef, leaves), graftax.unflatten(graphdef, leaves)
    # A module's function that is code and nothing else stays itself.
    ids = [{id(node) for node in oracle.reachable(x)[0] if not callable(node)} for x in (graph, first, second)]
    assert not ids[0] & ids[1] and not ids[0] & ids[2] and not ids[1] & ids[2]


def test_unflatten_takes_any_leaves():
    _, graphdef = graftax.flatten({"a": f32(1), "b": [f32(2)]})
    marks = [object(), "x"]
    assert graftax.unflatten(graphdef, marks) == {"a": marks[0], "b": ["x"]}
    assert graftax.unflatten(graphdef, iter(marks)) == {"a": marks[0], "b": ["x"]}


@pytest.mark.parametrize("count", [0, 1, 3])
def test_unflatten_wants_as_many_leaves_as_there_were(count):
    _, graphdef = graftax.flatten([f32(1), f32(2)])
    with pytest.raises(ValueError, match="2"):
        graftax.unflatten(graphdef, [f32(0)] * count)


def test_init_and_setattr_are_not_called():
    class Strict:
        def __init__(self, w):
            object.__setattr__(self, "w", w)

        def __setattr__(self, name, value):
            raise AssertionError("never")

        def use(self):
            return self.w

    leaves, graphdef = graftax.flatten(Strict(f32(1)))
    assert graftax.unflatten(graphdef, leaves).use() is leaves[0]


def test_tracers_are_leaves():
    @jax.jit
    def f(x):
        leaves, graphdef = graftax.flatten([x, {"n": 1}])
        assert leaves == [x]
        return graftax.unflatten(graphdef, leaves)[0]

    f(f32(1))


def test_a_registered_type_opens_and_closes_through_its_own_functions_once():
    calls = []

    @jax.tree_util.register_pytree_node_class
    class Half:
        def __init__(self, w):
            self.w = w

        def tree_flatten(self):
            calls.append("flatten")
            return (self.w * 0.5,), None

        @classmethod
        def tree_unflatten(cls, aux, children):
            calls.append("unflatten")
            return cls(children[0] * 2)

    leaves, graphdef = graftax.flatten(Half(f32(4)))
    assert float(leaves[0][0]) == 2.0
    assert float(graftax.unflatten(graphdef, leaves).w[0]) == 4.0
    assert calls == ["flatten", "unflatten"]


def nested_list(depth):
    x = [f32(1)]
    for _ in range(depth):
        x = [x]
    return x


def nested_dict(depth):
    x = {"x": f32(1)}
    for _ in range(depth):
        x = {"x": x}
    return x


def nested_tuple(depth):
    x = (f32(1),)
    for _ in range(depth):
        x = (x,)
    return x


def nested_object(depth):
    x = Box(x=f32(1))
    for _ in range(depth):
        x = Box(x=x)
    return x


def nested_array_free_object(depth):
    x = Box(x=1)
    for _ in range(depth):
        x = Box(x=x)
    return x


def linked_list(depth):
    first = last = Box(value=f32(0), next=None)
    for _ in range(depth):
        last.next = last = Box(value=last.value, next=None)
    return first


DEEP = [nested_list, nested_dict, nested_tuple, nested_object, nested_array_free_object, linked_list]


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", [build.__name__ for build in DEEP])
@isolated()
def test_a_hundred_thousand_levels(name):
    build = {build.__name__: build for build in DEEP}[name]
    graph = build(DEPTH)
    leaves, graphdef = graftax.flatten(graph)
    assert len(leaves) == {"linked_list": DEPTH + 1, "nested_array_free_object": 0}.get(name, 1)
    assert graftax.flatten(graph)[1] == graphdef
    restored = graftax.unflatten(graphdef, leaves)
    assert graftax.flatten(restored)[1] == graphdef
    del restored
    assert graphdef.num_nodes > DEPTH
    assert isinstance(hash(graphdef), int)


@pytest.mark.quick(0)
@isolated()
def test_a_hundred_thousand_levels_print():
    _, graphdef = graftax.flatten(nested_list(DEPTH))
    assert repr(graphdef).count("[") >= DEPTH


@pytest.mark.quick(0)
@isolated()
def test_two_thousand_levels_have_a_flat_form():
    graph = nested_list(sized(2_000, 500))
    _, graphdef = graftax.flatten(graph)
    flat = graftax.to_dict(graph)
    assert graftax.flatten(graftax.from_dict(flat))[1] == graphdef


def test_a_dag_of_forty_levels_is_linear():
    x = [f32(1)]
    for _ in range(40):
        x = [x, x]
    leaves, graphdef = graftax.flatten(x)
    assert len(leaves) == 1
    assert graphdef.num_nodes < 200
    assert oracle.difference(x, graftax.unflatten(graphdef, leaves)) is None


def test_a_dag_of_forty_array_free_tuples_is_linear():
    x = ("x",)
    for _ in range(40):
        x = (x, x)
    leaves, graphdef = graftax.flatten([x, f32(1)])
    assert len(leaves) == 1
    assert graphdef == graftax.flatten([x, f32(1)])[1]


@pytest.mark.quick(0)
@isolated()
def test_a_dag_of_tuples_with_arrays_is_a_clear_error():
    x = (f32(1),)
    for _ in range(40):
        x = (x, x)
    with pytest.raises(graftax.GraftaxError, match=r"100[_,]?000"):
        graftax.flatten(x)


class Refuses(Exception):
    pass


@jax.tree_util.register_pytree_node_class
class Fails:
    """Registered, and its flatten raises the very error it was given."""

    def __init__(self, error):
        self.error = error

    def tree_flatten(self):
        raise self.error

    @classmethod
    def tree_unflatten(cls, aux, children):
        raise AssertionError


@pytest.mark.parametrize("kind", [Refuses, ValueError, KeyboardInterrupt, SystemExit, MemoryError, RecursionError])
def test_an_exception_of_a_registered_flatten_propagates_unchanged(kind):
    error = kind("no")
    x = [f32(1), Fails(error)]
    for _ in range(20):
        x = {"x": (x,)}
    with pytest.raises(kind) as caught:
        graftax.flatten(x)
    assert caught.value is error


def test_an_exception_of_a_registered_unflatten_propagates_unchanged():
    error = Refuses("no")

    @jax.tree_util.register_pytree_node_class
    class OneWay:
        def tree_flatten(self):
            return (f32(1),), None

        @classmethod
        def tree_unflatten(cls, aux, children):
            raise error

    leaves, graphdef = graftax.flatten([[OneWay()]])
    with pytest.raises(Refuses) as caught:
        graftax.unflatten(graphdef, leaves)
    assert caught.value is error


@pytest.mark.quick(0)
@isolated()
def test_ten_thousand_failures_leave_the_recursion_depth_unchanged():
    def usable_depth():
        def dive(n):
            try:
                return dive(n + 1)
            except RecursionError:
                return n

        return dive(0)

    def native_depth():
        low, high = 1, 200_000
        while low < high:
            middle = (low + high + 1) // 2
            x = []
            for _ in range(middle):
                x = [x]
            try:
                repr(x)
                low = middle
            except RecursionError:
                high = middle - 1
        return low

    x = [Fails(Refuses("no"))]
    for _ in range(20):
        x = [x]
    before = usable_depth(), native_depth()
    failures, turns = 0, sized(10_000, 1_000)
    for _ in range(turns):
        try:
            graftax.flatten(x)
        except Refuses:
            failures += 1
    assert failures == turns
    assert (usable_depth(), native_depth()) == before
    jax.tree.leaves(x[:0])


def test_failures_leak_no_references():
    target = Box(w=f32(1))
    x = [target, [Fails(Refuses("no"))]]

    def fail():
        with pytest.raises(Refuses):
            graftax.flatten(x)

    fail()
    before = sys.getrefcount(target)
    for _ in range(100):
        fail()
    assert sys.getrefcount(target) == before


def test_flatten_holds_nothing_of_the_graph_but_its_leaves():
    x = zoo.cyclic_object()
    gone = weakref.ref(x)
    leaves, graphdef = graftax.flatten(x)
    del x
    gc.collect()
    assert gone() is None
    restored = graftax.unflatten(graphdef, leaves)
    gone = weakref.ref(restored)
    del restored
    gc.collect()
    assert gone() is None


def test_a_graphdef_with_its_own_class_inside_is_collectable():
    def make():
        class Local:
            def __init__(self):
                self.w = f32(1)

            def use(self):
                return self.w

        x = Local()
        x.cls = Local
        Local.recorded = graftax.flatten(x)[1]
        return weakref.ref(Local)

    gone = make()
    gc.collect()
    assert gone() is None
