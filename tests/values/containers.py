# SPDX-License-Identifier: Apache-2.0
"""Python's containers, and classes derived from them."""

from __future__ import annotations

import array
import collections
import dataclasses
import types
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from typing import Any, NamedTuple, TypedDict

from values.record import IMMUTABLE, NO_ARRAYS, VALUE, Kind

Pair = namedtuple("Pair", ["w", "n", "box"])


class Point(NamedTuple):
    w: Any
    n: Any
    box: list[Any]


class Tagged(Point):
    """A namedtuple with room for attributes."""


class Stack(list[Any]):
    pass


class Table(dict[str, Any]):
    pass


class Row(tuple[Any, ...]):
    pass


class Ring(deque[Any]):
    pass


class Names(set[Any]):
    pass


class Fixed(frozenset[Any]):
    pass


class Letters(bytearray):
    pass


class Ordered(OrderedDict[str, Any]):
    pass


class Defaults(dict[str, Any]):
    def __missing__(self, key):
        return self.fallback


class Strict(list[Any]):
    """Its own methods refuse: graftax uses those of `list`."""

    def __setitem__(self, index, value):
        raise TypeError("read-only")

    def __iter__(self):
        raise TypeError("not to be iterated")


class Config(TypedDict):
    w: Any
    n: Any


@dataclasses.dataclass(frozen=True)
class Name:
    text: Any


class Token:
    """A key or an element that counts by identity."""

    def __init__(self, n):
        self.n = n


TOKENS = {n: Token(n) for n in ("a", "b")}

# ── how they are read and changed ──


def two(v):
    return v[0], v[1]


def assign_two(v, w, n):
    v[0], v[1] = w, n


def by_name(v):
    return v["w"], v["n"], *v


def assign_names(v, w, n):
    v["w"], v["n"] = w, n


def with_box(v):
    return v[0], v[1], *v[2]


def assign_box(v, w, n):
    v[2][:] = [w, n]


def tagged(cls, *content):
    """Makes an instance of a container class with attributes beside its content."""

    def make(w, n):
        v = cls(part(w, n) for part in content) if content else cls(w=w, n=n)
        v.w, v.n = w, n
        return v

    return make


def assign_tags(v, w, n):
    v.w, v.n = w, n


def tagged_namedtuple(w, n):
    v = Tagged(w, n, [w])
    v.note = n
    return v


def change_note(v, w, n):
    v.note = n
    v.box[0] = w


def defaults(w, n):
    v = Defaults(w=w)
    v.fallback = n
    return v


def change_set(v, w, n):
    v.clear()
    v.update([n, (n, "x")])


def tokens(v):
    """Of each key or element: its name, and whether it is the caller's own object."""
    return tuple(part for token in v for part in (token.n, token is TOKENS[token.n]))


def element_names(v):
    return tuple(sorted(element.text for element in v))


def proxy_and_dict(w, n):
    content = {"w": w, "n": n}
    return [content, types.MappingProxyType(content)]


def dict_views(w, n):
    content = {"w": w, "n": n}
    return [content, content.keys(), content.values()]


def ordered_moves(v, w, n):
    v["w"], v["n"] = w, n
    v.move_to_end("w")


def change_counter(v, w, n):
    v["w"], v["n"] = w, n


HOLDS = "Immutable, but the list inside can be changed."
BY_IDENTITY = "Compared by identity; inside, the elements are the caller's own, and adding one is an error."
no_arrays = {"traced": NO_ARRAYS}
fixed = {"traced": NO_ARRAYS, "in place": IMMUTABLE}

KINDS = [
    Kind("`list`", lambda w, n: [w, n], two, assign_two),
    Kind(
        "`list` that changes its length",
        lambda w, n: [w, n],
        lambda v: tuple(v),
        lambda v, w, n: v.__setitem__(slice(None), [n, w, n]),
    ),
    Kind("`dict`", lambda w, n: {"w": w, "n": n}, by_name, assign_names, note="Its order is part of the key."),
    Kind(
        "`dict` that changes its order",
        lambda w, n: {"w": w, "n": n},
        by_name,
        lambda v, w, n: (v.clear(), v.update(n=n, w=w))[1],
    ),
    Kind(
        "`dict` with keys of several types",
        lambda w, n: {1: w, "1": n, None: w, (1, "x"): n, 2.5: w, b"k": n, frozenset({1}): w},
        lambda v: (*v.values(), *v),
        lambda v, w, n: v.update({1: w, "1": n, None: w, (1, "x"): n, 2.5: w, b"k": n, frozenset({1}): w}),
    ),
    Kind(
        "`dict` whose key is the static",
        lambda w, n: {n: w},
        lambda v: (*v, *v.values()),
        lambda v, w, n: (v.clear(), v.update({n: w}))[1],
    ),
    Kind(
        "`dict` with a frozen dataclass as key",
        lambda w, n: {Name(n): w},
        lambda v: (*v.values(), *element_names(v)),
        lambda v, w, n: (v.clear(), v.update({Name(n): w}))[1],
    ),
    Kind(
        "`dict` with objects as keys",
        lambda w, n: {TOKENS[n]: w},
        lambda v: (*tokens(v), *v.values()),
        lambda v, w, n: (v.clear(), v.update({TOKENS[n]: w}))[1],
        statics=("a", "b"),
        inside=False,
        note=BY_IDENTITY,
    ),
    Kind(
        "`dict` beside an object that is its key",
        lambda w, n: [TOKENS["a"], {TOKENS["a"]: [w, n]}],
        lambda v: v[1][v[0]],
        lambda v, w, n: v[1][v[0]].__setitem__(slice(None), [w, n]),
    ),
    Kind("`typing.TypedDict`", lambda w, n: Config(w=w, n=n), by_name, assign_names),
    Kind("`tuple`", lambda w, n: (w, n, [w, n]), with_box, assign_box, identity=VALUE, note=HOLDS),
    Kind(
        "`tuple`, nothing mutable inside",
        lambda w, n: (w, (n, (w, n))),
        lambda v: (v[0], *v[1]),
        identity=VALUE,
        without={"in place": IMMUTABLE},
    ),
    Kind("`collections.namedtuple`", lambda w, n: Pair(w, n, [w, n]), with_box, assign_box, identity=VALUE, note=HOLDS),
    Kind("`typing.NamedTuple`", lambda w, n: Point(w, n, [w, n]), with_box, assign_box, identity=VALUE, note=HOLDS),
    Kind("`OrderedDict`", lambda w, n: OrderedDict(w=w, n=n), by_name, assign_names),
    Kind("`OrderedDict` that moves an item", lambda w, n: OrderedDict(w=w, n=n), by_name, ordered_moves),
    Kind(
        "`defaultdict`",
        lambda w, n: defaultdict(list, w=w, n=n),
        lambda v: (*by_name(v), v.default_factory),
        assign_names,
    ),
    Kind(
        "`defaultdict` that makes an item",
        lambda w, n: defaultdict(list, w=w, n=n),
        lambda v: (v["w"], v["n"], *v.get("new", ())),
        lambda v, w, n: (v.update(w=w, n=n), v["new"].append(w))[1],
    ),
    Kind("`Counter`", lambda w, n: Counter({"w": w, "n": n}), by_name, change_counter),
    Kind("`deque`", lambda w, n: deque([w, n]), two, assign_two),
    Kind(
        "`deque` with `maxlen`",
        lambda w, n: deque([w, n], 2),
        lambda v: (*v, v.maxlen),
        lambda v, w, n: (v.append(w), v.append(n))[1],
    ),
    Kind("`UserDict`", lambda w, n: UserDict(w=w, n=n), by_name, assign_names),
    Kind("`UserList`", lambda w, n: UserList([w, n]), two, assign_two),
    Kind(
        "`collections.ChainMap`",
        lambda w, n: collections.ChainMap({"w": w}, {"n": n}),
        lambda v: (v["w"], v["n"]),
        lambda v, w, n: (v.maps[0].update(w=w), v.maps[1].update(n=n))[1],
    ),
    Kind(
        "`types.MappingProxyType`",
        lambda w, n: types.MappingProxyType({"w": w, "n": n, "box": [w, n]}),
        lambda v: (v["w"], v["n"], *v["box"]),
        lambda v, w, n: v["box"].__setitem__(slice(None), [w, n]),
        identity=VALUE,
    ),
    Kind(
        "`types.MappingProxyType` beside its dict",
        proxy_and_dict,
        lambda v: (v[1]["w"], v[1]["n"], *v[1]),
        lambda v, w, n: v[0].update(w=w, n=n, m=n),
    ),
    Kind(
        "views of a `dict`",
        dict_views,
        lambda v: (*v[1], *v[2]),
        lambda v, w, n: v[0].update(w=w, n=n),
    ),
    Kind(
        "`set`",
        lambda w, n: {n, (n, "x")},
        lambda v: (set(v),),
        change_set,
        without=no_arrays,
    ),
    Kind(
        "`set` of frozen dataclasses",
        lambda w, n: {Name(n), Name("x")},
        element_names,
        lambda v, w, n: (v.clear(), v.update([Name(n), Name("x")]))[1],
        statics=("a", "b"),
        without=no_arrays,
    ),
    Kind(
        "`set` of objects",
        lambda w, n: {TOKENS[n]},
        tokens,
        lambda v, w, n: (v.clear(), v.add(TOKENS[n]))[1],
        statics=("a", "b"),
        inside=False,
        note=BY_IDENTITY,
        without=no_arrays,
    ),
    Kind("`frozenset`", lambda w, n: frozenset({n, "x"}), lambda v: (v,), identity=VALUE, without=fixed),
    Kind(
        "`frozenset` of tuples",
        lambda w, n: frozenset({(n, "x"), (n, n)}),
        lambda v: (v,),
        identity=VALUE,
        without=fixed,
    ),
    Kind(
        "`frozenset` of frozensets",
        lambda w, n: frozenset({frozenset({n}), frozenset()}),
        lambda v: (v,),
        identity=VALUE,
        without=fixed,
    ),
    Kind(
        "`frozenset` of frozen dataclasses",
        lambda w, n: frozenset({Name(n)}),
        element_names,
        identity=VALUE,
        without=fixed,
    ),
    Kind(
        "`frozenset` of objects",
        lambda w, n: frozenset({TOKENS[n]}),
        tokens,
        statics=("a", "b"),
        identity=VALUE,
        without=fixed,
        note=BY_IDENTITY,
    ),
    Kind(
        "`bytearray`",
        lambda w, n: bytearray(n),
        lambda v: (bytes(v),),
        lambda v, w, n: v.__setitem__(slice(None), n),
        statics=(b"a", b"bc", b""),
        without=no_arrays,
    ),
    Kind(
        "`array.array`",
        lambda w, n: array.array("d", [n, 1.0]),
        lambda v: (*v, v.typecode),
        lambda v, w, n: v.__setitem__(0, n),
        statics=(1.0, 0.0, -0.0),
        without=no_arrays,
    ),
]

SUBCLASSES = [
    Kind("`list` subclass", tagged(Stack, lambda w, n: w, lambda w, n: n), lambda v: (v.w, v.n, *v), assign_tags),
    Kind("`dict` subclass", tagged(Table), lambda v: (v.w, v.n, *by_name(v)), assign_tags),
    Kind(
        "`tuple` subclass",
        tagged(Row, lambda w, n: w, lambda w, n: n),
        lambda v: (v.w, v.n, *v),
        assign_tags,
        identity=VALUE,
        note="A tuple has no identity, but changes to its attributes are kept.",
    ),
    Kind(
        "namedtuple subclass",
        tagged_namedtuple,
        lambda v: (v.w, v.n, *v.box, v.note),
        change_note,
        identity=VALUE,
    ),
    Kind("`deque` subclass", tagged(Ring, lambda w, n: w, lambda w, n: n), lambda v: (v.w, v.n, *v), assign_tags),
    Kind("`OrderedDict` subclass", tagged(Ordered), lambda v: (v.w, v.n, *by_name(v)), assign_tags),
    Kind("`set` subclass", tagged(Names, lambda w, n: n), lambda v: (v.w, v.n, *v), assign_tags),
    Kind(
        "`frozenset` subclass",
        tagged(Fixed, lambda w, n: n),
        lambda v: (v.w, v.n, *v),
        assign_tags,
    ),
    Kind(
        "`bytearray` subclass",
        tagged(Letters, lambda w, n: 65),
        lambda v: (v.w, v.n, bytes(v)),
        assign_tags,
    ),
    Kind(
        "`dict` subclass with `__missing__`",
        defaults,
        lambda v: (v["w"], v["other"]),
        lambda v, w, n: (v.update(w=w), setattr(v, "fallback", n))[1],
    ),
    Kind(
        "`list` subclass whose methods refuse",
        lambda w, n: Strict((w, n)),
        lambda v: (list.__getitem__(v, 0), list.__getitem__(v, 1)),
        lambda v, w, n: (list.__setitem__(v, 0, w), list.__setitem__(v, 1, n))[1],
    ),
]
