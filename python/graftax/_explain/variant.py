# SPDX-License-Identifier: Apache-2.0
"""One compiled program of a function: everything in which another call can differ from it."""

from __future__ import annotations

import dataclasses
import time
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from graftax import _core
from graftax._base.errors import some
from graftax._base.handles import HandleLayout
from graftax._capture.read_set import ReadSet
from graftax._explain.array_signature import ArraySignature, array_signatures
from graftax._explain.cause_texts import Cause, cause_from_difference, plain_text, without_addresses
from graftax._explain.read_values import ReadValues, changes, read_values
from graftax._graph.structure import Op, Structure, place_name
from graftax._graph.structure_diff import Difference, differences, differences_by_name, function_text
from graftax._jax.settings import settings_of_traces
from graftax._jax.tracebacks import call_site

_MAX_CAUSES = 64
_MAX_NODES = 2000  # how many nodes `nearest` compares
_CACHES_CLEARED = "JAX has dropped it since (jax.clear_caches())"
_UNCOMPARED_PARTS = "a set, or an object whose id() it asks for"


@dataclasses.dataclass(eq=False)
class Variant:
    """A compiled program, or a call to be compared with programs.

    Attributes:
        number: counts the function's variants from 1; 0 for a call.
        when: seconds since the epoch.
        where: (file, line) of the call.
        seconds: of each stage: `traced`, `lowered`, `compiled`.
        causes: how the call differed from `nearest`, the number of the most similar variant.
    """

    name: str
    graphdef: _core.GraphDef  # with weak statics
    names: tuple[str, ...]  # of the roots
    packed: dict[str, _core.GraphDef]  # by key path
    functions: dict[str, tuple[str, int]]  # by key path: (text, hash of the code)
    signatures: tuple[ArraySignature, ...]
    numbers: dict[int, int | float]  # leaves that are Python numbers
    settings: dict[str, Any]
    reads: ReadValues
    where: tuple[str, int]
    when: float = dataclasses.field(default_factory=time.time)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    number: int = 0
    nearest: int = 0
    causes: tuple[Cause, ...] = ()
    entry: Callable[[], _core.Entry | None] = lambda: None
    dropped: str = ""  # the reason why the cache dropped it
    was_retrieved: bool = False  # JAX has read its executable from its own cache
    on_disk: str = ""  # whether the cache on disk had it, and whether it was written there
    repeated: tuple[str, ...] = ()  # which calls in it share a program, and which do not
    changed: tuple[str, ...] = ()  # numbers that its first trace changed: a second one has them as inputs
    is_reused: bool = False  # its trace came to a program that was compiled already
    is_compiling: bool = False  # in the background
    is_ahead: bool = False  # it was made before a call needed it
    is_replaced: bool = False  # compiled again later, after jax.clear_caches() or a failed guard

    @property
    def all_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def notes(self) -> list[str]:
        """What there is to say of its trace, as lines."""
        notes = ["made before a call needed it: a test on a number may come out otherwise"] if self.is_ahead else []
        if self.changed:
            notes.append(f"traced twice: the first trace changed {some(self.changed, 3)}, an input now")
        return [*notes, *self.repeated]

    @property
    def has_program(self) -> bool:
        """Has it been compiled in this process, or found to be equal to one that was?"""
        return "compiled" in self.seconds or self.is_reused

    @property
    def is_live(self) -> bool:
        return self.entry() is not None and not self.dropped

    def was_compiled_under(self, settings: dict[str, str]) -> bool:
        """Was it compiled under these settings, whose values are texts?"""
        return settings_texts(self.settings) == settings

    def replaces(self, previous: Variant) -> bool:
        """Does it take the calls of a previous variant, since both are for the same entry, arrays and settings?"""
        entry = self.entry()
        has_same_inputs = entry is not None and previous.entry() is entry and previous.signatures == self.signatures
        return has_same_inputs and previous.was_compiled_under(settings_texts(self.settings))

    def set_entry(self, entry: _core.Entry) -> None:
        self.entry = weakref.ref(entry)

    @classmethod
    def from_call(
        cls,
        name: str,
        graphdef: _core.GraphDef,
        names: tuple[str, ...],
        leaves: Sequence[Any],
        reads: ReadSet | None,
        entry: _core.Entry | None = None,
    ) -> Variant:
        """The running call, to be compared with variants. `entry`: its cache entry, whose weak GraphDef it shares."""
        weak, settings = entry.graphdef if entry else _core.weaken(graphdef), settings_of_traces()
        numbers = {i: leaf for i, leaf in enumerate(leaves) if type(leaf) in (int, float)}
        packed, functions = _packed_and_functions(graphdef, names)
        signatures, values = array_signatures(leaves), read_values(reads)
        variant = cls(name, weak, names, packed, functions, signatures, numbers, settings, values, call_site())
        if entry is not None:
            variant.set_entry(entry)
        return variant

    def differences_to(self, call: Variant) -> list[Cause]:
        """All causes why this program does not serve `call`; empty if it would."""
        causes: dict[Any, Cause] = {}
        for cause in self._differences_to(call):
            # Several names may be bound to one value that changed: its change is one cause.
            causes.setdefault((cause.before, cause.now) if cause.kind == "read" else cause, cause)
            if cause.kind == "code":  # a global that names this function differs as well: do not report both
                causes.setdefault((cause.before, cause.now), cause)
        return list(dict.fromkeys(causes.values()))[:_MAX_CAUSES]

    def _differences_to(self, call: Variant) -> Iterator[Cause]:
        # Only between equal structures do leaves have equal numbers.
        if self.graphdef == call.graphdef and self.names == call.names:
            yield from self._array_differences(call, enumerate(call.signatures), None)
            yield from self._guard_differences(call)
        else:
            structure_differences, pairs = differences_by_name(self.graphdef, call.graphdef, self.names, call.names)
            became_roots = set(call.names).difference(self.names)
            for difference in structure_differences:
                if difference.path in self.packed and difference.path in call.packed:
                    yield from self._packed_differences(difference, call)
                elif difference.path in became_roots:
                    yield self._became_root(cause_from_difference(difference), call)
                else:
                    yield call.as_symbol_cause(cause_from_difference(difference))
            for path, (text, code) in self.functions.items():
                other_text, other_code = call.functions.get(path, (text, code))
                if code != other_code:
                    yield Cause("code", path, text, other_text)
            # Leaves of the two structures correspond by their key paths: (own leaf, leaf of the call, path).
            paths = {leaf: path for _, leaf, path in pairs}
            partner = {leaf: own_leaf for own_leaf, leaf, _ in pairs}
            signatures = ((leaf, signature) for leaf, signature in enumerate(call.signatures) if leaf in partner)
            yield from self._array_differences(call, signatures, paths, partner)
        yield from settings_changes(self.settings, call.settings)
        yield from changes(self.reads, call.reads)

    def _guard_differences(self, call: Variant) -> Iterator[Cause]:
        """Guards of the program that the numbers of the call fail."""
        entry = self.entry()
        program = entry.host if entry is not None else None
        if program is not None and all(leaf in call.numbers for leaf in program.leaves):
            paths = call.graphdef.leaf_places()
            names = [place_name(paths[leaf], call.names) for leaf in program.leaves]
            numbers = [call.numbers[leaf] for leaf in program.leaves]
            for broken in program.broken(numbers, names):
                yield Cause("asked" if broken[3] else "guard", *broken)

    def as_symbol_cause(self, cause: Cause) -> Cause:
        """The cause as it is, or of the kind "symbol" if a number that was static before is symbolic in this call."""
        # To the structure a symbolic number is an array where a static one was, so its type has changed.
        value = self._number(cause.path) if cause.kind == "type" else None
        return cause if value is None else Cause("symbol", cause.path, cause.before, repr(value))

    def _number(self, path: str) -> int | float | None:
        """The traced Python number at a key path, if there is one."""
        if not self.numbers:
            return None
        paths = self.graphdef.leaf_places()
        return next(
            (number for leaf, number in self.numbers.items() if place_name(paths[leaf], self.names) == path), None
        )

    def _became_root(self, cause: Cause, call: Variant) -> Cause:
        """The cause for a global or capture that has changed for the first time, and so has become a root."""
        previous, value = self.reads.get(cause.path), call._number(cause.path)
        text = "not known to change" if previous is None else previous[0]
        return Cause("read", cause.path, text, cause.now if value is None else repr(value))

    def _array_differences(
        self,
        call: Variant,
        signatures: Iterable[tuple[int, ArraySignature]],
        paths: dict[int, str] | None,
        partner: dict[int, int] | None = None,
    ) -> Iterator[Cause]:
        leaf_paths = None
        for i, signature in signatures:
            j = i if partner is None else partner[i]
            if j >= len(self.signatures) or self.signatures[j] == signature:
                continue
            if paths is not None:
                path = paths[i]
            else:
                leaf_paths = leaf_paths or call.graphdef.leaf_places()
                path = place_name(leaf_paths[i], call.names)
            yield from self.signatures[j].causes(signature, path)

    def _packed_differences(self, difference: Difference[str], call: Variant) -> Iterator[Cause]:
        """The causes inside packed state."""
        has_differences = False
        for inner in differences(self.packed[difference.path], call.packed[difference.path], ("",)):
            has_differences = True
            cause = cause_from_difference(inner)
            cause_kind = "packed number" if cause.kind == "number" else cause.kind
            yield cause._replace(kind=cause_kind, path=_without_layout(difference.path) + cause.path)
        if not has_differences:
            yield Cause("packed", _without_layout(difference.path), "packed state", "packed state of other shapes")

    def cause_if_equal(self, entry: _core.Entry | None) -> Cause:
        """Why it does not serve a call, which has this entry, although no difference was found."""
        own_entry = self.entry()
        if self.dropped:
            return Cause("evicted", self.dropped)
        if entry is not None and own_entry is entry and entry.donor is not None and not self.seconds:
            return Cause("donation", "")  # it was loaded
        if own_entry is None or own_entry is entry:
            return Cause("cleared", _CACHES_CLEARED)
        return Cause("set order", _UNCOMPARED_PARTS)


def _packed_and_functions(
    graphdef: _core.GraphDef, names: tuple[str, ...]
) -> tuple[dict[str, _core.GraphDef], dict[str, tuple[str, int]]]:
    """(structures of packed state, functions) by key path."""
    # The structure of the variant holds both weakly, and they may be gone by the next call.
    packed: dict[str, _core.GraphDef] = {}
    functions: dict[str, tuple[str, int]] = {}
    nodes, statics = graphdef._types()  # pyright: ignore[reportPrivateUsage]
    # Most structures have neither, as their types tell without a look at each row.
    if types.FunctionType not in nodes and not any(issubclass(cls, HandleLayout) for cls in statics):
        return packed, functions
    structure = Structure(graphdef)
    for row in structure.rows:
        if row.op is Op.node and row.type is types.FunctionType:
            function: types.FunctionType | types.CodeType = row.value  # a weak structure keeps only the code
            code = function if isinstance(function, types.CodeType) else function.__code__
            token = hash((code, code.co_code))  # before 3.12 the hash of code ignores its instructions
            text = code.co_qualname if isinstance(function, types.CodeType) else function_text(function)
            functions[place_name(structure.root_path(row), names)] = text, token
        elif row.op is Op.static and isinstance(value := row.value, HandleLayout):
            packed[place_name(structure.root_path(row), names)] = _core.weaken(value.graphdef)
    return packed, functions


def _without_layout(path: str) -> str:
    return path.rpartition(".")[0]


def settings_texts(settings: dict[str, Any]) -> dict[str, str]:
    """The settings as texts that are the same in every process."""
    return {name: without_addresses(repr(value)) for name, value in settings.items()}


def settings_changes(previous: dict[str, Any], current: dict[str, Any]) -> Iterator[Cause]:
    for name, value in current.items():
        if name in previous and previous[name] is not value and previous[name] != value:
            # Users know this one as what `jax.set_mesh` sets.
            shown = "the mesh" if name.endswith("mesh_context_manager") else name
            yield Cause("setting", shown, plain_text(previous[name]), plain_text(value))


def nearest(candidates: Sequence[Variant], call: Variant) -> tuple[Variant | None, list[Cause]]:
    """(the variant with the fewest differences to a call, these differences). Of equally near ones the first counts."""
    # Comparing two structures node by node is slow. So variants with an equal structure come first, then those that
    # differ in one static value, and the search ends when no other variant can be nearer.
    best: Variant | None = None
    causes: list[Cause] = []
    nodes_left = _MAX_NODES
    for rank, variant in sorted(((_rank(v, call), v) for v in candidates), key=lambda ranked: ranked[0]):
        if best is not None and (len(causes) <= min(rank, 1) or nodes_left < 0):
            break
        try:
            differences = variant.differences_to(call)
        except Exception:  # e.g. an __eq__ that raises: an explanation must not fail the call
            continue
        nodes_left -= call.graphdef.num_nodes if rank else 0
        if best is None or len(differences) < len(causes):
            best, causes = variant, differences
    return best, causes


def _rank(candidate: Variant, call: Variant) -> int:
    """0: the same structure; 1: one static value differs; 2: more differs."""
    try:
        if candidate.names != call.names:
            return 2
        if candidate.graphdef == call.graphdef:
            return 0
        return 1 if candidate.graphdef._static_change(call.graphdef) else 2  # pyright: ignore[reportPrivateUsage]
    except Exception:  # raised by the `__eq__` of a static value
        return 2
