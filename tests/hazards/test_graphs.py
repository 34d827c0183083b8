# SPDX-License-Identifier: Apache-2.0
"""Graphs that trees cannot say: shared, cyclic, deep, wide, and changed while they are read."""

import contextlib
import gc
import itertools

import jax
import pytest

import graftax
import oracle
import zoo
from sizes import sized
from watchdog import isolated
from zoo import Box, f32


def test_shared_then_distinct_then_shared():
    f = graftax.jit(lambda a, b: (a.append(b[0] + 1), len(b))[1])
    for build in (zoo.f32, lambda v: v):
        x = [build(1)]
        assert f(x, x) == 2
        assert f([build(1)], [build(1)]) == 1
        x = [build(1)]
        assert f(x, x) == 2
    assert f.cache_info().traces == 4


def test_one_object_as_two_arguments_and_twice_inside_one():
    @graftax.jit
    def f(a, b):
        a["x"].w = a["x"].w + 1
        return a["x"] is a["y"], a["x"] is b, b.w

    for _ in range(2):
        x = Box(w=f32(1))
        same, across, w = f({"x": x, "y": x}, x)
        assert (same, across, w.tolist(), x.w.tolist()) == (True, True, [2.0], [2.0])


def test_a_returned_list_twice_is_one_list():
    f = graftax.jit(lambda x: (x, x, [x[0] + 1]))
    for _ in range(2):
        x = [f32(1)]
        out = f(x)
        assert out[0] is out[1] is x


@pytest.mark.parametrize("name", [name for name in zoo.NAMES if name.startswith(("cyclic", "two", "parent", "doubly"))])
def test_cycles_as_input_and_output(name):
    build = dict(zoo.ZOO)[name]

    @graftax.jit
    def f(x):
        return x, oracle.deep_copy(x)

    for _ in range(2):
        graph = build()
        same, copy = f(graph)
        assert oracle.difference(graph, same) is None
        assert oracle.difference(build(), copy) is None
        if oracle.is_mutable(graph):
            assert same is graph and copy is not graph


def chain(kind, depth):
    x = {"list": [f32(1)], "dict": {"x": f32(1)}, "tuple": (f32(1),), "object": Box(x=f32(1))}[kind]
    for _ in range(depth):
        x = {
            "list": lambda x: [x],
            "dict": lambda x: {"x": x},
            "tuple": lambda x: (x,),
            "object": lambda x: Box(x=x),
        }[kind](x)
    return x


@pytest.mark.quick(0)
@pytest.mark.parametrize("kind", ["list", "dict", "tuple", "object"])
@pytest.mark.parametrize("depth", [10_000, 200_000])
@isolated()
def test_deep_chains(kind, depth):
    @graftax.jit
    def f(x, w):
        for _ in range(depth):
            x = x[0] if kind in ("list", "tuple") else x["x"] if kind == "dict" else x.x
        inner = x[0] if kind in ("list", "tuple") else x["x"] if kind == "dict" else x.x
        return inner + w

    try:
        for value in (1.0, 2.0):
            assert f(chain(kind, depth), f32(value)).tolist() == [value + 1]
        assert f.cache_info().traces == 1
    except (graftax.GraftaxError, RecursionError) as error:
        assert depth > 10_000 or kind == "object", error
        assert "depth" in str(error) or "nodes" in str(error)


@pytest.mark.quick(0)
@isolated()
def test_a_linked_list_of_ten_thousand_objects_is_updated():
    nodes = [Box(w=f32(1)) for _ in range(10)] + [Box(n=i) for i in range(sized(9_990, 1_990))]
    for left, right in itertools.pairwise(nodes):
        left.next = right
    nodes[-1].next = nodes[0]

    @graftax.jit
    def f(first):
        first.w = first.w + 1
        node = first
        while node.next is not first:
            node = node.next
        node.last = first.w
        return node

    assert f(nodes[0]) is nodes[-1]
    assert nodes[-1].last.tolist() == nodes[0].w.tolist() == [2.0]


@pytest.mark.quick(0)
@isolated()
def test_ten_thousand_failed_calls_on_a_deep_cycle_leave_the_interpreter_usable():
    @jax.tree_util.register_pytree_node_class
    class Fails:
        def tree_flatten(self):
            raise ValueError("no")

        @classmethod
        def tree_unflatten(cls, aux, children):
            raise AssertionError

    x = {"x": Fails()}
    x["me"] = x
    for _ in range(20):
        x = {"x": x}
    f = graftax.jit(lambda x: x)
    for _ in range(sized(10_000, 1_000)):
        with pytest.raises(ValueError, match="no"):
            f(x)
    assert jax.jit(lambda tree: tree)([[[[f32(1)]]]])[0][0][0][0].tolist() == [1.0]
    assert f([f32(1)])[0].tolist() == [1.0]


@pytest.mark.quick(0)
@isolated()
def test_a_hundred_thousand_leaves():
    x = f32(1)
    f = graftax.jit(lambda g: g[0] + g[-1]["w"])
    for _ in range(2):
        assert f([x, *({"w": 1, "n": i % 7} for i in range(100_000)), {"w": x}]).tolist() == [2.0]
    assert len(graftax.flatten([x] * 100_000)[0]) == 100_000
    assert f.cache_info().traces == 1


class Meddles:
    """Registered; its flatten does something to what holds it."""

    def __init__(self, meddle):
        self.meddle = meddle
        self.w = f32(1)


def flatten_meddling(x):
    x.meddle()
    return (x.w,), None


def unflatten_meddling(aux, children):
    new = object.__new__(Meddles)
    new.meddle, (new.w,) = print, children
    return new


jax.tree_util.register_pytree_node(Meddles, flatten_meddling, unflatten_meddling)


def meddled_list(what):
    holder = [f32(0), None, *[Box(w=f32(i)) for i in range(50)]]
    junk = []

    def meddle():
        match what:
            case "clear":
                holder.clear()
            case "grow":
                holder.extend([f32(1)] * 1000)
            case "replace":
                holder[:] = [f32(2)] * len(holder)
            case "shrink":
                del holder[1:]
            case "collect":
                junk.extend(type(x) for x in gc.get_objects() if isinstance(x, list) and len(x) == -1)
                gc.collect()
        junk.append([object() for _ in range(100)])

    holder[1] = Meddles(meddle)
    return holder


def meddled_dict(what):
    holder = {"a": f32(0), "m": None, **{f"k{i}": Box(w=f32(i)) for i in range(50)}}

    def meddle():
        match what:
            case "clear":
                holder.clear()
            case "grow":
                holder.update((f"n{i}", f32(1)) for i in range(1000))
            case "replace":
                for key in holder:
                    holder[key] = f32(2)
            case "shrink":
                for key in list(holder)[2:]:
                    del holder[key]
            case "collect":
                gc.collect()

    holder["m"] = Meddles(meddle)
    return holder


def meddled_object(what):
    holder = Box()
    vars(holder).update(meddled_dict(what))
    return holder


@pytest.mark.quick(0)
@pytest.mark.parametrize("what", ["clear", "grow", "replace", "shrink", "collect"])
@pytest.mark.parametrize("kind", ["list", "dict", "object"])
@isolated()
def test_a_flatten_that_changes_what_holds_it(kind, what):
    build = {"list": meddled_list, "dict": meddled_dict, "object": meddled_object}[kind]
    jitted = graftax.jit(lambda x: None, mutation="discard")
    for call in (graftax.flatten, graftax.to_dict, jitted):
        for _ in range(3):
            holder = build(what)
            try:
                call(holder)
            except (RuntimeError, IndexError) as error:
                assert "chang" in str(error), error
    gc.collect()
    assert graftax.flatten([f32(1)])[1] == graftax.flatten([f32(2)])[1]


@pytest.mark.quick(0)
@isolated()
def test_a_key_whose_hash_and_eq_change_the_dict():
    holder = {}

    class Key:
        armed = False

        def __hash__(self):
            if Key.armed:
                holder.clear()
            return 7

        def __eq__(self, other):
            if Key.armed:
                holder.clear()
            return self is other

    holder.update({Key(): f32(1), Key(): f32(2), "x": f32(3)})
    Key.armed = True
    f = graftax.jit(lambda x: len(x))
    for call in (graftax.flatten, f):
        with contextlib.suppress(RuntimeError, TypeError, graftax.GraftaxError):
            call(holder)
    Key.armed = False
    assert f({"x": f32(1)}) == 1


@isolated()
def test_a_property_or_getattr_is_not_called():
    class Trap:
        def __init__(self):
            self.w = f32(1)

        @property
        def danger(self):
            raise AssertionError("a property was read")

        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            raise AssertionError(f"__getattr__ was called for {name}")

        def __getattribute__(self, name):
            if name == "w":
                raise AssertionError("__getattribute__ was called")
            return object.__getattribute__(self, name)

    leaves, _ = graftax.flatten(Trap())
    assert len(leaves) == 1
    assert graftax.jit(lambda x: type(x).__name__)(Trap()) == "Trap"


@pytest.mark.quick(0)
@isolated()
def test_a_direct_cycle_through_a_registered_node_works_or_is_a_clear_error():
    x = zoo.Registered(None, f32(1))
    x.a = x
    try:
        leaves, graphdef = graftax.flatten(x)
        y = graftax.unflatten(graphdef, leaves)
        assert y.a is y
    except graftax.GraftaxError:
        pass


def test_an_unflatten_that_makes_something_else_works_or_is_a_clear_error():
    @jax.tree_util.register_pytree_node_class
    class Opens:
        """Comes back as its only child, as JAX allows."""

        def __init__(self, w):
            self.w = w

        def tree_flatten(self):
            return (self.w,), None

        @classmethod
        def tree_unflatten(cls, aux, children):
            return children[0]

    f = graftax.jit(lambda x: x["opens"] + 1)
    for _ in range(2):
        try:
            assert f({"opens": Opens(f32(1))}).tolist() == [2.0]
        except graftax.GraftaxError as error:
            assert "opens" in str(error)
