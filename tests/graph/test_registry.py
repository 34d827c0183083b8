# SPDX-License-Identifier: Apache-2.0
"""`register`: classes that JAX's own functions open, too."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import attrs
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import graftax
from sizes import sized
from zoo import f32

structure = jax.tree.structure


def checked(self: Any, weight: Any, name: str = "n") -> None:
    self.weight, self.name = weight, name
    assert isinstance(weight, (jax.Array, np.ndarray)), "never a placeholder"


def registered() -> list[Any]:
    @graftax.register(static=["name"])
    class Plain:
        __init__ = checked

    @graftax.register(dynamic=["weight"])
    class ByChildren:
        __init__ = checked

    @graftax.register(static=(name for name in ["name"]))
    class Slotted:
        __slots__ = ("__weakref__", "name", "weight")
        __init__ = checked

    @graftax.register
    @dataclasses.dataclass
    class Data:
        weight: Any
        name: str = graftax.field(static=True, default="n")

        def __post_init__(self) -> None:
            assert isinstance(self.weight, jax.Array)

    @graftax.register(static=["name"])
    @dataclasses.dataclass(frozen=True, slots=True)
    class Frozen:
        weight: Any
        name: str = "n"

    @graftax.register(static=["name"])
    @attrs.define
    class Attrs:
        weight: Any = attrs.field(validator=attrs.validators.instance_of(jax.Array))
        name: str = "n"

    @graftax.register(static=["name"])
    @attrs.frozen(slots=False)
    class FrozenAttrs:
        weight: Any
        name: str = "n"

    class ByHand:
        __init__ = checked

    def unflatten(name: str, children: Any) -> Any:
        new = object.__new__(ByHand)
        new.__dict__.update(weight=children[0], name=name)
        return new

    graftax.register(ByHand, flatten=lambda x: ((x.weight,), x.name), unflatten=unflatten)
    return [Plain, ByChildren, Slotted, Data, Frozen, Attrs, FrozenAttrs, ByHand]


CLASSES = registered()


@pytest.mark.parametrize("cls", CLASSES, ids=[cls.__name__ for cls in CLASSES])
def test_registered_classes(cls: Any):
    obj = cls(f32(1, 2, 3), name="first")
    assert jax.tree.leaves(obj)[0] is obj.weight and len(jax.tree.leaves(obj)) == 1
    assert structure(obj) == structure(cls(f32(0), name="first")) != structure(cls(f32(0), name="second"))
    assert hash(structure(obj)) == hash(structure(cls(f32(0), name="first")))
    mapped = jax.tree.map(lambda x: x * 2, obj)
    assert type(mapped) is cls and mapped.name == "first" and mapped.weight.tolist() == [2, 4, 6]
    assert jax.jit(lambda o: o)(obj).weight.tolist() == [1, 2, 3]
    assert jax.vmap(lambda o: o)(obj).name == "first" and jax.vmap(lambda o: o.weight, in_axes=0)(obj).shape == (3,)
    assert jax.jacobian(lambda o: o)(obj).weight.weight.shape == (3, 3)
    assert jax.grad(lambda o: o.weight.sum())(obj).weight.tolist() == [1, 1, 1]
    assert jax.tree.map(lambda x: None, obj).weight is None and jax.tree.map(lambda x: object(), obj).name == "first"
    assert graftax.jit(lambda o: o.weight + 1)(obj).tolist() == [2, 3, 4]
    selected, rest = graftax.partition([obj], jax.Array)
    assert rest[0].weight is None and rest[0].name == "first" and graftax.equal(graftax.combine(selected, rest), [obj])
    assert graftax.equal(graftax.copy(obj), obj) and graftax.equal(graftax.tree.map(lambda x: x, obj), obj)
    changed = graftax.at([obj])[lambda x: x[0].weight].set(f32(9))
    assert changed[0].weight == 9 and obj.weight.shape == (3,)
    optimizer = optax.adam(0.1)
    updates, _ = optimizer.update(obj, optimizer.init(obj), obj)
    assert type(optax.apply_updates(obj, updates)) is cls


def test_a_registered_class_changes_in_place_in_graftax():
    cls = CLASSES[0]
    obj = cls(f32(1))
    obj.me = obj
    graftax.jit(lambda o: setattr(o.me, "weight", o.weight + 1))(obj)
    assert obj.weight == 2 and obj.me is obj


def test_empty_slots_and_attributes_beside_the_fields():
    cls = CLASSES[2]
    obj = cls(f32(1))
    del obj.weight
    restored = jax.tree.map(lambda x: x, obj)
    assert not hasattr(restored, "weight") and restored.name == "n" and jax.tree.leaves(obj) == []
    data = CLASSES[3](f32(1))
    data.later = f32(2)
    assert len(jax.tree.leaves(data)) == 2 and jax.tree.map(lambda x: x, data).later == 2


@pytest.mark.quick(20)  # a case takes milliseconds
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: graftax.register(CLASSES[0]), ValueError, "Plain is registered with JAX already"),
        (lambda: graftax.register(3), TypeError, "register expects a class, got 3"),
        (
            lambda: graftax.register(type("L", (list,), {})),
            TypeError,
            "L holds items besides .*flatten= and unflatten=",
        ),
        (lambda: graftax.register(enum.Enum("E", "a")), TypeError, "members of E are values"),
        (
            lambda: graftax.register(type("X", (), {}), flatten=lambda x: x),
            TypeError,
            "flatten= and unflatten= together",
        ),
        (
            lambda: graftax.register(type("X", (), {}), static=["a"], flatten=len, unflatten=len),
            TypeError,
            "leave out static= and dynamic=",
        ),
        (
            lambda: graftax.register(type("X", (), {}), flatten=len, unflatten=len, names="ab"),
            TypeError,
            r"give a list of names: \['ab'\]",
        ),
        (
            lambda: graftax.register(type("X", (), {}), flatten=len, unflatten=len, names=["a", "a"]),
            TypeError,
            "a different string for each child",
        ),
        (lambda: graftax.register(type("X", (), {}), names=["a"]), TypeError, "names= names the children of flatten="),
        (lambda: graftax.register(type("X", (), {}), static="ab"), TypeError, r"give a list of names: \['ab'\]"),
        (
            lambda: graftax.register(dataclasses.make_dataclass("D", ["w"]), static=["v"]),
            TypeError,
            "D has no field 'v'. It has 'w'",
        ),
    ],
)
def test_what_register_refuses(make: Any, error: Any, message: str):
    with pytest.raises(error, match=message):
        make()


def test_a_subclass_of_list_with_its_own_flatten():
    class Items(list):  # type: ignore[type-arg]
        pass

    graftax.register(Items, flatten=lambda x: (tuple(x), len(x)), unflatten=lambda _, children: Items(children))
    assert jax.tree.map(lambda x: x + 1, Items([1, 2])) == [2, 3]
    assert graftax.jit(lambda x: x)(Items([f32(1)]))[0] == 1


def pair_of_arrays(names: Any) -> Any:
    class Pair:
        def __init__(self, first: Any, second: Any) -> None:
            self.first, self.second = first, second

    flatten = lambda p: (iter((p.first, p.second)), None)
    graftax.register(Pair, flatten=flatten, unflatten=lambda _, children: Pair(*children), names=names)
    return Pair


def test_children_of_a_flatten_function_go_by_the_names_given():
    pair = pair_of_arrays(name for name in ("first", "second"))([f32(1)], f32(2))
    for tree in (jax.tree_util, graftax.tree):
        paths = [tree.keystr(path) for path, _ in tree.tree_leaves_with_path({"p": pair})]
        assert paths == ["['p'].first[0]", "['p'].second"]
        assert tree.tree_map(lambda x: x + 1, pair).second == 3
    leaves, graphdef = graftax.flatten({"p": pair})
    assert [jax.tree_util.keystr(path) for path in graphdef.leaf_paths()] == ["['p'].first[0]", "['p'].second"]
    assert [repr(path) for path in graftax.to_dict(pair) if "_" not in repr(path)] == ["obj.first[0]", "obj.second"]
    assert graftax.at(pair)[lambda p: p.second].set(5).second == 5 and graftax.at(pair)["second"].get() is pair.second
    assert graftax.unflatten(graphdef, leaves)["p"].first[0] is pair.first[0]
    with pytest.raises(ValueError, match=r"\.first: expected list of length 1, found list of length 0"):
        graftax.tree.map(lambda a, b: a, pair, type(pair)([], 2))
    by_number = pair_of_arrays(None)([f32(1)], f32(2))
    for tree in (jax.tree_util, graftax.tree):
        paths = [tree.keystr(path) for path, _ in tree.tree_leaves_with_path(by_number)]
        assert paths == ["[<flat index 0>][0]", "[<flat index 1>]"]
    assert jax.tree_util.keystr(graftax.flatten(by_number)[1].leaf_paths()[1]) == "[<flat index 1>]"


def test_as_many_names_as_children():
    pair = pair_of_arrays(["first"])(1, 2)
    assert jax.tree.leaves(pair) == [1, 2]
    for tree in (jax.tree_util, graftax.tree):
        with pytest.raises(ValueError, match=r"register\(.*Pair.* names 1 children \('first'\), and flatten gave 2"):
            tree.tree_leaves_with_path(pair)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    bias: Any
    weight: Any
    name: str = dataclasses.field(metadata={"static": True}, default="layer")


@flax.struct.dataclass
class Struct:
    width: int = flax.struct.field(pytree_node=False)
    weight: Any = None


def test_children_of_a_dataclass_go_by_the_names_that_jax_has():
    model = {"layers": [Layer(f32(1), f32(2)), Struct(3, f32(4))]}
    leaves, graphdef = graftax.flatten(model)
    expected = [path for path, _ in jax.tree_util.tree_leaves_with_path(model)]
    assert graphdef.leaf_paths() == expected and len(leaves) == 3
    assert [tuple(path) for path, _ in graftax.find(model, jax.Array)] == expected
    gradient = graftax.grad(lambda m: (m["layers"][0].weight * m["layers"][1].weight)[0], wrt="m.**.weight")(model)
    assert gradient["layers"][0].weight == 4 and gradient["layers"][0].bias is None
    assert graftax.equal(graftax.from_dict(dict(reversed(graftax.to_dict(model).items()))), model)


# ---- what a class's own unflatten reads


class Bag:
    """Its unflatten reads what it is given, and keeps copies."""

    def __init__(self, items=(), named=None):
        self.items, self.named = tuple(items), dict(named or {})


jax.tree_util.register_pytree_node(
    Bag, lambda b: ((list(b.items), b.named), None), lambda _, children: Bag(children[0], children[1])
)


def test_a_class_is_asked_no_more_often_where_its_instance_is_returned_twice():
    calls = []

    @dataclasses.dataclass(frozen=True)
    class Asked:
        w: Any

    def flatten(value: Any) -> tuple[Any, None]:
        calls.append(value)
        return (value.w,), None

    jax.tree_util.register_pytree_node(Asked, flatten, lambda _, children: Asked(*children))
    counts = []
    for returned in (lambda value: value, lambda value: [value, value]):
        del calls[:]
        graftax.jit(returned)(Asked(f32(2)))
        counts.append(len(calls))
    assert counts[0] == counts[1]


def test_unflatten_is_given_containers_with_their_content():
    bag = Bag([jnp.ones(2), "text"], {"c": jnp.array(2.0)})
    assert graftax.jit(lambda b: b.items[0] * b.named["c"])(bag).tolist() == [2, 2]
    created = graftax.jit(lambda x: Bag([x], {"c": x}))(jnp.array(3.0))
    assert created.items == (3,) and created.named == {"c": 3}
    copied = graftax.copy(bag)
    assert copied.items[1] == "text" and copied.named == {"c": 2}
    assert graftax.grad(lambda b: b.items[0].sum() * b.named["c"])(bag).named == {"c": 2}
    assert graftax.filter_vmap(lambda b, x: b.named["c"] * x, in_axes=(None, 0))(bag, jnp.ones(2)).tolist() == [2, 2]


def test_a_partial_of_jax_keeps_its_keywords():
    partial = jax.tree_util.Partial(lambda a, c=1: a * c, c=jnp.array(3.0))
    for call in (lambda p: p(2.0), graftax.jit(lambda p: p(2.0)), graftax.filter_jit(lambda p: p(2.0))):
        assert call(partial) == 6
    assert graftax.jit(partial)(2.0) == 6
    assert graftax.jit(lambda x: jax.tree_util.Partial(lambda c=1: c, c=x))(jnp.array(5.0))() == 5
    assert graftax.grad(lambda p: p(2.0))(partial).keywords == {"c": 2}
    assert graftax.from_dict(graftax.to_dict(partial))(2.0) == 6


def test_unflatten_reads_containers_that_are_reached_another_way():
    shared = {"c": jnp.array(2.0)}

    def scale(named, bag, outer):
        named["c"] = named["c"] + 1
        return bag.named["c"] * outer.items[0].named["c"]

    bag = Bag([], shared)
    assert graftax.jit(scale)(shared, bag, Bag([bag, shared], {"again": shared})) == 4
    assert shared["c"] == 3
    nested = Bag([Bag([[{"c": Bag([jnp.array(7.0)])}]])])
    assert graftax.jit(lambda b: b.items[0].items[0][0]["c"].items[0])(nested) == 7


def test_unflatten_reads_containers_in_cycles():
    class Owner:
        def __init__(self):
            self.bag = Bag([jnp.array(2.0)], {"owner": self})

    def through(owner):
        assert owner.bag.named["owner"] is owner
        return owner.bag.items[0] * 2

    owner = Owner()
    assert graftax.jit(through)(owner) == 4
    copied = graftax.copy(owner)
    assert copied is not owner and copied.bag.named["owner"] is copied and copied.bag.items == (2,)

    around = Bag([], {})
    around.items = (Bag([jnp.array(3.0)], {"c": jnp.array(4.0)}), [around])
    inner = graftax.jit(lambda b: (b.items[0].items[0], b.items[0].named["c"], b.items[1][0].items[0].named["c"]))
    assert inner(around) == (3, 4, 4)


def test_a_deep_graph_of_classes_whose_unflatten_reads():
    bag = Bag([jnp.array(1.0)])
    for _ in range(sized(100_000, 20_000)):
        bag = Bag([bag])
    copied = graftax.copy(bag)
    while isinstance(copied.items[0], Bag):
        copied = copied.items[0]
    assert copied.items == (1,)
