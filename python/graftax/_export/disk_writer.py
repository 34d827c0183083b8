# SPDX-License-Identifier: Apache-2.0
"""Writes files of programs to a cache on disk, in a separate thread, and removes the least recently used ones."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import pickle
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from graftax._base.errors import RecompileWarning
from graftax._base.whole_file import alone_in
from graftax._explain import Variant
from graftax._export.program_file import write_file
from graftax._export.programs import Program

PROGRAM, READS = ".program", ".reads"  # suffixes of the files
OF_JAX = "jax"  # the folder of JAX's own cache; a file there is a program

CANNOT_WRITE = (
    "the cache on disk in {folder} cannot be written ({error}), so programs that are compiled from now on are not kept "
    "there. Those that are there are used."
)

_SECONDS_FOR_OTHERS = 10.0  # to write; a file is whole in any case
_SECONDS_AT_EXIT = 60.0  # what is not begun by then is dropped
_SECONDS_OF_TEMPORARY = 3600.0  # after which a temporary file is that of a process which was killed


@dataclasses.dataclass
class Job:
    """One file to write. Everything but the executables is pickled already: objects may change meanwhile."""

    path: Path
    header: dict[str, Any]
    saved: bytes
    programs: list[Program]
    reads_path: Path
    reads_header: dict[str, Any]
    reads: bytes
    variants: Sequence[Variant]  # they are told what became of it
    lookup: str  # what the cache had of it before it was compiled

    def tell(self, text: str) -> None:
        for variant in self.variants:
            variant.on_disk = f"{self.lookup}; {text}"


class Writer:
    """Writes to the folder of a cache.

    The thread lives while there is something to write, and Python waits for it at its end. So a program that was
    compiled last is written too, and nothing is left half.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._has_failed = False
        self._forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Begins without jobs and without a thread: after a fork, the parent writes what it has compiled."""
        self._changed = threading.Condition()
        self._jobs: collections.deque[Job] = collections.deque()
        self._thread: threading.Thread | None = None

    def submit(self, job: Job) -> None:
        with self._changed:
            if self._has_failed:
                job.tell("not written: the folder cannot be written")
                return
            job.tell("being written")
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="graftax cache on disk")
                try:
                    self._thread.start()
                # Python starts no threads any more once it shuts down.
                except RuntimeError:
                    self._thread = None
                    self._jobs.clear()
                    job.tell("not written: Python ends")

    def flush(self) -> None:
        """Waits until everything is written."""
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None)

    def _run(self) -> None:
        deadline: float | None = None  # once Python waits for this thread
        while True:
            with self._changed:
                # Under the lock, so that a job that is submitted after this starts a thread of its own.
                if not self._jobs:
                    self._thread = None
                    self._changed.notify_all()
                    return
                job = self._jobs.popleft()
            if deadline is None and not threading.main_thread().is_alive():
                deadline = time.monotonic() + _SECONDS_AT_EXIT
            if self._has_failed or (deadline is not None and time.monotonic() > deadline):
                job.tell("not written")
                continue
            self._write(job)

    def _write(self, job: Job) -> None:
        try:
            payload = pickle.dumps((job.saved, job.programs))
        # An executable that calls functions of this process cannot be serialized, for one.
        except Exception as error:
            job.tell(f"not written: its executable cannot be saved ({type(error).__name__}: {error})")
            return
        if len(payload) > self._max_bytes:
            job.tell(f"not written: its {len(payload)} bytes are more than max_bytes={self._max_bytes}")
            return
        try:
            with alone_in(str(self._folder), _SECONDS_FOR_OTHERS):
                job.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                # The read set first: a program without one is never found.
                if not job.reads_path.exists():
                    write_file(str(job.reads_path), job.reads_header, job.reads, 0o600)
                write_file(str(job.path), job.header, payload, 0o600)
                self._evict(job.path)
            job.tell("written")
        except OSError as error:
            self._fail(error)
            job.tell(f"not written: {error}")
        # Whatever happens, this thread goes on: `flush` and Python's exit wait for it.
        except Exception as error:
            job.tell(f"not written: {type(error).__name__}: {error}")

    def _fail(self, error: OSError) -> None:
        self._has_failed = True
        # Where warnings are errors it is raised, and nobody would catch it in this thread.
        with contextlib.suppress(RecompileWarning):
            warnings.warn(CANNOT_WRITE.format(folder=self._folder, error=error), RecompileWarning, stacklevel=1)

    def _evict(self, newest: Path) -> None:
        """Removes the least recently used programs, until those that remain are small enough."""
        current_time, total = time.time(), 0
        programs: list[tuple[float, int, Path]] = []
        for path, status in _files(self._folder):
            if path.suffix == ".tmp" and current_time - status.st_mtime > _SECONDS_OF_TEMPORARY:
                _remove(path)
                continue
            total += status.st_size
            # A read set goes with its last program. The program that was just written stays.
            if (path.suffix == PROGRAM or path.parent == self._folder / OF_JAX) and path != newest:
                programs.append((status.st_mtime, status.st_size, path))
        for _, size, path in sorted(programs):
            if total <= self._max_bytes:
                break
            _remove(path)
            total -= size
            if path.suffix == PROGRAM:
                remove_unused_reads(path.parent)


def remove_unused_reads(folder: Path) -> None:
    """Removes the read sets of a function that belong to no program, and its folder if that is empty."""
    paths = [path for path, _ in _files(folder)]
    used = {path.name.partition("-")[0] for path in paths if path.suffix == PROGRAM}
    for path in paths:
        if path.suffix == READS and path.stem not in used:
            _remove(path)
    # A folder that is not empty cannot be removed, so it stays.
    with contextlib.suppress(OSError):
        folder.rmdir()


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in folder.rglob("*"):
        # Another process may have removed it meanwhile.
        with contextlib.suppress(OSError):
            status = path.stat()
            if path.is_file():
                yield path, status


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
