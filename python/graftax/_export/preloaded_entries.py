# SPDX-License-Identifier: Apache-2.0
"""Cache entries for loaded programs, stored before the first call, which is a hit then."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import jax

from graftax import _core
from graftax._base.errors import GraftaxError
from graftax._capture.retrace_signals import NewReads
from graftax._explain import ArraySignature, Variant
from graftax._export.programs import Program, Token, fitting, shipped_entry
from graftax._export.saved_entry import Saved
from graftax._export.structure_data import Structured, bind_sentinels
from graftax._export.structure_digest import digest, names_of_instances
from graftax._graph.structure import Structure
from graftax._jit.cache import FunctionTable
from graftax._jit.jitted import Jitted
from graftax._jit.multihost_comparison import compares_hosts
from graftax._jit.number_policy import SymbolicNumbers

NO_FITTING_PROGRAM = "the file has no program for arrays of these shapes, dtypes and devices"


class PreloadedProgram:
    """Takes the place of the entry's `jax.jit` object. If no program fits, the call is retried without the entry."""

    def __init__(self, programs: Sequence[Program], tupled: bool, table: FunctionTable, key: tuple[Any, ...]) -> None:
        self._programs, self._tupled = programs, tupled
        self._table, self._key = weakref.ref(table), key

    def __call__(self, *leaves: Any) -> Any:
        stage = self.stage_for(leaves[0] if self._tupled else leaves)
        # The retried call finds no entry, and makes one that can compile.
        if stage is None:
            table = self._table()
            if table is not None:
                table.drop(self._key, NO_FITTING_PROGRAM)
            raise NewReads
        return stage(*leaves)

    def stage_for(self, leaves: Sequence[Any]) -> Any:
        program = fitting(self._programs, leaves)
        return None if program is None else program.stage


@dataclasses.dataclass
class UnboundEntry:
    """A loaded entry whose sentinels are objects of this process, known from the first call on."""

    graphdef: _core.GraphDef
    context: object
    saved: Saved
    structure: Structured
    variants: list[Variant]
    named: dict[int, Any]  # instances of the sentinels' classes that have a name, so that they are not placeholders


class ProgramsOfFiles:
    """The programs that `load_compiled` read for one function: the `LoadedPrograms` of its table.

    Args:
        table: the table of the function, which holds this object.
        reads: the bindings that the programs depend on.
    """

    def __init__(self, table: FunctionTable, reads: _core.Reads) -> None:
        self._table = weakref.ref(table)
        self.reads = reads
        self.on_disk: Any = None  # the `FunctionPrograms` of the cache on disk
        self._saved: dict[tuple[str, object], list[Saved]] = {}  # by digest and context
        self._unbound: list[UnboundEntry] = []

    def add(self, caller: Jitted[..., Any], fingerprint: str, context: object, saved: Saved) -> None:
        """Adds one structure of a file, and stores its entry if this process has the same classes and code."""
        self._saved.setdefault((fingerprint, context), []).append(saved)
        name, table, structure = caller._plan.name, caller._table, saved.structure
        if structure is None or compares_hosts():
            return
        try:
            graphdef = structure.graphdef()
            is_unchanged = digest(graphdef, structure.names, name) == fingerprint
            variants = [_variant(caller, graphdef, structure.names, saved, program) for program in saved.programs]
        # The structure cannot be rebuilt here. The first call finds the program by its digest, or compiles.
        except Exception:
            return
        if is_unchanged:
            rows = Structure(graphdef).rows
            named = names_of_instances({type(rows[number].own) for number in structure.unnamed})
            # Each process has placeholders of its own, so an entry with some waits for the objects of the first call.
            loaded = UnboundEntry(graphdef, context, saved, structure, variants, named)
            if structure.unnamed:
                self._unbound.append(loaded)
            else:
                self._store_entry(table, loaded)

    def make_entry(self, roots: tuple[Any, ...], layout: tuple[Any, ...], context: Any) -> bool:
        """Stores the loaded entry that fits these roots, with their sentinels. False if there is none.

        Each entry is bound once. Calls with other sentinels find the program by its digest.
        """
        table = self._table()
        if table is None:
            return False
        for i, loaded in enumerate(self._unbound):
            if loaded.context != context or (loaded.graphdef._layout or ()) != layout or not self.reads.holds():
                continue
            graphdef = bind_sentinels(loaded.graphdef, loaded.structure.unnamed, loaded.named, roots)
            if graphdef is not None:
                del self._unbound[i]
                weak = _core.weaken(graphdef)
                variants = [dataclasses.replace(variant, graphdef=weak) for variant in loaded.variants]
                self._store_entry(table, dataclasses.replace(loaded, graphdef=graphdef, variants=variants))
                return True
        return False

    def find(
        self, recording: _core.Recording, context: Any, name: str, numbers: SymbolicNumbers | None = None
    ) -> Any | None:
        saved = self._find_loaded(recording, context, name, numbers)
        if saved is None and self.on_disk is not None:
            saved = self.on_disk.find(recording, context, name, numbers)
        return saved

    def _find_loaded(
        self, recording: _core.Recording, context: Any, name: str, numbers: SymbolicNumbers | None
    ) -> Saved | None:
        if not self._saved or not self.reads.holds():
            return None
        try:
            candidates = self._saved.get((digest(recording.graphdef, recording.names, name), context), [])
        # A structure with a value that has no name was not saved.
        except GraftaxError:
            return None
        candidates = [candidate for candidate in candidates if candidate.guards.serves(recording.leaves)]
        if numbers is None:
            return next((candidate for candidate in candidates if candidate.host is None), None)
        values = [recording.leaves[leaf] for leaf in numbers.leaves]
        return next(
            (
                candidate
                for candidate in candidates
                if candidate.host and candidate.host.leaves == numbers.leaves and candidate.host.serves(values)
            ),
            None,
        )

    def entry(
        self, entry: _core.Entry, context: Any, arguments: int, program: Any, numbers: SymbolicNumbers | None
    ) -> _core.Entry:
        if program.source == "disk":
            self.on_disk.used()
        return shipped_entry(entry, context, arguments, program, numbers)

    def runs_only(self, entry: _core.Entry) -> bool:
        return isinstance(entry.compiled, PreloadedProgram)

    def forget_unbound(self) -> None:
        self._unbound = []

    def _store_entry(self, table: FunctionTable, loaded: UnboundEntry) -> None:
        graphdef, context, saved, structure = loaded.graphdef, loaded.context, loaded.saved, loaded.structure
        weak = _core.weaken(graphdef)
        # Entries of one structure with other guards have a number behind the key.
        key: tuple[Any, ...] = (weak, context)
        while key in table.entries:
            key = (*key[:2], key[2] + 1 if len(key) > 2 else 1)
        compiled = PreloadedProgram(saved.programs, structure.tupled, table, key)
        outcomes = list(saved.outcomes)
        entry = _core.Entry(weak, context, compiled, outcomes, structure.arguments, structure.tupled)
        saved.guards.put(entry)
        if saved.host is not None:
            entry.use_numbers(list(zip(saved.host.leaves, saved.host.kinds, strict=True)), saved.host)
            entry.evaluate = saved.host.compiled(len(outcomes))
        entry.tell(self.reads)
        table._promote(table.store(key, entry))
        for variant in loaded.variants:
            variant.set_entry(entry)
            table.history.add_ready(variant, "loaded")


def _variant(
    caller: Jitted[..., Any], graphdef: _core.GraphDef, names: tuple[str, ...], saved: Saved, program: Program
) -> Variant:
    """The variant that `graftax.explain` shows for a loaded program."""
    signatures = [_array_signature(token) for token in program.signatures if token is not None]
    numbers: dict[int, Any] = {}
    # Behind the leaves, such a program takes the two vectors that the host computes of its numbers.
    if saved.host is not None:
        numbers = {leaf: number_type() for leaf, number_type in zip(saved.host.leaves, saved.host.kinds, strict=True)}
        signatures = signatures[:-2]
    variant = Variant.from_call(caller._plan.name, graphdef, names, (), caller._table.reads)
    return dataclasses.replace(variant, signatures=tuple(signatures), numbers=numbers)


def _array_signature(token: Token) -> ArraySignature:
    shape, dtype, weak, placement = token
    sharding = None
    if placement != "anywhere":
        # A mesh is not rebuilt here: the first call finds such a program by its digest.
        if placement[0] != "on":
            raise ValueError(placement)
        device = next(device for device in jax.devices() if device.id == placement[1])
        sharding = jax.sharding.SingleDeviceSharding(device, memory_kind=placement[2])
    return ArraySignature(shape, _dtype(dtype), weak, sharding, sharding is not None)


def _dtype(text: str) -> Any:
    with contextlib.suppress(TypeError):
        return jax.numpy.dtype(text)
    # NumPy cannot make the dtype of typed keys of a text. Only keys of the default implementation are known by theirs.
    keys = jax.eval_shape(jax.random.key, 0).dtype
    if str(keys) != text:
        raise ValueError(text)
    return keys
