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
from graftax._export.programs import Program, look_token, settings_tokens
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
OTHER_PLACE = (
    "the programs in {path} do not fit here and are not used, so {name} compiles: {differences}. Save them again here."
)

# After it stands the digest of all that follows: machine code is not run where a bit of it is wrong.
_MAGIC = b"graftax programs 5\n"


@dataclasses.dataclass
class Saved:
    """What is compiled for one structure: its Outcomes, and an executable for each look of the leaves."""

    outcomes: list[_core.Outcome]
    programs: list[Program]
    host: HostProgram | None = None  # of its symbolic numbers
    places: frozenset[str] = frozenset()  # where these are
    structure: Structured | None = None
    numbers: list[list[tuple[int, int]]] = dataclasses.field(default_factory=list[list[tuple[int, int]]])  # of Outcomes


def save(caller: Any, path: str | os.PathLike[str]) -> int:
    """Writes the programs of a jitted function. Returns how many."""
    name, table = caller._plan.name, caller._table
    if table.reads is None or not caller._options.captured:
        raise GraftaxError(READS_UNKNOWN.format(name=name))
    settings, why = settings_tokens(), "nothing was compiled"
    saved: list[tuple[str, Any, Saved]] = []
    refused: list[PackedError] = []
    for (graphdef, context, *others), entry in list(table.entries.items()):
        host: HostProgram | None = entry.host
        if (others and host is None) or not entry.holds():
            continue  # others: of bindings that had other values, or of other guards
        programs: list[Program] = []
        names: tuple[str, ...] = ()
        for variant in cast("list[Variant]", table.history.variants):
            given = _looks_of_given(host, variant.signatures)
            tokens = tuple(map(look_token, given))
            if variant.entry() is not entry or "compiled" not in variant.seconds:
                continue
            if None in tokens or not variant.was_compiled_under(settings):
                why = "it was compiled under other settings of JAX, or for arrays that lie in another way"
                continue
            lowered, names = _lowered(entry, given), variant.names
            programs.append(Program.of(lowered, cast(Any, tokens), settings))
        try:
            key = digest(graphdef, names, name) if programs else ""
        except PackedError as error:
            refused.append(error)
            continue
        if programs:
            numbers = [outcome.numbers for outcome in entry.outcomes]
            structure = Structured.of(entry, graphdef, names, caller._plan.signature.arguments(graphdef._layout or ()))
            one = Saved(list(entry.outcomes), programs, host, _places(host, graphdef, names), structure, numbers)
            saved.append((key, context, one))
    if refused and not saved:
        raise refused[0]
    if refused:
        warnings.warn(LEFT_OUT.format(count=len(refused), why=refused[0]), RecompileWarning, caller_level())
    if not saved:
        raise GraftaxError(NOTHING_TO_SAVE.format(name=name, why=why))
    reads = as_data(table.reads, name, caller._function)
    header = {"name": name, "direct": fast_dispatch.status() == "on", **_here(caller)}
    content = json.dumps(header).encode() + b"\n" + pickle.dumps((reads, saved))
    with replacing(os.path.realpath(path)) as file:
        file.write(_MAGIC + _digest(content) + content)
    return sum(len(one.programs) for _, _, one in saved)


def load(caller: Any, path: str | os.PathLike[str], tell: ProgressCallback | None) -> int:
    """Gives a jitted function the programs of a file. Returns how many: 0, and a warning, where they do not fit."""
    name, table = caller._plan.name, caller._table
    with Path(path).open("rb") as file:
        if file.readline() != _MAGIC:
            raise GraftaxError(NO_PROGRAMS.format(path=path))
        whole = file.readline() == _digest(content := file.read())
    header_text, _, content = content.partition(b"\n")
    header = json.loads(header_text) if whole else {}
    here = {"name": name, **_here(caller)}
    differences = [f"{k} was {header.get(k)}, is {v}" for k, v in here.items() if header.get(k) != v]
    if not whole:
        differences = ["it cannot be read: it is damaged"]
    saved: list[tuple[str, Any, Saved]] = []
    if not differences:
        try:
            reads, saved = pickle.loads(content)
            _load_all([program for _, _, one in saved for program in one.programs], tell or Bar(name))
        except Exception as error:
            differences = [f"it cannot be read ({type(error).__name__}: {error})"]
        else:
            why = _restored(caller, reads)
            differences = [why] if why else []
    if differences:
        message = OTHER_PLACE.format(path=path, name=name, differences="; ".join(differences))
        warnings.warn(message, RecompileWarning, caller_level())
        return 0
    if header.get("direct"):
        fast_dispatch.skip_self_test()
    for key, context, one in saved:
        for outcome, numbers in zip(one.outcomes, one.numbers, strict=True):
            outcome.numbers = numbers
        table.numbers.expect(one.places)
        table.loaded.add(caller, key, context, one)
    return sum(len(one.programs) for _, _, one in saved)


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode() + b"\n"


def _load_all(programs: list[Program], tell: ProgressCallback) -> None:
    begin = time.perf_counter()
    for done, program in enumerate(programs, 1):
        program.load()
        tell(done, len(programs), time.perf_counter() - begin)


def _restored(caller: Any, data: dict[str, Any]) -> str | None:
    """What of the code's reads is not as it was; where nothing is, they are the function's own from here on."""
    table = caller._table
    table.reads.note_itself(caller._function)
    why = restore(data, table.reads)
    if why is None:
        reads = table.reads.reads()
        if table.loaded is None:
            table.loaded = ProgramsOfFiles(table, reads)
        table.loaded.reads = reads
        caller._rebind()
    return why


def _looks_of_given(host: HostProgram | None, recorded: tuple[ArraySignature, ...]) -> tuple[ArraySignature, ...]:
    """What the executable is given of a call: nothing for its symbolic numbers, and what the host computes of them."""
    if host is None:
        return recorded
    nothing, *vectors = array_signatures([np.int32(0), *host.vectors((), ())])
    return (*(nothing if leaf in host.leaves else look for leaf, look in enumerate(recorded)), *vectors)


def _places(host: HostProgram | None, graphdef: _core.GraphDef, names: tuple[str, ...]) -> frozenset[str]:
    places = graphdef.leaf_places()
    return frozenset(place_name(places[leaf], names) for leaf in (host.leaves if host is not None else ()))


def _lowered(entry: _core.Entry, given: tuple[ArraySignature, ...]) -> Any:
    """The program for these looks, which JAX has, as it has its executable: nothing is traced or compiled for it."""
    specs = [
        jax.ShapeDtypeStruct(
            look.shape, look.dtype, weak_type=look.weak, sharding=look.sharding if look.committed else None
        )
        for look in given
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of donation: its first compilation has said it
        return entry.compiled.lower(tuple(specs)) if entry.tupled else entry.compiled.lower(*specs)


def _here(caller: Any) -> dict[str, Any]:
    """What a program depends on besides what its code reads: versions, devices, the function, its options."""
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
    """The instructions that compiled code for the host may use."""
    import hashlib

    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        flags = platform.processor()
    return f"{platform.machine()} {hashlib.sha256(flags.encode()).hexdigest()[:12]}"
