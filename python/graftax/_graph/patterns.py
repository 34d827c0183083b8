# SPDX-License-Identifier: Apache-2.0
"""Patterns that mean key paths: `layers[*].w`, `**.bias`."""

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
from graftax._graph.structure import Chain, Op, Place, Structure, walk

# A name: the cell of a function's free variable has one with brackets.
NAME = r"__closure__\['[^']*'\]|[^.\[\]]+"
QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
UNUSED = (
    "{name}: the pattern {pattern!r} of {option} decides about no array: it covers none, or earlier patterns cover "
    "them all (the first that covers a path counts). There is: {paths}. .w is an attribute, [w] a key."
)
NO_PATTERN = "{text!r} is no pattern: it makes no sense from {rest!r} on. Write layers[*].w or **.w"
EMPTY_PATTERN = "'' is no pattern: it is empty. Write layers[*].w, or '**', which covers everything"
_CELL = r"""__closure__\[(?:'[^']*'|"[^"]*"|[^\[\]'"]*)\]"""  # quotes may be left out here, too

_KNOWN = 2000  # steps that a pattern remembers

Positions = frozenset[int]  # in a pattern: how many of its steps have been made


class Root(NamedTuple):
    """The first entry of a path that begins with an argument's name, which is neither an attribute nor a key."""

    name: str


class _Step(NamedTuple):
    """One step of a pattern. Kinds: any (`**`), name (`.x`), key (`[x]`), quoted (`['x']`), first (`x`)."""

    kind: str
    literal: str | None  # its text, where no `*` is in it
    text: re.Pattern[str]
    at_start: bool  # where a quoted key may be an argument's name: those of `**kwargs` need not be identifiers
    whole: bool  # `*`: any name, key or index
    no_text: bool  # it reads as a number, None, ...: a key that is a text has quotes then

    def fits(self, entry: Any) -> bool:
        if isinstance(entry, Root):
            return (self.kind == "first" or (self.kind == "quoted" and self.at_start)) and self._is(entry.name)
        if isinstance(entry, GetAttrKey):
            return self.kind in ("name", "first") and self._is(entry.name)
        if self.kind == "quoted":
            return isinstance(entry, DictKey) and isinstance(entry.key, str) and self._is(str(entry.key))
        if self.kind == "name" or not isinstance(entry, (DictKey, SequenceKey, FlattenedIndexKey)):
            return False
        if isinstance(entry, FlattenedIndexKey) and self._is(f"<flat index {entry.key}>"):
            return True
        key: Any = entry.idx if isinstance(entry, SequenceKey) else entry.key
        if self.whole or isinstance(key, (str, int)):
            return self.whole or (self._is(str(key)) and not (self.no_text and isinstance(key, str)))
        return any(map(self._is, _texts(key)))

    def _is(self, text: str) -> bool:
        return self.whole or self.text.fullmatch(text) is not None


def _texts(key: Any) -> list[str]:
    """How a key may be written: as it is and as messages print it."""
    try:
        return [str(key), repr(key)]
    except Exception:  # it cannot be named, but `*` covers it
        return []


_TOKEN = re.compile(
    rf"\.?(?P<any>\*\*)(?=$|[.\[*])|\.(?P<name>{_CELL}|{NAME})|\[(?P<quoted>{QUOTED})\]|\[(?P<key>[^\[\]]*)\]"
    r"|(?P<first>[^.\[\]]+)"
)


def is_pattern(text: str) -> bool:
    """Has it a `*` outside of quotes?"""
    return "*" in re.sub(rf"\[(?:{QUOTED})\]", "", text)


class Pattern:
    """A pattern, as steps: `*` in a step stands for any characters of one name, key or index, `**` for any steps.

    Args:
        text: what comes first may be an attribute, a key or, in a path that has one, an argument's name; quotes around
            keys may be left out where these read as nothing else (`[1]` is an index or the number, `['1']` the text).

    Raises:
        ValueError: where the text is no pattern.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.steps: list[_Step] = []
        at = 0
        while at < len(text):
            found = _TOKEN.match(text, at)
            step = None if found is None else _step(found)
            if found is None or step is None:
                raise ValueError(NO_PATTERN.format(text=text, rest=text[at:]))
            self.steps.append(step)
            at = found.end()
        self.start = self.further({0})
        self._end = frozenset({len(self.steps)})
        self._count = len(self.steps)
        self._known: dict[tuple[Positions, Any, Any], Any] = {}  # what `after` found for names and indices

    @property
    def root(self) -> str | None:
        """The argument with which it begins, where it names one."""
        first = self.steps[0] if self.steps else None
        return first.literal if first is not None and first.kind in ("first", "quoted") else None

    def further(self, positions: Iterable[int]) -> Positions:
        """These positions, and those behind a `**`, which may stand for no step."""
        out = set(positions)
        for at in sorted(out):
            while at < len(self.steps) and self.steps[at].kind == "any" and at + 1 not in out:
                at += 1
                out.add(at)
        return frozenset(out)

    def after(self, positions: Positions, entry: Any) -> Positions:
        """The positions after one more step of a path."""
        kind = type(entry)
        if kind is GetAttrKey:
            token = entry.name
        elif kind is DictKey and type(entry.key) is str:
            token = entry.key
        elif kind is SequenceKey:
            token = entry.idx if self._asks_for_index(positions) else None
        else:
            return self._after(positions, entry)
        found = self._known.get((positions, kind, token))
        if found is None:
            found = self._after(positions, entry)
            if len(self._known) < _KNOWN:
                self._known[positions, kind, token] = found
        return found

    def _asks_for_index(self, positions: Positions) -> bool:
        known = self._known.get((positions, None, None))
        if known is None:
            steps = (self.steps[at] for at in positions if at < len(self.steps))
            known = any(not step.whole and (step.literal is None or step.literal.isdigit()) for step in steps)
            self._known[positions, None, None] = known
        return known

    def _after(self, positions: Positions, entry: Any) -> Positions:
        out: set[int] = set()
        for at in positions:
            if at == len(self.steps):
                continue
            step = self.steps[at]
            if step.kind == "any":
                out.add(at)
            elif step.fits(entry):
                out.add(at + 1)
        return self.further(out) if out else frozenset()

    def step(self, positions: Positions, entry: Any) -> Positions | None:
        """As `after`; None where the pattern leads no further."""
        return self.after(positions, entry) or None

    def step_below(self, positions: Positions, entry: Any) -> Positions | None:
        """As `below`; None where the pattern leads no further."""
        return self.below(positions, entry) or None

    def below(self, positions: Positions, entry: Any) -> Positions:
        """As `after`, of a pattern that covers what is below. A captured variable is a cell and its content."""
        if self._count in positions:
            return self._end
        after = self.after(positions, entry)
        return positions | after if type(entry) is GetAttrKey and entry.name == "cell_contents" else after

    def ends(self, positions: Positions) -> bool:
        return self._count in positions

    def waits(self, positions: Positions) -> bool:
        """Was the last step made by a name, and not by `**`? Then what the next one names may come later."""
        return any(at > 0 and self.steps[at - 1].kind != "any" for at in positions)

    def matches(self, path: Iterable[Any]) -> bool:
        """Does it mean this path?"""
        positions = self.start
        for entry in path:
            positions = self.after(positions, entry)
        return self.ends(positions)

    def covers(self, path: Iterable[Any]) -> bool:
        """Does it mean this path, or one that leads there?"""
        return self.ends(self.along(path, self.start))

    def along(self, path: Iterable[Any], positions: Positions) -> Positions:
        """The positions after all steps of a path, of a pattern that covers all below what it means."""
        for entry in path:
            if not positions or self.ends(positions):
                break
            positions = self.below(positions, entry)
        return positions

    def at_root(self, name: str) -> Positions:
        """The positions at the root of this name."""
        return self.along(root_entries(name), self.start)


def _step(found: re.Match[str]) -> _Step | None:
    kind = cast(str, found.lastgroup)
    text: str = found[kind]
    at_start = found.start() == 0
    if kind == "quoted":
        key = unquoted(text)
        return None if key is None else _Step(kind, key, re.compile(re.escape(key), re.DOTALL), at_start, False, False)
    if (kind == "first" and not at_start) or (kind in ("first", "name") and "**" in text):
        return None
    if kind == "name" and re.fullmatch(_CELL, text):
        text = "__closure__['" + text[len("__closure__[") : -1].strip("'\"") + "']"
    return _Step(kind, None if "*" in text else text, expression(text), at_start, set(text) == {"*"}, _is_literal(text))


def expression(text: str) -> re.Pattern[str]:
    """What a text with `*` for any characters fits. Each takes as little as it can, for good: none is tried again."""
    first, *rest = map(re.escape, text.split("*"))
    between = "".join(f"(?>.*?{part})" for part in rest[:-1] if part)
    return re.compile(f"{first}{between}.*{rest[-1]}" if rest else first, re.DOTALL)


def literal(text: str) -> Any:
    """The value that a text reads as: 1, None, (1, 2).

    Raises:
        ValueError: where it reads as none.
    """
    try:
        return ast.literal_eval(text)
    # The last two: it is too deep for the parser.
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(str(error)) from None


def unquoted(text: str) -> str | None:
    """A key without its quotes; None where these hold an escape that is none."""
    try:
        return literal(text)
    except ValueError:
        return None


def _is_literal(text: str) -> bool:
    """Does it read as a value that is no text?"""
    try:
        literal(text)
    except ValueError:
        return False
    return True


# ---- patterns of what a function is called with: `state.opt`, `args[0][w]`, `closure model`


@functools.lru_cache(maxsize=512)
def of_arguments(text: str, name: str, option: str) -> Pattern:
    """The pattern that an option of a call has.

    Raises:
        ValueError: where the text is no pattern; names the call and the option.
    """
    try:
        if not text:
            raise ValueError(EMPTY_PATTERN)
        return Pattern(text)
    except ValueError as error:
        raise ValueError(f"{name}, {option}: {error}") from None


_NUMBERED = re.compile(r"(\w+)\[(\d+)\]")


def root_entries(name: str) -> tuple[Any, ...]:
    """The entries that a root's name stands for: `x`, `args[0]`, `closure n`."""
    found = _NUMBERED.fullmatch(name)
    return (Root(name),) if found is None else (Root(found[1]), SequenceKey(int(found[2])))


def tester(patterns: Sequence[Pattern], names: Sequence[str]) -> Callable[[Place], bool] | None:
    """Does one of the patterns cover a place?"""
    if not patterns:
        return None
    starts = [[(pattern, pattern.at_root(name)) for pattern in patterns] for name in names]

    def covers(place: Place) -> bool:
        root, path = place
        return any(pattern.ends(pattern.along(path, positions)) for pattern, positions in starts[root])

    return covers


class Entered:
    """What a walk with a pattern has entered: each node once for each position in the pattern."""

    def __init__(self) -> None:
        self._known: dict[int, Positions] = {}

    def anew(self, node: int, positions: Positions) -> tuple[int, Positions] | None:
        """The node with those of the positions that were not met there before."""
        known = self._known.get(node)
        if known is not None:
            positions -= known
        if not positions:
            return None
        self._known[node] = positions if known is None else known | positions
        return node, positions


class Cover(NamedTuple):
    """What a pattern covers of a structure."""

    leaves: set[int]  # the rows of leaves
    statics: set[int]  # and those of statics
    anything: bool  # does it mean a place, or one that may be filled later in what is empty now?


class Covering:
    """A structure in which patterns are looked for.

    Args:
        graphdef: the structure.
        names: one name a root.
    """

    def __init__(self, graphdef: _core.GraphDef, names: Sequence[str]) -> None:
        self.names, self.structure = names, Structure(graphdef)

    @property
    def leaves(self) -> list[int]:
        """The rows of all leaves, in order: an array in two places may have two."""
        return [row.number for row in self.structure.leaves]

    def leaf(self, number: int) -> int:
        """Which leaf the row of one is."""
        return self.structure.rows[number].leaf

    def of(self, pattern: Pattern, roots: Container[int] | None = None) -> Cover:
        """What a pattern covers, in some roots or in all."""
        leaves: set[int] = set()
        statics: set[int] = set()
        anything = pattern.ends(pattern.start)
        rows = self.structure.rows

        entered = Entered()

        def visit(chain: Chain, positions: Positions) -> tuple[int, Positions] | None:
            nonlocal anything
            number = chain[1]
            ends = pattern.ends(positions)
            anything = anything or ends
            row = rows[number]
            node = rows[row.target]
            if row.op is Op.leaf:
                if ends:
                    leaves.add(number)
            elif node.op is not Op.node:
                if ends:
                    statics.add(node.number)
                anything = anything or (pattern.waits(positions) and node.value is None)
            elif not (ends and node.number < number < node.end):  # a reference to what it is in: not below it
                anything = anything or (node.end == node.number + 1 and pattern.waits(positions))
                return entered.anew(node.number, positions)
            return None

        walk(self._starts(pattern, roots), visit, self.structure.key_entries, pattern.step_below)
        return Cover(leaves, statics, anything)

    def _starts(self, pattern: Pattern, roots: Container[int] | None) -> Iterator[tuple[int, Positions]]:
        for name, row in zip(self.names, self.structure.roots, strict=False):
            if roots is None or row.root in roots:
                positions = pattern.at_root(name)
                if positions:
                    yield row.number, positions


def refuse_unused(pattern: str, name: str, option: str, paths: Iterable[str]) -> NoReturn:
    """Raises for a pattern that decides about no array: most likely it is misspelled."""
    close_paths = nearest(pattern, paths) or "no array"
    raise ValueError(UNUSED.format(name=name, pattern=pattern, option=option, paths=close_paths))


_NAMES = 500  # names that a message looks through for one that is close


def nearest(pattern: str, names: Iterable[str]) -> str:
    """Some names for a message, those that are spelt like the pattern first; empty where there are none."""
    known = list(dict.fromkeys(itertools.islice(names, _NAMES)))
    close = difflib.get_close_matches(pattern, known, n=3, cutoff=0.4)
    close += [name for name in known if name not in close]
    return some(close)
