# SPDX-License-Identifier: Apache-2.0
"""`f.save_compiled` and `f.load_compiled`: the programs of a function as a file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pickle
import platform
import time
import warnings
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from graftax import _core
from graftax._base.errors import GraftaxError, RecompileWarning
from graftax._base.progress_bar import Bar, ProgressCallback
from graftax._base.whole_file import replacing
from graftax._capture.numbers.host_program import HostProgram
from graftax._explain import ArraySignature, Variant, array_signatures
from graftax._export.digest import PackedError, code_digest, digest
from graftax._export.preloaded_entries import ProgramsOfFiles
from graftax._export.programs import Program, settings_tokens, signature_token
from graftax._export.read_set_data import as_data, restore, version_of
from graftax._export.structure_data import Structured
from graftax._graph.structure import place_name
from graftax._jax import fast_dispatch
from graftax._jax.tracebacks import caller_level

LEFT_OUT = "The file is without {count} of the structures: {why}"
NOTHING_TO_SAVE = (
    "{name} has no program that can be saved: {why}. Call it first, or warm it: f.warm([args]) and then "
    "f.save_compiled(path)."
)
READS_UNKNOWN = (
    "{name} cannot be saved: what the function of filter_jit reads outside of its arguments is fixed when it is "
    "traced, as in JAX, and not known. graftax.jit(f, mutation='discard') works by value, and can be."
)
NO_PROGRAMS = "{path} holds no programs of graftax: write it with f.save_compiled(path)"
PROGRAMS_DO_NOT_FIT = (
    "the programs in {path} do not fit here and are not used, so {name} compiles: {differences}. Save them again here."
)

# Followed by the digest of the rest of the file, so that damaged machine code is never run.
_MAGIC = b"graftax programs 6\n"


@dataclasses.dataclass
class Saved:
    """What was compiled for one structure: its Outcomes, and an executable for each signature of the leaves."""

    outcomes: list[_core.Outcome]
    programs: list[Program]
    host: HostProgram | None = None  # of its symbolic numbers
    number_paths: frozenset[str] = frozenset()  # the key paths of the symbolic numbers
    structure: Structured | None = None
    numbers: list[list[tuple[int, int]]] = dataclasses.field(default_factory=list[list[tuple[int, int]]])  # of Outcomes


def save(caller: Any, path: str | os.PathLike[str]) -> int:
    """Writes the programs of a jitted function. Returns their number."""
    name, table = caller._plan.name, caller._table
    if table.reads is None or not caller._options.captured:
        raise GraftaxError(READS_UNKNOWN.format(name=name))
    settings, reason = settings_tokens(), "nothing was compiled"
    saved: list[tuple[str, Any, Saved]] = []
    refused: list[PackedError] = []
    for (graphdef, context, *variant_key), entry in list(table.entries.items()):
        host: HostProgram | None = entry.host
        if (variant_key and host is None) or not entry.holds():
            continue  # an entry for other values of what the code reads, or for other guards
        programs: list[Program] = []
        names: tuple[str, ...] = ()
        for variant in cast("list[Variant]", table.history.variants):
            signatures = _executable_signatures(host, variant.signatures)
            tokens = tuple(map(signature_token, signatures))
            if variant.entry() is not entry or "compiled" not in variant.seconds:
                continue
            if None in tokens or not variant.was_compiled_under(settings):
                reason = "it was compiled under other settings of JAX, or for arrays that lie in another way"
                continue
            lowered, names = _lowered(entry, signatures), variant.names
            programs.append(Program.from_lowered(lowered, cast(Any, tokens), settings))
        try:
            key = digest(graphdef, names, name) if programs else ""
        except PackedError as error:
            refused.append(error)
            continue
        if programs:
            numbers = [outcome.numbers for outcome in entry.outcomes]
            structure = Structured.from_entry(
                entry, graphdef, names, caller._plan.signature.arguments(graphdef._layout or ())
            )
            program_set = Saved(
                list(entry.outcomes), programs, host, _number_paths(host, graphdef, names), structure, numbers
            )
            saved.append((key, context, program_set))
    if refused and not saved:
        raise refused[0]
    if refused:
        warnings.warn(LEFT_OUT.format(count=len(refused), why=refused[0]), RecompileWarning, caller_level())
    if not saved:
        raise GraftaxError(NOTHING_TO_SAVE.format(name=name, why=reason))
    reads = as_data(table.reads, name, caller._function)
    header = {"name": name, "direct": fast_dispatch.status() == "on", **_environment(caller)}
    content = json.dumps(header).encode() + b"\n" + pickle.dumps((reads, saved))
    with replacing(os.path.realpath(path)) as file:
        file.write(_MAGIC + _digest(content) + content)
    return sum(len(program_set.programs) for _, _, program_set in saved)


def load(caller: Any, path: str | os.PathLike[str], report: ProgressCallback | None) -> int:
    """Adds the programs of a file to a jitted function. Returns their number: 0, with a warning, if they do not fit."""
    name, table = caller._plan.name, caller._table
    with Path(path).open("rb") as file:
        if file.readline() != _MAGIC:
            raise GraftaxError(NO_PROGRAMS.format(path=path))
        is_intact = file.readline() == _digest(content := file.read())
    header_text, _, content = content.partition(b"\n")
    header = json.loads(header_text) if is_intact else {}
    environment = {"name": name, **_environment(caller)}
    differences = [f"{k} was {header.get(k)}, is {v}" for k, v in environment.items() if header.get(k) != v]
    if not is_intact:
        differences = ["it cannot be read: it is damaged"]
    saved: list[tuple[str, Any, Saved]] = []
    if not differences:
        try:
            reads, saved = pickle.loads(content)
            _load_all([program for _, _, program_set in saved for program in program_set.programs], report or Bar(name))
        except Exception as error:
            differences = [f"it cannot be read ({type(error).__name__}: {error})"]
        else:
            difference = _restore_reads(caller, reads)
            differences = [difference] if difference else []
    if differences:
        message = PROGRAMS_DO_NOT_FIT.format(path=path, name=name, differences="; ".join(differences))
        warnings.warn(message, RecompileWarning, caller_level())
        return 0
    if header.get("direct"):
        fast_dispatch.skip_self_test()
    for key, context, program_set in saved:
        for outcome, numbers in zip(program_set.outcomes, program_set.numbers, strict=True):
            outcome.numbers = numbers
        table.numbers.expect(program_set.number_paths)
        table.loaded.add(caller, key, context, program_set)
    return sum(len(program_set.programs) for _, _, program_set in saved)


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode() + b"\n"


def _load_all(programs: list[Program], report: ProgressCallback) -> None:
    begin = time.perf_counter()
    for count, program in enumerate(programs, 1):
        program.load()
        report(count, len(programs), time.perf_counter() - begin)


def _restore_reads(caller: Any, data: dict[str, Any]) -> str | None:
    """The first difference in what the code reads. If there is none, the saved read set becomes the function's."""
    table = caller._table
    table.reads.note_itself(caller._function)
    difference = restore(data, table.reads)
    if difference is None:
        reads = table.reads.reads()
        if table.loaded is None:
            table.loaded = ProgramsOfFiles(table, reads)
        table.loaded.reads = reads
        caller._rebind()
    return difference


def _executable_signatures(
    host: HostProgram | None, recorded: tuple[ArraySignature, ...]
) -> tuple[ArraySignature, ...]:
    """The signatures of an executable's inputs: symbolic numbers are replaced by vectors that the host computes."""
    if host is None:
        return recorded
    no_leaf, *vectors = array_signatures([np.int32(0), *host.vectors((), ())])
    return (*(no_leaf if leaf in host.leaves else signature for leaf, signature in enumerate(recorded)), *vectors)


def _number_paths(host: HostProgram | None, graphdef: _core.GraphDef, names: tuple[str, ...]) -> frozenset[str]:
    leaf_paths = graphdef.leaf_places()
    return frozenset(place_name(leaf_paths[leaf], names) for leaf in (host.leaves if host is not None else ()))


def _lowered(entry: _core.Entry, signatures: tuple[ArraySignature, ...]) -> Any:
    """The lowered program for these signatures, from JAX's caches: nothing is traced or compiled again."""
    specs = [
        jax.ShapeDtypeStruct(
            signature.shape,
            signature.dtype,
            weak_type=signature.weak,
            sharding=signature.sharding if signature.committed else None,
        )
        for signature in signatures
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX's warnings of donation, shown when the program was first compiled
        return entry.compiled.lower(tuple(specs)) if entry.tupled else entry.compiled.lower(*specs)


def _environment(caller: Any) -> dict[str, Any]:
    """What a program depends on besides what its code reads: versions, devices, the function and its options."""
    devices = jax.devices()
    return {
        "code": code_digest(caller._function.__code__),
        "options": str(caller._options),
        "python": platform.python_version(),
        **{package: version_of(package) for package in ("graftax", "jax", "jaxlib")},
        "devices": f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})",
        "processor": _processor(),
    }


def _processor() -> str:
    """The instruction set of the host's processor, which compiled code relies on."""
    import hashlib

    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        flags = platform.processor()
    return f"{platform.machine()} {hashlib.sha256(flags.encode()).hexdigest()[:12]}"
