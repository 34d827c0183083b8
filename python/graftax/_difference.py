# SPDX-License-Identifier: Apache-2.0
"""Where two structures differ, and how: `path: expected this, given that`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax.tree_util import GetAttrKey, SequenceKey, keystr

from . import _core
from ._errors import GraftaxError
from .packed import PackLayout

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_SHOWN = 80  # characters of a value
_NAMED = 8  # keys in a list of them
_SPELLED = 5_000_000  # entries of all key paths together: 40 MB


_IN_CELL = GetAttrKey("cell_contents")


def place_name(path: tuple[Any, ...], root_names: tuple[str, ...]) -> str:
    """The text of a path, as messages print it: a closure cell is what is in it."""
    root, rest = (0, path) if len(root_names) == 1 else (path[0], path[1:])
    return root_names[root] + keystr(tuple(k for k in rest if k != _IN_CELL))


class Difference(NamedTuple):
    """One place where two object graphs differ."""

    path: str
    expected: str
    given: str

    def __str__(self) -> str:
        return f"{self.path}: expected {self.expected}, given {self.given}"


class _Node:
    """One instruction of a GraphDef, with its children."""

    __slots__ = ("children", "cls", "op", "path", "value")

    def __init__(self, path: tuple[Any, ...], op: str, cls: type | None, value: Any) -> None:
        self.path, self.op, self.cls, self.value = path, op, cls, value
        self.children: list[_Node] = []


_NODE, _NUMBER = 4, 16  # `Op::node` and the flag of a traced Python number, in a GraphDef's state

# A place in the lockstep walk: the place above, and the key entry (or the number of the root) that leads here.
_Place = tuple["_Place | None", Any]


def differences(
    expected: _core.GraphDef, given: _core.GraphDef, names: Sequence[str] | None = None
) -> Iterator[Difference]:
    """Yields where `given` is not `expected`, in the order of the walk; nothing is yielded below such a place.

    Args:
        expected, given: the structures.
        names: one name a root; without it a single root is called `obj`.
    """
    comparison = _Comparison(expected, given, names)
    roots = itertools.zip_longest(comparison.left.roots, comparison.right.roots)
    for number, (one, other) in enumerate(roots):
        yield from comparison.walk(one, other, (None, number))


def describe(
    expected: _core.GraphDef, given: _core.GraphDef, names: Sequence[str] | None = None, limit: int = 4
) -> str:
    """At most `limit` differences as lines of text."""
    if too_deep(expected, given):
        return "  they are not equal; their nodes lie too deep for a list of key paths"
    found = list(itertools.islice(differences(expected, given, names), limit + 1))
    lines = [f"  {d}" for d in found[:limit]]
    if len(found) > limit:
        lines.append("  ... and more")
    if not lines:  # what no instruction shows
        lines.append("  an object that counts by identity, such as a sentinel, is another one than before")
    return "\n".join(lines)


def only_order(expected: _core.GraphDef, given: _core.GraphDef) -> bool:
    """Do they differ in nothing but the order of keys and attributes?"""
    if expected == given:
        return True
    if too_deep(expected, given):
        return False
    found = list(differences(expected, given))
    return bool(found) and all(d.expected.startswith("the order ") for d in found)


def too_deep(*graphdefs: _core.GraphDef) -> bool:
    """Do their nodes lie too deep for a list of all key paths?"""
    return max(map(_path_entries, graphdefs)) > _SPELLED


def _path_entries(graphdef: _core.GraphDef) -> int:
    """How long all key paths are together: the square of the depth, in a long chain of nodes."""
    ends: list[int] = []
    total = 0
    for pc, (op, _, _, end, *_) in enumerate(graphdef._state()[4]):
        while ends and ends[-1] <= pc:
            ends.pop()
        total += len(ends)
        if op == _NODE:
            ends.append(end)
    return total


class _Tree:
    """A GraphDef as nodes with children; `at` finds a node by its path."""

    def __init__(self, graphdef: _core.GraphDef) -> None:
        self.roots: list[_Node] = []
        self._at: dict[tuple[Any, ...], _Node] = {}
        above: list[_Node] = []
        for (path, op, cls, value), (_, flags, *_) in zip(graphdef.instructions(), graphdef._state()[4], strict=True):
            node = _Node(path, "number" if op == "leaf" and flags & _NUMBER else op, cls, value)
            many = bool(path) and isinstance(path[0], int)
            del above[len(path) - many :]
            (above[-1].children if above else self.roots).append(node)
            above.append(node)
            if op == "node":
                self._at[_identities(path)] = node

    def at(self, path: tuple[Any, ...]) -> _Node:
        return self._at[_identities(path)]


class _Comparison:
    def __init__(self, expected: _core.GraphDef, given: _core.GraphDef, names: Sequence[str] | None) -> None:
        self.left, self.right = _Tree(expected), _Tree(given)
        self.names = names
        self.partner: dict[int, _Node] = {}  # a node of `left` -> the one of `right` that was met with it
        # A leaf's index -> the index and the place that it was met with first: a donated array has an identity.
        self.leaf: tuple[dict[int, tuple[int, _Place]], dict[int, tuple[int, _Place]]] = ({}, {})

    def walk(self, one: _Node | None, other: _Node | None, place: _Place) -> Iterator[Difference]:
        todo = [(one, other, place)]
        while todo:
            e, g, place = todo.pop()
            e, g = self._spelled_out(self.left, e), self._spelled_out(self.right, g)
            if e is None or g is None:
                yield Difference(self.text(place), self._what(self.left, e), self._what(self.right, g))
            elif "ref" in (e.op, g.op):
                yield from self._sharing(e, g, place)
            elif e.op != g.op or e.cls is not g.cls:
                yield Difference(self.text(place), *_apart(self._what(self.left, e), self._what(self.right, g), e, g))
            elif e.op == "leaf":
                yield from self._same_array(e, g, place)
            elif e.op == "static":
                if not _same_value(e.value, g.value):
                    yield Difference(self.text(place), *_values(e.value, g.value))
            elif e.op == "node":
                self.partner[id(e)] = g
                yield from self._content(e, g, place)
                todo += reversed([(a, b, (place, (a or b).path[-1])) for a, b in _pairs(e, g)])  # type: ignore[union-attr]

    def _spelled_out(self, tree: _Tree, node: _Node | None) -> _Node | None:
        return tree.at(node.value) if node is not None and node.op == "same" else node

    def _sharing(self, e: _Node, g: _Node, place: _Place) -> Iterator[Difference]:
        here = self.text(place)
        if e.op == g.op:
            first = self.left.at(e.value)
            met = self.partner.get(id(first))
            if met is not None and met is not self.right.at(g.value):
                yield Difference(
                    here, f"the object at {self._of(first.path)}", f"the object at {self._of(tuple(g.value))}"
                )
        elif e.op == "ref":
            two = "two objects" if g.op == "node" else f"{self._what(self.right, g)} for the second"
            yield Difference(f"{self._of(e.value)} and {here}", "one object", two)
        else:
            two = "two objects" if e.op == "node" else f"{self._what(self.left, e)} for the second"
            yield Difference(f"{self._of(g.value)} and {here}", two, "one object")

    def _same_array(self, e: _Node, g: _Node, place: _Place) -> Iterator[Difference]:
        one, other = (
            self.leaf[0].setdefault(e.value, (g.value, place)),
            self.leaf[1].setdefault(g.value, (e.value, place)),
        )
        if one[0] != g.value:
            yield Difference(f"{self.text(one[1])} and {self.text(place)}", "one array", "two arrays")
        elif other[0] != e.value:
            yield Difference(f"{self.text(other[1])} and {self.text(place)}", "two arrays", "one array")

    def _content(self, e: _Node, g: _Node, place: _Place) -> Iterator[Difference]:
        """What a node holds beside its children, and the order of its keys."""
        if isinstance(e.value, list) and isinstance(g.value, list):  # the elements of a set
            gone = [x for x in e.value if not any(_same_value(x, y) for y in g.value)]
            new = [y for y in g.value if not any(_same_value(x, y) for x in e.value)]
            if gone or new:
                yield Difference(self.text(place), _with(gone), _with(new))
        elif isinstance(e.value, bytes) and e.value != g.value:
            yield Difference(self.text(place), *_values(e.value, g.value))
        elif e.cls is not None and hasattr(e.cls, "maxlen") and e.value != g.value:
            yield Difference(self.text(place), f"maxlen={e.value}", f"maxlen={g.value}")
        pairs = _pairs(e, g)
        if all(a and b for a, b in pairs) and [id(b) for _, b in pairs] != [id(b) for b in g.children]:
            orders = [_listed([_key(c.path[-1]) for c in node.children]) for node in (e, g)]
            yield Difference(self.text(place), f"the order {orders[0]}", f"the order {orders[1]}")

    def _what(self, tree: _Tree, node: _Node | None) -> str:
        if node is None:
            return "nothing"
        if node.op == "leaf":
            return "an array"
        if node.op == "number":
            return "a traced number"
        if node.op == "static":
            return show(node.value)
        if node.op == "ref":
            return f"the object at {self._of(node.value)}"
        return node.cls.__qualname__ if node.cls is not None else "None"

    def _of(self, path: tuple[Any, ...]) -> str:
        many = bool(path) and isinstance(path[0], int)
        return _text(path[0] if many else 0, path[many:], self.names)

    def text(self, place: _Place) -> str:
        entries: list[Any] = []
        at: _Place | None = place
        while at is not None:
            entries.append(at[1])
            at = at[0]
        return _text(entries[-1], tuple(reversed(entries[:-1])), self.names)


def _text(root: int, path: tuple[Any, ...], names: Sequence[str] | None) -> str:
    name = names[root] if names is not None and root < len(names) else "obj"
    if path and isinstance(path[0], GetAttrKey) and path[0].name == "cell_contents":
        path = path[1:]  # a captured variable goes by its own name
    return name + keystr(path)


def _identities(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """A path as a key of a dict: keys count by identity, since no user's `__hash__` is to run, but names by value."""
    return tuple(k if isinstance(k, int) else (type(k), *_identity(_key(k))) for k in path)


def _identity(key: Any) -> tuple[Any, Any]:
    return (type(key), key) if type(key) in (int, str) else (None, id(key))


def _key(entry: Any) -> Any:
    if isinstance(entry, SequenceKey):
        return entry.idx
    return entry.name if isinstance(entry, GetAttrKey) else entry.key


def _pairs(e: _Node, g: _Node) -> list[tuple[_Node | None, _Node | None]]:
    """The children of two nodes, matched by key: first those of `e`, then what only `g` has."""
    plain: dict[Any, _Node] = {}
    rest: list[_Node] = []
    for child in g.children:
        token = _token(child.path[-1])
        if token is None:
            rest.append(child)
        else:
            plain[token] = child
    out: list[tuple[_Node | None, _Node | None]] = []
    for child in e.children:
        token = _token(child.path[-1])
        if token is not None:
            out.append((child, plain.pop(token, None)))
            continue
        found = next((c for c in rest if _same_value(_key(child.path[-1]), _key(c.path[-1]))), None)
        if found is not None:
            rest.remove(found)
        out.append((child, found))
    left = {id(c) for c in (*plain.values(), *rest)}
    return [*out, *((None, c) for c in g.children if id(c) in left)]


def _token(entry: Any) -> tuple[Any, ...] | None:
    """What tells one key from another where the key is a plain value; None for other keys."""
    key = _key(entry)
    return (type(entry), type(key), repr(key)) if type(key) in _PLAIN else None


def _same_value(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) in _PLAIN or type(b) in _PLAIN:
        return type(a) is type(b) and repr(a) == repr(b)
    try:  # as the engine compares them, as keys; arrays that count by identity are no keys
        return _core.flatten({(a,): None})[1] == _core.flatten({(b,): None})[1]
    except (GraftaxError, TypeError):
        return _core.flatten(a)[1] == _core.flatten(b)[1] and not hasattr(a, "dtype")


def _values(expected: Any, given: Any) -> tuple[str, str]:
    if isinstance(expected, PackLayout) and isinstance(given, PackLayout):
        return _packed(expected, given)
    one, other = show(expected), show(given)
    if one == other or type(expected) is not type(given):
        return f"{one} ({type(expected).__qualname__})", f"{other} ({type(given).__qualname__})"
    return one, other


def _packed(expected: PackLayout, given: PackLayout) -> tuple[str, str]:
    """What is inside of two handles, where that differs first."""
    if not too_deep(expected.graphdef, given.graphdef):
        for d in differences(expected.graphdef, given.graphdef, ("",)):
            return f"{d.expected} inside at {d.path}", d.given
        shapes = given.shapes
        for path, shape in expected.shapes.items():
            if shapes.get(path, shape) != shape:
                return f"{shape} inside at {keystr(path)}", shapes[path]
    return "packed state", "packed state that lies in its buffers in another way"


def _apart(one: str, other: str, e: _Node, g: _Node) -> tuple[str, str]:
    """The same two texts, told apart where two classes share a name."""
    if one == other and e.cls is not None and g.cls is not None:
        return f"{e.cls.__module__}.{one}", f"another class named {g.cls.__module__}.{other}"
    return one, other


def show(value: Any) -> str:
    """The repr of a value, cut short, whatever its class does."""
    try:
        text = repr(value)
    except Exception:
        text = object.__repr__(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _with(elements: Sequence[Any]) -> str:
    return f"a set with {_listed(elements)}" if elements else "a set without"


def _listed(values: Sequence[Any]) -> str:
    return ", ".join([*map(show, values[:_NAMED]), *(["..."] if len(values) > _NAMED else [])])
