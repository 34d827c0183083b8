# SPDX-License-Identifier: Apache-2.0
"""`graftax.cache`: compiled programs stay on disk, and the next process runs them."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from pathlib import Path

from graftax._base.errors import GraftaxError, RecompileWarning
from graftax._export.disk_programs import check_owner
from graftax._export.disk_store import DiskStore
from graftax._export.disk_writer import OF_JAX
from graftax._jax import cache_of_jax
from graftax._jax.tracebacks import caller_level
from graftax._jit import program_store

ENVIRONMENT = "GRAFTAX_CACHE"
OTHERS_MAY_WRITE = (
    "{folder} cannot be a cache of compiled programs: it belongs to another user, or others may write to it, and "
    "programs that are loaded from there are run. Use a folder of your own, or make it private: chmod 700 {folder}"
)
NO_FOLDER = "there is no cache on disk: {folder} cannot be created ({error})"
NOT_POSITIVE = "{name}={value}: expected {expected}"


class DiskCache:
    """A cache of compiled programs that `graftax.cache` has turned on.

    Attributes:
        folder: where the programs are.
        min_seconds: a program that was traced and compiled in less time is not written.
        max_bytes: the size of all files.
    """

    folder: Path
    min_seconds: float
    max_bytes: int

    def __init__(self, store: DiskStore, max_bytes: int) -> None:
        self.folder, self.min_seconds, self.max_bytes = store.folder, store.min_seconds, max_bytes
        self._store = store

    def flush(self) -> None:
        """Waits until everything that was compiled so far is written. A process does this by itself when it exits."""
        self._store.writer.flush()

    def __repr__(self) -> str:
        return f"<graftax cache in {self.folder}>"


_active: DiskStore | None = None
_was_chosen = False  # by a call, which counts more than the environment


def cache(
    folder: str | os.PathLike[str] | None,
    *,
    min_seconds: float = 0.5,
    max_bytes: int = 2 << 30,
    jax_cache: bool = True,
) -> DiskCache | None:
    """Keeps compiled programs in a folder, so that the next process neither traces nor compiles them.

    A program is used if everything is as it was when it was compiled: the function and all that its code reads, its
    options, the structure of the call, shapes, JAX and its settings, Python, and the devices. `GRAFTAX_CACHE=folder`
    in the environment does the same for a whole run. The cache is off by default.

    Programs are written in the background. `explain(f)` says for each one whether it was found, and if not, why;
    `f.cache_info().disk` counts those that were found. The files contain pickles and machine code, which are run, so
    only you may be able to write to the folder.

    JAX's own cache is turned on as well, in the same folder, for what is compiled outside of functions of graftax, such
    as each operation that makes the initial weights. A cache of JAX that you have chosen stays as it is.

    Args:
        folder: the folder, which is created if it does not exist. None turns the cache off.
        min_seconds: a program that was traced and compiled in less time is not written.
        max_bytes: the maximum size of all files. Beyond it, the least recently used are removed.
        jax_cache: whether to turn on JAX's own cache.

    Returns:
        the cache, whose `flush()` waits until everything is written; None if it is off.

    Raises:
        GraftaxError: if others may write to the folder.

    Example:
        >>> import tempfile
        >>> programs = graftax.cache(tempfile.mkdtemp(), min_seconds=0)
        >>> f = graftax.jit(lambda x: x * 2)
        >>> f(jnp.ones(2)), programs.flush()
        (Array([2., 2.], dtype=float32), None)
        >>> f.clear_cache()  # as a fresh process
        >>> f(jnp.ones(2)), f.cache_info().traces, f.cache_info().disk
        (Array([2., 2.], dtype=float32), 0, 1)
        >>> graftax.cache(None)
    """
    global _active, _was_chosen
    store = None if folder is None else _store_in(folder, min_seconds, max_bytes)
    _use_cache_of_jax(store if jax_cache else None)
    _active, _was_chosen = store, True
    return None if store is None else DiskCache(store, max_bytes)


def _store_in(folder: str | os.PathLike[str], min_seconds: float, max_bytes: int) -> DiskStore | None:
    if min_seconds < 0:
        raise ValueError(NOT_POSITIVE.format(name="min_seconds", value=min_seconds, expected="0 or more"))
    if max_bytes < 1:
        raise ValueError(NOT_POSITIVE.format(name="max_bytes", value=max_bytes, expected="at least 1"))
    path = Path(os.path.realpath(Path(folder).expanduser()))
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_owner(path)
    except OSError as error:
        # A folder that is there and not trusted is an error; a program runs without one that cannot be made.
        if isinstance(error, PermissionError) and path.is_dir():
            raise GraftaxError(OTHERS_MAY_WRITE.format(folder=path)) from error
        warnings.warn(NO_FOLDER.format(folder=path, error=error), RecompileWarning, caller_level())
        return None
    return DiskStore(path, min_seconds, max_bytes)


def _use_cache_of_jax(store: DiskStore | None) -> None:
    # JAX would warn of each program that it cannot write.
    if store is None or not os.access(store.folder, os.W_OK):
        cache_of_jax.turn_off()
        return
    folder = store.folder / OF_JAX
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        check_owner(folder)
    except PermissionError as error:
        raise GraftaxError(OTHERS_MAY_WRITE.format(folder=folder)) from error
    cache_of_jax.turn_on(str(folder))


@functools.cache
def _from_environment() -> DiskStore | None:
    folder = os.environ.get(ENVIRONMENT, "")
    store = _store_in(folder, 0.5, 2 << 30) if folder else None
    if store is not None:
        _use_cache_of_jax(store)
    return store


def _current() -> DiskStore | None:
    return _active if _was_chosen else _from_environment()


program_store.use(_current)
# At import, so that JAX's cache has what is compiled before the first call of a jitted function. An error of the folder
# is raised again by that call: an exception here would only say that graftax cannot be imported.
with contextlib.suppress(GraftaxError):
    _from_environment()
