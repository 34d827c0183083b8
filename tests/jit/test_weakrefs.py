# SPDX-License-Identifier: Apache-2.0
"""Weak references: rebuilt to the rebuilt object, wherever their referent is; dead ones stay dead."""

import gc
import weakref

import jax.numpy as jnp
import pytest

import graftax

x = jnp.arange(3.0)


class Node:
    def __init__(self, w=None, parent=None):
        self.w = w
        self.parent = weakref.ref(parent) if parent is not None else None
        self.children = []


def family():
    root = Node(x)
    root.children = [Node(x + 1, root), Node(x + 2, root)]
    return root


def test_a_weak_parent_is_the_rebuilt_parent():
    @graftax.jit
    def f(root):
        for child in root.children:
            assert child.parent() is root
            child.w = child.w + child.parent().w
        return root.children[0].parent()

    root, plain = family(), family()
    for _ in range(3):
        assert f(root) is root
        for child in plain.children:
            child.w = child.w + child.parent().w
    assert [c.w.tolist() for c in root.children] == [c.w.tolist() for c in plain.children]
    assert f.cache_info().traces == 1


def test_a_referent_outside_the_arguments_is_traced_and_written_to():
    root = family()

    @graftax.jit
    def f(child):
        child.parent().w = child.parent().w * 2
        return child.parent().w.sum()

    assert [float(f(root.children[0])) for _ in range(2)] == [6, 12]
    assert root.w.tolist() == (4 * x).tolist()
    assert f.cache_info().traces == 1


def test_a_dead_reference_stays_dead_and_is_another_key():
    node = Node()
    jitted = graftax.jit(lambda ref, y: y if ref() is None else y + 1)
    ref = weakref.ref(node)
    assert jitted(ref, x).tolist() == (x + 1).tolist()
    del node
    assert jitted(ref, x).tolist() == x.tolist()
    assert jitted(ref, x).tolist() == x.tolist()
    assert jitted.cache_info().traces == 2


def test_a_static_referent_counts_by_its_state():
    node = Node()
    node.k = 1
    jitted = graftax.jit(lambda ref, y: y * ref().k)
    assert jitted(weakref.ref(node), x).tolist() == x.tolist()
    node.k = 2
    assert jitted(weakref.ref(node), x).tolist() == (2 * x).tolist()


def test_a_returned_reference_refers_to_the_callers_object():
    root = family()
    ref = graftax.jit(lambda r: [weakref.ref(r)])(root)[0]
    assert ref() is root

    @graftax.jit
    def make(y):
        node = Node(y)
        return [node, weakref.ref(node)]

    made = make(x)
    assert made[1]() is made[0] and made[0].w.tolist() == x.tolist()


def test_weak_containers_keep_their_content():
    values = weakref.WeakValueDictionary()
    node = Node(x)
    values["a"] = node
    get = graftax.jit(lambda d: d["a"].w.sum() * len(d))
    assert float(get(values)) == 3
    node.w = x + 1
    assert float(get(values)) == 6
    assert get.cache_info().traces == 1

    @graftax.jit
    def write(d, y):
        d["b"] = d["a"]
        d["a"].w = d["a"].w * y

    write(values, jnp.float32(2))
    assert values["b"] is node and node.w.tolist() == (2 * (x + 1)).tolist()
    del node
    gc.collect()
    assert len(values) == 0


def test_weak_sets_and_weak_keys_of_objects_without_arrays():
    a, b = Node(), Node()
    a.k, b.k = 1, 2
    members = weakref.WeakSet([a, b])
    total = graftax.jit(lambda s, y: sum(n.k for n in s) * y)
    assert total(members, x).tolist() == (3 * x).tolist()
    b.k = 5
    assert total(members, x).tolist() == (6 * x).tolist()
    table = weakref.WeakKeyDictionary({a: x})
    look = graftax.jit(lambda t, n: t[n] * n.k)
    assert look(table, a).tolist() == x.tolist()
    table[a] = x + 1
    assert look(table, a).tolist() == (x + 1).tolist()
    assert look.cache_info().traces == 1


@pytest.mark.parametrize("make", [lambda n: weakref.WeakSet([n]), lambda n: weakref.WeakKeyDictionary({n: 1})])
def test_what_is_changed_below_a_weak_key_is_changed_on_each_call(make):
    node = Node()
    node.seen, node.count = [], 0
    members = make(node)

    @graftax.jit
    def emit(members, y):
        for member in members:
            member.seen.append(member.count)
            member.count += 1
        return y * node_count(members)

    def node_count(members):
        return sum(member.count for member in members)

    for count in (1, 2, 3):
        assert emit(members, x).tolist() == (count * x).tolist()
        assert node.seen == list(range(count)) and node.count == count


def test_an_array_that_is_put_below_a_weak_key_is_put_there_or_refused():
    node = Node()
    node.seen = []
    members = weakref.WeakSet([node])

    @graftax.jit
    def emit(members, y):
        for member in members:
            member.seen.append(y)
        return y

    emit(members, x)
    assert [each.tolist() for each in node.seen] == [x.tolist()]
    with pytest.raises(graftax.UnsupportedValueError, match=r"members\.data: .* has arrays below"):
        emit(members, x)
    assert len(node.seen) == 1


@pytest.mark.parametrize("make", [lambda node: weakref.WeakSet([node]), lambda node: {node: 2}], ids=["weak", "strong"])
def test_a_number_below_a_key_is_static_whatever_else_is_traced(make):
    node = Node(None)
    node.k = 1
    jitted = graftax.jit(lambda keys, rate, y: y * rate * next(iter(keys)).k, dynamic="rate")
    assert jitted(make(node), 0.5, x).tolist() == (x * 0.5).tolist()


@pytest.mark.parametrize("make", [lambda node: weakref.WeakSet([node]), lambda node: {node: 2}], ids=["weak", "strong"])
def test_an_edit_of_an_object_that_is_a_key_as_well_is_not_lost(make):
    node = Node(None)
    node.k = 1
    graph = [node, make(node)]
    assert graftax.at(graph)["[0].k"].set(5)[0].k == 5 and node.k == 1
    numbers, rest = graftax.partition(graph, int)
    assert numbers[0] is not node and graftax.combine(numbers, rest)[0].k == 1


def test_two_methods_of_one_object_are_two_weak_keys():
    class Model:
        def first(self):
            return 1

        def second(self):
            return 2

    model = Model()
    jitted = graftax.jit(lambda methods, y: y * next(iter(methods))()())
    for method, expected in ((model.first, 1), (model.second, 2), (model.first, 1)):
        assert jitted({weakref.WeakMethod(method): 0}, jnp.ones(())).item() == expected
    assert jitted.cache_info().traces == 2


def test_an_array_below_a_weak_key_is_a_clear_error():
    node = Node(x)
    with pytest.raises(graftax.UnsupportedValueError, match="dict key"):
        graftax.jit(lambda t: 0)(weakref.WeakKeyDictionary({node: 1}))


def test_a_proxy_is_its_referent():
    node = Node(x)
    jitted = graftax.jit(lambda p: p.w.sum())
    assert float(jitted(weakref.proxy(node))) == 3
    node.w = x + 1
    assert float(jitted(weakref.proxy(node))) == 6
    assert jitted.cache_info().traces == 1


def test_nothing_is_kept_alive_by_a_reference():
    node = Node(x)
    reference = weakref.ref(node)
    jitted = graftax.jit(lambda ref: ref().w)
    jitted(weakref.ref(node))
    del node
    gc.collect()
    assert reference() is None


class Called:
    def __call__(self): ...


class Reference(weakref.ref):
    """A reference of a subclass."""


@pytest.mark.parametrize("make", [weakref.ref, weakref.proxy, Reference])
@pytest.mark.parametrize("cls", [Node, Called])
def test_a_reference_is_rebuilt_as_one_of_its_type_also_where_it_is_dead(make, cls):
    target = cls()
    refs = [make(target), target]
    leaves, graphdef = graftax.flatten(refs)
    ref, again = graftax.unflatten(graphdef, leaves)
    assert type(ref) is type(refs[0]) and again is not target
    assert weakref.getweakrefcount(again) == 1
    refs.pop(), ref, again
    del target
    leaves, graphdef = graftax.flatten(refs)
    [dead] = graftax.unflatten(graphdef, leaves)
    assert type(dead) is type(refs[0])
    if make is not weakref.proxy:
        assert dead() is None
        return
    with pytest.raises(ReferenceError):
        dead.w  # noqa: B018
