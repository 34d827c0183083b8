# SPDX-License-Identifier: Apache-2.0
"""JAX's settings: readers that are as cheap as JAX's own, those that a program depends on, and who hears of changes.

Public readers look a name up each time, or do not have all settings; a call asks for several of them.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from typing import Any

from graftax import _core
from graftax._jax.missing_names import expect

# With these settings on, `jax.jit` does more than run the executable: each has to be False.
MUST_BE_OFF = (
    "jax_check_tracer_leaks",
    "jax_debug_infs",
    "jax_debug_key_reuse",
    "jax_debug_nans",
    "jax_enable_pgle",
    "jax_no_execution",
    "jax_thread_guard",
)
# Settings in the cache key of `jax.jit` besides the trace context: they have to be unchanged.
IN_JITS_KEY = (
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
    "jax_memory_fitting_level",
    "jax_optimization_level",
    "jax_pallas_auto_assign_collective_ids",
    "jax_pallas_auto_assign_collective_ids_limit",
)
_NOT_COMPARED = {"axis_env_state", "jax_disable_jit", "jax_xla_profile_version"}  # of one trace, or checked elsewhere
_IN_KEY = (
    "jax_allow_f16_reductions",
    "jax_default_device",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_custom_prng",
    "jax_enable_x64",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
    "jax_memory_fitting_level",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_optimization_level",
    "jax_random_seed_offset",
    "jax_softmax_custom_jvp",
    "jax_threefry_partitionable",
    "jax_use_direct_linearize",
)


def setting(name: str, default: object) -> tuple[Callable[..., Any], Any]:
    """Asks for the setting in force in this thread: a function and its argument (no public reader is as cheap)."""
    from jax._src import config

    state = getattr(config, name, None)
    return reader_of(state) if hasattr(state, "value") else ((lambda: default), None)  # this version may not have it


def reader_of(state: Any) -> tuple[Callable[..., Any], Any]:
    """(getter, argument) that read a setting. Looking the getter up once saves time in each call."""
    return getattr(getattr(type(state), "value", None), "fget", None) or operator.attrgetter("value"), state


def setting_readers() -> tuple[list[tuple[Any, Any, Any]], list[tuple[Any, Any]]]:
    """Readers of settings: (those that have to be off, those that have to be unchanged)."""
    readers, holders = required_off(shown=False), _setting_objects()
    expect(all(read(state) in (True, False) for read, state, _ in readers), readers)
    return readers, [reader_of(holders[name]) for name in IN_JITS_KEY if name in holders]


def required_off(shown: bool) -> list[tuple[Any, Any, Any]]:
    """Readers of the settings that have to be off, in the trace context (`shown`) or outside of it."""
    # Those in the trace context are read once: afterwards comparing the context covers them.
    states = (_setting_objects().get(name) for name in MUST_BE_OFF if (name in _trace_context_names()) is shown)
    return [(*reader_of(state), False) for state in states if state is not None]


def settings_of_traces() -> dict[str, Any]:
    """JAX's settings that a compiled program depends on, in force in this thread. No public reader has them all."""
    from jax._src import config

    holders = _setting_objects()
    settings = {name: holders[name].value for name in _IN_KEY if name in holders}
    # Before JAX 0.11 the names of the trace context are not told: then those that are known are read one by one.
    with contextlib.suppress(AttributeError, NotImplementedError):
        names: Any = config.trace_context_names()  # pyright: ignore[reportAttributeAccessIssue]
        shown = zip(names, config.trace_context(), strict=False)  # pyright: ignore[reportAttributeAccessIssue]
        return settings | {name: value for name, value in shown if name not in _NOT_COMPARED}
    for name in ("mesh_context_manager", "abstract_mesh_context_manager"):
        state: Any = getattr(config, name, None)
        if hasattr(state, "value"):
            settings[name] = state.value
    return settings


def _setting_objects() -> dict[str, Any]:
    """JAX's setting objects by name."""
    from jax._src import config

    holders: Any = getattr(getattr(config, "config", None), "_value_holders", None)
    if holders is None:
        named = ((name, getattr(config, name, None)) for name in dir(config))
        return {f"jax_{name}": state for name, state in named if hasattr(type(state), "value")}
    return holders


def _trace_context_names() -> set[str]:
    from jax._src import config

    return set(getattr(config, "trace_context_names", tuple)())


def follow_settings() -> bool:
    """Hooks into JAX's settings, so that the core hears of changes. Returns whether a test of the hooks succeeds."""
    holders = _setting_objects()
    names = ("jax_default_prng_impl", "jax_enable_custom_prng", *MUST_BE_OFF, *IN_JITS_KEY)
    states = [holders[name] for name in names if name in holders and name not in _trace_context_names()]
    try:
        states.append(holders["jax_disable_jit"])  # shown or not: it is asked for before anything else
        for state in states:
            # JAX calls the first one after a change for the process, the other one after a change for one thread.
            for hook in ("_update_global_hook", "_update_thread_local_hook"):
                setattr(state, hook, _notify_after(getattr(state, hook)))
        # The core counts each hook that runs, and these calls, too. A `with` block of a setting is two changes.
        version = _core.settings_changed()
        sample = holders["jax_debug_nans"]
        with sample(sample.value):
            expect(_core.settings_changed() == version + 2, "a setting that changes unheard in one thread")
        sample._set(sample.get_global())
        expect(_core.settings_changed() == version + 5, "a setting that changes unheard")
    except Exception:
        return False
    return True


def _notify_after(previous: Callable[[Any], None] | None) -> Callable[[Any], object]:
    """A hook that calls the `previous` one and then notifies the core."""
    if previous is None:
        return _core.settings_changed

    def changed(value: Any) -> None:
        try:
            previous(value)
        finally:
            _core.settings_changed()

    return changed
