# SPDX-License-Identifier: Apache-2.0
"""The `ProgramStore` on disk: what is asked at each miss, and told of each compilation."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path
from typing import Any

import jax

from graftax import _core
from graftax._base.errors import GraftaxError
from graftax._capture.read_set_numbers import OfSymbols
from graftax._explain import Variant, compile_events, settings_texts
from graftax._export.constant_reads import ConstantReads, constants_data
from graftax._export.disk_programs import NOTHING, FunctionPrograms
from graftax._export.disk_writer import PROGRAM, READS, Job, Writer
from graftax._export.preloaded_entries import ProgramsOfFiles
from graftax._export.program_key import call_key, environment, folder_name
from graftax._export.programs import Program, Shipped, settings_tokens, signature_token
from graftax._export.read_set_data import as_data, key_of_data
from graftax._export.saved_entry import (
    OTHER_SETTINGS,
    READS_UNKNOWN,
    Saved,
    compiled_programs,
    saved_entry,
)
from graftax._export.structure_digest import collecting_digests, digest
from graftax._jax import cache_of_jax, fast_dispatch
from graftax._jit.jitted import Jitted
from graftax._jit.leaf_guards import LeafGuards
from graftax._jit.multihost_comparison import compares_hosts

SEVERAL_PROCESSES = "several processes compare what they trace"
IMPURE = (
    "its code uses {call} ({place}), which each process has to do again: pass its value to the function as an argument"
)
HAS_WARNED = "a warning was given while it was traced, which each process has to give"
READS_CHANGED = "what its code reads has changed meanwhile"


class DiskStore:
    """Programs in a folder.

    Args:
        folder: of the cache.
        min_seconds: a program that was traced and compiled in less time is not written.
        max_bytes: the size of all files.
    """

    def __init__(self, folder: Path, min_seconds: float, max_bytes: int) -> None:
        self.folder, self.min_seconds = folder, min_seconds
        self.writer = Writer(folder, max_bytes)

    # ---- asked

    def adopt(self, caller: Any) -> bool:
        # What `filter_jit` reads may not be known, and hosts that compare their traces have to trace.
        reads = caller._table.reads
        if reads is None or compares_hosts() or jax.process_count() > 1:
            return False
        if isinstance(reads, OfSymbols) and reads.constants is None:
            reads.tell(ConstantReads())
        return self._programs_of(caller).adopt(caller)

    def _programs_of(self, caller: Jitted[..., Any]) -> FunctionPrograms:
        table = caller._table
        if table.loaded is None:
            table.loaded = ProgramsOfFiles(table, table.reads.reads())
        on_disk: FunctionPrograms | None = table.loaded.on_disk
        if on_disk is None or on_disk.folder.parent != self.folder:
            current = environment(caller)
            folder = self.folder / folder_name(caller, current)
            on_disk = table.loaded.on_disk = FunctionPrograms(table, folder, current)
        return on_disk

    def extensible(self, compiled: Any, tupled: bool) -> Any:
        return Shipped(compiled, (), tupled, self.min_seconds)

    def add_program(self, caller: Any, recording: _core.Recording, outcomes: list[_core.Outcome]) -> bool:
        table, name = caller._table, caller._plan.name
        on_disk: FunctionPrograms | None = getattr(table.loaded, "on_disk", None)
        # An entry without an Outcome is new: its program was looked for just now.
        entry = table.entry_of(outcomes) if outcomes else None
        if on_disk is None or entry is None or entry.host is not None or not isinstance(entry.compiled, Shipped):
            return False
        # A call would have run that program: this trace is for `lower`.
        if entry.compiled.has_program(recording.leaves):
            return False
        # A function by value has constants, which are compared with the present values.
        if not caller._options.captured:
            on_disk.adopt(caller)
        saved = on_disk.find(recording, _core.settings_now()[0], name, None, outcomes)
        if saved is None or saved.guards != LeafGuards.of(entry):
            return False
        entry.compiled.programs.extend(saved.programs)
        on_disk.used()
        compile_events.record_ready(table, entry, name, recording, saved.source)
        return True

    # ---- told

    def keep(self, caller: Any, entry: _core.Entry) -> None:
        table = caller._table
        variants = [v for v in table.history.variants_of(entry) if v.has_program and not v.on_disk]
        if not variants:
            return
        on_disk: FunctionPrograms | None = getattr(table.loaded, "on_disk", None)
        lookup = f"not found: {NOTHING if on_disk is None else on_disk.miss}"
        for variant in variants:
            # A reused program took its time in another variant of this history.
            equal = table.history.variants if variant.is_reused else [variant]
            if max(v.all_seconds for v in equal) < self.min_seconds:
                variant.on_disk = f"{lookup}; not written: it took less than {self.min_seconds} s"
                continue
            try:
                self.writer.submit(self._job(caller, entry, variant, lookup))
            # Of a value that has no name in another process, or of user code that describes a value.
            except Exception as error:
                text = str(error) if isinstance(error, GraftaxError) else f"{type(error).__name__}: {error}"
                variant.on_disk = f"{lookup}; not written: {text}"

    def _job(self, caller: Jitted[..., Any], entry: _core.Entry, variant: Variant, lookup: str) -> Job:
        """The file of a program. What may change later is pickled here, in the thread of the call."""
        table, name = caller._table, caller._plan.name
        if (reads := table.reads) is None or (isinstance(reads, OfSymbols) and reads.constants is None):
            raise GraftaxError(READS_UNKNOWN.format(name=name))
        if compares_hosts() or jax.process_count() > 1:
            raise GraftaxError(SEVERAL_PROCESSES)
        for call, place in table.reads.impure.heard.items():
            raise GraftaxError(IMPURE.format(call=call, place=place))
        if table.has_warned:
            raise GraftaxError(HAS_WARNED)
        host, settings = entry.host, settings_tokens()
        variants = [variant] if host is None else table.history.variants_of(entry)
        programs, compiled = _donating(entry, variant, settings) or compiled_programs(entry, variants, settings)
        if variant not in compiled:
            raise GraftaxError(OTHER_SETTINGS)
        # All programs of an entry with symbolic numbers are in one file, since they share its host program.
        if host is not None and isinstance(entry.compiled, Shipped):
            programs += entry.compiled.programs
        # Tokens are taken of the present values. These may change meanwhile: `held` tells, after the last one.
        held = table.reads.reads()
        with collecting_digests() as digests:
            if isinstance(reads, OfSymbols) and isinstance(reads.constants, ConstantReads):
                read_data = constants_data(reads.constants, name, caller._function, variant.graphdef)
            else:
                read_data = as_data(reads, name, caller._function)
            fingerprint = digest(variant.graphdef, variant.names, name)
        saved = saved_entry(entry, [], variant.graphdef, variant.names)
        # Without symbolic numbers a file has one program, and so one Outcome.
        if host is None:
            number = programs[0].outcome
            saved.outcomes, saved.numbers = [saved.outcomes[number]], [saved.numbers[number]]
        saved_pickle = pickle.dumps(saved)
        if not held.holds():
            raise GraftaxError(READS_CHANGED)
        tokens = list(map(signature_token, variant.signatures))
        context, number_leaves = _core.settings_now()[0], host.leaves if host is not None else None
        key = call_key(fingerprint, context, settings, tokens, number_leaves)
        tag = "" if host is None and not any(saved.guards) else _tag(saved)
        on_disk, reads_key = self._programs_of(caller), key_of_data(read_data)
        header = {"numbers": sorted(saved.number_paths), "direct": fast_dispatch.status() == "on"}
        return Job(
            on_disk.folder / ("-".join(filter(None, (reads_key, *key, tag))) + PROGRAM),
            header,
            saved_pickle,
            programs,
            on_disk.folder / (reads_key + READS),
            on_disk.environment,
            pickle.dumps((read_data, digests)),
            compiled,
            lookup,
        )


def _donating(
    entry: _core.Entry, variant: Variant, settings: dict[str, str]
) -> tuple[list[Program], list[Variant]] | None:
    """The programs of an entry that donate, which were compiled in place of the one that does not."""
    tokens = list(map(signature_token, variant.signatures))
    programs: list[Program] = []
    for donating in entry.donor.programs if entry.donor is not None else ():
        signatures = tuple(map(signature_token, donating.signatures))
        same_arrays = entry.host is not None or list(signatures) == tokens
        if same_arrays and None not in signatures and settings_texts(donating.settings) == settings:
            # Hosts compare no program that donates, so it has no digest.
            program = Program(signatures, settings, fast_dispatch.devices_of(donating.stage), "", donating.stage)
            program.was_retrieved = cache_of_jax.may_be_loaded(donating.stage)
            program.donating = donating.donated, donating.number
            programs.append(program)
    return (programs, [variant]) if programs else None


def _tag(saved: Saved) -> str:
    """Tells entries of one structure apart by their guards: of numbers, and which leaves are NumPy's, or one array."""
    guards = None if saved.host is None else sorted(map(repr, saved.host.guards.items()))
    return hashlib.sha256(repr((guards, saved.guards)).encode()).hexdigest()[:8]
