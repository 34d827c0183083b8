# SPDX-License-Identifier: Apache-2.0
"""Instances of Python classes: plain objects, dataclasses, attrs."""

from __future__ import annotations

import abc
import dataclasses
import functools
import types
from typing import Any, Generic, Protocol, TypeVar

import attr
import attrs
from values.record import IMMUTABLE, NO_ARRAYS, VALUE, Kind

# ── plain classes ──


class Plain:
    def __init__(self, w, n):
        self.w, self.n = w, n


class Child(Plain):
    def __init__(self, w, n):
        super().__init__(w, n)
        self.more = [w, n]


class Slots:
    __slots__ = ("n", "w")

    def __init__(self, w, n):
        self.w, self.n = w, n


class SlotsAndDict(Slots):
    def __init__(self, w, n):
        super().__init__(w, n)
        self.more = [w, n]


class Private:
    __slots__ = ("__n", "__w")

    def __init__(self, w, n):
        self.set(w, n)

    def set(self, w, n):
        self.__w, self.__n = w, n

    def get(self):
        return self.__w, self.__n


class Logged:
    """Its `__setattr__` keeps a list of what was set."""

    def __init__(self, w, n):
        object.__setattr__(self, "log", [])
        self.w, self.n = w, n

    def __setattr__(self, name, value):
        self.log.append(name)
        object.__setattr__(self, name, value)


class Locked:
    """Its `__setattr__` refuses; `__getattr__` looks in a dict."""

    def __init__(self, w, n):
        object.__setattr__(self, "_values", {"w": w, "n": n})

    def __setattr__(self, name, value):
        raise AttributeError(name)

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return self._values[name]


class WithProperty:
    def __init__(self, w, n):
        self._w, self._n = w, n

    @property
    def w(self):
        return self._w * 2

    @w.setter
    def w(self, value):
        self._w = value / 2

    @property
    def n(self):
        return self._n


class Field:
    """A data descriptor that keeps its value in the instance's `__dict__` under another name."""

    def __set_name__(self, owner, name):
        self.name = "_" + name

    def __get__(self, instance, owner=None):
        return self if instance is None else vars(instance)[self.name]

    def __set__(self, instance, value):
        vars(instance)[self.name] = value


class WithDescriptor:
    w = Field()
    n = Field()

    def __init__(self, w, n):
        self.w, self.n = w, n


class WithCachedProperty(Plain):
    @functools.cached_property
    def twice(self):
        return self.w * 2


def change_cached(v, w, n):
    v.w, v.n = w, n
    vars(v).pop("twice", None)


class WithCachedMethod(Plain):
    @functools.lru_cache  # noqa: B019
    def twice(self):
        return self.w * 2


def change_cached_method(v, w, n):
    v.w, v.n = w, n
    WithCachedMethod.twice.cache_clear()


class AlwaysEqual(Plain):
    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0


class NeverEqual(Plain):
    __hash__ = None

    def __eq__(self, other):
        raise RuntimeError("not to be asked")


class WithDel:
    """It notes that it goes; it holds no array."""

    gone: list[Any] = []  # noqa: RUF012

    def __init__(self, w, n):
        self.n = n

    def __del__(self):
        self.gone.append(self.n)


T = TypeVar("T")


class GenericClass(Generic[T]):
    def __init__(self, w, n):
        self.w, self.n = w, n


class Shape(Protocol):
    w: Any

    def area(self): ...


class Square(Shape):
    def __init__(self, w, n):
        self.w, self.n = w, n

    def area(self):
        return self.w * self.w


class Abstract(abc.ABC):
    @abc.abstractmethod
    def get(self): ...


class Concrete(Abstract):
    def __init__(self, w, n):
        self.w, self.n = w, n

    def get(self):
        return self.w, self.n


class Problem(Exception):
    def __init__(self, w, n):
        super().__init__(w)
        self.n = n


def change_problem(v, w, n):
    v.args, v.n = (w,), n


class Parent:
    def __init__(self, w, n):
        self.children = [Plain(w, n), Plain(w, n)]
        for child in self.children:
            child.parent = self


def read_children(v):
    first, second = v.children
    return first.w, second.n, first.parent is v, second.parent.children[0] is first


def change_children(v, w, n):
    v.children[0].w, v.children[1].n = w, n


class Custom:
    """It asks to be pickled and copied in a way of its own, which graftax has no need of."""

    def __init__(self, w, n):
        self.w, self.n = w, n

    def __reduce__(self):
        raise TypeError("not to be pickled")

    def __copy__(self):
        raise TypeError("not to be copied")

    __deepcopy__ = __copy__


# ── dataclasses ──


@dataclasses.dataclass
class Data:
    w: Any
    n: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    w: Any
    n: Any
    box: list[Any]


@dataclasses.dataclass(slots=True)
class SlotsData:
    w: Any
    n: Any


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    w: Any
    n: Any
    box: list[Any]


@dataclasses.dataclass(kw_only=True)
class KeywordOnly:
    w: Any
    n: Any = 5


@dataclasses.dataclass
class WithInitVar:
    w: Any
    n: Any
    scale: dataclasses.InitVar[float]
    scaled: Any = dataclasses.field(init=False)

    def __post_init__(self, scale):
        self.scaled = self.w * scale


@dataclasses.dataclass
class Inherited(Data):
    more: Any = None


@dataclasses.dataclass
class WithFactory:
    w: Any = None
    n: Any = None
    box: list[Any] = dataclasses.field(default_factory=list)


def with_factory(w, n):
    v = WithFactory(w, n)
    v.box.append(w)
    return v


@dataclasses.dataclass
class NoCompare:
    w: Any = dataclasses.field(compare=False)
    n: Any = dataclasses.field(compare=False, hash=False, repr=False)


@dataclasses.dataclass
class ClassDefault:
    """`n` is left to the class's default by deleting it from the instance."""

    w: Any
    n: Any = 5


def without_n(w, n):
    v = ClassDefault(w)
    del v.n
    v.box = [n]
    return v


# ── attrs ──


@attrs.define
class Attrs:
    w: Any
    n: Any


@attrs.frozen
class AttrsFrozen:
    w: Any
    n: Any
    box: list[Any]


@attrs.define(slots=False)
class AttrsDict:
    w: Any
    n: Any = attrs.field(converter=lambda n: n, eq=False)


@attr.s
class OldAttrs:
    w: Any = attr.ib()
    n: Any = attr.ib(default=3)


@attrs.define
class AttrsPostInit:
    w: Any
    n: Any
    twice: Any = attrs.field(init=False)

    def __attrs_post_init__(self):
        self.twice = self.w * 2


# ── how they are read and changed ──


def both(v):
    return v.w, v.n


def assign(v, w, n):
    v.w, v.n = w, n


def with_more(v):
    return v.w, v.n, *v.more


def assign_more(v, w, n):
    v.w, v.n = w, n
    v.more[:] = [w, n]


def with_box(v):
    return v.w, v.n, *v.box


def assign_box(v, w, n):
    v.box[:] = [w, n]


def boxed(cls):
    return lambda w, n: cls(w, n, [w, n])


HOLDS = "Immutable, but the list inside can be changed."

PLAIN = [
    Kind("plain class", Plain, both, assign, note="Neither `__init__` nor `__new__` runs again."),
    Kind("subclass", Child, with_more, assign_more),
    Kind(
        "attribute added in place", Plain, lambda v: (v.w, v.n, *vars(v)), lambda v, w, n: vars(v).update(w=w, n=n, m=n)
    ),
    Kind(
        "attribute deleted in place",
        Child,
        lambda v: (v.w, v.n, *vars(v)),
        lambda v, w, n: (vars(v).pop("more", None), vars(v).update(w=w, n=n))[1],
    ),
    Kind("`__slots__`", Slots, both, assign),
    Kind("`__slots__` and `__dict__`", SlotsAndDict, with_more, assign_more),
    Kind("private `__slots__`", Private, lambda v: v.get(), lambda v, w, n: v.set(w, n)),
    Kind("`__setattr__` with an effect", Logged, lambda v: (v.w, v.n, *v.log), assign, note="graftax never calls it."),
    Kind("`__setattr__` that refuses", Locked, both, lambda v, w, n: v._values.update(w=w, n=n)),
    Kind(
        "property",
        WithProperty,
        lambda v: (v.w, v.n, v._w),
        lambda v, w, n: (setattr(v, "w", w * 2), vars(v).update(_n=n))[1],
    ),
    Kind("descriptor", WithDescriptor, both, assign),
    Kind(
        "`functools.cached_property`",
        WithCachedProperty,
        lambda v: (v.w, v.n, v.twice),
        change_cached,
        note="The value computed while tracing is cached in the caller's object, as without `jit`.",
    ),
    Kind(
        "`functools.lru_cache` on a method",
        WithCachedMethod,
        lambda v: (v.w, v.n, v.twice()),
        change_cached_method,
        inside=False,
        note="Clearing the cache inside is warned of.",
    ),
    Kind("`__eq__` that is always true", AlwaysEqual, both, assign, note="graftax never calls `__eq__` of an object."),
    Kind("`__eq__` that raises, no `__hash__`", NeverEqual, both, assign),
    Kind("`__reduce__` and `__copy__` that refuse", Custom, both, assign),
    Kind(
        "`__del__`, no arrays",
        WithDel,
        lambda v: (v.n,),
        lambda v, w, n: setattr(v, "n", n),
        without={"traced": NO_ARRAYS},
        note="An error if the object holds an array: `__del__` would run for copies that only the trace sees.",
    ),
    Kind("class from `typing.Generic`", GenericClass, both, assign),
    Kind("class from `typing.Protocol`", Square, lambda v: (v.area(), v.n), assign),
    Kind("class from `abc.ABC`", Concrete, lambda v: v.get(), assign),
    Kind("exception", Problem, lambda v: (*v.args, v.n), change_problem),
    Kind("parent and children", Parent, read_children, change_children),
    Kind("`types.SimpleNamespace`", lambda w, n: types.SimpleNamespace(w=w, n=n), both, assign),
]

DATA = [
    Kind("`dataclass`", Data, both, assign),
    Kind("`frozen=True`", boxed(Frozen), with_box, assign_box, identity=VALUE, note=HOLDS),
    Kind("`slots=True`", SlotsData, both, assign),
    Kind("`frozen=True, slots=True`", boxed(FrozenSlots), with_box, assign_box, identity=VALUE, note=HOLDS),
    Kind("`kw_only=True`", lambda w, n: KeywordOnly(w=w, n=n), both, assign),
    Kind(
        "`InitVar`",
        lambda w, n: WithInitVar(w, n, 2.0),
        lambda v: (v.w, v.n, v.scaled),
        lambda v, w, n: v.__init__(w, n, 2.0),
        note="`__post_init__` does not run again.",
    ),
    Kind("inherited fields", lambda w, n: Inherited(w, n, [w, n]), with_more, assign_more),
    Kind("`default_factory`", with_factory, with_box, lambda v, w, n: v.__init__(w, n, [w])),
    Kind("`compare=False`", NoCompare, both, assign, note="graftax compares every field."),
    Kind(
        "field left to the class",
        without_n,
        with_box,
        lambda v, w, n: (setattr(v, "w", w), v.box.__setitem__(0, n))[1],
    ),
    Kind(
        "frozen, nothing mutable inside",
        lambda w, n: Frozen(w, n, ()),
        both,
        identity=VALUE,
        without={"in place": IMMUTABLE},
    ),
]

ATTRS = [
    Kind("`attrs.define`", Attrs, both, assign),
    Kind("`attrs.frozen`", boxed(AttrsFrozen), with_box, assign_box, identity=VALUE, note=HOLDS),
    Kind("`attrs.define(slots=False)`", AttrsDict, both, assign),
    Kind("`attr.s`", OldAttrs, both, assign),
    Kind("`__attrs_post_init__`", AttrsPostInit, lambda v: (v.w, v.n, v.twice), lambda v, w, n: v.__init__(w, n)),
]
