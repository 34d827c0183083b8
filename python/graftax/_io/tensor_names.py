# SPDX-License-Identifier: Apache-2.0
"""Paths by the names that other writers give tensors, and renamed paths: `layers.0.weight` for `layers[0].weight`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from graftax._graph.path import Path
from graftax._graph.structure import plain_key
from graftax._io.decode_graph import Rows
from graftax._io.errors import LoadError

Names = tuple[str, ...]

_NAME = re.compile(r"\[(?:'([^']*)'|\"([^\"]*)\"|([^\[\]]*))\]|([^.\[\]/]+)")

BAD_RENAME = (
    "rename= has {old!r}: {new!r}, which have not the same `*` and `**`: each stands for what it is in the other"
)

TWICE = "{one} and {other} of the file are both {path} by the names in like"


def tensor_path(path: Path) -> Names:
    """A path as texts: attributes, keys and numbers are all the same in the name of a tensor."""
    return tuple(str(plain_key(entry)) for entry in path)


def named(text: str) -> Names:
    """The parts of a name: `a.b`, `a/b`, `a[b]`, `['a'].b`."""
    return tuple(next(part for part in found.groups() if part is not None) for found in _NAME.finditer(text))


class Renaming:
    """What paths of a file are in `like`.

    Args:
        renames: patterns by patterns. `*` stands for one part of a path, `**` for any number.

    Raises:
        ValueError: where what `*` stands for has no place on the other side.
    """

    def __init__(self, renames: dict[str, str]) -> None:
        self._rules: list[tuple[list[Names], Names]] = []
        for old, new in renames.items():
            before, after = named(old), named(new)
            if [part for part in before if "*" in part] != [part for part in after if "*" in part]:
                raise ValueError(BAD_RENAME.format(old=old, new=new))
            self._rules.append((_blocks(before), after))

    def of_tensors(self, names: Iterable[str]) -> dict[Names, str]:
        """The tensors of a file by their paths in `like`."""
        found: dict[Names, str] = {}
        for name in names:
            path = self._renamed(named(name))
            if path in found:
                raise LoadError(TWICE.format(one=found[path], other=name, path=".".join(path)))
            found[path] = name
        return found

    def of_rows(self, rows: Rows) -> dict[Names, Any]:
        """The rows of arrays and values by their paths in `like`."""
        found: dict[Names, Any] = {}
        for number in range(len(rows.all)):
            at = rows.target(number)
            if rows.all[number].op in "as-" or (at != number and rows.all[at].op == "s"):
                path = self._renamed(tensor_path(rows.path(number)))
                if found.setdefault(path, at) != at:
                    texts = {"one": repr(rows.path(found[path])), "other": repr(rows.path(number))}
                    raise LoadError(TWICE.format(**texts, path=".".join(path)))
        return found

    def _renamed(self, names: Names) -> Names:
        for blocks, after in self._rules:
            taken = _taken(blocks, names)
            if taken is not None:
                groups = iter(taken)
                return tuple(name for part in after for name in (next(groups) if "*" in part else (part,)))
        return names


def _blocks(parts: Names) -> list[Names]:
    """What stands between the `**` of a pattern."""
    out: list[list[str]] = [[]]
    for part in parts:
        if part == "**":
            out.append([])
        elif "*" in part and part != "*":
            raise ValueError(f"{part!r} in rename=: a * stands for a whole part, as in layers[*].w")
        else:
            out[-1].append(part)
    return [tuple(block) for block in out]


def _taken(blocks: list[Names], names: Names) -> list[Names] | None:
    """What each `*` and `**` of a pattern stands for, in order; None where it does not fit.

    Each `**` takes as little as it can: where what follows it fits first, the rest fits as well as anywhere later.
    """
    out: list[Names] = []
    first, last = blocks[0], blocks[-1]
    if len(blocks) == 1:
        return out if len(names) == len(first) and _fits(first, names, 0, out) else None
    at, end = len(first), len(names) - len(last)
    if at > end or not _fits(first, names, 0, out):
        return None
    for block in blocks[1:-1]:
        stars: list[Names] = []
        start = next((i for i in range(at, end - len(block) + 1) if _fits(block, names, i, stars)), None)
        if start is None:
            return None
        out += [names[at:start], *stars]
        at = start + len(block)
    out.append(names[at:end])
    return out if _fits(last, names, end, out) else None


def _fits(block: Names, names: Names, at: int, stars: list[Names]) -> bool:
    """Does it fit there? Then adds what each `*` stands for."""
    if any(part not in ("*", names[at + i]) for i, part in enumerate(block)):
        return False
    stars += [(names[at + i],) for i, part in enumerate(block) if part == "*"]
    return True
