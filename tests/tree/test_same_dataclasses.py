# SPDX-License-Identifier: Apache-2.0
"""Classes given to `register_dataclass`: read and built by their fields, as far as that is what JAX does."""

import abc
import dataclasses
import functools
import subprocess
import sys
import textwrap
from typing import Any, ClassVar, Generic, TypeVar

import jax
import pytest

import graftax.tree
from beside import JAX, OURS, both, laws, same

T = TypeVar("T")


def dataclass(cls=None, *, data=None, meta=None, drop=(), **options):
    def decorate(cls):
        return graftax.tree.register_dataclass(dataclasses.dataclass(cls, **options), data, meta, drop)

    return decorate if cls is None else decorate(cls)


def static(**kwargs):
    return dataclasses.field(metadata={"static": True}, **kwargs)


def test_fields_metadata_and_dropped_fields():
    @functools.partial(dataclass, data=["x"], meta=["n"], drop=["cache"])
    class Dropped:
        x: Any
        n: int = 1
        cache: Any = dataclasses.field(default_factory=dict)

    obj = Dropped(1, 2)
    obj.cache["a"] = 3
    laws(lambda: [obj])
    assert graftax.tree.map(lambda v: v, obj).cache == {}

    @functools.partial(dataclass, data=["b", "a"], meta=["d", "c"])
    class Order:
        a: Any
        b: Any
        c: Any
        d: Any

    laws(lambda: Order(1, [2], 3, 4))


def test_wrong_registrations_are_the_errors_of_jax():
    @dataclasses.dataclass
    class Fields:
        x: Any
        y: Any = 0

    for args in (["x"], []), (["x", "y"], ["y"]), (["x", "y", "z"], []), (["x", "y"], None):
        both(lambda t: t.register_dataclass(Fields, *args))
    both(lambda t: t.register_dataclass(object), TypeError)
    both(lambda t: t.tree_leaves([1]), [1])


@pytest.mark.parametrize("options", [{}, {"frozen": True}, {"slots": True}, {"kw_only": True}, {"eq": False}], ids=str)
@pytest.mark.parametrize("weak", [False, True])
def test_every_option_of_a_dataclass(options, weak):
    if weak and options.get("slots"):
        options = {**options, "weakref_slot": True}

    @dataclass(**options)
    class Fields:
        x: Any
        y: Any = None
        z: Any = dataclasses.field(default_factory=lambda: ["made"])
        n: Any = static(default=1)

    laws(lambda: [Fields(x=1), Fields(x=[2], y=(3,), z={"a": 4}, n="n")])


def test_init_runs_where_it_does_more_than_assign():
    calls = []

    @dataclass
    class Post:
        x: Any

        def __post_init__(self):
            calls.append("post")

    @dataclass
    class Own:
        x: Any

        def __init__(self, x):
            calls.append("own")
            self.x = x

    @dataclass
    class New:
        x: Any

        def __new__(cls, *args, **kwargs):
            calls.append("new")
            return super().__new__(cls)

    @dataclass
    class Set:
        x: Any

        def __setattr__(self, name, value):
            calls.append("set")
            super().__setattr__(name, value)

    class Meta(type):
        def __call__(cls, *args, **kwargs):
            calls.append("meta")
            return super().__call__(*args, **kwargs)

    @dataclass
    class OfMeta(metaclass=Meta):
        x: Any

    @dataclass
    class Shadow:
        x: Any
        y: Any

        def _get(self):
            return self.__dict__["_y"]

        def _set(self, value):
            calls.append("property")
            self.__dict__["_y"] = value

    Shadow.y = property(Shadow._get, Shadow._set)

    class Base:
        def __init_subclass__(cls):
            cls.made = 0

        def __new__(cls, *args, **kwargs):
            calls.append("base")
            return super().__new__(cls)

    @dataclass(frozen=True)
    class Inherits(Base):
        x: Any

    for cls, args in ((Post, 1), (Own, 1), (New, 1), (Set, 1), (OfMeta, 1), (Shadow, 2), (Inherits, 1)):
        obj = cls(*range(args))
        counts = []
        for trees in (JAX, OURS):
            calls.clear()
            result = trees.tree_map(lambda v: v + 1, [obj, obj])[1]
            assert result.x == 1 and type(result) is cls
            counts.append(list(calls))
        assert counts[0] == counts[1] and len(counts[0]) == 2, cls


@pytest.mark.quick(0)
def test_an_init_that_is_written_in_a_script_without_a_file_runs():
    code = """
        import dataclasses, jax, graftax.tree
        @jax.tree_util.register_dataclass
        @dataclasses.dataclass
        class Own:
            x: object
            def __init__(self, x):
                self.x = x + 100
        print(graftax.tree.map(lambda v: v, Own(1)).x, jax.tree.map(lambda v: v, Own(1)).x)
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert result.stdout == "201 201\n"


def test_init_only_variables_and_fields_not_in_init():
    @functools.partial(dataclass, data=["x"], meta=[])
    class Variable:
        x: Any
        scale: dataclasses.InitVar[int] = 3
        count: ClassVar[int] = 5

        def __post_init__(self, scale):
            self.scaled = scale

    @functools.partial(dataclass, data=["x"], meta=[])
    class Later:
        x: Any
        y: Any = dataclasses.field(init=False, default="later")

    @functools.partial(dataclass, data=["x"], meta=[])
    class NoDefault:
        x: Any
        y: Any = dataclasses.field(init=False)

    obj = Later(1)
    obj.y = "changed"
    laws(lambda: [Variable(1, 2), obj, NoDefault(2)])
    assert graftax.tree.map(lambda v: v, obj).y == "later"
    assert not hasattr(graftax.tree.map(lambda v: v, NoDefault(1)), "y")


def test_a_dataclass_without_init_is_called():
    @functools.partial(graftax.tree.register_dataclass, data_fields=["x"], meta_fields=[])
    @dataclasses.dataclass(init=False)
    class NoInit:
        x: Any = 3

    obj = NoInit()
    both(lambda t: t.tree_leaves(obj), [3])
    both(lambda t: t.tree_map(lambda v: v, obj), TypeError)


def test_inheritance():
    @dataclass
    class Base:
        x: Any
        n: Any = static(default=0)

    @dataclass
    class Child(Base):
        y: Any = None

    class Unregistered(Base):
        pass

    @dataclasses.dataclass
    class GenericBase(Generic[T]):
        value: T

    @dataclass(frozen=True)
    class Abstract(abc.ABC):
        z: Any

        def method(self):
            return self.z

    @dataclass
    class Slotted:
        __slots__ = ("__dict__", "x")
        x: Any
        y: Any

    leaf = Unregistered(1)
    laws(lambda: [Child([1], "n", (2,)), Base(3), leaf, Abstract(4), Slotted(5, 6)])
    graftax.tree.register_dataclass(GenericBase)
    laws(lambda: [GenericBase[int](1)])


def test_attributes_that_come_from_elsewhere():
    class ByDefault:
        x = "of the class"

        def __init__(self, **values):
            self.__dict__.update(values)

        def __getattr__(self, name):
            if name == "y":
                return "made up"
            raise AttributeError(name)

    class Everywhere(ByDefault):
        def __getattribute__(self, name):
            return "everywhere" if name in ("x", "y") else super().__getattribute__(name)

    class Computed(ByDefault):
        @property
        def x(self):
            return "computed"

        @functools.cached_property
        def y(self):
            return "cached"

    for cls in (ByDefault, Everywhere, Computed):
        jax.tree_util.register_dataclass(cls, ["x"], ["y"])
        obj, own = cls(), cls(x=1, y=2) if cls is not Computed else cls(y=2)
        both(lambda t: t.tree_flatten([obj, own]))
        both(lambda t: t.tree_flatten_with_path([own, obj, own]))


def test_attributes_that_are_not_there():
    @dataclass
    class Fields:
        x: Any
        n: Any = static(default=dataclasses.MISSING)

    for name in ("x", "n"):
        obj = Fields(1, 2)
        delattr(obj, name)
        both(lambda t: t.tree_leaves(obj), AttributeError)
        both(lambda t: t.tree_leaves([1, (obj,)]), AttributeError)
        both(lambda t: t.tree_leaves_with_path(obj), AttributeError)
    extra = Fields(1, 2)
    extra.more = 3
    both(lambda t: t.tree_flatten(extra))
    assert not hasattr(graftax.tree.map(lambda v: v, extra), "more")
    swapped = Fields(0, 0)
    swapped.__dict__ = {"n": 1, "more": 0, "x": 2}
    laws(lambda: [Fields(3, 4), swapped, Fields(5, 6)])


CHANGES = {
    "property": lambda cls: setattr(cls, "x", property(lambda self: "computed", lambda self, v: None)),
    "property of a base": lambda cls: setattr(cls.__base__, "x", property(lambda self: "base", lambda self, v: None)),
    "getattribute": lambda cls: setattr(
        cls, "__getattribute__", lambda self, n: "read" if n == "x" else object.__getattribute__(self, n)
    ),
    "setattr": lambda cls: setattr(cls, "__setattr__", lambda self, n, v: object.__setattr__(self, n, ["set", v])),
    "init": lambda cls: setattr(cls, "__init__", lambda self, x, n=0: self.__dict__.update(x=["init", x], n=n)),
    "new": lambda cls: setattr(cls, "__new__", lambda c, *a, **k: setattr(o := object.__new__(c), "new", 1) or o),
    "post init": lambda cls: setattr(cls, "__post_init__", lambda self: setattr(self, "x", "post")),
    "class attribute": lambda cls: setattr(cls, "x", "of the class"),
    "slot": lambda cls: setattr(cls, "n", 7),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("changed_before", [0, 1500])  # so often that the interpreter stops counting
def test_a_class_that_changes_after_the_first_walk(name, changed_before):
    Base = type("Base", (), {})

    @dataclass
    class Fields(Base):
        x: Any
        n: Any = static(default=0)

    for i in range(changed_before):
        Fields.counter = i
        Fields(1).counter  # noqa: B018  (a look-up gives the class its next version)
    obj = Fields(1, 2)
    both(lambda t: t.tree_map(lambda v: [v], [obj]))
    treedef = graftax.tree.structure(obj)
    CHANGES[name](Fields)
    both(lambda t: t.tree_flatten([obj]))
    both(lambda t: t.tree_map(lambda v: [v], [obj]))
    both(lambda t: t.tree_flatten_with_path([obj]))
    theirs = jax.tree.structure(obj)
    assert graftax.tree.structure(obj) == treedef or name == "slot"
    same(vars(theirs.unflatten([5])), vars(graftax.tree.structure(obj).unflatten([5])))
