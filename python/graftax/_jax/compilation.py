# SPDX-License-Identifier: Apache-2.0
"""JAX's compilations: its own `jit`, the events of each stage, and how executables are pickled."""

from __future__ import annotations

import contextlib
import copyreg
import inspect
import threading
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.monitoring
from jax._src import core as _jax_core

from graftax._jax.jaxprs import run_the_same

own_jit = jax.jit  # whatever a program or a test puts in its place later

_STAGES = {
    "/jax/core/compile/jaxpr_trace_duration": "traced",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowered",
    "/jax/core/compile/backend_compile_duration": "compiled",
}


def on_compile_stages(listener: Callable[..., None]) -> None:
    """Registers `listener(event, seconds, **metadata)`, called at the end of each stage of a compilation."""
    jax.monitoring.register_event_duration_secs_listener(listener)


_LISTENERS: list[Callable[..., None]] = []
_LISTENERS_LOCK = threading.Lock()


def listen_to_compile_stages(listener: Callable[..., None]) -> None:
    """Registers a listener that stays, once for the process: JAX would call it as many times as it was registered."""
    with _LISTENERS_LOCK:
        if listener not in _LISTENERS:
            _LISTENERS.append(listener)
            on_compile_stages(listener)


def compile_stage(event: str, about: dict[str, object]) -> tuple[str, str] | None:
    """(`traced`, `lowered` or `compiled`; name of the function) of an event of JAX; None for other events."""
    stage, name = _STAGES.get(event), about.get("fun_name")
    if stage is None or _unheard.active or not isinstance(name, str):
        return None
    # Some events name the function, others the module that is made of it: `jit(step)`.
    return stage, name[4:-1] if name.startswith("jit(") and name.endswith(")") else name


class _Unheard(threading.local):
    active = False


_unheard = _Unheard()


@contextlib.contextmanager
def unheard_stages() -> Generator[None]:
    """While entered, what JAX does in this thread is no stage of a compilation."""
    outer, _unheard.active = _unheard.active, True
    try:
        yield
    finally:
        _unheard.active = outer


_AVAL_LOCK = threading.RLock()


@contextlib.contextmanager
def pickling_avals() -> Generator[None]:
    """While entered, the types of arrays are pickled by what they are made of."""
    # Newer versions of JAX compare them, and a mark in them, by identity. A pickle of an executable holds copies, so
    # functions that get the results of a loaded executable would be traced again.
    cls: Any = _jax_core.ShapedArray
    # `_create` is where those versions look for an equal type that is there already.
    if not hasattr(cls, "_create"):
        yield
        return
    parameters = inspect.signature(cls.__new__).parameters.values()
    # An option with its default is left out: that of the layout is a mark, of which a pickle would have a copy.
    defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}

    def reduce(aval: Any) -> tuple[Any, ...]:
        options = {name: getattr(aval, name) for name in defaults if getattr(aval, name) is not defaults[name]}
        return copyreg.__newobj_ex__, (cls, (aval.shape, aval.dtype, aval.weak_type), options)  # pyright: ignore

    with _AVAL_LOCK:  # copyreg has one table for all threads
        copyreg.pickle(cls, reduce)
        try:
            yield
        finally:
            del copyreg.dispatch_table[cls]


def is_cache_retrieval(event: str) -> bool:
    """Does this event say that an executable was read from JAX's own cache? The end of its compilation follows."""
    return event == "/jax/compilation_cache/cache_retrieval_time_sec"


def same_executable(first: object, second: object) -> bool:
    """Have two traces for equal arguments one executable, if no constant was changed in place? False if uncertain."""
    # The parameters of a `jit` equation: the Jaxpr, and the shardings, donation and options that it is compiled with.
    params = [getattr(traced, "_params", None) for traced in (first, second)]
    return all(isinstance(param, dict) for param in params) and run_the_same(*params)


def with_results(stage: Any, out_tree: Any) -> Any:
    """A compiled stage whose results have another tree. Raises AttributeError where this JAX has it otherwise."""
    arguments = stage._params.const_args, stage.args_info, out_tree
    return jax.stages.Compiled(stage._executable, *arguments, no_kwargs=stage._no_kwargs)
