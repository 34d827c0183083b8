# SPDX-License-Identifier: Apache-2.0
"""`f.save_compiled` and `f.load_compiled`: the programs of a function as a file."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import time
import warnings
from pathlib import Path
from typing import Any

from graftax._base.errors import GraftaxError, RecompileWarning
from graftax._base.progress_bar import Bar, ProgressCallback
from graftax._base.whole_file import replacing
from graftax._export.preloaded_entries import ProgramsOfFiles
from graftax._export.program_key import environment
from graftax._export.programs import settings_tokens
from graftax._export.read_set_data import as_data, restore
from graftax._export.saved_entry import OTHER_SETTINGS, READS_UNKNOWN, Saved, compiled_programs, saved_entry
from graftax._export.structure_data import Structured
from graftax._export.structure_digest import PackedError, digest
from graftax._jax import fast_dispatch
from graftax._jax.tracebacks import caller_level
from graftax._jit.jitted import Jitted

LEFT_OUT = "The file leaves out {count} of the structures: {why}"
NOTHING_TO_SAVE = "{name} has no program that can be saved: {why}."
NOTHING_COMPILED = "nothing was compiled. Call it first, or warm it: f.warm([args]) and then f.save_compiled(path)"
NO_PROGRAMS = "{path} holds no programs of graftax: write it with f.save_compiled(path)"
PROGRAMS_DO_NOT_FIT = (
    "the programs in {path} do not fit here and are not used, so {name} compiles: {differences}. Save them again here."
)

# Followed by the digest of the rest of the file, so that damaged machine code is never run.
_MAGIC = b"graftax programs 8\n"


def save(caller: Jitted[..., Any], path: str | os.PathLike[str]) -> int:
    """Writes the programs of a jitted function. Returns their number."""
    name, table = caller._plan.name, caller._table
    if table.reads is None or not caller._options.captured:
        raise GraftaxError(READS_UNKNOWN.format(name=name))
    for entry in list(table.entries.values()):
        # A program may still be compiling in the background.
        if hasattr(entry.compiled, "wait_until_compiled"):
            entry.compiled.wait_until_compiled()
    settings, reason = settings_tokens(), NOTHING_COMPILED
    saved: list[tuple[str, Any, Saved]] = []
    refused: list[PackedError] = []
    for (graphdef, context, *variant_key), entry in list(table.entries.items()):
        # Not an entry for other values of what the code reads, or for other guards.
        if (variant_key and entry.host is None) or not entry.holds():
            continue
        programs, variants = compiled_programs(entry, table.history.variants, settings)
        if not programs:
            reason = OTHER_SETTINGS if any(v.has_program for v in table.history.variants) else reason
            continue
        names = variants[-1].names
        try:
            key = digest(graphdef, names, name)
        except PackedError as error:
            refused.append(error)
            continue
        program_set = saved_entry(entry, programs, graphdef, names)
        arguments = caller._plan.signature.arguments(graphdef._layout or ())
        program_set.structure = Structured.from_entry(entry, graphdef, names, arguments)
        saved.append((key, context, program_set))
    # One packed argument does not keep the other structures from being saved.
    if refused and not saved:
        raise refused[0]
    if refused:
        warnings.warn(LEFT_OUT.format(count=len(refused), why=refused[0]), RecompileWarning, caller_level())
    if not saved:
        raise GraftaxError(NOTHING_TO_SAVE.format(name=name, why=reason))
    reads = as_data(table.reads, name, caller._function)
    header = {"name": name, "direct": fast_dispatch.status() == "on", **environment(caller)}
    write_file(os.path.realpath(path), header, pickle.dumps((reads, saved)))
    return sum(len(program_set.programs) for _, _, program_set in saved)


def load(caller: Jitted[..., Any], path: str | os.PathLike[str], report: ProgressCallback | None) -> int:
    """Adds the programs of a file to a jitted function. Returns their number: 0, with a warning, if they do not fit."""
    name, table = caller._plan.name, caller._table

    def refuse(differences: str) -> int:
        message = PROGRAMS_DO_NOT_FIT.format(path=path, name=name, differences=differences)
        warnings.warn(message, RecompileWarning, caller_level())
        return 0

    try:
        header, content = read_file(path)
    except DamagedError as error:
        return refuse(str(error))
    # Compared before anything is unpickled.
    current = {"name": name, **environment(caller)}
    differences = [f"{k} was {header.get(k)}, is {v}" for k, v in current.items() if header.get(k) != v]
    if differences:
        return refuse("; ".join(differences))
    try:
        reads, pickled = pickle.loads(content)
        saved: list[tuple[str, Any, Saved]] = pickled
        programs = [program for _, _, program_set in saved for program in program_set.programs]
        report, begin = report or Bar(name), time.perf_counter()
        for count, program in enumerate(programs, 1):
            program.load()
            report(count, len(programs), time.perf_counter() - begin)
    except Exception as error:
        return refuse(f"it cannot be read ({type(error).__name__}: {error})")
    if (difference := _restore_reads(caller, reads)) is not None:
        return refuse(difference)
    # The process that saved them has tested direct calls in the same environment.
    if header.get("direct"):
        fast_dispatch.skip_self_test()
    for key, context, program_set in saved:
        program_set.restore_numbers()
        table.numbers.expect(program_set.number_paths)
        table.loaded.add(caller, key, context, program_set)
    return len(programs)


class DamagedError(GraftaxError):
    """A file of programs is not as it was written."""


def write_file(path: str, header: dict[str, Any], payload: bytes, mode: int | None = None) -> None:
    """Writes a file of programs, whole or not at all: a header, and a pickle."""
    content = json.dumps(header).encode() + b"\n" + payload
    with replacing(path, mode) as file:
        file.write(_MAGIC + _digest(content) + content)


def read_file(path: str | os.PathLike[str]) -> tuple[dict[str, Any], bytes]:
    """(header, pickle) of a file of programs.

    Raises:
        DamagedError: if it is not as it was written.
        GraftaxError: if it is something else.
        OSError: if it cannot be read.
    """
    with Path(path).open("rb") as file:
        if file.readline(len(_MAGIC)) != _MAGIC:
            raise GraftaxError(NO_PROGRAMS.format(path=path))
        if file.readline() != _digest(content := file.read()):
            raise DamagedError("it cannot be read: it is damaged")
    header, _, payload = content.partition(b"\n")
    return json.loads(header), payload


def read_header(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The header of a file of programs, if it has one that can be read. It is not compared with its digest."""
    with Path(path).open("rb") as file:
        if file.readline(len(_MAGIC)) != _MAGIC:
            return {}
        file.readline()
        return json.loads(file.readline())


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode() + b"\n"


def _restore_reads(caller: Jitted[..., Any], data: dict[str, Any]) -> str | None:
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
