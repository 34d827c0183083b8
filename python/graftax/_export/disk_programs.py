# SPDX-License-Identifier: Apache-2.0
"""What a cache on disk has of one function: a file for each program, and one for each read set that they depend on.

The name of a program's file says what it is for: the read set, the structure of the call, its arrays and settings.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from graftax import _core
from graftax._base.errors import GraftaxError, RecompileWarning
from graftax._explain import array_signatures
from graftax._export.constant_reads import constants_difference
from graftax._export.disk_writer import PROGRAM, READS
from graftax._export.program_file import read_file, read_header
from graftax._export.program_key import call_key
from graftax._export.programs import all_fitting, settings_tokens, signature_token
from graftax._export.read_set_data import modules_of, restore
from graftax._export.saved_entry import Saved
from graftax._export.structure_digest import digest, know_digests
from graftax._jax import fast_dispatch
from graftax._jax.tracebacks import caller_level
from graftax._jax.tracers import has_tracer
from graftax._jit.cache import FunctionTable
from graftax._jit.flat_function import add_outcome
from graftax._jit.jitted import Jitted
from graftax._jit.number_policy import SymbolicNumbers

NOTHING = "no program of this function"
OTHER_STRUCTURE = "no program for arguments of this structure with these static values"
OTHER_ARRAYS = "no program for arrays of these shapes, dtypes and devices under these settings of JAX"
OTHER_NUMBERS = "no program for these values of the numbers"
UNREADABLE = "{path}, a program in the cache on disk, cannot be read and is removed ({error}). It is compiled again."


class FunctionPrograms:
    """The files of one function. Its table has it, and asks it at each miss.

    Args:
        folder: of the function, which need not exist.
        environment: what the programs of this folder depend on besides what the code reads.
    """

    def __init__(self, table: FunctionTable, folder: Path, environment: dict[str, Any]) -> None:
        self._table = weakref.ref(table)
        self.folder, self.environment = folder, environment
        self.miss = NOTHING
        # By the key of a read set: the bindings that have to hold, or None where their values are constants.
        self._adopted: dict[str, _core.Reads | None] = {}
        self._refused = ""  # why the last read set was not adopted
        self._last_found: tuple[Path | None, Saved | None] = (None, None)

    # ---- what the code reads

    def adopt(self, caller: Jitted[..., Any]) -> bool:
        """Takes over the read sets that hold here. True if the function has new roots now.

        Those with the most roots come first: the last process of several that traced one function had all of them.
        """
        table = caller._table
        if not caller._options.captured:
            self._compare_constants(table, caller._function)
            return False
        waiting = [path for path in self._paths(READS) if path.stem not in self._adopted]
        if not waiting:
            if not self._adopted:
                self.miss = self._other_versions()
            return False
        read_sets = [(path.stem, data) for path in waiting if (data := self._unpickled(path)) is not None]
        roots = table._known_roots()
        table.reads.note_itself(caller._function)
        for key, data in sorted(read_sets, key=lambda item: len(item[1]["origins"]), reverse=True):
            # With new roots, the entries of the table would be dropped.
            if table.entries and len(data["origins"]) != len(table.reads.names.origins):
                self._refused = "its code reads other things"
                continue
            if self._holds(table, key, data, functools.partial(restore, reads=table.reads)):
                self._adopted[key] = table.reads.reads()
        return table._known_roots() != roots

    def _compare_constants(self, table: FunctionTable, function: types.FunctionType) -> None:
        """Takes over what a function by value reads, where it has the same content at this moment."""
        # Nothing watches these values, so each miss compares them again.
        self._adopted.clear()
        self._refused = ""
        paths = list(self._paths(READS))
        self.miss = NOTHING if paths else self._other_versions()
        for path in paths:
            data, compare = self._unpickled(path), functools.partial(constants_difference, function=function)
            if data is not None and self._holds(table, path.stem, data, compare):
                self._adopted[path.stem] = None

    def _holds(
        self,
        table: FunctionTable,
        key: str,
        data: dict[str, Any],
        compare: Callable[[dict[str, Any]], str | None],
    ) -> bool:
        """Is nothing different from a saved read set? `compare` says what is."""
        # Nothing is imported for it: that is done by the function, if at all.
        missing = next((module for module in modules_of(data) if module not in sys.modules), None)
        try:
            difference = compare(data) if missing is None else f"module {missing} is not imported"
        # Comparing runs code of the user, such as `__reduce__`.
        except Exception as error:
            difference = f"it cannot be compared ({type(error).__name__}: {error})"
        if difference is not None:
            self._refused = difference
            return False
        # Numbers that are symbolic in a program of this read set are symbolic from the first call on.
        for path in self._paths(PROGRAM, key):
            with contextlib.suppress(OSError, ValueError):
                table.numbers.expect(frozenset(read_header(path).get("numbers", ())))
        return True

    def _other_versions(self) -> str:
        """What differs from the programs of this function that other versions have written."""
        # The folders of one function differ in the last part of their names, the digest of the environment.
        versions = sorted(self.folder.parent.glob(f"{self.folder.name.rpartition('-')[0]}-*/*{READS}"), key=_time)
        for path in reversed(versions):
            with contextlib.suppress(OSError, ValueError):
                header = read_header(path)
                changed = [(k, header.get(k), v) for k, v in self.environment.items() if header.get(k) != v]
                differences = [f"{name} was {saved}, is {current}" for name, saved, current in changed]
                return "; ".join("another code" if text.startswith("code was") else text for text in differences)
        return NOTHING

    # ---- programs

    def find(
        self,
        recording: _core.Recording,
        context: Any,
        name: str,
        numbers: SymbolicNumbers | None = None,
        outcomes: list[_core.Outcome] | None = None,
    ) -> Saved | None:
        """The program for a call, loaded.

        Args:
            outcomes: of the entry that it is added to; None for an entry of its own.
        """
        self.miss = self._refused or self.miss
        adopted = [key for key, reads in self._adopted.items() if reads is None or reads.holds()]
        if not adopted or has_tracer(recording.leaves):
            return None
        try:
            fingerprint = digest(recording.graphdef, recording.names, name)
        except GraftaxError as error:
            self.miss = str(error)
            return None
        number_leaves = numbers.leaves if numbers is not None else None
        tokens = list(map(signature_token, array_signatures(recording.leaves)))
        structure, arrays = call_key(fingerprint, context, settings_tokens(), tokens, number_leaves)
        paths = [path for reads in adopted for path in self._paths(PROGRAM, f"{reads}-{structure}-")]
        for path in paths:
            # The name of a file is its read set, the structure, the arrays, and the guards if it has any.
            if path.stem.split("-")[2] == arrays and (saved := self._loaded(path, recording, numbers, outcomes)):
                # The files that were used the longest time ago are removed first.
                with contextlib.suppress(OSError):
                    os.utime(path)
                    os.utime(path.with_name(path.name.partition("-")[0] + READS))
                return saved
        self.miss = (OTHER_ARRAYS if numbers is None else OTHER_NUMBERS) if paths else OTHER_STRUCTURE
        return None

    def _loaded(
        self,
        path: Path,
        recording: _core.Recording,
        numbers: SymbolicNumbers | None,
        outcomes: list[_core.Outcome] | None,
    ) -> Saved | None:
        # A miss may ask twice: whether its numbers have to be symbolic, and then for the program.
        last_path, last_saved = self._last_found
        saved = last_saved if last_path == path and outcomes is None else self._unpickled(path)
        if saved is None or not _fits(saved, recording, numbers):
            return None
        # Symbolic numbers: the file has all Outcomes of its entry, and each program the number of its own.
        number = None if numbers is not None else 0
        if outcomes is not None:
            number = add_outcome(outcomes, saved.outcomes[0])
        try:
            for program in saved.programs:
                program.load(number, saved.host is not None)
        except Exception as error:
            self._remove(path, error)
            return None
        self._last_found = (None, None) if outcomes is not None else (path, saved)
        return saved

    def _unpickled(self, path: Path) -> Any | None:
        """What a file holds. None, with a warning, if it cannot be read."""
        try:
            check_owner(path)
            header, payload = read_file(path)
            if path.suffix == READS:
                data, digests = pickle.loads(payload)
                know_digests(digests)
                return data
            saved_pickle, programs = pickle.loads(payload)
            saved: Saved = pickle.loads(saved_pickle)
            saved.programs, saved.source = programs, "disk"
            saved.restore_numbers()
        # Another process has removed it to make room.
        except FileNotFoundError:
            return None
        except Exception as error:
            self._remove(path, error)
            return None
        # The process that wrote the program has tested direct calls in the same environment.
        if header.get("direct"):
            fast_dispatch.skip_self_test()
        return saved

    def used(self) -> None:
        """The program that was found last is run from now on."""
        self._last_found = (None, None)
        if (table := self._table()) is not None:
            table.disk += 1

    def _remove(self, path: Path, error: Exception) -> None:
        with contextlib.suppress(OSError):
            path.unlink()
        text = UNREADABLE.format(path=path, error=f"{type(error).__name__}: {error}")
        warnings.warn(text, RecompileWarning, caller_level())

    def _paths(self, suffix: str, prefix: str = "") -> Iterator[Path]:
        try:
            names = os.listdir(self.folder)
        except OSError:
            names = []
        yield from (self.folder / name for name in sorted(names) if name.endswith(suffix) and name.startswith(prefix))


def _fits(saved: Saved, recording: _core.Recording, numbers: SymbolicNumbers | None) -> bool:
    """Does a saved entry serve this recording, of its structure?"""
    leaves = list(recording.leaves)
    if not saved.guards.serves(leaves):
        return False
    # A program without symbolic numbers has those of its call as constants, so it serves no call that has some.
    if numbers is None or saved.host is None:
        return numbers is None and saved.host is None
    if saved.host.leaves != numbers.leaves or not saved.host.serves([leaves[leaf] for leaf in numbers.leaves]):
        return False
    # Its executables get the host's vectors in place of the numbers, whose leaves they ignore.
    for leaf in numbers.leaves:
        leaves[leaf] = np.int32(0)
    return bool(all_fitting(saved.programs, [*leaves, *saved.host.vectors((), ())]))


def check_owner(path: Path) -> None:
    """Raises PermissionError for a file or a folder that others may write: loading runs what is in it."""
    # Windows has access lists in place of these bits.
    if os.name == "nt":
        return
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(f"others may write {path}")


def _time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
