# SPDX-License-Identifier: Apache-2.0
"""JAX's own cache of executables on disk: turns it on beside ours, and reads the bytes of what was loaded from it.

An executable that XLA has loaded cannot be serialized once more: the copy would not run. Its bytes in the cache do.
"""

from __future__ import annotations

import functools
import io
from typing import Any

import jax
from jax._src import compilation_cache as _cache
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from graftax._base.errors import GraftaxError

GONE = (
    "its executable comes from JAX's own cache on disk, which no longer has it, and a copy of what was loaded cannot "
    "be run. Set JAX_ENABLE_COMPILATION_CACHE=false in the process that saves"
)

_FOLDER, _SECONDS = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
_SECONDS_BY_DEFAULT = 1.0

_keys: dict[int, str] = {}  # in the cache, by the id of the executable that was loaded last with this id
_turned_on: str | None = None  # the folder that the cache was given here


def turn_on(folder: str) -> None:
    """From now on JAX keeps in this folder what it compiles, unless the user has chosen one, or has turned that off."""
    global _turned_on
    turn_off()
    if jax.config.jax_compilation_cache_dir is not None or not jax.config.jax_enable_compilation_cache:
        return
    _turned_on = folder
    jax.config.update(_FOLDER, folder)
    # Outside of jitted functions each operation is a small program of its own, which takes less time than JAX asks for.
    # Another value than its default is the user's own choice.
    if jax.config.jax_persistent_cache_min_compile_time_secs == _SECONDS_BY_DEFAULT:
        jax.config.update(_SECONDS, 0.0)
    compilation_cache.reset_cache()  # JAX asks at its first compilation whether there is one


def turn_off() -> None:
    """JAX keeps no more in the folder of `turn_on`."""
    global _turned_on
    folder, _turned_on = _turned_on, None
    if folder is None or jax.config.jax_compilation_cache_dir != folder:
        return
    jax.config.update(_FOLDER, None)
    if jax.config.jax_persistent_cache_min_compile_time_secs == 0.0:
        jax.config.update(_SECONDS, _SECONDS_BY_DEFAULT)
    compilation_cache.reset_cache()


@functools.cache
def note_keys() -> None:
    """From now on the keys of executables that JAX loads from its cache are noted."""
    load = getattr(_cache, "get_executable_and_time", None)
    keep = getattr(_cache, "put_executable_and_time", None)
    if load is None or keep is None:
        return

    @functools.wraps(load)
    def load_and_note(cache_key: str, *args: Any, **kwargs: Any) -> Any:
        executable, seconds = load(cache_key, *args, **kwargs)
        if executable is not None:
            _keys[id(executable)] = cache_key
        return executable, seconds

    @functools.wraps(keep)
    def keep_and_forget(cache_key: str, module_name: str, executable: Any, *args: Any, **kwargs: Any) -> Any:
        _keys.pop(id(executable), None)  # it was compiled: the key is that of a dead executable with this id
        return keep(cache_key, module_name, executable, *args, **kwargs)

    # JAX calls both through the module, and tells nobody else under which key it found an executable.
    _cache.get_executable_and_time, _cache.put_executable_and_time = load_and_note, keep_and_forget


def may_be_loaded(stage: Any) -> bool:
    """May the executable of a stage come from JAX's cache? Not surely: a dead executable may have had its id."""
    return id(_executable_of(stage)) in _keys


def _executable_of(stage: Any) -> Any:
    return getattr(getattr(stage._executable, "_unloaded_executable", None), "xla_executable", None)


def serialize(stage: Any) -> tuple[bytes, Any, Any]:
    """What `serialize_executable.serialize` makes of a stage, whose executable came from JAX's cache.

    Raises:
        GraftaxError: if the cache no longer has it.
    """
    executable = _executable_of(stage)
    arguments, in_tree = jax.tree.flatten(stage.args_info)
    # A constant that JAX passes as an argument is not in the bytes.
    if stage._params.const_args or not may_be_loaded(stage):
        raise GraftaxError(GONE)
    with io.BytesIO() as file:
        _Pickler(file, executable).dump((stage._executable._unloaded_executable, arguments, stage._no_kwargs))
        return file.getvalue(), in_tree, stage.out_tree


class _Pickler(serialize_executable._JaxPjrtPickler):  # pyright: ignore[reportPrivateUsage]
    """Pickles an executable by its bytes in JAX's cache."""

    def __init__(self, file: io.BytesIO, executable: Any) -> None:
        super().__init__(file)
        self._executable = executable

    def persistent_id(self, obj: object) -> Any:
        return ("exec", _content_of(obj)) if obj is self._executable else super().persistent_id(obj)


def _content_of(executable: Any) -> bytes:
    """The executable as JAX has serialized it."""
    client = executable.client
    try:
        from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

        cache: Any = _cache._get_cache(client)  # pyright: ignore[reportPrivateUsage]
        entry = cache.get(_keys[id(executable)])
        content = _cache.extract_executable_and_time(_cache.decompress_executable(entry))[0]
        devices = xla_client.DeviceList(tuple(executable.local_devices()))
        # The id may have been that of another executable, so the programs are compared.
        loaded = client.deserialize_executable(content, executable_devices=devices)
        is_same = _texts(loaded) == _texts(executable)
    except Exception as error:  # it has removed it, or another version has it otherwise
        raise GraftaxError(GONE) from error
    if not is_same:
        raise GraftaxError(GONE)
    return content


def _texts(executable: Any) -> list[str]:
    return [module.to_string() for module in executable.hlo_modules()]
