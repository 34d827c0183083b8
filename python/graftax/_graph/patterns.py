# SPDX-License-Identifier: Apache-2.0
"""Patterns that match key paths: `layers[*].w`, `**.bias`."""

from __future__ import annotations

import ast
import difflib
import functools
import itertools
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, cast

from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from graftax import _core
from graftax._base.errors import some
from graftax._base.missing import MISSING
from graftax._graph.structure import Chain, KeyEntry, Op, RootPath, Structure, walk

# An attribute's name. That of a closure cell has brackets.
NAME = r"__closure__\['[^']*'\]|[^.\[\]]+"
QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
UNUSED = (
    "{name}: the pattern {pattern!r} of {option} has no effect: it covers no array, or earlier patterns cover them "
    "all (the first that covers a path decides). Available: {paths}. .w is an attribute, [w] a key."
)
_CELL = r"""__closure__\[(?:'[^']*'|"[^"]*"|[^\[\]'"]*)\]"""  # quotes may be left out here, too

_CACHE_SIZE = 2000  # steps that a pattern caches
NAMES_COMPARED = 500  # among which a message looks for similar names

# The states of a pattern, which is matched as a nondeterministic automaton: how many segments may be matched so far.
Positions = frozenset[int]


class Root(NamedTuple):
    """The first entry of a path that begins with an argument's name, which is neither an attribute nor a key."""

    name: str


class _Segment(NamedTuple):
    """The part of a pattern that matches one key entry, or any number of them (`**`)."""

    syntax: str  # any (`**`), name (`.x`), key (`[x]`), quoted (`['x']`), first (`x`)
    literal: str | None  # its text; None if it contains a `*`
    text: re.Pattern[str]
    at_start: bool  # a quoted key there may be an argument's name: those of `**kwargs` need not be identifiers
    matches_all: bool  # `*`: any name, key or index
    is_literal: bool  # reads as a number, None, ...: such a text as a key needs quotes

    def matches_entry(self, entry: KeyEntry) -> bool:
        # Argument names match only bare or quoted segments, attributes only names with a dot or bare ones.
        if isinstance(entry, Root):
            return (self.syntax == "first" or (self.syntax == "quoted" and self.at_start)) and self._matches_text(
                entry.name
            )
        if isinstance(entry, GetAttrKey):
            return self.syntax in ("name", "first") and self._matches_text(entry.name)
        if self.syntax == "quoted":
            return isinstance(entry, DictKey) and isinstance(entry.key, str) and self._matches_text(str(entry.key))
        if self.syntax == "name" or not isinstance(entry, (DictKey, SequenceKey, FlattenedIndexKey)):
            return False
        if isinstance(entry, FlattenedIndexKey) and self._matches_text(f"<flat index {entry.key}>"):
            return True
        # `[1]` matches an index and the integer key; the text key '1' has to be quoted.
        key: Any = entry.idx if isinstance(entry, SequenceKey) else entry.key
        if self.matches_all or isinstance(key, (str, int)):
            return self.matches_all or (self._matches_text(str(key)) and not (self.is_literal and isinstance(key, str)))
        return any(map(self._matches_text, _texts(key)))

    def _matches_text(self, text: str) -> bool:
        return self.matches_all or self.text.fullmatch(text) is not None


def _texts(key: object) -> list[str]:
    """The texts by which a pattern may name a key: its `str` and its `repr`."""
    try:
        return [str(key), repr(key)]
    except Exception:  # such a key cannot be named, but `*` matches it
        return []


_TOKEN = re.compile(
    rf"\.?(?P<any>\*\*)(?=$|[.\[*])|\.(?P<name>{_CELL}|{NAME})|\[(?P<quoted>{QUOTED})\]|\[(?P<key>[^\[\]]*)\]"
    r"|(?P<first>[^.\[\]]+)"
)


def is_pattern(text: str) -> bool:
    """Is there a `*` outside of quotes?"""
    return "*" in re.sub(rf"\[(?:{QUOTED})\]", "", text)


class Pattern:
    """A parsed pattern: `*` stands for any characters of one name, key or index, `**` for any number of key entries.

    Args:
        text: the first segment may be an attribute, a key or, for paths that begin with one, an argument's name.
            Quotes around a key may be left out unless it reads as a literal (`[1]` is an index or the number, `['1']`
            the text).

    Raises:
        ValueError: if the text is not a pattern.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.segments: list[_Segment] = []
        offset = 0
        while offset < len(text):
            match = _TOKEN.match(text, offset)
            segment = None if match is None else _parse_segment(match)
            if match is None or segment is None:
                raise ValueError(
                    f"{text!r} is not a pattern: what begins at {text[offset:]!r} cannot be parsed. "
                    "Write layers[*].w or **.w"
                )
            self.segments.append(segment)
            offset = match.end()
        # A leading `**` may match nothing, so matching may begin after it as well.
        self.start = self._past_double_stars({0})
        self._end = frozenset({len(self.segments)})
        self._count = len(self.segments)
        self._advance_cache: dict[tuple[Positions, Any, Any], Any] = {}  # results of `advance` for names and indices

    @property
    def root(self) -> str | None:
        """The name of the argument with which the pattern begins; None where it does not name one."""
        segment = self.segments[0] if self.segments else None
        return segment.literal if segment is not None and segment.syntax in ("first", "quoted") else None

    def _past_double_stars(self, positions: Iterable[int]) -> Positions:
        """These positions and those after a `**`, which may match no entry at all."""
        closure = set(positions)
        for position in sorted(closure):
            while (
                position < len(self.segments)
                and self.segments[position].syntax == "any"
                and position + 1 not in closure
            ):
                position += 1
                closure.add(position)
        return frozenset(closure)

    def advance(self, positions: Positions, entry: KeyEntry) -> Positions:
        """The positions after one more key entry of a path."""
        # Indices are part of the cache key only where the pattern tells them apart: a long list takes one cache entry.
        entry_type = type(entry)
        if entry_type is GetAttrKey:
            token = entry.name
        elif entry_type is DictKey and type(entry.key) is str:
            token = entry.key
        elif entry_type is SequenceKey:
            token = entry.idx if self._index_matters(positions) else None
        else:
            return self._advance(positions, entry)
        advanced = self._advance_cache.get((positions, entry_type, token))
        if advanced is None:
            advanced = self._advance(positions, entry)
            if len(self._advance_cache) < _CACHE_SIZE:
                self._advance_cache[positions, entry_type, token] = advanced
        return advanced

    def _index_matters(self, positions: Positions) -> bool:
        matters = self._advance_cache.get((positions, None, None))
        if matters is None:
            segments = (self.segments[position] for position in positions if position < len(self.segments))
            # Only a literal number, or a segment with a `*` next to other characters, treats indices differently.
            matters = any(
                not segment.matches_all and (segment.literal is None or segment.literal.isdigit())
                for segment in segments
            )
            self._advance_cache[positions, None, None] = matters
        return matters

    def _advance(self, positions: Positions, entry: object) -> Positions:
        advanced: set[int] = set()
        for position in positions:
            if position == len(self.segments):
                continue
            segment = self.segments[position]
            # `**` takes the entry and may take more: its position stays.
            if segment.syntax == "any":
                advanced.add(position)
            elif segment.matches_entry(entry):
                advanced.add(position + 1)
        return self._past_double_stars(advanced) if advanced else frozenset()

    def advance_covering(self, positions: Positions, entry: KeyEntry) -> Positions:
        """As `advance`, for a pattern that covers all below its matches; a closure cell counts as its content."""
        # Below a match everything is covered, whatever the entry is.
        if self._count in positions:
            return self._end
        advanced = self.advance(positions, entry)
        return positions | advanced if type(entry) is GetAttrKey and entry.name == "cell_contents" else advanced

    def is_match(self, positions: Positions) -> bool:
        return self._count in positions

    def expects_more(self, positions: Positions) -> bool:
        """Was the last entry matched by a segment other than `**`? Then a child that would match may be added later."""
        return any(position > 0 and self.segments[position - 1].syntax != "any" for position in positions)

    def matches(self, path: Iterable[object]) -> bool:
        positions = self.start
        for entry in path:
            positions = self.advance(positions, entry)
        return self.is_match(positions)

    def covers(self, path: Iterable[Any]) -> bool:
        """Does it match this path or a prefix of it?"""
        return self.is_match(self.advance_along(path, self.start))

    def advance_along(self, path: Iterable[object], positions: Positions) -> Positions:
        """The positions after all entries of a path, for a pattern that covers all below its matches."""
        for entry in path:
            if not positions or self.is_match(positions):
                break
            positions = self.advance_covering(positions, entry)
        return positions

    def positions_at_root(self, name: str) -> Positions:
        """The positions at the root of an argument with this name."""
        return self.advance_along(root_entries(name), self.start)


def _parse_segment(match: re.Match[str]) -> _Segment | None:
    """The segment of a token; None where it is not allowed there."""
    syntax = cast(str, match.lastgroup)
    text: str = match[syntax]
    at_start = match.start() == 0
    if syntax == "quoted":
        key = literal(text, None)
        if key is None:  # an invalid escape
            return None
        return _Segment(syntax, key, re.compile(re.escape(key), re.DOTALL), at_start, False, False)
    # Bare names are allowed only at the start, and `**` only as a whole segment.
    if (syntax == "first" and not at_start) or (syntax in ("first", "name") and "**" in text):
        return None
    # The attribute of a closure cell has quotes in its name, which users may leave out or write in the other way.
    if syntax == "name" and re.fullmatch(_CELL, text):
        text = "__closure__['" + text[len("__closure__[") : -1].strip("'\"") + "']"
    unstarred = None if "*" in text else text
    is_literal = literal(text, MISSING) is not MISSING
    return _Segment(syntax, unstarred, wildcard_regex(text), at_start, set(text) == {"*"}, is_literal)


def wildcard_regex(text: str) -> re.Pattern[str]:
    """The regex of a text in which `*` stands for any characters.

    Each `*` takes as few characters as possible, in an atomic group: without backtracking, no text takes exponential
    time.
    """
    prefix, *parts = map(re.escape, text.split("*"))
    # Each atomic group matches up to the next literal part.
    between = "".join(f"(?>.*?{part})" for part in parts[:-1] if part)
    return re.compile(f"{prefix}{between}.*{parts[-1]}" if parts else prefix, re.DOTALL)


def literal(text: str, default: Any) -> Any:
    """The Python literal that a text spells (1, None, (1, 2)); the default if it does not spell one."""
    try:
        return ast.literal_eval(text)
    # MemoryError and RecursionError: the text is nested too deeply for the parser.
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return default


# ---- patterns for the arguments and captured variables of a call: `state.opt`, `args[0][w]`, `closure model`


@functools.lru_cache(maxsize=512)
def argument_pattern(text: str, name: str, option: str) -> Pattern:
    """Parses a pattern given to an option of a call.

    Args:
        text: the pattern.
        name: the name of the function that is called, for errors.
        option: the name of the option, for errors.

    Raises:
        ValueError: if the text is not a pattern.
    """
    try:
        if not text:
            raise ValueError("'' is not a pattern: it is empty. Write layers[*].w, or '**', which covers everything")
        return Pattern(text)
    except ValueError as error:
        raise ValueError(f"{name}, {option}: {error}") from None


_NUMBERED = re.compile(r"(\w+)\[(\d+)\]")


def root_entries(name: str) -> tuple[KeyEntry, ...]:
    """The key entries that a root's name stands for: `x`, `args[0]`, `closure n`."""
    match = _NUMBERED.fullmatch(name)
    return (Root(name),) if match is None else (Root(match[1]), SequenceKey(int(match[2])))


def coverage_test(patterns: Sequence[Pattern], names: Sequence[str]) -> Callable[[RootPath], bool] | None:
    """A function that tells whether one of the patterns covers a root path; None without patterns."""
    if not patterns:
        return None
    # The positions at each root are computed once: the predicate is called for every leaf.
    starts = [[(pattern, pattern.positions_at_root(name)) for pattern in patterns] for name in names]

    def is_covered(root_path: RootPath) -> bool:
        root, path = root_path
        return any(pattern.is_match(pattern.advance_along(path, positions)) for pattern, positions in starts[root])

    return is_covered


class PatternVisits:
    """The nodes that a walk with a pattern has entered: once for each position, so that it ends in a cyclic graph."""

    def __init__(self) -> None:
        self._visited: dict[int, Positions] = {}

    def enter(self, node: int, positions: Positions) -> tuple[int, Positions] | None:
        """The node and those of the positions that are new there; None if there are none."""
        visited = self._visited.get(node)
        if visited is not None:
            positions -= visited
        if not positions:
            return None
        self._visited[node] = positions if visited is None else visited | positions
        return node, positions


class Cover(NamedTuple):
    """The part of a structure that a pattern covers."""

    leaves: set[int]  # rows of leaves
    statics: set[int]  # rows of statics
    matches_any: bool  # does it match a path, or one that may come to exist in a node that is empty or None now?


class CoverFinder:
    """Finds what patterns cover in a structure.

    Args:
        graphdef: the structure.
        names: a name for each root.
    """

    def __init__(self, graphdef: _core.GraphDef, names: Sequence[str]) -> None:
        self.names, self.structure = names, Structure(graphdef)

    @property
    def leaves(self) -> list[int]:
        """The rows of all leaves, in order: a leaf that stands at two paths has two rows."""
        return [row.number for row in self.structure.leaves]

    def leaf(self, number: int) -> int:
        """The leaf of a row."""
        return self.structure.rows[number].leaf

    def cover(self, pattern: Pattern, roots: Container[int] | None = None) -> Cover:
        """The part that a pattern covers, in these roots or in all."""
        leaves: set[int] = set()
        statics: set[int] = set()
        # A pattern such as `**` covers the roots themselves.
        matches_any = pattern.is_match(pattern.start)
        rows = self.structure.rows
        visits = PatternVisits()

        def visit(chain: Chain, positions: Positions) -> tuple[int, Positions] | None:
            nonlocal matches_any
            number = chain[1]
            is_match = pattern.is_match(positions)
            matches_any = matches_any or is_match
            row = rows[number]
            node = rows[row.target]
            # A leaf counts by its own row, a repeated static by the row of its first occurrence.
            if row.op is Op.leaf:
                if is_match:
                    leaves.add(number)
            elif node.op is not Op.node:
                if is_match:
                    statics.add(node.number)
                matches_any = matches_any or (pattern.expects_more(positions) and node.value is None)
            # What is below a match is covered, but not its ancestors, to which a reference may lead back.
            elif not (is_match and node.number < number < node.end):
                is_empty = node.end == node.number + 1
                matches_any = matches_any or (is_empty and pattern.expects_more(positions))
                return visits.enter(node.number, positions)
            return None

        walk(self._starts(pattern, roots), visit, self.structure.key_entries, pattern.advance_covering)
        return Cover(leaves, statics, matches_any)

    def _starts(self, pattern: Pattern, roots: Container[int] | None) -> Iterator[tuple[int, Positions]]:
        for name, row in zip(self.names, self.structure.roots, strict=False):
            if roots is None or row.root in roots:
                positions = pattern.positions_at_root(name)
                if positions:
                    yield row.number, positions


def refuse_unused(pattern: str, name: str, option: str, paths: Iterable[str]) -> NoReturn:
    """Raises for a pattern that decides about no array: most likely it is misspelled."""
    similar_paths = nearest(pattern, paths) or "no array"
    raise ValueError(UNUSED.format(name=name, pattern=pattern, option=option, paths=similar_paths))


def nearest(pattern: str, names: Iterable[str]) -> str:
    """Some names for a message, those most like the pattern first; empty where there are no names."""
    unique_names = list(dict.fromkeys(itertools.islice(names, NAMES_COMPARED)))
    # Names that are not similar follow, so that a message always shows some.
    similar = difflib.get_close_matches(pattern, unique_names, n=3, cutoff=0.4)
    return some(similar + [name for name in unique_names if name not in similar])
