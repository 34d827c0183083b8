# SPDX-License-Identifier: Apache-2.0
"""Where two structures differ, and how: one walk, and what it says of two GraphDefs."""

from __future__ import annotations

import itertools
import os
import types
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from graftax import _core
from graftax._base.errors import GraftaxError
from graftax._base.handles import HandleLayout
from graftax._base.key_path import keystr
from graftax._graph.structure import Op, Row, Structure, place_name, plain_key
from graftax._jax.compat import is_jaxpr

A = TypeVar("A")
B = TypeVar("B")
D = TypeVar("D")
P = TypeVar("P")

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_NUMBERS = {bool, int, float, complex}
_KINDS = {"number": {int, float, complex}, "bool": {bool}, "text": {str, bytes}}
_SHOWN = 80  # characters of a value
_NAMED = 8  # keys in a list of them
_LONG = 1000  # characters of a path that is not cut


class Difference(NamedTuple, Generic[P]):
    """One place where two graphs differ."""

    path: P  # a text where roots have names, which may be of two places
    one: str  # what the first has there
    other: str
    kind: str = "content"  # value, content, type, added, removed, order, sharing: what advice may ask

    def __str__(self) -> str:
        return f"{self.path!r}: {self.one} and {self.other}"

    def line(self) -> str:
        """As a message says it: `one` is what was expected."""
        path = str(self.path)
        path = path if len(path) <= _LONG else f"{path[: _LONG // 4]} ... {path[-_LONG // 4 :]}"
        return f"{path}: expected {self.one}, given {self.other}"


# The way to the node above, and the key entry from there. A tuple for each place would be as long as the place is deep.
Way = tuple["Way", Any] | None


def spelled(way: Way) -> tuple[Any, ...]:
    """The key entries of a way."""
    entries: list[Any] = []
    while way is not None:
        way, entry = way
        entries.append(entry)
    return tuple(reversed(entries))


def lockstep(
    meet: Callable[[A, B, Way], Generator[D, None, Sequence[tuple[A, B, Any]]]], one: A, other: B, way: Way = None
) -> Iterator[D]:
    """Walks two structures side by side, in the order of the first, and yields what is found.

    Args:
        meet: yields what it finds of two nodes, and returns the pairs below to go on with, each with its key entry.
        one, other: the roots.
        way: where they stand.
    """
    stack = [(one, other, way)]
    while stack:
        one, other, way = stack.pop()
        below = yield from meet(one, other, way)
        stack.extend((a, b, (way, entry)) for a, b, entry in reversed(below))


def differences(
    expected: _core.GraphDef, given: _core.GraphDef, names: Sequence[str] | None = None
) -> Iterator[Difference[str]]:
    """Yields where `given` is not `expected`, in the order of the walk; nothing is yielded below such a place.

    Args:
        expected, given: the structures.
        names: one name a root; without it a root is called `obj`.
    """
    comparison = Comparison(expected, given, names)
    roots = itertools.zip_longest(comparison.left.roots, comparison.right.roots)
    for number, (one, other) in enumerate(roots):
        yield from lockstep(comparison.meet, one, other, (None, number))


def differences_by_name(
    expected: _core.GraphDef, given: _core.GraphDef, names: Sequence[str], given_names: Sequence[str]
) -> tuple[list[Difference[str]], list[tuple[int, int, str]]]:
    """What differs between structures whose roots have names, and need not be the same roots.

    Returns:
        (the differences, for each array that both have: its leaf in the one and in the other, and its place).
    """
    all_names = [*names, *(name for name in given_names if name not in names)]
    comparison = Comparison(expected, given, all_names)
    left = dict(zip(names, comparison.left.roots, strict=False))
    right = dict(zip(given_names, comparison.right.roots, strict=False))
    found: list[Difference[str]] = []
    for number, name in enumerate(all_names):
        found += lockstep(comparison.meet, left.get(name), right.get(name), (None, number))
    return found, [(one, other, comparison.text(way)) for one, (other, way) in comparison.leaf[0].items()]


def differences_text(
    expected: _core.GraphDef,
    given: _core.GraphDef,
    names: Sequence[str] | None = None,
    limit: int = 4,
    orders: bool = True,
    known: Collection[str] = (),
) -> str:
    """At most `limit` differences as lines of text, but for those of paths that are `known`.

    Without `orders` none in the order of keys, where it is free.
    """
    told = (d for d in differences(expected, given, names) if d.path not in known)
    counted = (d for d in told if orders or d.kind != "order")
    found = list(itertools.islice(counted, limit + 1))
    lines = [f"  {d.line()}" for d in found[:limit]]
    if len(found) > limit:
        lines.append("  ... and more")
    if not lines:  # they differ in something that has no row
        lines.append("  an object that counts by identity, such as a sentinel, is another one than before")
    return "\n".join(lines)


def like_but_for_jaxprs(expected: _core.GraphDef, given: _core.GraphDef) -> bool:
    """Do they differ in nothing but Jaxprs, of which each trace of one function makes another?"""
    if expected == given:
        return True

    def jaxprs(graphdef: _core.GraphDef) -> set[str]:
        structure = Structure(graphdef)
        return {place_name(structure.place(row), ("",)) for row, value in structure.statics() if is_jaxpr(value)}

    places = jaxprs(expected) & jaxprs(given)
    return expected.num_leaves == given.num_leaves and {d.path for d in differences(expected, given, ("",))} <= places


def only_order(expected: _core.GraphDef, given: _core.GraphDef) -> bool:
    """Do they differ in nothing but the order of keys and attributes?"""
    if expected == given:
        return True
    first = None
    for first in differences(expected, given):
        if not first.one.startswith("the order "):
            return False
    return first is not None


class _Gone:
    """Stands for a static that is gone: a weak structure does not keep it."""

    def __repr__(self) -> str:
        return "a value that is gone"


_GONE = _Gone()


def _value(row: Row) -> Any:
    try:
        return row.value
    except ReferenceError:
        return _GONE


_Pairs = list[tuple[Row | None, Row | None, Any]]


class Comparison:
    """Two GraphDefs side by side."""

    def __init__(self, expected: _core.GraphDef, given: _core.GraphDef, names: Sequence[str] | None) -> None:
        self.left, self.right = Structure(expected), Structure(given)
        roots = max(len(self.left.roots), len(self.right.roots))
        self.names = (*(names or ()), *["obj"] * roots)
        self.partner: dict[int, int] = {}  # a node of `left` -> the one of `right` that was met with it
        # A leaf -> the other one and the place that it was met with first: a donated array has an identity.
        self.leaf: tuple[dict[int, tuple[int, Way]], dict[int, tuple[int, Way]]] = ({}, {})

    def meet(self, e: Row | None, g: Row | None, way: Way) -> Generator[Difference[str], None, _Pairs]:
        e, g = _spelled_out(self.left, e), _spelled_out(self.right, g)
        if e is None or g is None:
            yield self._apart(e, g, way)
        elif Op.ref in (e.op, g.op):
            yield from self._sharing(e, g, way)
        elif e.op is not g.op or e.type is not g.type or e.is_number is not g.is_number:
            yield self._apart(e, g, way)
        elif e.op is Op.leaf and not e.is_number:
            yield from self._same_array(e.leaf, g.leaf, way)
        elif e.op is Op.static:
            one, other = _value(e), _value(g)
            if not _same_value(one, other):
                yield Difference(self.text(way), *_values(one, other), kind=_kind(one, other))
        elif e.op is Op.node:
            self.partner[e.number] = g.number
            pairs = _pairs(list(self.left.children(e)), list(self.right.children(g)))
            yield from self._content(e, g, pairs, way)
            return pairs
        return []

    def _apart(self, e: Row | None, g: Row | None, way: Way) -> Difference[str]:
        """The two as texts, told apart where two classes share a name."""
        one, other = self._what(self.left, e), self._what(self.right, g)
        if e is not None and g is not None and one == other and e.type is not None and g.type is not None:
            one, other = f"{e.type.__module__}.{one}", f"another class named {g.type.__module__}.{other}"
            return Difference(self.text(way), one, other, "class")
        kind = "added" if e is None else "removed" if g is None else "type"
        return Difference(self.text(way), one, other, kind)

    def _sharing(self, e: Row, g: Row, way: Way) -> Iterator[Difference[str]]:
        here = self.text(way)
        if e.op is g.op:
            if self.partner.get(e.target, g.target) != g.target:
                first, second = self._of(self.left, e), self._of(self.right, g)
                yield Difference(here, f"the object at {first}", f"the object at {second}", "sharing")
        elif e.op is Op.ref:
            two = "two objects" if g.op is Op.node else f"{self._what(self.right, g)} for the second"
            yield Difference(f"{self._of(self.left, e)} and {here}", "one object", two, "sharing")
        else:
            two = "two objects" if e.op is Op.node else f"{self._what(self.left, e)} for the second"
            yield Difference(f"{self._of(self.right, g)} and {here}", two, "one object", "sharing")

    def _same_array(self, e: int, g: int, way: Way) -> Iterator[Difference[str]]:
        one, other = self.leaf[0].setdefault(e, (g, way)), self.leaf[1].setdefault(g, (e, way))
        if one[0] != g:
            yield Difference(f"{self.text(one[1])} and {self.text(way)}", "one array", "two arrays", "sharing")
        elif other[0] != e:
            yield Difference(f"{self.text(other[1])} and {self.text(way)}", "two arrays", "one array", "sharing")

    def _content(self, e: Row, g: Row, pairs: _Pairs, way: Way) -> Iterator[Difference[str]]:
        """What a node holds beside its children, and the order of its keys."""
        one, other = _value(e), _value(g)
        if isinstance(one, list) and isinstance(other, list):  # the elements of a set
            gone = [x for x in one if not any(_same_value(x, y) for y in other)]
            new = [y for y in other if not any(_same_value(x, y) for x in one)]
            if gone or new:
                yield Difference(self.text(way), _with(gone), _with(new))
        elif isinstance(one, bytes) and one != other:
            yield Difference(self.text(way), *_values(one, other))
        elif hasattr(e.type, "maxlen") and one != other:
            yield Difference(self.text(way), f"maxlen={one}", f"maxlen={other}")
        elif isinstance(one, types.FunctionType) and isinstance(other, types.FunctionType):
            if one.__code__ != other.__code__:
                yield Difference(self.text(way), function_text(one), function_text(other), "code")
        elif e.type is np.ndarray and one != other:  # of one that holds texts
            yield Difference(self.text(way), _texts(one), _texts(other))
        numbers = [b.number for a, b, _ in pairs if a and b]
        if len(numbers) == len(pairs) and numbers != sorted(numbers):
            orders = [
                _listed([plain_key(c.key_entry) for c in s.children(n)]) for s, n in ((self.left, e), (self.right, g))
            ]
            yield Difference(self.text(way), f"the order {orders[0]}", f"the order {orders[1]}", "order")

    def _what(self, structure: Structure, row: Row | None) -> str:
        if row is None:
            return "nothing"
        if row.op is Op.leaf:
            return "a traced number" if row.is_number else "an array"
        if row.op is Op.static:
            return short_text(_value(row))
        if row.op is Op.ref:
            return f"the object at {self._of(structure, row)}"
        return row.type.__qualname__ if row.type is not None else "None"

    def _of(self, structure: Structure, row: Row) -> str:
        return place_name(structure.place(structure.target(row)), self.names)

    def text(self, way: Way) -> str:
        root, *path = spelled(way)
        return place_name((root, tuple(path)), self.names)


def _spelled_out(structure: Structure, row: Row | None) -> Row | None:
    return structure.target(row) if row is not None and row.op is Op.same else row


def _pairs(e: Sequence[Row], g: Sequence[Row]) -> _Pairs:
    """The children of two nodes, matched by key: first those of `e`, then what only `g` has."""
    plain: dict[Any, Row] = {}
    rest: list[Row] = []
    for child in g:
        token = _token(child.key_entry)
        if token is None:
            rest.append(child)
        else:
            plain[token] = child
    out: _Pairs = []
    for child in e:
        token = _token(child.key_entry)
        if token is not None:
            out.append((child, plain.pop(token, None), child.key_entry))
            continue
        found = next((c for c in rest if _same_value(plain_key(child.key_entry), plain_key(c.key_entry))), None)
        if found is not None:
            rest.remove(found)
        out.append((child, found, child.key_entry))
    left = {c.number for c in (*plain.values(), *rest)}
    return [*out, *((None, c, c.key_entry) for c in g if c.number in left)]


def _token(entry: Any) -> tuple[Any, ...] | None:
    """A hashable stand-in for a key that is a plain value; None for other keys."""
    key = plain_key(entry)
    return (type(entry), type(key), repr(key)) if type(key) in _PLAIN else None


def _same_value(a: Any, b: Any) -> bool:
    if a is b or a is _GONE or b is _GONE:
        return a is b
    if type(a) in _PLAIN or type(b) in _PLAIN:
        return type(a) is type(b) and repr(a) == repr(b)
    try:  # as the engine compares them, as keys; arrays that count by identity are no keys
        return _core.flatten({(a,): None})[1] == _core.flatten({(b,): None})[1]
    except (GraftaxError, TypeError):
        return _core.flatten(a)[1] == _core.flatten(b)[1] and not hasattr(a, "dtype")


def _kind(expected: Any, given: Any) -> str:
    """What advice asks of two static values that differ."""
    both = {type(expected), type(given)}
    if _Gone in both:
        return "identity"  # only what counts by it is held weakly
    if len(both) > 1:
        alike = type(expected).__mro__[-2] is type(given).__mro__[-2]  # two dtypes, two paths
        return "number type" if both <= _NUMBERS else "value" if alike else "type"
    if both == {types.FunctionType}:
        return "code"
    for kind, those in _KINDS.items():
        if both <= those:
            return kind
    return "handle" if both == {HandleLayout} else "value" if _is_data(given) else "identity"


def _is_data(value: Any) -> bool:
    """Does it compare by value, not by identity?"""
    return type(value).__eq__ is not object.__eq__ and not isinstance(value, type)


def _values(expected: Any, given: Any) -> tuple[str, str]:
    if isinstance(expected, types.FunctionType) and isinstance(given, types.FunctionType):
        return function_text(expected), function_text(given)
    if isinstance(expected, HandleLayout) and isinstance(given, HandleLayout):
        return _packed(expected, given)
    one, other = short_text(expected), short_text(given)
    if expected is not _GONE and (one == other or type(expected) is not type(given)):
        return f"{one} ({type(expected).__qualname__})", f"{other} ({type(given).__qualname__})"
    return one, other


def _packed(expected: HandleLayout, given: HandleLayout) -> tuple[str, str]:
    """The first difference of what two handles hold."""
    for d in differences(expected.graphdef, given.graphdef, ("",)):
        return f"{d.one} inside at {d.path}", d.other
    shapes = given.shapes
    for path, shape in expected.shapes.items():
        if shapes.get(path, shape) != shape:
            return f"{shape} inside at {keystr(path)}", shapes[path]
    return "packed state", "packed state that lies in its buffers in another way"


def short_text(value: Any) -> str:
    """The repr of a value, cut short, whatever its class does."""
    try:
        text = repr(_head(value))
    except Exception:
        text = object.__repr__(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _head(value: Any) -> Any:
    """So much of a container or text as is shown: the repr of a long one costs more than the call that it explains."""
    cls: Any = type(value)
    if cls not in (str, bytes, tuple, list, dict, set, frozenset) or len(value) <= _SHOWN:
        return value
    if cls is dict:
        return dict(itertools.islice(value.items(), _SHOWN))
    return cls(itertools.islice(value, _SHOWN)) if cls in (set, frozenset) else value[:_SHOWN]


def function_text(function: types.FunctionType) -> str:
    """A function by its name and its line, which tells two functions of one name apart."""
    code = function.__code__
    return f"function {function.__qualname__} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


def _texts(payload: Any) -> str:
    dtype, shape, _ = payload
    return f"an array of {dtype}, shape {shape}"


def _with(elements: Sequence[Any]) -> str:
    return f"a set with {_listed(elements)}" if elements else "a set without"


def _listed(values: Sequence[Any]) -> str:
    return ", ".join([*map(short_text, values[:_NAMED]), *(["..."] if len(values) > _NAMED else [])])
