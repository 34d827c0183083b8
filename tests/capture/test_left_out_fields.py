# SPDX-License-Identifier: Apache-2.0
"""Fields that the flatten of a registered class leaves out: a change is given back, or refused with its path."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax

ONE = jnp.ones(1)


class Layer:
    """Its flatten gives `w` alone."""

    def __init__(self, w: Any) -> None:
        self.w = w
        self.cache, self.log, self.tags, self.queue = {}, [], set[str](), collections.deque[int]()
        self.bytes, self.array, self.inner = bytearray(b"a"), np.zeros(1), Inner()
        self.count = 0

    @functools.cached_property
    def double(self) -> Any:
        return self.w * 2


class Inner:
    def __init__(self) -> None:
        self.count, self.names = 0, ["a"]


class Slotted:
    __slots__ = ("count", "log", "w")

    def __init__(self, w: Any) -> None:
        self.w, self.count, self.log = w, 0, []


@dataclasses.dataclass
class Declared:
    w: Any
    name: str = dataclasses.field(default="a", metadata={"static": True})
    log: list[int] = dataclasses.field(default_factory=list)


KEY = jax.tree_util.GetAttrKey("w")
for cls in (Layer, Slotted):
    jax.tree_util.register_pytree_with_keys(
        cls, lambda x: (((KEY, x.w),), None), lambda aux, parts, cls=cls: cls(*parts)
    )
jax.tree_util.register_dataclass(Declared, ["w"], ["name"], drop_fields=["log"])


def counts(m: Any) -> None:
    m.count += 1


def counts_by_a_text(m: Any) -> None:
    setattr(m, "count", getattr(m, "count", 0) + 1)  # noqa: B010


def a_new_field(m: Any) -> None:
    m.seen = getattr(m, "seen", 0) + 1


def into_a_dict(m: Any) -> None:
    m.cache["a"] = m.w * 2


def after_a_child(m: Any) -> None:
    m.w = m.w + 1
    m.log.append(1)


def in_a_nested_list(m: Any) -> None:
    m.inner.names[0] = "b"


def in_an_array(m: Any) -> None:
    m.array[0] = 5


LOST: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a number": (counts, "count"),
    "by a text": (counts_by_a_text, "count"),
    "a new one": (a_new_field, "seen"),
    "a dict": (into_a_dict, "cache"),
    "a list, beside a child": (after_a_child, "log"),
    "a set": (lambda m: m.tags.add("a"), "tags"),
    "a deque": (lambda m: m.queue.append(1), "queue"),
    "bytes": (lambda m: m.bytes.append(1), "bytes"),
    "an array": (in_an_array, "array"),
    "an object": (lambda m: counts(m.inner), "inner"),
    "a list in an object": (in_a_nested_list, "inner"),
}


def _refused(f: Callable[[Any], Any], model: Any, given: Any, text: str) -> None:
    originals = {name: repr(getattr(model, name)) for name in ("count", "log", "name") if hasattr(model, name)}
    with pytest.raises(graftax.MutationError, match=text):
        graftax.jit(lambda m: f(m))(given)
    assert originals == {name: repr(getattr(model, name)) for name in originals}


@pytest.mark.quick(4)
@pytest.mark.parametrize(("change", "field"), LOST.values(), ids=LOST)
def test_a_change_that_would_be_lost_names_its_place(change, field):
    model = Layer(ONE)
    _refused(change, model, model, f"field '{field}' of m, which the flatten of Layer leaves out")
    _refused(lambda m: change(m["layers"][0]), model, {"layers": [model]}, rf"field '{field}' of m\['layers'\]\[0\]")


@pytest.mark.parametrize("change", [counts, lambda m: m.log.append(1)], ids=["a number", "a list"])
def test_of_a_slot(change):
    _refused(change, model := Slotted(ONE), model, "of m, which the flatten of Slotted leaves out")


def test_of_a_dataclass_with_dropped_fields():
    _refused(lambda m: m.log.append(1), model := Declared(ONE), model, "'log' of m, which the flatten of Declared")


def test_of_an_object_that_is_captured():
    model = Layer(ONE)
    with pytest.raises(graftax.MutationError, match="'count' of closure model"):
        graftax.jit(lambda x: counts(model))(ONE)


def test_what_is_only_set_is_given_back():
    def f(m, x):
        m.count, m.last, m.w = 7, x * 2, m.w + x
        return m.double

    model, other, jitted = Layer(ONE), Layer(ONE), graftax.jit(f)
    for factor in (1, 2, 3):
        assert jitted(model, ONE * factor).tolist() == f(other, ONE * factor).tolist()
        assert (model.count, model.last.tolist(), model.w.tolist()) == (7, other.last.tolist(), other.w.tolist())
        vars(other).pop("double"), vars(model).pop("double", None)


def test_by_value_nothing_goes_back():
    model = Layer(ONE)
    assert graftax.jit(into_a_dict, mutation="discard")(model) is None
    assert model.cache == {}


class Logged:
    """Its aux data is made anew from a list."""

    def __init__(self, w: Any, log: Any) -> None:
        self.w, self.log = w, list(log)


jax.tree_util.register_pytree_node(Logged, lambda m: ((m.w,), tuple(m.log)), lambda log, parts: Logged(*parts, log))


def test_what_aux_data_is_made_of_is_given_back():
    def f(m):
        m.log.append(len(m.log))
        return m.w * len(m.log)

    model, jitted = Logged(ONE, ()), graftax.jit(f)
    assert [jitted(model).tolist() for _ in range(3)] == [[1.0], [2.0], [3.0]]
    assert model.log == [0, 1, 2]


class Tree:
    """A child is in a dict that its flatten makes, and is an attribute as well."""

    def __init__(self, parts: dict[str, Any]) -> None:
        self.inner, self.items = parts["inner"], [parts["inner"], parts["inner"].names]


jax.tree_util.register_pytree_node(Tree, lambda m: (({"inner": m.inner},), None), lambda aux, parts: Tree(*parts))


def test_what_is_a_node_of_its_own_is_no_field_that_is_left_out():
    def f(m, x):
        m.inner.w = x * 2
        m.items[0].count += 1
        return x

    tree, jitted = Tree({"inner": Inner()}), graftax.jit(f)
    for n in (1, 2):
        jitted(tree, ONE * n)
        assert (tree.inner.count, tree.inner.w.tolist()) == (n, [2.0 * n])


class Empty:
    """Its flatten gives nothing: where no array is beside it, the function gets the object itself."""

    def __init__(self) -> None:
        self.log, self.table, self.tags = [1], {"a": 1}, {"a"}
        self.queue, self.bytes, self.array = collections.deque([1]), bytearray(b"a"), np.zeros(1)
        self.inner = Inner()


jax.tree_util.register_pytree_node(Empty, lambda m: ((), None), lambda aux, parts: Empty())
KEPT = Empty()


def with_default(x: Any, change: Callable[[Any], Any], m: Empty = KEPT) -> Any:
    change(m)
    return x


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.log.append(2),
        lambda m: m.table.update(a=5),
        lambda m: m.tags.add("b"),
        lambda m: m.queue.append(2),
        lambda m: m.bytes.extend(b"bc"),
        lambda m: counts(m.inner),
        lambda m: m.inner.names.append("b"),
        in_an_array,
        counts_by_a_text,
    ],
)
def test_an_object_without_arrays_is_as_before(change):
    def state() -> list[str]:
        return [repr(vars(KEPT.inner)) if name == "inner" else repr(value) for name, value in vars(KEPT).items()]

    original, jitted = state(), graftax.jit(lambda x: with_default(x, change))
    for _ in range(3):
        with pytest.raises(graftax.MutationError, match="__defaults__"):
            jitted(ONE)
        assert state() == original


TRANSFORMS = {
    "vmap": lambda change: graftax.vmap(lambda m, x: change(m) or x, in_axes=(None, 0)),
    "grad": lambda change: graftax.grad(lambda m, x: change(m) or x.sum(), wrt=1),
    "grad in jit": lambda change: graftax.jit(
        lambda m, x: graftax.grad(lambda m, x: change(m) or x.sum(), wrt=1)(m, x)
    ),
    "scan": lambda change: lambda m, x: graftax.scan(lambda c, v: change(m) or (c, v), 0.0, x),
    "checkpoint": lambda change: graftax.checkpoint(lambda m, x: change(m) or x),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_under_a_transform(transform):
    _refused(in_a_nested_list, model := Layer(ONE), model, "'inner' of m")  # as the function does by itself
    with pytest.raises(graftax.MutationError, match=r"field 'inner' of .*, which the flatten of Layer leaves out"):
        transform(in_a_nested_list)(model, ONE)
    assert model.inner.names == ["a"]
