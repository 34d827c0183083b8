# SPDX-License-Identifier: Apache-2.0
"""Patterns that mean key paths: `layers[*].w`, `**.bias`."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

# A name: the cell of a function's free variable has one with brackets.
NAME = r"__closure__\['[^']*'\]|[^.\[\]]+"
QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""


class _Step(NamedTuple):
    """One step of a pattern. Kinds: any (`**`), name (`.x`), key (`[x]`), quoted (`['x']`), first (`x`)."""

    kind: str
    text: re.Pattern[str]

    def fits(self, entry: Any) -> bool:
        if isinstance(entry, GetAttrKey):
            return self.kind in ("name", "first") and self.text.fullmatch(entry.name) is not None
        if self.kind == "quoted":
            return isinstance(entry, DictKey) and isinstance(entry.key, str) and bool(self.text.fullmatch(entry.key))
        if self.kind == "name" or not isinstance(entry, (DictKey, SequenceKey, FlattenedIndexKey)):
            return False
        if isinstance(entry, FlattenedIndexKey) and self.text.fullmatch(f"<flat index {entry.key}>"):
            return True
        key = entry.idx if isinstance(entry, SequenceKey) else entry.key
        return self.text.fullmatch(str(key)) is not None


_TOKEN = re.compile(
    rf"\.?(?P<any>\*\*)(?=$|[.\[*])|\.(?P<name>{NAME})|\[(?P<quoted>{QUOTED})\]|\[(?P<key>[^\[\]]*)\]|(?P<first>[^.\[\]]+)"
)


def is_pattern(text: str) -> bool:
    """Has it a `*` outside of quotes?"""
    return "*" in re.sub(rf"\[(?:{QUOTED})\]", "", text)


class Pattern:
    """A pattern, as steps: `*` in a step stands for any characters of one name, key or index, `**` for any steps.

    Args:
        text: what comes first may be an attribute or a key; quotes around keys may be left out.

    Raises:
        ValueError: where the text is no pattern.
    """

    def __init__(self, text: str) -> None:
        self.steps: list[_Step] = []
        at = 0
        while at < len(text):
            found = _TOKEN.match(text, at)
            if (
                found is None
                or (found["first"] is not None and at > 0)
                or "**" in (found["first"] or found["name"] or "")
            ):
                raise ValueError(
                    f"{text!r} is no pattern: it makes no sense from {text[at:]!r} on. Write layers[*].w or **.w"
                )
            self.steps.append(_step(found))
            at = found.end()
        self.start = self.further({0})

    def further(self, places: Iterable[int]) -> frozenset[int]:
        """The same positions, and those that `**` leads to without a step."""
        out = set(places)
        for at in sorted(out):
            while at < len(self.steps) and self.steps[at].kind == "any":
                at += 1
                out.add(at)
        return frozenset(out)

    def after(self, places: frozenset[int], entry: Any) -> frozenset[int]:
        """Where in the pattern one is, coming from `places`, after a step of a path."""
        out: set[int] = set()
        for at in places:
            if at == len(self.steps):
                continue
            step = self.steps[at]
            if step.kind == "any":
                out.add(at)
            elif step.fits(entry):
                out.add(at + 1)
        return self.further(out) if out else frozenset()

    def ends(self, places: frozenset[int]) -> bool:
        return len(self.steps) in places

    def matches(self, path: Iterable[Any]) -> bool:
        """Does it mean this path?"""
        places = self.start
        for entry in path:
            places = self.after(places, entry)
        return self.ends(places)


def _step(found: re.Match[str]) -> _Step:
    kind = cast(str, found.lastgroup)
    if kind == "quoted":
        return _Step(kind, re.compile(re.escape(ast.literal_eval(found[kind])), re.DOTALL))
    parts = [re.escape(part) for part in found[kind].split("*")]
    return _Step(kind, re.compile(".*".join(parts), re.DOTALL))


# ---- patterns for the texts of paths in messages

_PIECE = re.compile(r"\*\*|\*|[^*]+")


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


def _bare(text: str) -> str:
    return text.replace("'", "").replace('"', "")


def _expression(pattern: str) -> str:
    wild: dict[str, str] = {"**": r".*", "*": r"[^.\[\]]*"}
    return "".join(wild[p] if p in wild else re.escape(p) for p in cast("list[str]", _PIECE.findall(_bare(pattern))))
