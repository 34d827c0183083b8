# SPDX-License-Identifier: Apache-2.0
"""Matches paths with tensor names of other writers (`layers.0.weight` for `layers[0].weight`), and renames paths."""

from __future__ import annotations

import re
from collections.abc import Iterable

from graftax._graph.path import Path
from graftax._graph.structure import plain_key
from graftax._io.decode_graph import FileGraph
from graftax._io.errors import LoadError

NameParts = tuple[str, ...]

_NAME = re.compile(r"\[(?:'([^']*)'|\"([^\"]*)\"|([^\[\]]*))\]|([^.\[\]/]+)")

TWICE = "{one} and {other} in the file both stand for {path} in like"


def tensor_path(path: Path) -> NameParts:
    """The parts of a path as texts: the name of a tensor does not tell attributes, keys and indices apart."""
    return tuple(str(plain_key(entry)) for entry in path)


def name_parts(text: str) -> NameParts:
    """The parts of a name: `a.b`, `a/b`, `a[b]`, `['a'].b`."""
    return tuple(next(part for part in match.groups() if part is not None) for match in _NAME.finditer(text))


class Renaming:
    """Translates paths of a file to paths of `like`.

    Args:
        renames: pattern in the file -> pattern in `like`. `*` stands for one part of a path, `**` for any number.

    Raises:
        ValueError: if the two patterns of a pair have different wildcards.
    """

    def __init__(self, renames: dict[str, str]) -> None:
        self._rules: list[tuple[list[NameParts], NameParts]] = []
        for source, target in renames.items():
            source_parts, target_parts = name_parts(source), name_parts(target)
            # What a wildcard matches is put in the place of the same wildcard in the target.
            if [part for part in source_parts if "*" in part] != [part for part in target_parts if "*" in part]:
                raise ValueError(
                    f"rename= has {source!r}: {target!r}, which do not have the same `*` and `**`: each stands for the "
                    "same in both"
                )
            self._rules.append((_blocks(source_parts), target_parts))

    def tensors_by_path(self, names: Iterable[str]) -> dict[NameParts, str]:
        """The names of a file's tensors by their paths in `like`."""
        tensors: dict[NameParts, str] = {}
        for name in names:
            path = self._renamed(name_parts(name))
            if path in tensors:
                raise LoadError(TWICE.format(one=tensors[path], other=name, path=".".join(path)))
            tensors[path] = name
        return tensors

    def rows_by_path(self, file_graph: FileGraph) -> dict[NameParts, int]:
        """The rows of arrays and values by their paths in `like`."""
        targets: dict[NameParts, int] = {}
        for number in range(len(file_graph.rows)):
            target = file_graph.target(number)
            # A reference to an array or a value is a path of its own.
            if file_graph.rows[number].op in "as-" or (target != number and file_graph.rows[target].op == "s"):
                path = self._renamed(tensor_path(file_graph.path(number)))
                if targets.setdefault(path, target) != target:
                    texts = {"one": repr(file_graph.path(targets[path])), "other": repr(file_graph.path(number))}
                    raise LoadError(TWICE.format(**texts, path=".".join(path)))
        return targets

    def _renamed(self, names: NameParts) -> NameParts:
        for blocks, target_parts in self._rules:
            wildcards = _match_blocks(blocks, names)
            if wildcards is not None:
                groups = iter(wildcards)  # both patterns have the same wildcards, in the same order
                return tuple(name for part in target_parts for name in (next(groups) if "*" in part else (part,)))
        return names


def _blocks(parts: NameParts) -> list[NameParts]:
    """The parts of a pattern, divided at each `**`."""
    blocks: list[list[str]] = [[]]
    for part in parts:
        if part == "**":
            blocks.append([])
        elif "*" in part and part != "*":
            raise ValueError(f"{part!r} in rename=: a * stands for a whole part, as in layers[*].w")
        else:
            blocks[-1].append(part)
    return [tuple(block) for block in blocks]


def _match_blocks(blocks: list[NameParts], names: NameParts) -> list[NameParts] | None:
    """The parts that each `*` and `**` of a pattern matches, in order; None where the pattern does not match.

    Each `**` takes as few parts as possible: if the pattern matches at all, it matches with the next block as early as
    possible. So nothing is tried twice.
    """
    wildcards: list[NameParts] = []
    head, tail = blocks[0], blocks[-1]
    # Without `**`, the number of parts has to be the same.
    if len(blocks) == 1:
        return wildcards if len(names) == len(head) and _match_block(head, names, 0, wildcards) else None
    # The ends are fixed; only the blocks between two `**` have to be searched for.
    position, end = len(head), len(names) - len(tail)
    if position > end or not _match_block(head, names, 0, wildcards):
        return None
    for block in blocks[1:-1]:
        stars: list[NameParts] = []
        start = next((i for i in range(position, end - len(block) + 1) if _match_block(block, names, i, stars)), None)
        if start is None:
            return None
        wildcards += [names[position:start], *stars]
        position = start + len(block)
    wildcards.append(names[position:end])
    return wildcards if _match_block(tail, names, end, wildcards) else None


def _match_block(block: NameParts, names: NameParts, position: int, stars: list[NameParts]) -> bool:
    """Does a block match at a position? Then the parts that each `*` matches are added to `stars`."""
    if any(part not in ("*", names[position + i]) for i, part in enumerate(block)):
        return False
    stars += [(names[position + i],) for i, part in enumerate(block) if part == "*"]
    return True
