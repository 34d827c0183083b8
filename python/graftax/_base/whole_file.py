# SPDX-License-Identifier: Apache-2.0
"""Files that appear whole, or not at all, whoever else writes them at the same time."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import time
from collections.abc import Generator
from typing import IO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


def permissions(path: str) -> int | None:
    """Who may read and write the file at a path; None where there is no file."""
    try:
        return stat.S_IMODE(os.stat(path).st_mode)
    except OSError:
        return None


@contextlib.contextmanager
def replacing(path: str, mode: int | None = None) -> Generator[IO[bytes]]:
    """A file that becomes `path` when it is complete and on the disk; on an error it is gone.

    Args:
        mode: its permissions; None: those of the file that it replaces, or of any new file.
    """
    folder = os.path.dirname(path) or "."
    # Of a long name only a part: file systems limit names, often to 255 bytes.
    temporary = os.path.join(folder, f".{os.path.basename(path)[:100]}.{secrets.token_hex(6)}.tmp")
    mode = permissions(path) if mode is None else mode

    # From the beginning as private as it will be: nobody else opens it before its permissions are set.
    def opened(name: str, flags: int) -> int:
        return os.open(name, flags, 0o666 if mode is None else mode & 0o666)

    try:
        with open(temporary, "xb", buffering=1 << 20, opener=opened) as file:
            if mode is not None:  # whatever the umask is; where that is not allowed, it is as private as it was
                with contextlib.suppress(OSError):
                    os.chmod(temporary, mode)
            yield file
            # Before the new name: after a loss of power, a file may otherwise have its name and not its content.
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_folder(folder)  # otherwise the new name may be lost with the power, and the old file be back


@contextlib.contextmanager
def alone_in(folder: str, seconds: float | None = None) -> Generator[None]:
    """In the block, no other process or thread is in such a block for this folder. Without effect where no locks exist.

    Args:
        seconds: how long to wait for the holder of the lock, which may be stopped; None: for as long as it takes.
    """
    descriptor = -1
    if fcntl is not None:
        with contextlib.suppress(OSError):
            descriptor = os.open(folder or ".", os.O_RDONLY)
            _lock(descriptor, seconds)
    try:
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _lock(descriptor: int, seconds: float | None) -> None:
    assert fcntl is not None
    # `flock` cannot wait for a limited time, so it is tried again and again. After that the block runs without it.
    end = None if seconds is None else time.monotonic() + seconds
    while end is not None and time.monotonic() < end:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(0.02)
    if end is None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _sync_folder(folder: str) -> None:
    if os.name == "nt":  # folders cannot be opened there
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
