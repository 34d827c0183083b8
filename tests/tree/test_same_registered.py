# SPDX-License-Identifier: Apache-2.0
"""Classes that are registered, in every way that JAX has, and what they do to the walk."""

import functools
from collections import namedtuple
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import graftax
import graftax.tree
from beside import JAX, OURS, both, laws, same

pytestmark = pytest.mark.quick(8)  # a case takes milliseconds

T = TypeVar("T")
REGISTERS = [n for n in vars(JAX) if n.startswith("register_")]


@pytest.mark.parametrize("name", REGISTERS)
def test_registration_is_that_of_jax(name):
    assert getattr(graftax.tree, name) is getattr(jax.tree_util, name)


def plain():
    class Plain:
        def __init__(self, *children, data=None):
            self.children, self.data = children, data

    return Plain


def registered(flatten, unflatten=lambda data, children: ("built", data, tuple(children)), cls=None):
    cls = cls or plain()
    jax.tree_util.register_pytree_node(cls, flatten, unflatten)
    return cls


# ── functions ──


@pytest.mark.parametrize("kind", [list, tuple, iter, lambda c: dict.fromkeys(c), lambda c: (v for v in c), jnp.array])
def test_children_may_come_in_any_iterable(kind):
    cls = registered(lambda p: (kind(p.children), p.data))
    tree = [cls(1, 2, 3, data="d"), 4]
    both(lambda t: t.tree_leaves(tree))
    both(lambda t: t.tree_structure(tree))
    both(lambda t: t.tree_map(lambda v: [v], tree))
    both(lambda t: t.tree_leaves_with_path(tree))
    both(lambda t: t.tree_structure(tree).flatten_up_to(tree))


@pytest.mark.parametrize(
    "returned",
    [None, 3, [], (), ((),), ((), None, None), [(), None], (3, None), (None, None), "ab", {"a": 1, "b": 2}],
    ids=repr,
)
def test_a_flatten_that_returns_no_pair_is_an_error(returned):
    cls = registered(lambda p: returned)
    both(lambda t: t.tree_leaves(cls()))
    both(lambda t: t.tree_leaves([1, (cls(), 2)]))
    both(lambda t: t.tree_structure(cls()))
    error = both(lambda t: t.tree_flatten(cls(1)))
    assert isinstance(error, Exception) or returned == "ab"


def test_an_iterable_of_children_that_raises():
    def children():
        yield 1
        raise KeyError("half way")

    cls = registered(lambda p: (children(), None))
    both(lambda t: t.tree_leaves(cls()), KeyError)
    both(lambda t: t.tree_leaves_with_path(cls()), KeyError)


@pytest.mark.parametrize("error", [KeyError, ValueError, TypeError, StopIteration, MemoryError])
def test_what_flatten_and_unflatten_raise_comes_out(error):
    def fail(*args):
        raise error("as told")

    opens, builds = registered(fail), registered(lambda p: (p.children, None), fail)
    for tree in (opens(1), [1, {"a": opens(1)}]):
        both(lambda t: t.tree_leaves(tree), error)
        both(lambda t: t.tree_leaves_with_path(tree), error)
        both(lambda t: t.structure([1, {"a": [1]}]).flatten_up_to([1, {"a": tree}]), ValueError)
    both(lambda t: t.tree_map(lambda v: v, builds(1)), error)
    both(lambda t: t.tree_leaves(builds(1)), [1])
    both(lambda t: t.structure([builds(1), 2]).unflatten([1, 2]), error)


def test_data_are_compared_by_their_own_equality():
    class Data:
        def __init__(self, value):
            self.value = value

        def __eq__(self, other):
            return abs(self.value - other.value) < 2

        def __hash__(self):
            return 0

    cls = registered(lambda p: (p.children, p.data))
    for a, b in ((1, 1), (1, 2), (1, 3)):
        both(lambda t: t.structure(cls(data=Data(a))) == t.structure(cls(data=Data(b))), abs(a - b) < 2)
        both(lambda t: t.tree_map(lambda *v: v, cls(data=Data(a)), cls(data=Data(b))) is None)


@pytest.mark.parametrize("error", [KeyError, TypeError, ValueError])
def test_data_whose_equality_raises(error):
    class Data:
        __hash__ = None

        def __eq__(self, other):
            raise error("from ==")

    cls = registered(lambda p: (p.children, Data()))
    both(lambda t: t.structure(cls(1)) == t.structure(cls(1)), ValueError)
    both(lambda t: t.structure(cls(1)) != t.structure(cls(1)), ValueError)
    both(lambda t: t.structure(cls(1)).flatten_up_to(cls(1)), error)
    both(lambda t: t.structure(cls(1)) == t.structure([1]), False)


def test_arrays_as_data_cannot_be_compared():
    cls = registered(lambda p: (p.children, p.data))
    a, b = cls(1, data=jnp.arange(3)), cls(1, data=jnp.arange(3))
    both(lambda t: t.structure(a) == t.structure(b), ValueError)
    both(lambda t: t.structure(a) == t.structure(a), True)  # the same array
    both(lambda t: t.tree_map(lambda v, w: v + w, a, b), ValueError)


def test_unflatten_is_given_a_tuple_of_children_and_the_data_themselves():
    data = object()
    recorded = []
    cls = registered(lambda p: (iter(p.children), data), lambda *args: recorded.append(args))
    for trees in (JAX, OURS):
        trees.tree_map(lambda v: v, cls(1, [2]))
    assert recorded == [(data, (1, [2]))] * 2 and recorded[1][0] is data


def test_what_unflatten_returns_is_taken_as_it_is():
    cls = registered(lambda p: (p.children, None), lambda data, children: None)
    both(lambda t: t.tree_map(lambda v: v, [cls(1), 2]), [None, 2])


def test_a_subclass_is_a_leaf_until_it_is_registered():
    base = registered(lambda p: (p.children, None))
    sub = type("Sub", (base,), {})
    obj = sub(1, 2)
    both(lambda t: t.tree_leaves([obj]), [obj])
    both(lambda t: t.is_tree_node(sub), False)
    jax.tree_util.register_pytree_node(sub, lambda p: (p.children, "sub"), lambda data, c: ("sub", *c))
    both(lambda t: t.tree_leaves([obj]), [1, 2])
    both(lambda t: t.is_tree_node(sub), True)
    both(lambda t: t.tree_leaves([base(3)]), [3])


def test_a_type_is_registered_once():
    cls = registered(lambda p: (p.children, None))
    with pytest.raises(ValueError, match="Duplicate"):
        graftax.tree.register_pytree_node(cls, lambda p: ((), None), lambda data, c: None)
    both(lambda t: t.tree_leaves(cls(1)), [1])
    for builtin in (list, dict, tuple, type(None)):
        with pytest.raises(ValueError):
            graftax.tree.register_pytree_node(builtin, lambda p: ((), None), lambda data, c: None)
    both(lambda t: t.tree_leaves([{"a": (1, None)}]), [1])


def test_builtin_types_may_be_registered():
    class Bag(set):
        pass

    registered(lambda b: (sorted(b), None), lambda data, c: Bag(c), Bag)
    both(lambda t: t.tree_map(lambda v: v + 1, [Bag({3, 1})]))
    Numbers = type("Numbers", (list,), {})
    registered(lambda v: (v, None), lambda data, c: Numbers(c), Numbers)
    both(lambda t: t.tree_map(lambda v: v + 1, Numbers([3, 1])))
    NT = type("NT", (namedtuple("NT", "a b"),), {})
    both(lambda t: t.tree_leaves_with_path(NT(1, 2)))
    registered(lambda v: (v[:1], v[1]), lambda data, c: NT(*c, data), NT)
    both(lambda t: t.tree_leaves_with_path(NT(1, 2)))  # JAX takes its own treedef of it apart wrongly
    both(lambda t: repr(t.structure(NT(1, 2))))
    both(lambda t: t.tree_map(lambda v: v + 1, NT(1, 2)), NT(2, 2))


# ── late registration ──


def test_a_class_registered_after_it_was_a_leaf_is_a_node_at_once():
    cls = plain()
    obj = cls(jnp.ones(2), [jnp.zeros(1)])
    both(lambda t: t.tree_leaves([obj]) == [obj], True)
    assert graftax.tree.all_leaves([obj])
    registered(lambda p: (p.children, None), lambda data, children: cls(*children), cls)
    assert graftax.tree.structure([obj]).num_leaves == 2
    assert not graftax.tree.all_leaves([obj])
    assert graftax.tree.structure([[0], [0]]).flatten_up_to([[obj], [1]]) == [obj, 1]
    laws(lambda: [obj])


def test_a_class_registered_late_is_a_node_of_graphs_too():
    cls = plain()
    obj = cls(jnp.ones(2), [jnp.zeros(1)])
    before = str(graftax.flatten(obj)[1])
    registered(lambda p: (p.children, None), lambda data, children: cls(*children), cls)
    graftax.tree.leaves(1)
    assert "CustomNode" in str(graftax.flatten(obj)[1]) and "CustomNode" not in before


def test_a_class_registered_late_is_a_node_in_a_compiled_function():
    cls = plain()
    obj = cls(jnp.ones(2), [jnp.zeros(1)])
    jitted = graftax.jit(lambda v: graftax.tree.structure(v).num_leaves)
    assert jitted(obj) == 1
    registered(lambda p: (p.children, None), lambda data, children: cls(*children), cls)
    assert jitted(obj) == 2


@pytest.mark.parametrize("where", ["flatten", "is_leaf", "iterable"])
def test_a_class_registered_within_the_walk_is_a_node_from_there_on(where):
    def program(t):
        late = plain()
        t.tree_leaves(late())  # known as a leaf

        def register():
            if not t.is_tree_node(late):
                registered(lambda p: (p.children, None), cls=late)

        def children():
            register()
            yield late(1, 2)

        def flatten(p):
            if where == "flatten":
                register()
                return [late(1, 2)], None
            return (children(), None) if where == "iterable" else ([late(1, 2)], None)

        is_leaf = (lambda v: register()) if where == "is_leaf" else None
        return t.tree_leaves([registered(flatten)(), late(3)], is_leaf)

    both(program, [1, 2, 3])


def test_a_class_registered_directly_with_the_registry():
    cls = plain()
    jax.tree_util.default_registry.register_node(cls, lambda p: (p.children, p.data), lambda d, c: ["built", d, *c])
    both(lambda t: t.tree_flatten(cls(1, [2], data="d")))
    both(lambda t: t.tree_map(lambda v: v + 1, [cls(1, [2], data="d")]), [["built", "d", 2, [3]]])
    both(lambda t: t.tree_leaves_with_path(cls(1, [2])))
    laws(lambda: [cls(1, 2, data="d")])


# ── with keys ──


@pytest.mark.parametrize("fast", [False, True])
def test_with_keys(fast):
    cls = plain()
    key = jax.tree_util.DictKey
    calls = []

    def with_keys(p):
        calls.append("keys")
        return ((("x", 1), p.children[0]), (key("y"), p.children[1])), p.data

    def without(p):
        calls.append("fast")
        return p.children, p.data

    extra = [without] if fast else []
    graftax.tree.register_pytree_with_keys(cls, with_keys, lambda data, c: ["built", data, *c], *extra)
    tree = [cls(1, {"b": 2}, data="d")]
    both(lambda t: t.tree_leaves_with_path(tree))
    both(lambda t: t.tree_map_with_path(lambda p, v: (p, v), tree))
    both(lambda t: [t.keystr(p) for p, _ in t.tree_leaves_with_path(tree)])
    calls.clear()
    both(lambda t: t.tree_flatten(tree))
    assert calls == ["fast" if fast else "keys"] * 2
    calls.clear()
    both(lambda t: t.tree_flatten_with_path(tree))
    assert calls == ["keys"] * 2
    laws(lambda: tree)


@pytest.mark.parametrize(
    "returned",
    [None, (), ((), None, None), ([3], None), ([(1,)], None), ([(1, 2, 3)], None), (None, None)],
    ids=repr,
)
def test_a_flatten_with_keys_that_returns_no_pairs_is_an_error(returned):
    cls = plain()
    jax.tree_util.register_pytree_with_keys(cls, lambda p: returned, lambda *a: None, lambda p: (p.children, None))
    both(lambda t: t.tree_leaves(cls(1)), [1])
    error = both(lambda t: t.tree_leaves_with_path(cls(1)))
    assert isinstance(error, Exception)


def test_keys_may_differ_from_one_object_to_the_next():
    cls = plain()
    flat = jax.tree_util.FlattenedIndexKey
    with_keys = lambda p: ([(k, 0) for k in p.data], None)
    jax.tree_util.register_pytree_with_keys(cls, with_keys, lambda *a: None)
    for keys in (["a"], [flat(0)], ["b", "c"], [flat(1)], [flat(1), flat(0)], [], [("d",)]):
        both(lambda t: t.tree_leaves_with_path([cls(data=keys)]))


def test_classes_with_methods():
    @graftax.tree.register_pytree_with_keys_class
    class Keyed:
        def __init__(self, a, b):
            self.a, self.b = a, b

        def tree_flatten_with_keys(self):
            return (("a", self.a), (jax.tree_util.GetAttrKey("b"), self.b)), None

        @classmethod
        def tree_unflatten(cls, data, children):
            return cls(*children)

    @graftax.tree.register_pytree_node_class
    class Both(Keyed):
        def tree_flatten(self):
            return (self.a, self.b), "fast"

    laws(lambda: [Keyed(1, [2]), Both(3, Keyed(4, 5))])
    result = graftax.tree.map(lambda v: v + 1, Both(3, Keyed(4, 5)))
    assert type(result) is Both and type(result.b) is Keyed and result.b.b == 6


# ── static, Partial, equinox ──


def test_register_static():
    @graftax.tree.register_static
    class Setting:
        def __init__(self, name):
            self.name = name

        def __eq__(self, other):
            return isinstance(other, Setting) and self.name == other.name

        def __hash__(self):
            return hash(self.name)

    obj = Setting("a")
    both(lambda t: t.tree_leaves([obj, 1]), [1])
    both(lambda t: t.tree_map(lambda v: v, [obj, 1])[0] is obj, True)
    both(lambda t: t.structure(Setting("a")) == t.structure(Setting("a")), True)
    both(lambda t: t.structure(Setting("a")) == t.structure(Setting("b")), False)
    both(lambda t: t.tree_map(lambda *v: v, Setting("a"), Setting("b")), ValueError)
    both(lambda t: t.tree_structure(obj).node_data()[1] is obj, True)
    laws(lambda: obj)


def test_partial():
    partial = jax.tree_util.Partial
    nested = partial(partial(max, 1), [2], key=partial(len))
    laws(lambda: nested)
    laws(lambda: partial(functools.partial(max, 1), 2, default={"a": 3}))
    result = graftax.tree.map(lambda v: v + 1, partial(pow, 2, exp=4))
    assert type(result) is partial and result() == 3**5
    assert graftax.tree.structure(partial(len, 1)) == graftax.tree.structure(partial(len, 2))
    assert graftax.tree.structure(partial(len, 1)) != graftax.tree.structure(partial(sum, 1))


def test_equinox_modules():
    class Layer(eqx.Module):
        w: Any
        n: int = eqx.field(static=True)
        inner: Any = None

        def __call__(self, x):
            return x

    class Child(Layer):
        extra: Any = eqx.field(converter=lambda v: [v], default=1)

        def __check_init__(self):
            assert self.extra is not None

    layer, child = Layer(jnp.ones(2), 3), Child(1, 2, extra=Layer([4], 5))
    laws(lambda: [layer, child, Layer(child, 1)])
    laws(lambda: [child.__call__, layer.__call__])
    both(lambda t: t.tree_map(lambda v, w: (v, w), layer, Layer([1], 3)))
    both(lambda t: t.tree_map(lambda v, w: (v, w), layer, Layer(1, 4)), ValueError)
    both(lambda t: t.tree_map(lambda v, w: (v, w), layer, Child(1, 3)), ValueError)
    result = graftax.tree.map(lambda v: None, layer)
    assert result.w is None and result.n == 3
    same(eqx.tree_at(lambda m: m.w, layer, 5), graftax.tree.map(lambda v: 5, layer))
    partly = object.__new__(Child)
    object.__setattr__(partly, "w", [1])
    laws(lambda: [partly, child])


def test_is_leaf_stops_at_modules():
    mlp = eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0))
    is_linear = lambda v: isinstance(v, eqx.nn.Linear)
    both(lambda t: t.tree_leaves(mlp, is_linear))
    both(lambda t: t.tree_map(lambda v: type(v).__name__, mlp, is_leaf=is_linear))
    both(lambda t: [t.keystr(p) for p, _ in t.tree_leaves_with_path(mlp)])
