# SPDX-License-Identifier: Apache-2.0
"""A call records at most once, and asks a registered class for its children as seldom as it can."""

import ctypes
import dataclasses
import functools
import gc
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import graftax
from graftax import _core
from graftax._jax import fast_dispatch
from zoo import Box

TAGS = 12  # structures of one function: more than are tried by replaying them


class Asked:
    """Counts how often classes were flattened."""

    flattened = 0


class Layer:
    """Its children are its attributes."""

    def __init__(self, w, tag):
        self.w, self.tag = w, tag

    def first(self):
        return self.w

    def replace(self, value):
        self.w = value


class Stack:
    """Its children are in a list that JAX does not see."""

    def __init__(self, items, tag):
        self.items, self.tag = list(items), tag

    def first(self):
        return self.items[0]

    def replace(self, value):
        self.items = [value]


def flatten_layer(layer):
    Asked.flattened += 1
    return (layer.w,), layer.tag


def flatten_stack(stack):
    Asked.flattened += 1
    return iter(tuple(stack.items)), stack.tag  # an iterator can be read but once


jax.tree_util.register_pytree_node(Layer, flatten_layer, lambda tag, children: Layer(*children, tag))
jax.tree_util.register_pytree_node(Stack, flatten_stack, lambda tag, children: Stack(children, tag))

MAKE = {"layer": lambda tag: Layer(jnp.ones(2), tag), "stack": lambda tag: Stack([jnp.ones(2)], tag)}


def reads(node, _):
    return node.first() + 1


def replaces(node, _):
    node.replace(node.first() + 1)
    return node


def returns(node, _):
    return node


FUNCTIONS = [reads, replaces, returns]
BY_VALUE = functools.partial(graftax.jit, mutation="discard")


def flattened_in(call):
    Asked.flattened = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", graftax.RecompileWarning)
        call()
    return Asked.flattened


def called_with_every_tag(jit, function, make):
    jitted = jit(function)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", graftax.RecompileWarning)
        for tag in range(TAGS):
            jitted(make(tag), tag)
    return jitted


@pytest.fixture(params=MAKE)
def make(request):
    return MAKE[request.param]


@pytest.mark.quick(1)
@pytest.mark.parametrize("jit", [graftax.jit, graftax.filter_jit, BY_VALUE])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_miss_flattens_a_node_at_most_three_times(jit, function, make):
    jitted = called_with_every_tag(jit, function, make)
    before = jitted.cache_info().misses
    assert flattened_in(lambda: jitted(make(TAGS), TAGS)) <= 3
    assert jitted.cache_info().misses == before + 1


@pytest.mark.parametrize("jit", [graftax.jit, graftax.filter_jit])
@pytest.mark.parametrize("tag", [0, TAGS - 1], ids=["met long ago", "met last"])
def test_a_known_structure_is_flattened_once(jit, tag, make):
    jitted = called_with_every_tag(jit, reads, make)
    before = jitted.cache_info()
    assert flattened_in(lambda: jitted(make(tag), tag)) == 1
    after = jitted.cache_info()
    assert (after.hits, after.misses) == (before.hits + 1, before.misses)


def test_every_node_of_a_graph_is_flattened_once():
    def made(tag):
        shared = Layer(jnp.ones(2), tag)
        return {"a": [Layer(jnp.ones(2), 0), shared], "b": (shared, Stack([Layer(jnp.ones(2), 1)], 2))}

    jitted = called_with_every_tag(graftax.jit, lambda graph, _: graph["b"][1].items[0].w, made)
    assert flattened_in(lambda: jitted(made(0), 0)) == 4
    assert flattened_in(lambda: jitted(made(TAGS), TAGS)) <= 12


@pytest.mark.quick(0)
def test_patterns_of_traced_numbers_flatten_no_node_again():
    jitted = graftax.jit(lambda node, config, _: node.w * config["rate"], dynamic="config['rate']")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", graftax.RecompileWarning)
        for tag in range(TAGS):
            jitted(MAKE["layer"](tag), {"rate": 2.0}, tag)
    assert flattened_in(lambda: jitted(MAKE["layer"](0), {"rate": 3.0}, 0)) == 1
    assert flattened_in(lambda: jitted(MAKE["layer"](TAGS), {"rate": 3.0}, TAGS)) <= 3


@pytest.mark.parametrize("jit", [graftax.jit, graftax.filter_jit])
def test_a_change_behind_an_attribute_costs_no_further_flatten(jit):
    def swaps(stack, _):
        stack.items[0] = stack.items[0] + 1
        return stack

    jitted = called_with_every_tag(jit, swaps, MAKE["stack"])
    assert flattened_in(lambda: jitted(MAKE["stack"](TAGS), TAGS)) <= 3


def test_what_a_function_does_to_a_list_behind_a_registered_node_comes_back():
    @graftax.jit
    def grows(stack):
        stack.items.append(stack.items[0] + 1)

    @graftax.jit
    def swaps(stack):
        stack.items[0] = stack.items[0] * 5

    stack = MAKE["stack"](0)
    grows(stack)
    swaps(stack)
    grows(stack)
    np.testing.assert_array_equal(np.stack(stack.items), [[5, 5], [2, 2], [6, 6]])


class Converting:
    """Its unflatten does not keep what it is given: a new array each time."""

    def __init__(self, values):
        self.values = [v * 1 for v in values]


jax.tree_util.register_pytree_node(Converting, lambda c: (tuple(c.values), None), lambda _, values: Converting(values))


def test_an_unflatten_that_converts_is_no_change():
    for _ in range(2):  # the second trace knows what a tracer is
        jitted = graftax.jit(lambda c: c.values[0] + 1, mutation="error")
        np.testing.assert_array_equal(jitted(Converting([jnp.ones(2)])), [2, 2])

    def changes(c):
        c.values[0] = c.values[0] + 1

    with pytest.raises(graftax.MutationError, match="changed"):
        graftax.jit(changes, mutation="error")(Converting([jnp.ones(2)]))


class Restless:
    """Looks different each time it is asked."""

    asked = 0

    def __init__(self, w):
        self.w = w


def flatten_restless(node):
    Restless.asked += 1
    return (node.w,), Restless.asked


jax.tree_util.register_pytree_node(Restless, flatten_restless, lambda _, children: Restless(*children))


@pytest.mark.parametrize("jit", [graftax.jit, graftax.filter_jit])
def test_a_class_that_flattens_to_something_new_each_time_is_named_as_the_reason(jit):
    with pytest.raises(graftax.ConcurrentChangeError, match="flattens differently each time"):
        jit(lambda node: node.w)(Restless(jnp.ones(2)))


class Failing:
    """Cannot be flattened while `broken`."""

    broken = False
    w = np.ones(2)


def flatten_failing(node):
    if Failing.broken:
        raise RuntimeError("cannot be flattened now")
    return (Failing.w,), None


jax.tree_util.register_pytree_node(Failing, flatten_failing, lambda *_: Failing())


def test_a_flatten_that_raises_is_told_with_its_path_and_may_work_later(monkeypatch):
    jitted = graftax.jit(lambda nodes: 1)
    graph = [Layer(jnp.ones(2), 0), Failing()]
    jitted(graph)
    monkeypatch.setattr(Failing, "broken", True)
    with pytest.raises(RuntimeError, match="cannot be flattened now") as raised:
        jitted(graph)
    assert any("nodes[1]" in note for note in raised.value.__notes__)
    monkeypatch.setattr(Failing, "broken", False)
    assert jitted(graph) == 1
    assert jitted.cache_info().misses == 1


@pytest.mark.quick(3)
@pytest.mark.parametrize("make", [lambda x: [x], lambda x: MAKE["layer"](0), lambda x: MAKE["stack"](0)])
def test_a_closed_trace_keeps_nothing_alive(make):
    roots = (make(jnp.ones(2)),)
    held = [weakref.ref(x) for x in jax.tree.leaves(roots)]
    recording = _core.Recording(roots, ("x",), [0])
    trace, leaf = _core.Trace(recording), jnp.zeros(2)
    held.append(weakref.ref(leaf))
    rebuilt = trace.rebuild([leaf])
    result = trace.finish(None, False, True, [])
    trace.close()
    del roots, recording, leaf, rebuilt, result
    gc.collect()
    assert [x() for x in held] == [None, None]
    assert trace.functions() == [] == trace.leaf_names()


def test_a_recording_serves_every_trace_of_its_call():
    roots = ([jnp.ones(2)], 3)
    recording = _core.Recording(roots, ("x", "n"), [0, 0])
    assert (len(recording.leaves), recording.names, recording.graphdef.num_leaves) == (1, ("x", "n"), 1)
    for _ in range(2):
        trace = _core.Trace(recording)
        rebuilt = trace.rebuild([jnp.zeros(2)])
        assert rebuilt[0] is not roots[0]
        assert rebuilt[1] == 3
        assert trace.verify(roots)
        trace.close()
    assert recording.leaves[0] is roots[0][0]


BEHIND = {
    "a leaf": lambda x: setattr(x.v, "v", jnp.ones(1)),
    "an equal object": lambda x: setattr(x, "v", Box(v=x.v.v)),
    "an equal list": lambda x: setattr(x, "items", list(x.items)),
    "another number": lambda x: setattr(x, "n", 5),
}


@pytest.mark.parametrize("change", BEHIND.values(), ids=BEHIND)
@pytest.mark.quick(4)
def test_what_replaces_a_part_of_the_callers_own_object_in_a_trace_is_told(change):
    def program(x, address):
        change(ctypes.cast(address, ctypes.py_object).value)
        return x.v.v + 1

    for _ in range(3):
        x = Box(v=Box(v=jnp.ones(1)), items=[jnp.ones(2)], n=4)
        with pytest.raises(graftax.ConcurrentChangeError, match="from outside the traced copy"):
            graftax.jit(program)(x, id(x))


class Deep:
    """Its one child is two containers below an attribute."""

    def __init__(self, w):
        self.box = {"a": [w]}


jax.tree_util.register_pytree_node(
    Deep,
    lambda deep: ((deep.box["a"][0],), None),
    lambda _, children: Deep(children[0] + 0 if isinstance(children[0], jax.Array) else children[0]),
)


def test_a_change_two_containers_below_an_attribute_comes_back():
    def double(deep):
        deep.box["a"][0] = deep.box["a"][0] * 2

    jitted = graftax.jit(double)
    for i in range(3):
        deep = Deep(jnp.full(2, i + 1.0))
        jitted(deep)
        assert deep.box["a"][0].tolist() == [2 * i + 2] * 2


def test_another_static_argument_is_told_without_a_walk():
    layer = Layer(jnp.ones(2), 0)
    graphdef = _core.Recording((layer, "a"), ("obj", "name"), [0, 0]).graphdef
    assert flattened_in(lambda: _core.walk(graphdef, (layer, "b"))) == 0
    assert flattened_in(lambda: _core.walk(graphdef, (layer, "a"))) == 1


def test_a_structure_that_holds_nothing_by_identity_is_the_one_of_its_entry():
    values, objects = ({"x": jnp.ones(2), "n": n} for n in (object(), Layer))
    plain, by_identity = (_core.Recording((obj,), ("obj",), [0]).graphdef for obj in (values, objects))
    assert _core.weaken(plain) is plain
    weak = _core.weaken(by_identity)
    assert weak is not by_identity and weak == by_identity and _core.weaken(weak) is weak


@pytest.mark.skipif(fast_dispatch.status() != "on", reason="without direct calls it does not look at leaves")
def test_a_recording_tells_on_what_its_leaves_are():
    one = jax.devices()[0]
    mesh = NamedSharding(Mesh(np.array([one]), "d"), PartitionSpec())
    inputs = [jnp.ones(2), np.ones(2), jax.device_put(jnp.ones((2, 2)), mesh), jax.random.key(0)]
    recording = _core.Recording((inputs,), ("obj",), [0])
    assert recording.kinds_of_shardings() == {SingleDeviceSharding, NamedSharding} == recording.kinds_of_shardings()
    tracers = []
    jax.make_jaxpr(lambda x: tracers.append(_core.Recording(([x],), ("obj",), [0]).kinds_of_shardings()))(jnp.ones(2))
    assert tracers == [None]


class Derived:
    """Its flatten computes: other objects each time it is asked."""

    def __init__(self, w):
        self.w = w

    def tree_flatten(self):
        return (self.w * 2, {"b": [self.w + 1]}), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(children[0] / 2)


@dataclasses.dataclass(frozen=True)
class FrozenDerived(Derived):
    w: object


for derived in (Derived, FrozenDerived):
    jax.tree_util.register_pytree_node_class(derived)


@pytest.mark.quick(1)
@pytest.mark.parametrize("cls", [Derived, FrozenDerived])
@pytest.mark.parametrize("jit", [graftax.jit, graftax.filter_jit])
@pytest.mark.parametrize("make", [jnp.arange, np.arange], ids=["jax", "numpy"])
def test_a_flatten_may_make_other_objects_each_time(cls, jit, make):
    f = jit(lambda node, y: (node.w * y, node))
    for n in (3.0, 3.0, 4.0, 3.0):
        created, node = f(cls(make(n)), 3.0)
        assert created.tolist() == (3 * make(n)).tolist() and node.w.tolist() == make(n).tolist()
    assert f.cache_info().traces == 2
    slope = jax.grad(lambda y: f(cls(make(3.0)), y)[0].sum())(3.0)
    assert slope == 3
    nested = jit(lambda node: jax.jit(lambda y: f(cls(y), 3.0)[0])(node.w))
    assert nested(cls(jnp.arange(3.0))).tolist() == [0, 3, 6]


def test_what_is_changed_in_an_object_whose_flatten_computes_comes_back():
    def step(node):
        node.w = node.w + 1
        return node.w.sum()

    node = Derived(jnp.arange(3.0))
    assert [float(graftax.jit(step)(node)) for _ in range(2)] == [6, 9]
    assert node.w.tolist() == [2, 3, 4]


def test_transforms_of_an_object_whose_flatten_computes():
    node, loss = Derived(jnp.arange(3.0)), lambda node: (node.w**2).sum()
    assert graftax.grad(loss)(node).w.tolist() == jax.grad(loss)(node).w.tolist()
    with pytest.raises(graftax.StructureError, match=r"scan of .*: carry.*flatten of a registered class makes"):
        graftax.scan(lambda carry, _: (carry, None), node, jnp.arange(3.0))


@pytest.mark.parametrize("value", [np.ones(3, "float32"), jnp.ones(3), None], ids=["numpy", "jax", "traced"])
def test_what_replaces_a_part_of_an_object_whose_flatten_computes_is_told(value):
    def program(node, address):
        node_itself = ctypes.cast(address, ctypes.py_object).value
        node_itself.w = node.w + 1 if value is None else value
        return node.w

    node = Derived(jnp.arange(3.0))
    with pytest.raises(graftax.ConcurrentChangeError, match="from outside the traced copy"):
        graftax.jit(program)(node, id(node))
