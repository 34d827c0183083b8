# SPDX-License-Identifier: Apache-2.0
"""The entry of each leaf that a transform is given and gives: an axis, or a sharding."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, cast

from jax.tree_util import keystr

from .. import _core
from .._errors import StructureError
from .._handles import handle_classes
from ._program import Program
from ._specs import UNKNOWN, Broadcast, Constant, Entries, Here, Rule

ENTRIES_COUNT = (
    "{name}: {option} is a tuple of {count}, and there are {given} positional arguments. Give one entry for each of "
    "them{keywords}."
)
RETURNED_OTHERWISE = (
    "{name} returns at {path} an object that it was given, which comes back with {entry!r}, as {inputs} says, and "
    "{option} asks for {asked!r} there. Give {entry!r} for it in {option}, or return a copy or the arrays alone."
)
PACK_MAPPED = (
    "{name}: {option} maps {path}, a buffer of packed state, which has no such axis. Pass what unpack() gives, or give "
    "{entry!r} for the handle."
)


_RESULT = "result"


def broadcast_of(program: Program, entries: Entries, spec: Any, keyword: Any) -> Broadcast:
    """A specification of the arguments, brought to the leaves of a program."""
    broadcast = Broadcast(program.graphdef, program.names, _rules(program, entries, spec, keyword), program.leaves)
    for i in itertools.chain.from_iterable(map(broadcast.inside, handle_classes())):
        if broadcast.entries[i] != entries.nothing:
            raise StructureError(
                PACK_MAPPED.format(
                    name=entries.name, option=entries.option, path=broadcast.path(i), entry=entries.nothing
                )
            )
    return broadcast


def _rules(program: Program, entries: Entries, spec: Any, keyword: Any) -> list[Rule]:
    """One rule a root: what is captured is not mapped; keyword arguments have the entry `keyword`."""
    count = program.positional
    keywords = program.operands - count
    captured = [Constant(entries, entries.nothing)] * (len(program.roots) - program.operands)
    if isinstance(spec, (tuple, list)) and not entries.is_entry(spec):
        each = cast("Sequence[Any]", spec)
        if len(each) != count or (keywords and keyword is UNKNOWN):
            text = "; keyword arguments are not counted" if keyword is not UNKNOWN else ", and no keyword arguments"
            raise ValueError(
                ENTRIES_COUNT.format(
                    name=entries.name, option=entries.option, count=len(each), given=count, keywords=text
                )
            )
        return [*map(entries.rule, each), *[Constant(entries, keyword)] * keywords, *captured]
    rule = spec if isinstance(spec, Rule) else entries.rule(spec, names=True)
    rest = Constant(entries, keyword) if isinstance(rule, Constant) and keyword is not UNKNOWN else rule
    return [*[rule] * count, *[rest] * keywords, *captured]


class OutputLeaf(NamedTuple):
    """An output leaf of a traced function: of the result, or of what it changed."""

    path: str
    leaf: Any
    entry: Any
    written: bool
    of: int | None  # the leaf of the program that it is, untouched


class Outputs:
    """Gives each output leaf of a program its entry.

    Args:
        program: the program.
        broadcast: the entries of its leaves.
        entries: those of its result.
        leaves: what the transform gives in their place.
    """

    def __init__(self, program: Program, broadcast: Broadcast, entries: Entries, leaves: Sequence[Any]) -> None:
        self._program, self._broadcast, self._entries, self._leaves = program, broadcast, entries, leaves

    def trace(self, spec: Any) -> list[OutputLeaf]:
        """Runs the program, whose result has the entries of `spec`."""
        results: list[Any] = []

        def body(functions: list[Callable[..., Any]], operands: list[Any]) -> Any:
            result = functions[0](*operands)
            results.append(result)
            return result

        outcome, out = self._program.trace(self._leaves, body, arrays=True)
        nodes, _, tracks = outcome.inputs()
        places = outcome.leaf_places()
        rule = self._entries.rule(spec)
        whole = None
        if nodes or not isinstance(rule, Constant):  # else it is the same for all
            values, graphdef = _core.flatten(results[0])
            whole = Broadcast(graphdef, (_RESULT,), [rule], values)
        found: list[OutputLeaf] = []
        for i, ((root, path), leaf) in enumerate(zip(places, out, strict=True)):
            if root > 0:
                name, entry = self._broadcast.written(tracks[root - 1], path, leaf)
            else:
                name = _RESULT + keystr(path)
                entry = whole.at(path) if whole is not None else rule.entry(leaf, Here(lambda: _RESULT, tuple))
            of = self._program.untouched.get(i)
            if of is not None and not self._same(entry, self._broadcast.entries[of], leaf):
                of = None
            found.append(OutputLeaf(name, leaf, entry, root > 0, of))
        if whole is not None and nodes:
            self._check_returned(whole, {path for root, path in places if root == 0}, found)
        return found

    def _check_returned(self, whole: Broadcast, own: AbstractSet[tuple[Any, ...]], found: Sequence[OutputLeaf]) -> None:
        """An object that the function was given, and returns, comes back as it is: is that what was asked for?"""
        entries = self._entries
        has: dict[int, list[Any]] = {}
        for leaf, entry in [
            *zip(self._leaves, self._broadcast.entries, strict=True),
            *((o.leaf, o.entry) for o in found),
        ]:
            has.setdefault(id(leaf), []).append(entry)
        for path, leaf, asked in zip(whole.graphdef.leaf_paths(), whole.leaves, whole.entries, strict=True):
            if path in own or id(leaf) not in has:
                continue
            entry = has[id(leaf)][0]
            if not any(self._same(asked, e, leaf) for e in has[id(leaf)]):
                raise StructureError(
                    RETURNED_OTHERWISE.format(
                        name=entries.name,
                        path=_RESULT + keystr(path),
                        option=entries.option,
                        entry=entry,
                        asked=asked,
                        inputs=self._broadcast.option,
                    )
                )

    def _same(self, entry: Any, other: Any, leaf: Any) -> bool:
        return self._entries.canonical(entry, leaf) == self._entries.canonical(other, leaf)
