# SPDX-License-Identifier: Apache-2.0
"""Tier B: what it takes to run a compiled executable on the leaves of a call, without `jax.jit`.

The one module, with `_compat`, that uses names private to JAX. Each is looked up once, at import; where one is missing,
or the self-test before the first direct call finds anything else than what `jax.jit` gives, all calls stay with
`jax.jit`. `GRAFTAX_DIRECT_DISPATCH=0` in the environment says so beforehand. `core/call/fast_dispatch.cpp` is what
runs in a call.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import numpy as np
from jax import dtypes, tree_util

from graftax import _core
from graftax._jax import compat

_PLACES = 40  # for the numbers of one executable: more calls than JAX lets wait on the CPU
_ALIGNMENT = 64  # bytes
_SMALL = 4096  # bytes of a result that is kept for a while
_WITNESSES = 4
_WAIT = 32  # calls before an executable with few leaves is asked for: that takes as long as a hundred calls

# Settings under which an executable is not simply run: each has to be False.
_MUST_BE_OFF = (
    "jax_check_tracer_leaks",
    "jax_debug_infs",
    "jax_debug_key_reuse",
    "jax_debug_nans",
    "jax_enable_pgle",
    "jax_no_execution",
    "jax_thread_guard",
)
# Settings that `jax.jit` has in its key beside the trace context: they have to be as they were.
_IN_JITS_KEY = (
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
    "jax_memory_fitting_level",
    "jax_optimization_level",
    "jax_pallas_auto_assign_collective_ids",
    "jax_pallas_auto_assign_collective_ids_limit",
)


class _State:
    """Whether calls go direct, and why not. One for the process."""

    def __init__(self) -> None:
        self.reason: str | None = None  # why it is off
        self.tested = False
        self.looked = False  # for where an array holds its parts
        self.lock = threading.RLock()

    def off(self, reason: str) -> None:
        self.reason = reason
        _core.direct_from(0, 0)


_state = _State()


def status() -> str:
    """`on`, or `off` and why. Runs the self-test where no call has needed it yet."""
    if _state.reason is None:
        _tested()
    return "on" if _state.reason is None else f"off: {_state.reason}"


def trust() -> None:
    """The self-test has passed in a process with the same versions and devices: here it is not made again."""
    _state.tested = True


def setup() -> None:
    """Tells the core what direct calls read of JAX. Touches no device."""
    if os.environ.get("GRAFTAX_DIRECT_DISPATCH") == "0":
        _state.off("GRAFTAX_DIRECT_DISPATCH=0")
        return
    try:
        _follow_caches()
        _core.use_direct_settings(*_settings())
        _core.use_direct(capture, *_private_names())
    except Exception as error:
        _state.off(f"this JAX ({jax.__version__}) lacks what it reads: {type(error).__name__}: {error}")
        return
    _core.use_told_settings(_follow_settings())
    start_from(1, _WAIT)


def _settings() -> tuple[list[tuple[Any, Any, Any]], list[tuple[Any, Any]]]:
    """How to ask for the settings: those that have to be off, and those that have to be as they were."""
    off, holders = _off(shown=False), _holders()
    _expect(all(ask(state) in (True, False) for ask, state, _ in off), off)
    return off, [_question(holders[name]) for name in _IN_JITS_KEY if name in holders]


def _off(shown: bool) -> list[tuple[Any, Any, Any]]:
    """The settings that have to be off, and which the trace context shows, or does not.

    Those that it shows are asked once: later, comparing the context does.
    """
    states = (_holders().get(name) for name in _MUST_BE_OFF if (name in _shown()) is shown)
    return [(*_question(state), False) for state in states if state is not None]


def start_from(leaves: int, wait: int = 0) -> None:
    """Calls with so many leaves or more may go direct, from now on; those with few only after `wait` calls."""
    if _state.reason is None:
        _core.direct_from(leaves, wait)


def _private_names() -> tuple[Any, ...]:
    from jax._src import config, core, profiler
    from jax._src.interpreters import pxla

    array, key = compat.array_class(), compat.key_class()
    getters = tuple(vars(array)[name].fget for name in ("aval", "_sharding", "_committed", "_pjrt_layout"))
    session = next(n for n in ("session", "profile_session") if hasattr(profiler._profile_state, n))  # pyright: ignore
    state = getattr(core, "trace_state_strong_ref", None)  # what `trace_ctx.trace` reads; JAX 0.8 has none
    trace: tuple[Any, Any] = ("trace", core.trace_ctx) if state is None else _question(state)
    required: list[tuple[Any, Any, Any]] = [(*trace, core.eval_trace)]
    _expect(state is None or trace[0](trace[1]) is core.trace_ctx.trace, trace)
    required.append((session, profiler._profile_state, None))  # pyright: ignore
    _expect(hasattr(pxla, "ExecuteReplicated") and hasattr(pxla, "MeshExecutable"), pxla)
    return (
        key,
        getters,
        ("_impl", "_base_array"),
        "consume_with_handlers",
        required,
        _off(shown=True),
        (config.trace_context, None),
        _put(),
        compat.is_of_refused_arguments,
    )


def _put() -> tuple[Any, Any, type]:
    """What copies a NumPy leaf to a device, how it treats the memory (not read afterwards), and the scalars' class."""
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

    return xla_client.batched_device_put, xla_client.HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL, np.generic


def capture(compiled: Any, leaves: tuple[Any, ...], tupled: bool, inputs: int = 0) -> tuple[Any, ...] | None:
    """What runs the executable that a `jax.jit` object has for these leaves; None where it cannot be run by itself.

    Args:
        inputs: how many leaves at the end are vectors that the host makes for one call: nobody else has them.

    Returns:
        (takes a list of arrays and starts the computation, handlers that make arrays of its results, the leaves that it
        takes, the number of its Outcome, whether it donates, for each NumPy leaf that it takes: index, and aval,
        sharding and devices of the copy; where it reads the host's vectors in place, or None).
    """
    return _captured(compiled, leaves, tupled, inputs) if _tested() else None


def _call_of(stage: Any) -> Any:
    """What a compiled stage runs; None where that is no executable with its handlers."""
    from jax._src.interpreters import pxla

    if type(stage._executable) is not pxla.MeshExecutable:
        return None
    call = stage._executable.unsafe_call
    return call if type(call) is pxla.ExecuteReplicated else None


def alone(stage: Any) -> Callable[[list[Any]], list[Any]]:
    """The executable of a compiled stage with what makes arrays of its results, and nothing else.

    Nothing that runs it and hands arrays back takes less: the benchmarks show it as the floor. The arrays have to be
    those that it is compiled for; a program may not drop one of them.
    """
    call = _call_of(stage)
    if call is None or len(stage._executable._kept_var_idx) != len(stage.args_info[0]):
        raise ValueError("this stage has no executable that takes these arrays as they are")
    execute, handlers = call.xla_executable.execute_sharded, list(call.out_handler.handlers)
    return lambda arrays: execute(arrays).consume_with_handlers(handlers)


def _captured(compiled: Any, leaves: tuple[Any, ...], tupled: bool, inputs: int = 0) -> tuple[Any, ...] | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first compilation has given its warnings
        stage = compiled.stage_for(leaves) if hasattr(compiled, "stage_for") else None  # one that was loaded
        if stage is None:
            stage = compiled.lower(leaves).compile() if tupled else compiled.lower(*leaves).compile()
    call = _call_of(stage)
    if call is None:
        return None
    executable: Any = stage._executable
    kept = tuple(sorted(executable._kept_var_idx))
    if call.ordered_effects or call.has_unordered_effects or call.has_host_callbacks:
        return None
    if call.mut is not None or call.pgle_profiler is not None:
        return None
    # Arguments that are not leaves: constants of the program.
    if len(executable._all_args_info.in_avals) != len(leaves) or len(executable.in_avals) != len(kept):  # pyright: ignore
        return None
    hosts: list[tuple[Any, ...]] = []
    expected = zip(kept, call.in_handler.in_shardings, executable._xla_in_layouts, executable.in_avals, strict=True)
    for i, sharding, layout, aval in expected:
        if isinstance(leaves[i], np.ndarray | np.generic):
            host = _host(leaves[i], sharding, layout, aval)
            if host is None:
                return None
            hosts.append((i, *host))
            continue
        array = leaves[i] if type(leaves[i]) is compat.array_class() else leaves[i]._base_array
        if leaves[i].shape != aval.shape or leaves[i].dtype != aval.dtype:
            return None
        physical = sharding if array is leaves[i] else _physical(aval, sharding)
        same_place = array.sharding._internal_device_list == physical._internal_device_list
        if not same_place or not array.sharding.is_equivalent_to(physical, array.ndim):
            return None
        if array is leaves[i] and layout is not None and not array.is_deleted() and array.format.layout != layout:
            return None
    handlers = list(call.out_handler.handlers)
    outputs = tree_util.tree_unflatten(stage.out_tree, list(range(len(handlers))))
    number = _core.decode(outputs[2])
    donated = [info.donated for info in tree_util.tree_leaves(stage.args_info)]
    ring = _ring([host for host in hosts if host[0] >= len(leaves) - inputs and not donated[host[0]]], stage)
    return call.xla_executable.execute_sharded, handlers, kept, number, any(donated), hosts, ring


def _ring(hosts: Sequence[tuple[Any, ...]], stage: Any) -> tuple[Any, ...] | None:
    """Memory of the host that an executable on the CPU reads in place, for these of its NumPy leaves.

    A place may be written again when nothing reads it: a result of the call that read it is ready then.

    Returns:
        (the results that are small enough to be kept until then, the best first; for each place: for each leaf an
        array and its address; of each leaf: is it floating, bytes of an element, elements).
    """
    put, in_place = _put()[0], getattr(type(_put()[1]), "ZERO_COPY", None)
    if not hosts or in_place is None or any(devices[0].platform != "cpu" for *_, devices in hosts):
        return None
    results = enumerate(tree_util.tree_leaves(stage.out_info))
    witnesses = tuple(i for i, out in results if not jax.numpy.issubdtype(out.dtype, dtypes.extended) and _small(out))
    if not witnesses:
        return None
    places: list[list[tuple[Any, int]]] = []
    for _ in range(_PLACES):
        places.append([])
        for _, aval, place, devices in hosts:
            memory = _aligned(aval)
            array = put(aval, place, [memory], devices, False, False, in_place)
            address = memory.ctypes.data
            if array.unsafe_buffer_pointer() != address:
                return None
            places[-1].append((array, address))
    elements = [(aval.dtype.kind == "f", aval.dtype.itemsize, aval.size) for _, aval, _, _ in hosts]
    return witnesses[:_WITNESSES], places, elements


def _small(out: Any) -> bool:
    return out.size * out.dtype.itemsize <= _SMALL


def _aligned(aval: Any) -> np.ndarray[Any, Any]:
    """A vector where XLA takes the memory as it is."""
    size = aval.size * aval.dtype.itemsize
    memory = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(aval.dtype)


def _host(leaf: Any, sharding: Any, layout: Any, aval: Any) -> tuple[Any, ...] | None:
    """Aval, sharding and devices of the copy that the executable takes for a NumPy leaf; None for several devices."""
    devices = list(sharding.device_set)
    if len(devices) != 1 or leaf.shape != aval.shape or dtypes.canonicalize_dtype(leaf.dtype) != aval.dtype:
        return None
    place = jax.sharding.SingleDeviceSharding(devices[0])
    if sharding.memory_kind not in (None, place.memory_kind):
        return None
    if layout is not None and jax.device_put(leaf, place).format.layout != layout:
        return None
    return aval, place, devices


def _physical(aval: Any, sharding: Any) -> Any:
    """The sharding of the plain array behind an array of keys."""
    from jax._src import sharding_impls

    return sharding_impls.physical_sharding(aval, sharding)


def _tested() -> bool:
    """Whether the self-test has passed; runs it once, on the first device that a direct call is for."""
    with _state.lock:
        if not _state.tested:
            _state.tested = True  # from here on: the self-test captures, too
            try:
                _self_test()
            except Exception as error:
                _state.off(f"the self-test failed on JAX {jax.__version__}: {type(error).__name__}: {error}")
        if not _state.looked:
            _state.looked = True
            with contextlib.suppress(Exception):  # where they are not found, each array is asked by its getters
                _core.find_array_parts([(a, a.aval, a._sharding, a._committed) for a in _samples()])
    return _state.reason is None


def _samples() -> list[Any]:
    """Arrays that differ in all that an array holds: no two of its fields are alike in all of them."""
    device = jax.local_devices()[0]
    values = np.zeros(1, "int8"), 1, np.zeros((2, 3)), 1.0, np.zeros(4, "uint16"), 1j, np.zeros(5, bool), True
    places = [None, None, *(jax.sharding.SingleDeviceSharding(device) for _ in range(3)), None, None, device]
    return [jax.device_put(value, place) for value, place in zip(values, places, strict=True)]


def _self_test() -> None:
    """Runs a small program both ways: results, types, placement, weak types and forwarding have to be the same.

    The second call of a process waits for it: it compiles this one program, and nothing on the way there.
    """

    def program(x: Any, unused: Any, key: Any, i: Any, host: Any) -> tuple[Any, Any, Any]:
        del unused
        other = jax.random.wrap_key_data(jax.random.key_data(key) + 1, impl="threefry2x32")
        return (x * 2, other, i + 1, host + 1), (x.astype(int),), (None, ())

    jitted = jax.jit(program)
    bits = jax.device_put(np.asarray([0, 3], "uint32"))
    numbers = np.arange(6.0, dtype="float32").reshape(2, 3), np.zeros(4, "float32"), np.asarray(5, "int16")
    x, unused, i = map(jax.device_put, numbers)
    plain = x, unused, jax.random.wrap_key_data(bits, impl="threefry2x32"), i
    leaves: tuple[Any, ...] = (*plain, np.arange(3.0))
    expected: Any = jitted(*leaves)
    captured = _captured(jitted, leaves, tupled=False)
    if captured is None:
        raise RuntimeError("the program was refused")
    execute, handlers, kept, number, donates, hosts, _ = captured
    _expect((kept, number, donates) == ((0, 2, 3, 4), 2, False), (kept, number, donates))
    [(_, *place, devices)] = hosts
    host = _put()[0](*place, [leaves[4].copy()], devices, False, False, _put()[1])
    inputs = [leaves[0], leaves[2]._base_array, leaves[3], host]
    found = execute(inputs).consume_with_handlers(handlers)
    a: Any
    b: Any
    for a, b in zip((*expected[0], *expected[1]), found, strict=True):
        _expect(type(a) is type(b) and a.aval == b.aval and a.sharding == b.sharding, (a, b))
        if isinstance(a, compat.key_class()):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        _expect(a._committed == b._committed and a.weak_type == b.weak_type and a.tolist() == b.tolist(), (a, b))


def _expect(holds: bool, found: object) -> None:
    """An assertion that `python -O` keeps."""
    if not holds:
        raise RuntimeError(f"found {found}")


# ---- settings

_NOT_COMPARED = {"axis_env_state", "jax_disable_jit", "jax_xla_profile_version"}  # of one trace, or told elsewhere
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
    return _question(state) if hasattr(state, "value") else ((lambda: default), None)  # this version may not have it


def _question(state: Any) -> tuple[Callable[..., Any], Any]:
    """A setting's getter, looked up once, and what it is asked of."""
    return getattr(getattr(type(state), "value", None), "fget", None) or operator.attrgetter("value"), state


def settings_of_traces() -> dict[str, Any]:
    """JAX's settings that a compiled program depends on, in force in this thread. No public reader has them all.

    Before JAX 0.11 the names of the trace context are not told: then those that are known are read one by one.
    """
    from jax._src import config

    holders = _holders()
    found = {name: holders[name].value for name in _IN_KEY if name in holders}
    with contextlib.suppress(AttributeError, NotImplementedError):
        names: Any = config.trace_context_names()  # pyright: ignore[reportAttributeAccessIssue]
        shown = zip(names, config.trace_context(), strict=False)  # pyright: ignore[reportAttributeAccessIssue]
        return found | {name: value for name, value in shown if name not in _NOT_COMPARED}
    for name in ("mesh_context_manager", "abstract_mesh_context_manager"):
        state: Any = getattr(config, name, None)
        if hasattr(state, "value"):
            found[name] = state.value
    return found


def _holders() -> dict[str, Any]:
    """The object behind each of JAX's settings."""
    from jax._src import config

    holders: Any = getattr(getattr(config, "config", None), "_value_holders", None)
    if holders is None:
        found = ((name, getattr(config, name, None)) for name in dir(config))
        return {f"jax_{name}": state for name, state in found if hasattr(type(state), "value")}
    return holders


def _shown() -> set[str]:
    """The settings that the trace context shows."""
    from jax._src import config

    return set(getattr(config, "trace_context_names", tuple)())


def _follow_settings() -> bool:
    """Has JAX tell of each change of a setting that the core keeps; whether it does so is tried.

    Each setting has two functions that JAX calls behind a change, for the process and for one thread, with the new
    value. What stood there is called first.
    """
    holders = _holders()
    names = ("jax_default_prng_impl", "jax_enable_custom_prng", *_MUST_BE_OFF, *_IN_JITS_KEY)
    kept = [holders[name] for name in names if name in holders and name not in _shown()]
    try:
        kept.append(holders["jax_disable_jit"])  # shown or not: it is asked for before anything else
        for state in kept:
            for hook in ("_update_global_hook", "_update_thread_local_hook"):
                setattr(state, hook, _and_tell(getattr(state, hook)))
        version = _core.settings_changed()
        sample = holders["jax_debug_nans"]
        with sample(sample.value):
            _expect(_core.settings_changed() == version + 2, "a setting that changes unheard in one thread")
        sample._set(sample.get_global())
        _expect(_core.settings_changed() == version + 5, "a setting that changes unheard")
    except Exception:
        return False
    return True


def _and_tell(before: Callable[[Any], None] | None) -> Callable[[Any], object]:
    """A function that JAX calls behind a change of a setting."""
    if before is None:
        return _core.settings_changed

    def changed(value: Any) -> None:
        try:
            before(value)
        finally:
            _core.settings_changed()

    return changed


class _Clearing:
    """What hears of `jax.clear_caches()`: to JAX it is one of the caches that are cleared, and it is always empty."""

    def cache_clear(self) -> None:
        _core.caches_cleared()

    def cache_info(self) -> Any:
        return functools.lru_cache(maxsize=0)(len).cache_info()

    def cache_keys(self) -> list[Any]:
        return []


_clearing = _Clearing()


def _follow_caches() -> None:
    from jax._src import util

    util.register_cache(_clearing, "graftax: executables that run without jax.jit")


# ---- where leaves are

_own_sharding = operator.attrgetter("_sharding")  # what the property `sharding` of an array reads, without a frame


def kinds_of_shardings(leaves: Sequence[Any]) -> set[type]:
    """The classes of the shardings of leaves; that of None for what has no sharding."""
    try:
        return set(map(type, map(_own_sharding, leaves)))
    except AttributeError:  # a NumPy array, a number; a tracer takes long to say that it has none
        return {type(getattr(leaf, "sharding", None)) for leaf in leaves if not isinstance(leaf, jax.core.Tracer)}


# ---- several processes


class Coordinator(NamedTuple):
    """The key-value store of `jax.distributed`, and which of how many processes this is. Nothing public gives it."""

    client: Any
    process: int
    processes: int

    def put(self, key: str, value: bytes) -> None:
        self.client.key_value_set_bytes(key, value, True)

    def get(self, key: str, seconds: float) -> bytes | None:
        """What somebody puts there within a time; None where nobody does."""
        try:
            return self.client.blocking_key_value_get_bytes(key, max(1, int(seconds * 1000)))
        except jax.errors.JaxRuntimeError as error:
            if compat.is_of_a_timeout(error):
                return None
            raise

    def below(self, key: str) -> list[str]:
        return [name for name, _ in self.client.key_value_dir_get_bytes(key)]

    def delete(self, key: str) -> None:
        self.client.key_value_delete(key)


def coordinator() -> Coordinator | None:
    """That of this process; None where `jax.distributed` does not run.

    Raises:
        AttributeError: where this version has none that is known.
    """
    from jax._src import distributed

    state: Any = distributed.global_state
    client, process, count = state.client, state.process_id, state.num_processes
    if client is None:
        return None
    for name in ("key_value_set_bytes", "blocking_key_value_get_bytes", "key_value_dir_get_bytes", "key_value_delete"):
        getattr(client, name)
    return Coordinator(client, int(process), int(count or 1))


def devices_of(stage: Any) -> tuple[int, ...]:
    """The devices that an executable is compiled for, in its order. Its arguments do not tell where it has none."""
    return tuple(device.id for device in stage._executable._unloaded_executable.device_list)


def are_of_several(devices: Sequence[int]) -> bool:
    """Do several processes have these devices?"""
    return len({device.process_index for device in jax.devices() if device.id in set(devices)}) > 1


def spans_processes(lowered: Any, leaves: Any) -> bool:
    """Does a lowered program run on devices of several processes? Nothing public tells; its leaves may."""
    devices: Any = getattr(getattr(lowered, "_lowering", None), "_device_list", None)
    if devices is None:
        found = (getattr(leaf, "sharding", None) for leaf in leaves)
        return any(sharding is not None and not sharding.is_fully_addressable for sharding in found)
    return len({device.process_index for device in devices}) > 1
