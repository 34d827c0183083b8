# SPDX-License-Identifier: Apache-2.0
"""One compiled program of a function, as far as another call can differ from it."""

from __future__ import annotations

import dataclasses
import time
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from graftax import _core
from graftax._base.handles import HandleLayout
from graftax._capture.read_set import ReadSet
from graftax._explain.array_signature import Look, looks
from graftax._explain.cause import Cause, caused, plain_text, without_addresses
from graftax._explain.read_values import Seen, bindings, changes
from graftax._graph.structure import Op, Structure, place_name
from graftax._graph.structure_diff import Difference, differences, differences_by_name, function_text
from graftax._jax import fast_dispatch
from graftax._jax.tracebacks import call_site

_MOST_CAUSES = 64
_MOST_STEPS = 2000  # nodes that are compared with those of other structures
_CACHES_CLEARED = "JAX has dropped it since (jax.clear_caches())"
_SAME_BUT = "a set, or an object whose id() it asks for"


@dataclasses.dataclass(eq=False)
class Variant:
    """A program that was compiled, or a call that is asked about.

    Attributes:
        number: counts the function's variants, the first is 1; 0 where it is none yet.
        when: seconds since the epoch.
        where: (file, line) of the call.
        seconds: of each part: `traced`, `lowered`, `compiled`.
        causes: how the call differed from `nearest`, the number of the variant that was most like it.
    """

    name: str
    graphdef: _core.GraphDef  # with weak statics
    names: tuple[str, ...]  # of the roots
    packed: dict[str, _core.GraphDef]  # by place
    functions: dict[str, tuple[str, int]]  # by place: how it reads, and the hash of its code
    looks: tuple[Look, ...]
    numbers: dict[int, int | float]  # leaves that are Python numbers
    settings: dict[str, Any]
    reads: Seen
    where: tuple[str, int]
    when: float = dataclasses.field(default_factory=time.time)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    number: int = 0
    nearest: int = 0
    causes: tuple[Cause, ...] = ()
    entry: Callable[[], _core.Entry | None] = lambda: None
    dropped: str = ""  # why it is no more
    is_replaced: bool = False  # it was compiled once more, after the caches of JAX were cleared or a guard failed

    @property
    def all_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def is_live(self) -> bool:
        return self.entry() is not None and not self.dropped

    def is_among(self, settings: dict[str, str]) -> bool:
        """Was it compiled under these settings, given as texts?"""
        return settings_texts(self.settings) == settings

    def replaces(self, old: Variant) -> bool:
        entry = self.entry()
        same = entry is not None and old.entry() is entry and old.looks == self.looks
        return same and old.is_among(settings_texts(self.settings))

    def belongs_to(self, entry: _core.Entry) -> None:
        self.entry = weakref.ref(entry)

    @classmethod
    def of(
        cls,
        name: str,
        graphdef: _core.GraphDef,
        names: tuple[str, ...],
        leaves: Sequence[Any],
        reads: ReadSet | None,
        entry: _core.Entry | None = None,
    ) -> Variant:
        """A call that is going on, to be compared with what was compiled. An entry that it has knows its structure."""
        weak, settings = entry.graphdef if entry else _core.weaken(graphdef), fast_dispatch.settings_of_traces()
        numbers = {i: leaf for i, leaf in enumerate(leaves) if type(leaf) in (int, float)}
        held = _held(graphdef, names)
        return cls(name, weak, names, *held, looks(leaves), numbers, settings, bindings(reads), call_site())

    def differences_to(self, now: Variant) -> list[Cause]:
        """Everything in which a call is not as this one was; empty where this program would have served."""
        found: dict[Any, Cause] = {}
        for cause in self._differences_to(now):
            found.setdefault((cause.before, cause.now) if cause.kind == "read" else cause, cause)
            if cause.kind == "code":  # the code that reads it by its name says so too
                found.setdefault((cause.before, cause.now), cause)
        return list(dict.fromkeys(found.values()))[:_MOST_CAUSES]

    def _differences_to(self, now: Variant) -> Iterator[Cause]:
        if self.graphdef == now.graphdef and self.names == now.names:
            yield from self._arrays(now, enumerate(now.looks), None)
            yield from self._guards(now)
        else:
            found, pairs = differences_by_name(self.graphdef, now.graphdef, self.names, now.names)
            became_roots = set(now.names).difference(self.names)
            for difference in found:
                if difference.path in self.packed and difference.path in now.packed:
                    yield from self._inside(difference, now)
                elif difference.path in became_roots:
                    yield self._became_root(caused(difference), now)
                else:
                    yield now.symbolic(caused(difference))
            for path, (text, code) in self.functions.items():
                other, other_code = now.functions.get(path, (text, code))
                if code != other_code:
                    yield Cause("code", path, text, other)
            paths = {other: path for _, other, path in pairs}
            looked = {other: one for one, other, _ in pairs}
            there = ((i, look) for i, look in enumerate(now.looks) if i in looked)
            yield from self._arrays(now, there, paths, looked)
        yield from settings_changes(self.settings, now.settings)
        yield from changes(self.reads, now.reads)

    def _guards(self, now: Variant) -> Iterator[Cause]:
        """What the program is for, besides its structure."""
        entry = self.entry()
        program = entry.host if entry is not None else None
        if program is not None and all(leaf in now.numbers for leaf in program.leaves):
            places = now.graphdef.leaf_places()
            names = [place_name(places[leaf], now.names) for leaf in program.leaves]
            numbers = [now.numbers[leaf] for leaf in program.leaves]
            for broken in program.broken(numbers, names):
                yield Cause("asked" if broken[3] else "guard", *broken)

    def symbolic(self, cause: Cause) -> Cause:
        """Where a number of a call, static before, is a symbol of this one, the same with its value."""
        value = self._number(cause.path) if cause.kind == "type" else None
        return cause if value is None else Cause("symbol", cause.path, cause.before, repr(value))

    def _number(self, path: str) -> int | float | None:
        """The Python number that is traced there."""
        if not self.numbers:
            return None
        places = self.graphdef.leaf_places()
        return next((n for leaf, n in self.numbers.items() if place_name(places[leaf], self.names) == path), None)

    def _became_root(self, cause: Cause, now: Variant) -> Cause:
        """What code reads outside of its arguments, and has changed for the first time."""
        before, value = self.reads.get(cause.path), now._number(cause.path)
        text = "not known to change" if before is None else before[0]
        return Cause("read", cause.path, text, cause.now if value is None else repr(value))

    def _arrays(
        self,
        now: Variant,
        those: Iterable[tuple[int, Look]],
        paths: dict[int, str] | None,
        partner: dict[int, int] | None = None,
    ) -> Iterator[Cause]:
        places = None
        for i, look in those:
            j = i if partner is None else partner[i]
            if j >= len(self.looks) or self.looks[j] == look:
                continue
            if paths is not None:
                path = paths[i]
            else:
                places = places or now.graphdef.leaf_places()
                path = place_name(places[i], now.names)
            yield from self.looks[j].causes(look, path)

    def _inside(self, difference: Difference[str], now: Variant) -> Iterator[Cause]:
        """What differs in packed state."""
        found = False
        for d in differences(self.packed[difference.path], now.packed[difference.path], ("",)):
            found = True
            cause = caused(d)
            kind = "packed number" if cause.kind == "number" else cause.kind
            yield cause._replace(kind=kind, path=_without_layout(difference.path) + cause.path)
        if not found:
            yield Cause("packed", _without_layout(difference.path), "packed state", "packed state of other shapes")

    def same_otherwise(self, entry: _core.Entry | None) -> Cause:
        """Why it does not serve a call, of this entry, that is like its own in all that is compared here."""
        own = self.entry()
        if self.dropped:
            return Cause("evicted", self.dropped)
        if own is None or own is entry:
            return Cause("cleared", _CACHES_CLEARED)
        return Cause("set order", _SAME_BUT)


def _held(
    graphdef: _core.GraphDef, names: tuple[str, ...]
) -> tuple[dict[str, _core.GraphDef], dict[str, tuple[str, int]]]:
    """(the structures in packed state, the functions) of a structure, by place: both may be gone by the next call."""
    structure = Structure(graphdef)
    packed: dict[str, _core.GraphDef] = {}
    functions: dict[str, tuple[str, int]] = {}
    for row in structure.rows:
        if row.op is Op.node and row.type is types.FunctionType:
            function: types.FunctionType | types.CodeType = row.value  # of a weak structure, the code is left
            code = function if isinstance(function, types.CodeType) else function.__code__
            token = hash((code, code.co_code))  # before 3.12 its hash leaves the instructions out
            text = code.co_qualname if isinstance(function, types.CodeType) else function_text(function)
            functions[place_name(structure.place(row), names)] = text, token
        elif row.op is Op.static and isinstance(value := row.value, HandleLayout):
            packed[place_name(structure.place(row), names)] = _core.weaken(value.graphdef)
    return packed, functions


def _without_layout(path: str) -> str:
    return path.rpartition(".")[0]


def settings_texts(settings: dict[str, Any]) -> dict[str, str]:
    """Settings, as texts that are the same in every process."""
    return {name: without_addresses(repr(value)) for name, value in settings.items()}


def settings_changes(before: dict[str, Any], now: dict[str, Any]) -> Iterator[Cause]:
    for name, value in now.items():
        if name in before and before[name] is not value and before[name] != value:
            texts = plain_text(before[name]), plain_text(value)
            yield Cause("setting", setting_name(name), *texts)


def setting_name(name: str) -> str:
    """A setting as users know it."""
    return "the mesh" if name.endswith("mesh_context_manager") else name


def nearest(known: Sequence[Variant], now: Variant) -> tuple[Variant | None, list[Cause]]:
    """The variant from which a call differs in the fewest places, of equals the first, and where it differs.

    A walk through two structures takes time: those that are equal, and those that one static tells apart, come first,
    and where nothing can be nearer it ends.
    """
    best: Variant | None = None
    causes: list[Cause] = []
    steps = _MOST_STEPS
    for rank, variant in sorted(((_rank(v, now), v) for v in known), key=lambda ranked: ranked[0]):
        if best is not None and (len(causes) <= min(rank, 1) or steps < 0):
            break
        try:
            found = variant.differences_to(now)
        except Exception:  # parts that cannot be compared: an explanation fails no call
            continue
        steps -= now.graphdef.num_nodes if rank else 0
        if best is None or len(found) < len(causes):
            best, causes = variant, found
    return best, causes


def _rank(known: Variant, now: Variant) -> int:
    """0: the same structure; 1: one static differs; 2: more."""
    try:
        if known.names != now.names:
            return 2
        if known.graphdef == now.graphdef:
            return 0
        return 1 if known.graphdef._static_change(now.graphdef) else 2  # pyright: ignore[reportPrivateUsage]
    except Exception:  # a static's own __eq__ raised
        return 2
