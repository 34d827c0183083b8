# SPDX-License-Identifier: Apache-2.0
"""Key paths: tuples of JAX's own key entries, that print, compare and hash."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from graftax import _core
from graftax._base.errors import ConcurrentChangeError, StructureError, some, type_name
from graftax._base.key_path import KeyPath, entry_text, is_entry, keystr
from graftax._graph.patterns import NAME, QUOTED, Entered, Pattern, Positions, literal, unquoted
from graftax._graph.structure import Chain, is_unspoken, walk
from graftax._graph.types.describe import static_classes
from graftax._jax.compat import one_level_with_keys

NOT_MUTABLE = (
    "{paths} cannot be written to: every object from the root (a {cls}) down to it is immutable. "
    "graftax.at(obj)[path].set(value) returns a copy with the new value."
)
INSIDE_ANOTHER = (
    "{path!r} lies in {other!r}, which is replaced as well: the one value would be lost. Set the two one after the "
    "other, or make the pattern mean one of them."
)
CHANGED_SINCE = (
    "{cls} changed while it was read, in another thread or in a function that was given a part of the graph."
)

__all__ = ["DictKey", "FlattenedIndexKey", "GetAttrKey", "Path", "Ref", "SequenceKey"]


class Path(KeyPath):
    """A place in an object graph: a sequence of `SequenceKey`, `DictKey`, `GetAttrKey` and `FlattenedIndexKey`.

    A path that was made from another one keeps only what was added. So the paths of all places of a graph take what
    the graph takes, however deep it is. `tuple(path)` is the key path as JAX has it.

    Example:
        >>> from jax.tree_util import DictKey, GetAttrKey, SequenceKey
        >>> str(graftax.Path([DictKey("a"), SequenceKey(0), GetAttrKey("w")]))
        '[a][0].w'
    """

    __slots__ = ()

    def __str__(self) -> str:
        return "".join(_entry_text(entry) for entry in self if not is_unspoken(entry))

    def __repr__(self) -> str:
        return f"obj{self}"

    @staticmethod
    def parse(text: str) -> Path:
        """The path that a text means: what `str` and `repr` of a path print, `layers[0].w`, `['a'][1]`.

        Of an array in a Variable of Flax NNX they print the path of the Variable.

        A whole number in brackets is an index, or the key of a dict that has it; anything else is a key, and quotes
        around it may be left out. `obj` in front, which `repr` prints, is left out.

        Raises:
            ValueError: where the text is no path.

        Example:
            >>> Path.parse("layers[0].w") == Path([GetAttrKey("layers"), SequenceKey(0), GetAttrKey("w")])
            True
        """
        return _parsed(text, without_root(text))

    def get(self, obj: Any) -> Any:
        """What stands at this place of an object graph.

        Raises:
            StructureError: where there is no such place; says how far the path leads.
        """
        for depth, wanted in enumerate(self):
            obj = self._step(obj, wanted, depth)
        return obj

    def set(self, obj: Any, value: Any) -> None:
        """Puts a value into this place of an object graph, in place.

        Immutable objects on the way (tuples, frozen modules) are made anew inside the mutable object that holds them.

        Raises:
            StructureError: where there is no such place.
            TypeError: where no mutable object holds it. Use `graftax.at(obj)[path].set(value)`.
        """
        graph = Graph(obj)
        graph.write({graph.number(self): value})

    def matches(self, pattern: str) -> bool:
        """Does a pattern mean this path? `*` stands for one name, key or index, `**` for any number of steps.

        Example:
            >>> Path.parse("layers[0].w").matches("layers[*].w")
            True
        """
        return Pattern(without_root(pattern)).matches(self)

    def _step(self, obj: Any, wanted: Any, depth: int) -> Any:
        if type(obj) is dict and isinstance(wanted, DictKey) and type(wanted.key) is str and wanted.key in obj:
            return obj[wanted.key]
        if type(obj) in (list, tuple) and isinstance(wanted, SequenceKey) and 0 <= wanted.idx < len(obj):
            return obj[wanted.idx]
        child = _chosen(wanted, open_node(obj), obj)
        if child is None:
            raise StructureError(no_such_place(self, depth, obj))
        return child[1]


static_classes.add(Path)

# A key that reads as nothing else without its quotes.
_BARE = re.compile(r"(?!(?:None|True|False)$)[^\W\d][^\[\]'\"*\\\n]*")


def _entry_text(entry: Any) -> str:
    if not isinstance(entry, DictKey):
        return entry_text(entry)
    bare = not isinstance(entry.key, str) or _BARE.fullmatch(entry.key)
    return f"[{entry.key if bare else repr(entry.key)}]"


_ENTRY = re.compile(
    rf"""\.(?P<name>{NAME})|(?P<first>[^.\[\]]+)|\[<flat\ index\ (?P<flat>\d+)>\]|\[(?P<index>\d+)\]
    |\[(?P<quoted>{QUOTED})\]|\[(?P<key>(?!['"])[^\[\]]*)\]""",
    re.VERBOSE,
)


def without_root(text: str) -> str:
    """Without the `obj` with which the `repr` of a path begins."""
    return text[3:] if re.match(r"obj(?=$|[.\[])", text) else text


def _parsed(text: str, rest: str) -> Path:
    key_entries: list[Any] = []
    at = 0
    while at < len(rest):
        found = _ENTRY.match(rest, at)
        entry = None if found is None or (at > 0 and found["first"] is not None) else _entry(found)
        if found is None or entry is None:
            raise ValueError(f"{text!r} is no path: it makes no sense from {rest[at:]!r} on. Write layers[0].w")
        key_entries.append(entry)
        at = found.end()
    return Path(key_entries)


def _entry(found: re.Match[str]) -> Any:
    if found["flat"] is not None:
        return FlattenedIndexKey(int(found["flat"]))
    if found["index"] is not None:
        return SequenceKey(int(found["index"]))
    if found["quoted"] is not None:
        key = unquoted(found["quoted"])
        return None if key is None else DictKey(key)
    if found["key"] is not None:
        return DictKey(_literal(found["key"]))
    return GetAttrKey(found["name"] if found["name"] is not None else found["first"])


def _literal(text: str) -> Any:
    """A key as it prints without quotes: None, -1, 2.5, (1, 'x'); or the text."""
    try:
        value = literal(text)
        hash(value)
    except (ValueError, TypeError):
        return text
    return value


def open_node(obj: Any) -> list[tuple[Any, Any]]:
    """(key entry, child) one level below a node: a class registered with JAX by the names that it gave JAX."""
    children = _core.children_with_keys(obj)
    flat = [i for i, (entry, _) in enumerate(children) if isinstance(entry, FlattenedIndexKey)]
    opened = one_level_with_keys(obj) if flat and one_level_with_keys is not None else None
    pairs = [] if opened is None else list(opened[0])
    if len(pairs) == len(flat):
        for i, (entry, _) in zip(flat, pairs, strict=True):
            children[i] = (entry, children[i][1])
    return children


def _chosen(wanted: Any, children: list[tuple[Any, Any]], obj: Any) -> tuple[Any, Any] | None:
    """The child of `obj` that an entry of a path means."""
    for fits in (is_entry, same_entry):
        for child in children:
            if fits(wanted, child[0]):
                return child
    if isinstance(wanted, SequenceKey) and isinstance(obj, tuple) and wanted.idx < len(cast("tuple[Any, ...]", obj)):
        return children[wanted.idx]  # the number of an item of a named tuple
    if isinstance(wanted, FlattenedIndexKey):  # the number in the place of a name
        items = [c for c in children if not (isinstance(c[0], GetAttrKey) and c[0].name == "aux_data")]
        return items[wanted.key] if wanted.key < len(items) and len(items) < len(children) else None
    return None


def same_entry(wanted: Any, entry: Any) -> bool:
    """Can one key entry mean the other? In a text a number is an index or a key, and a name an attribute or a key."""
    if wanted == entry:
        return True
    if isinstance(wanted, SequenceKey) and isinstance(entry, (DictKey, FlattenedIndexKey)):
        return type(entry.key) is int and entry.key == wanted.idx
    if isinstance(wanted, GetAttrKey) and isinstance(entry, DictKey):
        return entry.key == wanted.name
    if isinstance(wanted, DictKey) and isinstance(entry, DictKey):
        return isinstance(wanted.key, str) != isinstance(entry.key, str) and str(entry.key) == str(wanted.key)
    return False


_NAMES = 500  # names that a message looks through for one that is close


def no_such_place(path: Sequence[Any], depth: int, obj: Any) -> str:
    """Says how far a path leads, and what is there instead."""
    texts = [keystr((entry,)) for entry, _ in open_node(obj)[:_NAMES]]
    close = difflib.get_close_matches(keystr((path[depth],)), texts, n=3) or texts[:6]
    name = type_name(obj)
    here = f"the {name} at {keystr(tuple(path[:depth]))}" if depth else f"this {name}"
    has = f"It has {some(close, total=len(texts))}." if close else "It has nothing below."
    return f"there is no {keystr(tuple(path))}: {here} has no {keystr((path[depth],))}. {has}"


class Graph:
    """An object graph as rows, which have numbers: nodes, values, and references to nodes met before.

    Args:
        obj: the root.
    """

    def __init__(self, obj: Any) -> None:
        self.core = _core.GraphEditor(obj)
        self._children: dict[int, list[int]] | None = None
        self._entries: dict[int, list[tuple[Any, int]]] = {}
        self._entry: dict[int, Any] = {}
        self._paths: dict[int, Path] = {0: Path()}

    @functools.cached_property
    def rows(self) -> list[GraphRow]:
        return self.core.rows(GraphRow)

    def path(self, number: int) -> Path:
        """The path of a row."""
        todo: list[int] = []
        while number not in self._paths:
            todo.append(number)
            number = self.rows[number].parent
        path = self._paths[number]
        for number in reversed(todo):
            if number not in self._entry:
                self.key_entries(self.rows[number].parent)
            path = self._paths[number] = path + (self._entry[number],)
        return path

    def children(self, number: int) -> list[int]:
        """The numbers of the rows one level below a node."""
        if self._children is None:
            self._children = {}
            for child, row in enumerate(self.rows):
                self._children.setdefault(row.parent, []).append(child)
        return self._children.get(number, [])

    def key_entries(self, number: int) -> list[tuple[Any, int]]:
        """(key entry, number) of the rows one level below a node."""
        known = self._entries.get(number)
        if known is None:
            below = self.children(number)
            opened = open_node(self.rows[number].value) if below else []
            if len(opened) != len(below):
                raise ConcurrentChangeError(CHANGED_SINCE.format(cls=type(self.rows[number].value).__qualname__))
            known = [(entry, child) for (entry, _), child in zip(opened, below, strict=True)]
            self._entries[number] = known
            self._entry.update((child, entry) for entry, child in known)
        return known

    def number(self, path: Sequence[Any]) -> int:
        """The number of the row that a path leads to, also through references.

        Raises:
            StructureError: where there is no such place; says how far the path leads.
        """
        at = 0
        for depth, wanted in enumerate(path):
            node = self.rows[at].target
            step = _chosen(wanted, self.key_entries(node), self.rows[node].value)
            if step is None:
                raise StructureError(no_such_place(path, depth, self.rows[node].value))
            at = step[1]
        return at

    def number_of(self, text: str) -> int:
        """The number of the row that a text leads to: `obj` is the root, unless the root has something of that name.

        Raises:
            ValueError: where the text is no path.
            StructureError: where there is no such place.
        """
        if self._has_obj():
            try:
                return self.number(_parsed(text, text))
            except StructureError:
                pass
        return self.number(_parsed(text, without_root(text)))

    def matching(self, text: str) -> list[int]:
        """The numbers of the rows that a pattern means, each once, by whatever way they are reached.

        Raises:
            ValueError: where the text is no pattern.
        """
        found = self._matching(Pattern(text)) if self._has_obj() else []
        return found or self._matching(Pattern(without_root(text)))

    def _matching(self, pattern: Pattern) -> list[int]:
        found: set[int] = set()

        entered = Entered()

        def visit(chain: Chain, positions: Positions) -> tuple[int, Positions] | None:
            number = chain[1]
            if pattern.ends(positions):
                found.add(number)
            return None if self.rows[number].is_leaf else entered.anew(self.rows[number].target, positions)

        walk([(0, pattern.start)], visit, self.key_entries, pattern.step)
        return sorted(found)

    def below(self, tops: Iterable[int]) -> set[int]:
        """All rows below some, through references, and these themselves."""
        return self.core.below(tops)

    def refers(self) -> dict[int, list[int]]:
        """Where else the nodes stand."""
        found: dict[int, list[int]] = {}
        for number, row in enumerate(self.rows):
            if row.what == "ref":
                found.setdefault(row.target, []).append(number)
        return found

    def refuse_nested(self, changes: dict[int, Any]) -> None:
        """Raises where one of several changes would be lost, because what it is in is replaced as well.

        Raises:
            ValueError: with the paths of both.
        """
        if len(changes) < 2:
            return
        reached, opened = {0}, set[int]()
        stack = [0]
        while stack:
            number = stack.pop()
            node = self.rows[number].target
            if number in changes or node in opened:
                continue
            opened.add(node)
            reached.update(self.children(node))
            stack += self.children(node)
        for number in changes:
            if number not in reached:
                other = self._replaced(number, changes)
                raise ValueError(INSIDE_ANOTHER.format(path=self.path(number), other=self.path(other)))

    def _replaced(self, number: int, changes: dict[int, Any]) -> int:
        while (number := self.rows[number].parent) > 0:
            if number in changes:
                return number
        return 0

    def _has_obj(self) -> bool:
        return any(_entry_text(entry) in (".obj", "[obj]") for entry, _ in self.key_entries(0))

    def write(self, changes: dict[int, Any]) -> None:
        """Writes values into the nodes themselves.

        Raises:
            TypeError: where no mutable object holds one of the rows.
        """
        if not self.core.write(changes):
            paths = some([repr(self.path(number)) for number in changes], 4)
            raise TypeError(NOT_MUTABLE.format(paths=paths, cls=type(self.rows[0].value).__qualname__))

    def put(self, changes: dict[int, Any]) -> Any:
        """The root with values written into it, or a new one where no mutable object holds one of the rows."""
        return self.rows[0].value if self.core.write(changes) else self.core.build(changes)


class GraphRow(NamedTuple):
    """A node, a value or a reference of a graph."""

    what: str  # array, value, node, ref
    aux: bool  # part of the structure for JAX: aux data, a static field
    parent: int  # -1 for the root
    target: int  # its own number; of a reference, that of the node
    value: Any

    @property
    def is_leaf(self) -> bool:
        return self.what in ("array", "value")


class Ref:
    """Stands, in the flat form of `to_dict`, for the node that is found at `path`."""

    __slots__ = ("path",)

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"Ref({self.path!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ref) and self.path == other.path

    def __hash__(self) -> int:
        return hash((Ref, self.path))
