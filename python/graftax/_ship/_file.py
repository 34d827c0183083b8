# SPDX-License-Identifier: Apache-2.0
"""`f.save_compiled` and `f.load_compiled`: the programs of a function as a file."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import platform
import time
import warnings
from pathlib import Path
from typing import Any, cast

import jax

from .. import _core
from .._advice import caller_level
from .._bar import Bar, Tell
from .._errors import GraftaxError, RecompileWarning
from .._explain import Variant
from ._digest import code_digest, digest
from ._programs import Program, look_token, settings_tokens
from ._reads import as_data, restore, version_of

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

_MAGIC = b"graftax programs 2\n"


@dataclasses.dataclass
class Saved:
    """What is compiled for one structure: its Outcomes, and an executable for each look of the leaves."""

    outcomes: list[_core.Outcome]
    programs: list[Program]


def save(caller: Any, path: str | os.PathLike[str]) -> int:
    """Writes the programs of a jitted function. Returns how many."""
    name, table = caller._plan.name, caller._table
    if table.reads is None:
        raise GraftaxError(READS_UNKNOWN.format(name=name))
    settings, why = settings_tokens(), "nothing was compiled"
    saved: list[tuple[str, Any, Saved]] = []
    for (graphdef, context, *others), entry in list(table.entries.items()):
        if entry.host is not None:
            why = "it computes with symbolic numbers, on the host too"
        if others or entry.host is not None or not entry.holds():
            continue  # others: of bindings that had other values
        programs: list[Program] = []
        names: tuple[str, ...] = ()
        for variant in cast("list[Variant]", table.history.variants):
            tokens = tuple(map(look_token, variant.looks))
            if variant.entry() is not entry or "compiled" not in variant.seconds:
                continue
            if None in tokens or not variant.is_among(settings):
                why = "it was compiled under other settings of JAX, or for arrays that lie in another way"
                continue
            lowered, names = _lowered(entry, variant), variant.names
            programs.append(Program.of(lowered, cast(Any, tokens), settings))
        if programs:
            key = digest(graphdef, names, name)
            saved.append((key, context, Saved(list(entry.outcomes), programs)))
    if not saved:
        raise GraftaxError(NOTHING_TO_SAVE.format(name=name, why=why))
    reads = as_data(table.reads, name)
    header = {"name": name, **_here(caller)}
    content = _MAGIC + json.dumps(header).encode() + b"\n" + pickle.dumps((reads, saved))
    _write(Path(path), content)
    return sum(len(one.programs) for _, _, one in saved)


def load(caller: Any, path: str | os.PathLike[str], tell: Tell | None) -> int:
    """Gives a jitted function the programs of a file. Returns how many: 0, and a warning, where they do not fit."""
    name, table = caller._plan.name, caller._table
    with Path(path).open("rb") as file:
        if file.readline() != _MAGIC:
            raise GraftaxError(NO_PROGRAMS.format(path=path))
        header, content = json.loads(file.readline()), file.read()
    here = {"name": name, **_here(caller)}
    differences = [f"{k} was {header.get(k)}, is {v}" for k, v in here.items() if header.get(k) != v]
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
    table.shipped |= {(key, context): one for key, context, one in saved}
    return sum(len(one.programs) for _, _, one in saved)


def _load_all(programs: list[Program], tell: Tell) -> None:
    begin = time.perf_counter()
    for done, program in enumerate(programs, 1):
        program.load()
        tell(done, len(programs), time.perf_counter() - begin)


def _restored(caller: Any, data: dict[str, Any]) -> str | None:
    """What of the code's reads is not as it was; where nothing is, they are the function's own from here on."""
    table = caller._table
    caller._note_own_code()
    why = restore(data, table.reads)
    if why is None:
        table.shipped_for = table.reads.reads()
        caller._rebind()
    return why


def _lowered(entry: _core.Entry, variant: Variant) -> Any:
    """The program of a variant, which JAX has, as it has its executable: nothing is traced or compiled for it."""
    specs = [
        jax.ShapeDtypeStruct(
            look.shape, look.dtype, weak_type=look.weak, sharding=look.sharding if look.committed else None
        )
        for look in variant.looks
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


def _write(path: Path, content: bytes) -> None:
    """As a whole, or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
