# SPDX-License-Identifier: Apache-2.0
"""Key paths: tuples of JAX's own key entries, that print, compare and hash."""

from __future__ import annotations

import ast
import difflib
import operator
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey, keystr

from . import _core
from ._errors import NOT_MUTABLE, StructureError

__all__ = ["DictKey", "FlattenedIndexKey", "GetAttrKey", "Path", "Ref", "SequenceKey"]


class Path(tuple[Any, ...]):
    """A place in an object graph: a tuple of `SequenceKey`, `DictKey`, `GetAttrKey` and `FlattenedIndexKey`.

    Example:
        >>> str(Path([DictKey("a"), SequenceKey(0), GetAttrKey("w")]))
        '[a][0].w'
    """

    __slots__ = ()

    def __str__(self) -> str:
        return "".join(f"[{k.key}]" if isinstance(k, DictKey) else str(k) for k in self)

    def __repr__(self) -> str:
        return f"obj{self}"

    def __eq__(self, other: object) -> bool:
        # 1, True and 1.0 name one entry of a dict, yet they are different keys.
        return isinstance(other, Path) and tuple.__eq__(self, other) and self._types() == other._types()

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return tuple.__hash__(self)

    def __add__(self, other: Any) -> Path:  # type: ignore[override]
        return Path((*self, *other))

    @staticmethod
    def parse(text: str) -> Path:
        """The path that a text means: what `str` and `repr` of a path print, `layers[0].w`, `['a'][1]`.

        A whole number in brackets is an index, anything else a key; quotes around keys may be left out.

        Raises:
            ValueError: where the text is no path.

        Example:
            >>> Path.parse("layers[0].w") == Path([GetAttrKey("layers"), SequenceKey(0), GetAttrKey("w")])
            True
        """
        entries: list[Any] = []
        rest = text[3:] if re.match(r"obj(?=$|[.\[])", text) else text
        at = 0
        while at < len(rest):
            found = _ENTRY.match(rest, at)
            if found is None or (at == 0) < (found["first"] is not None):
                raise ValueError(f"{text!r} is no path: it makes no sense from {rest[at:]!r} on. Write layers[0].w")
            entries.append(_entry(found))
            at = found.end()
        return Path(entries)

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
        graph.write({graph.place(self): value})

    def matches(self, pattern: str) -> bool:
        """Does a pattern mean this path? `*` stands for one name, key or index, `**` for any number of steps.

        Example:
            >>> Path.parse("layers[0].w").matches("layers[*].w")
            True
        """
        return glob(pattern)(str(self))

    def _step(self, obj: Any, wanted: Any, depth: int) -> Any:
        children = _core.children_with_keys(obj)
        for fits in (operator.eq, same_entry):
            for entry, child in children:
                if fits(wanted, entry):
                    return child
        raise StructureError(no_such_place(self, depth, obj))

    def _types(self) -> list[tuple[type, type]]:
        return [(type(k), type(getattr(k, "key", None))) for k in self]


_ENTRY = re.compile(
    r"""\.(?P<name>[^.\[\]]+)|(?P<first>[^.\[\]]+)|\[<flat\ index\ (?P<flat>\d+)>\]|\[(?P<index>\d+)\]
    |\[(?P<quoted>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")\]|\[(?P<key>[^\[\]]*)\]""",
    re.VERBOSE,
)


def _entry(found: re.Match[str]) -> Any:
    if found["flat"] is not None:
        return FlattenedIndexKey(int(found["flat"]))
    if found["index"] is not None:
        return SequenceKey(int(found["index"]))
    if found["quoted"] is not None:
        return DictKey(ast.literal_eval(found["quoted"]))
    if found["key"] is not None:
        return DictKey(found["key"])
    return GetAttrKey(found["name"] if found["name"] is not None else found["first"])


def same_entry(wanted: Any, entry: Any) -> bool:
    """Can one key entry mean the other? In a text a number is an index or a key, and a name an attribute or a key."""
    if wanted == entry:
        return True
    if isinstance(wanted, SequenceKey) and isinstance(entry, (DictKey, FlattenedIndexKey)):
        return type(entry.key) is int and entry.key == wanted.idx
    if isinstance(wanted, GetAttrKey) and isinstance(entry, DictKey):
        return entry.key == wanted.name
    if isinstance(wanted, DictKey) and isinstance(entry, DictKey):
        return isinstance(wanted.key, str) and not isinstance(entry.key, str) and str(entry.key) == wanted.key
    return False


def no_such_place(path: tuple[Any, ...], depth: int, obj: Any) -> str:
    """Says how far a path leads, and what is there instead."""
    texts = [keystr((entry,)) for entry, _ in _core.children_with_keys(obj)]
    close = difflib.get_close_matches(keystr((path[depth],)), texts, n=3) or texts[:6]
    here = (
        f"the {type(obj).__qualname__} at {keystr(tuple(path[:depth]))}" if depth else f"this {type(obj).__qualname__}"
    )
    has = (
        f"It has {', '.join(close)}{', ...' if len(texts) > len(close) else ''}." if close else "It has nothing below."
    )
    return f"there is no {keystr(tuple(path))}: {here} has no {keystr((path[depth],))}. {has}"


_STEP = re.compile(r"\*\*|\*|[^*]+")


def glob(pattern: str) -> Callable[[str], bool]:
    """A test of the text of a path. Quotes around keys may be left out; a name that comes first is a key, too."""
    first = re.match(r"(\*(?!\*)|[^.\[\]*])+(?=$|[.\[])", pattern)
    name, rest = (_expression(first[0]), pattern[first.end() :]) if first else ("", pattern.removeprefix("."))
    compiled = re.compile((rf"(?:{name}|\[{name}\])" if name else "") + _expression(rest), re.DOTALL)
    return lambda path: compiled.fullmatch(_bare(path).removeprefix(".")) is not None


def _bare(text: str) -> str:
    return text.replace("'", "").replace('"', "")


def _expression(pattern: str) -> str:
    wild: dict[str, str] = {"**": r".*", "*": r"[^.\[\]]*"}
    return "".join(wild[p] if p in wild else re.escape(p) for p in cast("list[str]", _STEP.findall(_bare(pattern))))


def matcher(patterns: Iterable[str]) -> Callable[[str], bool]:
    """A test of key paths as messages print them (`state.layers[0].w`, `params['w']`).

    A pattern covers a path and everything below it. `*` stands for one name, key or index, `**` for any number of
    steps: `model.layers[*].bias`, `**.bias`. Quotes around keys may be left out.
    """
    parts = [_expression(pattern) for pattern in patterns]
    if not parts:
        return lambda path: False
    compiled = re.compile(rf"(?:{'|'.join(parts)})(?:[.\[].*)?", re.DOTALL)
    return lambda path: compiled.fullmatch(_bare(path)) is not None


class Graph:
    """An object graph whose places have numbers: nodes, values, and references to nodes met before.

    Args:
        obj: the root.
    """

    def __init__(self, obj: Any) -> None:
        self.core = _core.Graph(obj)
        self.rows = [Row(*row) for row in self.core.rows()]
        self._paths: list[Path] | None = None
        self._children: dict[int, list[int]] | None = None

    @property
    def paths(self) -> list[Path]:
        """The path of every place."""
        if self._paths is None:
            self._paths = [Path(path) for path in self.core.paths()]
        return self._paths

    def children(self, place: int) -> list[int]:
        """The places one level below a node."""
        if self._children is None:
            self._children = {}
            for number, row in enumerate(self.rows):
                self._children.setdefault(row.parent, []).append(number)
        return self._children.get(place, [])

    def entries(self, place: int) -> list[tuple[Any, int]]:
        """(key entry, place) one level below a node."""
        below = self.children(place)
        if not below:
            return []
        entries = (entry for entry, _ in _core.children_with_keys(self.rows[place].value))
        return list(zip(entries, below, strict=True))

    def place(self, path: tuple[Any, ...]) -> int:
        """The place of a path, which may lead through references.

        Raises:
            StructureError: where there is no such place; says how far the path leads.
        """
        at = 0
        for depth, wanted in enumerate(path):
            below = self.entries(at)
            exact = [place for entry, place in below if entry == wanted]
            step = next(iter(exact or [place for entry, place in below if same_entry(wanted, entry)]), None)
            if step is None:
                raise StructureError(no_such_place(path, depth, self.rows[at].value))
            at = self.rows[step].target
        return at

    def write(self, changes: dict[int, Any]) -> None:
        """Writes values into the nodes themselves.

        Raises:
            TypeError: where no mutable object holds a place.
        """
        try:
            self.core.write(changes)
        except TypeError as error:
            if "no mutable object" not in str(error):
                raise
            paths = ", ".join(repr(self.paths[place]) for place in changes)
            raise TypeError(NOT_MUTABLE.format(paths=paths, cls=type(self.rows[0].value).__qualname__)) from None


class Row(NamedTuple):
    """One place of a graph."""

    what: str  # array, value, node, ref
    aux: bool  # part of the structure for JAX: aux data, a static field
    parent: int  # -1 for the root
    target: int  # the place itself; of a reference, the node
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
