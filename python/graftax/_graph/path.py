# SPDX-License-Identifier: Apache-2.0
"""`Path`, a key path that prints and parses, and `Graph`, the rows of an object graph by number."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from graftax import _core
from graftax._base.errors import ConcurrentChangeError, StructureError, some, type_name
from graftax._base.key_path import KeyPath, entry_text, is_entry, keystr
from graftax._graph.patterns import NAME, NAMES_COMPARED, QUOTED, Pattern, PatternVisits, Positions, literal
from graftax._graph.structure import Chain, KeyEntry, is_hidden_entry, walk
from graftax._graph.types.describe import static_classes
from graftax._jax.tree_registry import one_level_with_keys

NOT_MUTABLE = (
    "{paths} cannot be written to: every object from the root (a {cls}) down to it is immutable. "
    "graftax.at(obj)[path].set(value) returns a copy with the new value."
)
INSIDE_ANOTHER = (
    "{path!r} lies in {other!r}, which is replaced as well: one of the two values would be lost. Set them"
    " one after the other, or make the pattern match only one of them."
)

C = TypeVar("C")


class Path(KeyPath):
    """A key path in an object graph: a sequence of `SequenceKey`, `DictKey`, `GetAttrKey` and `FlattenedIndexKey`.

    A path made by extending another one stores only the added entries, so that all paths of a graph together take
    memory proportional to the graph, however deep it is. `tuple(path)` is a key path as JAX has it.

    Example:
        >>> from jax.tree_util import DictKey, GetAttrKey, SequenceKey
        >>> str(graftax.Path([DictKey("a"), SequenceKey(0), GetAttrKey("w")]))
        '[a][0].w'
    """

    __slots__ = ()

    def __str__(self) -> str:
        return "".join(_entry_text(entry) for entry in self if not is_hidden_entry(entry))

    def __repr__(self) -> str:
        return f"obj{self}"

    @staticmethod
    def parse(text: str) -> Path:
        """Parses a path: `layers[0].w`, `['a'][1]`, and whatever `str` and `repr` of a path print.

        An integer in brackets is an index, or a key of a dict that has it; anything else is a key, whose quotes may be
        left out. For an array in a Variable of Flax NNX, `str` and `repr` print the path of the Variable.

        Args:
            text: the path. A leading `obj`, which `repr` prints, is ignored.

        Raises:
            ValueError: if the text is not a path.

        Example:
            >>> Path.parse("layers[0].w") == Path([GetAttrKey("layers"), SequenceKey(0), GetAttrKey("w")])
            True
        """
        return _parse(text, without_root(text))

    def get(self, obj: object) -> Any:
        """The value at this path of an object graph.

        Args:
            obj: the root of the graph.

        Raises:
            StructureError: if the graph has no such path; says how far it leads.
        """
        for depth, entry in enumerate(self):
            obj = self._child(obj, entry, depth)
        return obj

    def set(self, obj: object, value: object) -> None:
        """Writes a value to this path of an object graph, in place.

        Immutable objects on the path (tuples, frozen modules) are rebuilt inside the mutable object that holds them.

        Args:
            obj: the root of the graph.
            value: the new value.

        Raises:
            StructureError: if the graph has no such path.
            TypeError: if no mutable object holds it. Use `graftax.at(obj)[path].set(value)`.
        """
        graph = Graph(obj)
        graph.write({graph.number(self): value})

    def matches(self, pattern: str) -> bool:
        """Does a pattern match this path? `*` stands for one name, key or index, `**` for any number of them.

        Args:
            pattern: such as `"layers[*].w"` or `"**.bias"`.

        Raises:
            ValueError: if the string is not a pattern.

        Example:
            >>> Path.parse("layers[0].w").matches("layers[*].w")
            True
        """
        return Pattern(without_root(pattern)).matches(self)

    def _child(self, obj: Any, entry: KeyEntry, depth: int) -> Any:
        # Plain dicts, lists and tuples are looked up directly; any other object is opened as the core opens it.
        if type(obj) is dict and isinstance(entry, DictKey) and type(entry.key) is str and entry.key in obj:
            return obj[entry.key]
        if type(obj) in (list, tuple) and isinstance(entry, SequenceKey) and 0 <= entry.idx < len(obj):
            return obj[entry.idx]
        child = _matching_child(entry, open_node(obj), obj)
        if child is None:
            raise StructureError(missing_path_text(self, depth, obj))
        return child[1]


static_classes.add(Path)

# A text key that cannot be taken for another key without its quotes.
_BARE = re.compile(r"(?!(?:None|True|False)$)[^\W\d][^\[\]'\"*\\\n]*")


def _entry_text(entry: KeyEntry) -> str:
    if not isinstance(entry, DictKey):
        return entry_text(entry)
    bare = not isinstance(entry.key, str) or _BARE.fullmatch(entry.key)
    return f"[{entry.key if bare else repr(entry.key)}]"


# The tokens of a path. Digits alone are an index, so a text key of digits needs its quotes.
_ENTRY = re.compile(
    rf"""\.(?P<name>{NAME})|(?P<first>[^.\[\]]+)|\[<flat\ index\ (?P<flat>\d+)>\]|\[(?P<index>\d+)\]
    |\[(?P<quoted>{QUOTED})\]|\[(?P<key>(?!['"])[^\[\]]*)\]""",
    re.VERBOSE,
)


def without_root(text: str) -> str:
    """Strips the `obj` with which the `repr` of a path begins."""
    # `object` or `obj_norm` is not the root followed by something.
    return text[3:] if re.match(r"obj(?=$|[.\[])", text) else text


def _parse(text: str, path_text: str) -> Path:
    """The path that `path_text` spells; `text` is the whole text, for the error."""
    key_entries: list[KeyEntry] = []
    position = 0
    while position < len(path_text):
        match = _ENTRY.match(path_text, position)
        # A name without a dot before it is allowed only at the start.
        entry = None if match is None or (position > 0 and match["first"] is not None) else _parse_entry(match)
        if match is None or entry is None:
            raise ValueError(
                f"{text!r} is not a path: what begins at {path_text[position:]!r} cannot be parsed. Write layers[0].w"
            )
        key_entries.append(entry)
        position = match.end()
    return Path(key_entries)


def _parse_entry(match: re.Match[str]) -> KeyEntry | None:
    """The key entry of a token; None for a bad escape in a quoted key."""
    if match["flat"] is not None:
        return FlattenedIndexKey(int(match["flat"]))
    if match["index"] is not None:
        return SequenceKey(int(match["index"]))
    if match["quoted"] is not None:
        key = literal(match["quoted"], None)
        return None if key is None else DictKey(key)
    if match["key"] is not None:
        return DictKey(_parse_key(match["key"]))
    return GetAttrKey(match["name"] if match["name"] is not None else match["first"])


def _parse_key(text: str) -> object:
    """A key written without quotes: the literal that it spells (None, -1, 2.5, (1, 'x')), or else the text itself."""
    value = literal(text, text)
    try:
        hash(value)
    except TypeError:  # a literal such as a list cannot be a key
        return text
    return value


def open_node(obj: object) -> list[tuple[KeyEntry, Any]]:
    """(key entry, child) of each child of a node; for a class registered with JAX, the keys that it gave JAX."""
    # The core gives flat indices where it has no keys: JAX may have them.
    children = _core.children_with_keys(obj)
    flat = [i for i, (entry, _) in enumerate(children) if isinstance(entry, FlattenedIndexKey)]
    opened = one_level_with_keys(obj) if flat and one_level_with_keys is not None else None
    pairs = [] if opened is None else list(opened[0])
    # The class may have other children for its flatten with keys than for the one that the core has called.
    if len(pairs) == len(flat):
        for i, (entry, _) in zip(flat, pairs, strict=True):
            children[i] = (entry, children[i][1])
    return children


def _matching_child(entry: KeyEntry, children: list[tuple[KeyEntry, C]], obj: object) -> tuple[KeyEntry, C] | None:
    """The child of `obj` that an entry of a path means."""
    # The very key entry comes before one that the same text could mean.
    for matches in (is_entry, entry_means):
        for child in children:
            if matches(entry, child[0]):
                return child
    # Indices and names may be used for the same child, as in Python itself.
    if isinstance(entry, SequenceKey) and isinstance(obj, tuple) and entry.idx < len(cast("tuple[Any, ...]", obj)):
        return children[entry.idx]  # an item of a named tuple, by its index
    if isinstance(entry, FlattenedIndexKey):  # a flat index for a child that has a name
        items = [c for c in children if not (isinstance(c[0], GetAttrKey) and c[0].name == "aux_data")]
        return items[entry.key] if entry.key < len(items) and len(items) < len(children) else None
    return None


def entry_means(written: KeyEntry, entry: KeyEntry) -> bool:
    """Can a key entry parsed from a text mean this entry? A text does not tell an index or an attribute from a key."""
    # As in JAX, 1 and True are equal keys. Where both exist, `is_entry` has found the right one before.
    if written == entry:
        return True
    if isinstance(written, SequenceKey) and isinstance(entry, (DictKey, FlattenedIndexKey)):
        return type(entry.key) is int and entry.key == written.idx
    if isinstance(written, GetAttrKey) and isinstance(entry, DictKey):
        return entry.key == written.name
    if isinstance(written, DictKey) and isinstance(entry, DictKey):
        return isinstance(written.key, str) != isinstance(entry.key, str) and str(entry.key) == str(written.key)
    return False


def missing_path_text(path: Sequence[object], depth: int, obj: object) -> str:
    """The message for a path that a graph does not have: how far it leads, and what is there instead."""
    # Names are few in a model, but a dict may have a million keys: only some of them are compared.
    texts = [keystr((entry,)) for entry, _ in open_node(obj)[:NAMES_COMPARED]]
    similar = difflib.get_close_matches(keystr((path[depth],)), texts, n=3) or texts[:6]
    name = type_name(obj)
    subject = f"the {name} at {keystr(tuple(path[:depth]))}" if depth else f"this {name}"
    contents = f"It has {some(similar, total=len(texts))}." if similar else "It has nothing below."
    return f"there is no {keystr(tuple(path))}: {subject} has no {keystr((path[depth],))}. {contents}"


class Graph:
    """An object graph as numbered rows in pre-order: nodes, values, and references to nodes of earlier rows.

    Args:
        obj: the root.
    """

    def __init__(self, obj: Any) -> None:
        self.core = _core.GraphEditor(obj)
        # Filled on demand: an edit of one path in a large graph needs few of these.
        self._children: dict[int, list[int]] | None = None
        self._entries_of_node: dict[int, list[tuple[KeyEntry, int]]] = {}
        self._entry_of_row: dict[int, KeyEntry] = {}
        self._paths: dict[int, Path] = {0: Path()}

    @functools.cached_property
    def rows(self) -> list[GraphRow]:
        return self.core.rows(GraphRow)

    def path(self, number: int) -> Path:
        # Up to the nearest row whose path is known, then down again: each path extends the one of its parent.
        todo: list[int] = []
        while number not in self._paths:
            todo.append(number)
            number = self.rows[number].parent
        path = self._paths[number]
        for number in reversed(todo):
            if number not in self._entry_of_row:
                self.key_entries(self.rows[number].parent)
            path = self._paths[number] = path + (self._entry_of_row[number],)
        return path

    def children(self, number: int) -> list[int]:
        """The numbers of the rows one level below a node."""
        if self._children is None:
            self._children = {}
            for child, row in enumerate(self.rows):
                self._children.setdefault(row.parent, []).append(child)
        return self._children.get(number, [])

    def key_entries(self, number: int) -> list[tuple[KeyEntry, int]]:
        """(key entry, number) of each row one level below a node."""
        # The core recorded the graph earlier, and does not keep key entries: the node is opened again for them.
        key_entries = self._entries_of_node.get(number)
        if key_entries is None:
            numbers = self.children(number)
            children = open_node(self.rows[number].value) if numbers else []
            if len(children) != len(numbers):
                raise ConcurrentChangeError(
                    f"{type(self.rows[number].value).__qualname__} changed while it was read, in another thread or in "
                    "a function that was given a part of the graph."
                )
            key_entries = [(entry, child) for (entry, _), child in zip(children, numbers, strict=True)]
            self._entries_of_node[number] = key_entries
            self._entry_of_row.update((child, entry) for entry, child in key_entries)
        return key_entries

    def number(self, path: Sequence[object]) -> int:
        """The number of the row that a path leads to, references followed.

        Raises:
            StructureError: if the graph has no such path; says how far it leads.
        """
        number = 0
        for depth, entry in enumerate(path):
            # A reference has no rows below it: its target has.
            node = self.rows[number].target
            child = _matching_child(entry, self.key_entries(node), self.rows[node].value)
            if child is None:
                raise StructureError(missing_path_text(path, depth, self.rows[node].value))
            number = child[1]
        return number

    def number_from_text(self, text: str) -> int:
        """The number of the row that a text leads to. A leading `obj` is the root, unless the root has a child `obj`.

        Raises:
            ValueError: if the text is not a path.
            StructureError: if the graph has no such path.
        """
        if self._has_child_named_obj():
            # An attribute or a key `obj` takes precedence, so that every path of the graph can be written.
            try:
                return self.number(_parse(text, text))
            except StructureError:
                pass
        return self.number(_parse(text, without_root(text)))

    def matching(self, text: str) -> list[int]:
        """The numbers of the rows that a pattern matches at any of their paths, each once.

        Raises:
            ValueError: if the text is not a pattern.
        """
        # As in `number_from_text`, a child `obj` takes precedence over the root.
        numbers = self._matching(Pattern(text)) if self._has_child_named_obj() else []
        return numbers or self._matching(Pattern(without_root(text)))

    def _matching(self, pattern: Pattern) -> list[int]:
        matches: set[int] = set()
        visits = PatternVisits()

        def visit(chain: Chain, positions: Positions) -> tuple[int, Positions] | None:
            number = chain[1]
            if pattern.is_match(positions):
                matches.add(number)
            # A node that is reached by several paths is visited for each of them, since they may match differently.
            return None if self.rows[number].is_leaf else visits.enter(self.rows[number].target, positions)

        walk([(0, pattern.start)], visit, self.key_entries, pattern.advance)
        return sorted(matches)

    def descendants(self, tops: Iterable[int]) -> set[int]:
        """These rows and all rows below them, references followed."""
        return self.core.descendants(tops)

    def references(self) -> dict[int, list[int]]:
        """The reference rows of each node that has some, by the number of the node."""
        references: dict[int, list[int]] = {}
        for number, row in enumerate(self.rows):
            if row.category == "ref":
                references.setdefault(row.target, []).append(number)
        return references

    def refuse_nested(self, changes: dict[int, Any]) -> None:
        """Raises where a change would be lost, because an object that contains it is replaced as well.

        Raises:
            ValueError: with the paths of both.
        """
        if len(changes) < 2:
            return
        # Walk the graph without entering what is replaced: a change that is not reached lies only in replaced objects.
        reached, visited = {0}, set[int]()
        stack = [0]
        while stack:
            number = stack.pop()
            node = self.rows[number].target
            if number in changes or node in visited:
                continue
            visited.add(node)
            reached.update(self.children(node))
            stack += self.children(node)
        for number in changes:
            if number not in reached:
                ancestor = self._replaced_ancestor(number, changes)
                raise ValueError(INSIDE_ANOTHER.format(path=self.path(number), other=self.path(ancestor)))

    def _replaced_ancestor(self, number: int, changes: dict[int, Any]) -> int:
        while (number := self.rows[number].parent) > 0:
            if number in changes:
                return number
        return 0

    def _has_child_named_obj(self) -> bool:
        return any(_entry_text(entry) in (".obj", "[obj]") for entry, _ in self.key_entries(0))

    def write(self, changes: dict[int, Any]) -> None:
        """Writes values to rows, in place.

        Raises:
            TypeError: if no mutable object holds one of the rows.
        """
        if not self.core.write(changes):
            paths = some([repr(self.path(number)) for number in changes], 4)
            raise TypeError(NOT_MUTABLE.format(paths=paths, cls=type(self.rows[0].value).__qualname__))

    def write_or_rebuild(self, changes: dict[int, Any]) -> Any:
        """The root, written in place; a new root where no mutable object holds one of the rows."""
        return self.rows[0].value if self.core.write(changes) else self.core.build(changes)


class GraphRow(NamedTuple):
    """A node, a value or a reference of a graph."""

    category: str  # array, value, node, ref
    aux: bool  # part of the structure for JAX: aux data, a static field
    parent: int  # -1 for the root
    target: int  # its own number; for a reference, that of the node
    value: Any

    @property
    def is_leaf(self) -> bool:
        return self.category in ("array", "value")


class Ref:
    """In the flat form of `to_dict`, a reference to the node at `path`."""

    __slots__ = ("path",)

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"Ref({self.path!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ref) and self.path == other.path

    def __hash__(self) -> int:
        return hash((Ref, self.path))
