# SPDX-License-Identifier: Apache-2.0
"""Modules and classes given to `register`: read and made by attribute here, by functions in JAX, to the same result."""

from __future__ import annotations

import abc
import dataclasses
import functools
import gc
import pickle
import sys
import weakref
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
import graftax.tree
from beside import both, laws
from sizes import sized
from watchdog import isolated

pytestmark = pytest.mark.quick(8)  # a case takes milliseconds

tree = graftax.tree
T = TypeVar("T")


class Plain(graftax.Module):
    a: Any
    b: Any = None
    c: Any = 3


class Named(graftax.Module):
    w: Any
    name: Any = graftax.field(static=True, default="n")
    more: Any = graftax.field(static=True, default=None)


class Open(graftax.Module):
    """Nothing is declared: the attributes are those that an instance has."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


@graftax.register(static=["name"])
class Layer:
    def __init__(self, weight: Any, name: str = "layer") -> None:
        self.name, self.weight = name, weight


@graftax.register(dynamic=["x"])
@dataclasses.dataclass(frozen=True)
class Frozen:
    n: Any
    x: Any


@graftax.register
class Slotted:
    __slots__ = ("__dict__", "b", "w")

    def __init__(self, w: Any, **others: Any) -> None:
        self.w = w
        self.__dict__.update(others)


def changed(obj: Any, *without: str, **attributes: Any) -> Any:
    for name in without:
        del obj.__dict__[name]
    obj.__dict__.update(attributes)
    return obj


TREES = {
    "fields": lambda: Plain(1, [2], Plain(3)),
    "no attributes": lambda: [Open(), Plain(1)],
    "static": lambda: [Named(1, "a"), Named([2], "b", (1, "x")), Named(None, more=[1, {"k": 2}])],
    "registered": lambda: {"x": Layer([1, 2]), "y": Layer(Layer(3), "inner")},
    "frozen": lambda: Frozen("n", [Frozen(2, 3)]),
    "undeclared, in two orders": lambda: [Open(x=1, y=2), Open(y=3, x=4), Open(x=5, y=6)],
    "declared, in another order": lambda: changed(Plain(1, 2), "a", a=5),
    "an attribute more": lambda: changed(Plain(1), later=[7]),
    "an attribute less": lambda: [changed(Plain(1), "b"), Plain(2)],
    "one more and one less": lambda: changed(Plain(1, 2, 3), "c", d=4),
    "a static one less": lambda: [changed(Named(1), "name"), Named(1)],
    "slots": lambda: [Slotted(1), Slotted([2], x=3)],
    "generic": lambda: [Generics[int](1), Generics[str]([2]), Generics(3)],
    "seventy attributes": lambda: Open(**{f"x{i}": i for i in range(70)}),
    "a name that is not interned": lambda: odd_name(),
    "static values of every kind": lambda: [Named(1, v) for v in STATIC_VALUES],
    "thirty layouts": lambda: [Open(**{f"x{i}": 1, "y": i}) for i in range(30)],
    "thirty names": lambda: [Named(i, f"layer {i}") for i in range(30)],
}
STATIC_VALUES = [1, True, 1.0, 0.0, -0.0, 1j, "s", b"s", None, (1, (2,)), (1, (True,)), len, int, print, 10**40, ...]


class Generics(graftax.Module, Generic[T]):
    value: T


def odd_name() -> Any:
    obj = Plain(1)
    obj.__dict__["".join(["not ", "interned"])] = 4
    return obj


@pytest.mark.parametrize("name", TREES)
def test_the_same_as_jax(name: str):
    for _ in range(2):  # the second time by what the first one learned
        laws(TREES[name])
    inputs, theirs = TREES[name](), TREES[name]()
    for trees in (tree, jax.tree):
        both(lambda t, trees=trees: t.tree_structure(trees.map(lambda v: [v], inputs)))
        both(lambda t, trees=trees: trees.map(lambda a, b: (a, b), inputs, theirs))


@pytest.mark.parametrize("name", TREES)
def test_treedefs_that_went_through_a_pickle(name: str):
    inputs = TREES[name]()
    leaves, treedef = tree.flatten(inputs)
    restored = pickle.loads(pickle.dumps(treedef))
    assert restored == treedef == tree.structure(restored.unflatten(leaves)) and hash(restored) == hash(treedef)
    assert tree.to_jax(restored) == jax.tree.structure(inputs)


@pytest.mark.parametrize("first", STATIC_VALUES, ids=repr)
def test_static_values_are_told_apart_as_in_jax(first: Any):
    for second in STATIC_VALUES:
        equal = both(lambda t, second=second: t.structure(Named(1, first)) == t.structure(Named(1, second)))
        assert equal is (first is second)
        both(lambda t, second=second: type(t.map(lambda v: v, Named(1, second)).name), type(second))


def test_a_static_value_that_is_changed_in_place_is_another_one():
    for make in (list, lambda v: {"k": v}, lambda v: (1, [v]), np.array):
        value = make([1])
        module = Named(1, value)
        before = both(lambda t, module=module: t.structure(module))
        inner = value[1][0] if isinstance(value, tuple) else value["k"] if isinstance(value, dict) else value
        inner[0] = 2
        assert tree.structure(module) != before
        both(lambda t, module=module, before=before: t.structure(module) == before)


def calls_of(program: Any) -> list[str]:
    """The functions of Python that a program calls, besides itself."""
    recorded: list[str] = []
    gc.disable()  # a collection calls whoever asked for that
    sys.setprofile(lambda frame, event, arg: recorded.append(frame.f_code.co_qualname) if event == "call" else None)
    try:
        program()
    finally:
        sys.setprofile(None)
        gc.enable()
    return [name for name in recorded if "<lambda>" not in name]


@pytest.mark.parametrize(
    "name", ["fields", "registered", "static", "frozen", "an attribute more", "undeclared, in two orders"]
)
def test_known_attributes_are_read_and_written_without_a_call_of_python(name: str):
    inputs = [TREES[name]() for _ in range(3)]
    if name == "undeclared, in two orders":
        cls = type("Few", (Open,), {})  # a class with ever new layouts is not worth remembering
        inputs = [cls(x=1, y=2), cls(y=3, x=4)]
    if name == "static":
        inputs = [Named(1, "a"), Named([2], "b", (1, "x")), Named(3, more=len)]
    leaves, treedef = tree.flatten(inputs)
    treedef.unflatten(leaves), tree.flatten_with_path(inputs)
    assert calls_of(lambda: tree.flatten(inputs)) == []
    assert calls_of(lambda: tree.flatten_with_path(inputs)) == []
    assert calls_of(lambda: treedef.unflatten(leaves)) == []
    assert calls_of(lambda: tree.map(lambda v: v, inputs)) == []
    assert calls_of(lambda: jax.tree.flatten(inputs)) != []


# ── classes that have a say in their attributes ──


class Shy(graftax.Module):
    """An instance holds an attribute that the class hides behind a property, and another one behind a method."""

    a: Any

    def __init__(self, a: Any) -> None:
        self.a = a
        self.__dict__.update(hidden=[1], method=2)

    @property
    def hidden(self) -> Any:
        raise AssertionError("a property of the class")

    @hidden.setter
    def hidden(self, value: Any) -> None:
        raise AssertionError("a setter of the class")

    def method(self) -> Any:
        raise AssertionError("a method of the class")


class Eager(graftax.Module):
    a: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return [name]

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, ("set", value))


class Watched(graftax.Module):
    a: Any

    def __getattribute__(self, name: str) -> Any:
        if name == "__dict__":
            return {"a": "from the class"}
        return object.__getattribute__(self, name)


class OtherDict(graftax.Module):
    a: Any

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        return {"a": "from the class", "b": 1}


class Final(graftax.Module):
    a: Any

    def __new__(cls, *args: Any) -> Any:
        raise AssertionError("instances are made anew without __new__")


def made(cls: Any, **attributes: Any) -> Any:
    return changed(object.__new__(cls), **attributes)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Shy(1),
        lambda: [Eager(1), made(Eager)],
        lambda: made(Final, a=[1]),
        lambda: [Shy(Eager([1]))],
    ],
)
def test_what_the_class_says_of_attributes_counts_as_in_jax(make: Any):
    for _ in range(2):
        laws(make)


@pytest.mark.parametrize("cls", [Watched, OtherDict])
def test_a_class_with_a_dict_of_its_own_goes_through_the_functions(cls: Any):
    both(lambda t: t.leaves(cls(1)))
    both(lambda t: t.tree_leaves_with_path([cls(1)]))
    assert "from the class" in tree.leaves(cls(1))


def test_a_class_that_is_changed_later():
    class Module(graftax.Module):
        a: Any
        b: Any = 2

    module = Module(1)
    laws(lambda: module)
    leaves, treedef = tree.flatten(module)
    Module.a = property(lambda self: "read", lambda self, value: None)
    both(lambda t: t.leaves(module), [1, 2])
    both(lambda t: vars(t.map(lambda v: v + 1, module)), {"a": 2, "b": 3})
    assert vars(treedef.unflatten(leaves)) == {"a": 1, "b": 2}
    del Module.a
    laws(lambda: module)
    Module.__getattribute__ = lambda self, name: {"z": 5} if name == "__dict__" else object.__getattribute__(self, name)
    both(lambda t: t.leaves(module), [5])
    del Module.__getattribute__
    laws(lambda: module)
    Module.__abstractmethods__ = frozenset({"f"})
    both(lambda t: t.map(lambda v: v, module), TypeError)
    with pytest.raises(TypeError, match="abstract"):
        treedef.unflatten(leaves)


def test_an_abstract_base_class_and_what_is_below_it():
    class Base(graftax.Module, abc.ABC):
        w: Any

        @abc.abstractmethod
        def f(self) -> Any: ...

    class Below(Base):
        v: Any = 2

        def f(self) -> Any:
            return self.w

        @functools.cached_property
        def twice(self) -> Any:
            return self.w * 2

    below = Below(1)
    laws(lambda: [below])
    assert below.twice == 2
    laws(lambda: [below, Below(3)])


def test_node_data_and_children_that_do_not_go_together():
    aux, other = tree.structure(Plain(1)).node_data()[1], tree.structure(Named(1, "a")).node_data()[1]
    leaf = tree.structure(0)
    make = functools.partial(tree.PyTreeDef.from_node_data_and_children, tree.default_registry)
    assert vars(make((Plain, aux), [leaf] * 3).unflatten([1, 2, 3])) == {"a": 1, "b": 2, "c": 3}
    with pytest.raises(ValueError):
        make((Plain, aux), [leaf]).unflatten([1])
    with pytest.raises((ValueError, TypeError, AttributeError)):
        make((Plain, None), [leaf]).unflatten([1])
    assert vars(make((Plain, other), [leaf]).unflatten([5])) == {"w": 5, "name": "a", "more": None}
    twin = jax.tree_util.default_registry.flatten_one_level(Plain(1))[1]
    assert (
        twin == aux and vars(make((Plain, pickle.loads(pickle.dumps(twin))), [leaf] * 3).unflatten("abc"))["c"] == "c"
    )


def test_trees_that_do_not_match_are_named():
    with pytest.raises(ValueError, match=r"\.a: expected list of length 1, found float32\[3\]"):
        tree.map(lambda a, b: a, Plain([1]), Plain(jnp.ones(3)))
    with pytest.raises(ValueError, match=r"name='b'.*name='a'"):
        tree.map(lambda a, b: a, Named([1], "a"), Named([1], "b"))
    for one, other in ((Plain(1), Named(1)), (Plain(1), changed(Plain(1), d=2)), (Open(x=1, y=2), Open(y=1, x=2))):
        with pytest.raises(ValueError, match="expected"):  # JAX 0.10 fails at its own message
            tree.map(lambda a, b: a, one, other)


def test_instances_do_not_outlive_a_walk():
    module = Plain([1, 2], Named(jnp.ones(2), "gone"))
    refs = [weakref.ref(module), weakref.ref(module.b), weakref.ref(module.b.w)]
    treedef = tree.structure(module)
    copies = [treedef.unflatten([1, 2, 3, 4]), tree.map(lambda v: v, module)]
    refs += [weakref.ref(copy) for copy in copies]
    del module, copies
    gc.collect()
    assert [ref() for ref in refs] == [None] * 5


def chain(levels: int) -> Any:
    value: Any = 1
    for i in range(levels):
        value = Named(value, f"layer {i % 5}") if i % 2 else Plain(value)
    return value


@pytest.mark.quick(0)
@isolated()
def test_a_chain_of_a_hundred_thousand_modules():
    value = chain(sized(100_000, 20_000))
    leaves, treedef = tree.flatten(value)
    assert tree.structure(treedef.unflatten(leaves)) == treedef and tree.leaves(value) == leaves


@pytest.mark.quick(0)
@isolated()
def test_the_treedef_of_a_deep_chain_is_jaxs_and_back():
    # Each level of one is asked by itself, so the time grows with the square of the depth.
    treedef = tree.structure(chain(sized(2000, 500)))
    assert tree.from_jax(tree.to_jax(treedef)) == treedef
