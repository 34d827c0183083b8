# SPDX-License-Identifier: Apache-2.0
"""Direct calls: a compiled executable runs on the leaves of a call, without `jax.jit`.

Private names are looked up once, at import. If one is missing, or if the self-test before the first direct call finds a
difference to `jax.jit`, all calls stay with `jax.jit`. `GRAFTAX_DIRECT_DISPATCH=0` in the environment turns direct
calls off. They run in `core/call/fast_dispatch.cpp`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax import dtypes, tree_util

from graftax import _core
from graftax._jax.arrays import array_class, key_class
from graftax._jax.compilation import own_jit
from graftax._jax.error_texts import is_of_refused_arguments
from graftax._jax.missing_names import expect
from graftax._jax.settings import follow_settings, reader_of, required_off, setting_readers

_RING_SLOTS = 40  # host input buffers of one executable: more than JAX queues calls on the CPU
_ALIGNMENT = 64  # bytes
_SMALL = 4096  # bytes of a result that may be kept as a witness
_MAX_WITNESSES = 4
# Calls before an executable with few leaves is asked for: that takes as long as a hundred calls.
_CALLS_BEFORE_CAPTURE = 32


class _State:
    """The state of direct calls in this process."""

    def __init__(self) -> None:
        self.reason: str | None = None  # the reason if they are off
        self.tested = False
        self.searched_fields = False  # for the offsets of the fields of an array
        self.lock = threading.RLock()

    def disable(self, reason: str) -> None:
        self.reason = reason
        _core.direct_from(0, 0)


_state = _State()


def status() -> str:
    """`on`, or `off` with the reason. Runs the self-test if no call has done so."""
    if _state.reason is None:
        _passes_self_test()
    return "on" if _state.reason is None else f"off: {_state.reason}"


def skip_self_test() -> None:
    """Skips the self-test, because it has passed in a process with the same versions and devices."""
    _state.tested = True


def setup() -> None:
    """Gives the core the private names that direct calls need. Does not initialize a device."""
    if os.environ.get("GRAFTAX_DIRECT_DISPATCH") == "0":
        _state.disable("GRAFTAX_DIRECT_DISPATCH=0")
        return
    try:
        from jax._src import util

        # After `jax.clear_caches()` JAX compiles again, and so must calls that no longer ask it.
        util.register_cache(_cache_clear_listener, "graftax: executables that run without jax.jit")
        _core.use_direct_settings(*setting_readers())
        _core.use_direct(capture, *_private_names())
    except Exception as error:
        _state.disable(f"this JAX ({jax.__version__}) lacks what it reads: {type(error).__name__}: {error}")
        return
    _core.use_told_settings(follow_settings())
    start_from(1, _CALLS_BEFORE_CAPTURE)


def start_from(leaves: int, wait: int = 0) -> None:
    """Allows direct calls with this many leaves or more; an executable with few leaves only after `wait` calls."""
    if _state.reason is None:
        _core.direct_from(leaves, wait)


def _private_names() -> tuple[Any, ...]:
    from jax._src import config, core, profiler
    from jax._src.interpreters import pxla

    array, key = array_class(), key_class()
    getters = tuple(vars(array)[name].fget for name in ("aval", "_sharding", "_committed", "_pjrt_layout"))
    session = next(n for n in ("session", "profile_session") if hasattr(profiler._profile_state, n))  # pyright: ignore
    state = getattr(core, "trace_state_strong_ref", None)  # what `trace_ctx.trace` reads; JAX 0.8 has none
    trace: tuple[Any, Any] = ("trace", core.trace_ctx) if state is None else reader_of(state)
    # No call goes direct inside of a trace, or while a profiler runs.
    required: list[tuple[Any, Any, Any]] = [(*trace, core.eval_trace)]
    expect(state is None or trace[0](trace[1]) is core.trace_ctx.trace, trace)
    required.append((session, profiler._profile_state, None))  # pyright: ignore
    expect(hasattr(pxla, "ExecuteReplicated") and hasattr(pxla, "MeshExecutable"), pxla)
    return (
        key,
        getters,
        ("_impl", "_base_array"),
        "consume_with_handlers",
        required,
        required_off(shown=True),
        (config.trace_context, None),
        _device_put(),
        is_of_refused_arguments,
    )


def _device_put() -> tuple[Any, Any, type]:
    """(function that copies NumPy leaves to a device, its semantics for the buffer, the class of NumPy scalars)."""
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

    return xla_client.batched_device_put, xla_client.HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL, np.generic


def capture(
    compiled: Any, leaves: tuple[Any, ...], tupled: bool, inputs: int = 0
) -> tuple[Any, ...] | Literal[False] | None:
    """Captures the executable that a `jax.jit` object has for these leaves.

    None if it cannot be run directly, False if it is still being compiled.

    Args:
        inputs: how many leaves at the end are vectors that the host computes for each call. They are not shared.

    Returns:
        (takes a list of arrays and starts the computation, handlers that make arrays of its results, the leaves that it
        takes, the number of its Outcome, whether it donates, for each NumPy leaf that it takes: index, and aval,
        sharding and devices of the copy; where it reads the host's vectors in place, or None).
    """
    return _capture_executable(compiled, leaves, tupled, inputs) if _passes_self_test() else None


def _call_of(stage: Any) -> Any:
    """The call object of a compiled stage; None if it is not an executable with result handlers."""
    from jax._src.interpreters import pxla

    if type(stage._executable) is not pxla.MeshExecutable:
        return None
    call = stage._executable.unsafe_call
    return call if type(call) is pxla.ExecuteReplicated else None


def devices_of(stage: Any) -> tuple[int, ...]:
    """The ids of the devices that an executable is compiled for, in its order, also if it has no arguments."""
    return tuple(device.id for device in stage._executable._unloaded_executable.device_list)


def executable_of(stage: Any) -> Any:
    """The executable of XLA in a compiled stage: stages of one program have the same."""
    return getattr(stage._executable, "xla_executable", None)


def bare_executable(stage: Any) -> Callable[[list[Any]], list[Any]]:
    """The bare executable of a compiled stage, with the handlers that make arrays of its results.

    The benchmarks show it as the lower bound of a call. The arrays have to be those that it was compiled for, and the
    program has to use each of them.
    """
    call = _call_of(stage)
    if call is None or len(stage._executable._kept_var_idx) != len(stage.args_info[0]):
        raise ValueError("this stage has no executable that takes these arrays as they are")
    execute, handlers = call.xla_executable.execute_sharded, list(call.out_handler.handlers)
    return lambda arrays: execute(arrays).consume_with_handlers(handlers)


def _capture_executable(
    compiled: Any, leaves: tuple[Any, ...], tupled: bool, inputs: int = 0
) -> tuple[Any, ...] | Literal[False] | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first compilation has given its warnings
        # `Shipped` and `Reusing` have executables that no `lower` leads to.
        stage = compiled.stage_for(leaves) if hasattr(compiled, "stage_for") else None  # one that was loaded
        if stage is None and hasattr(compiled, "is_compiling") and compiled.is_compiling(leaves):
            return False
        if stage is None:
            stage = compiled.lower(leaves).compile() if tupled else compiled.lower(*leaves).compile()
    if _call_of(stage) is None:
        return None
    # The last output is the number of the Outcome, which has no leaves: it stands in the tree alone.
    outputs = tree_util.tree_unflatten(stage.out_tree, list(range(stage.out_tree.num_leaves)))
    return _parts_of_stage(stage, leaves, _core.decode(outputs[2]), inputs)


def capture_donating(stage: Any, leaves: tuple[Any, ...], number: int, inputs: int) -> tuple[Any, ...] | None:
    """Captures a compiled stage that takes these leaves one by one, as `capture` does. `number` is its Outcome's."""
    return _parts_of_stage(stage, leaves, number, inputs) if _passes_self_test() else None


def _parts_of_stage(stage: Any, leaves: tuple[Any, ...], number: int, inputs: int) -> tuple[Any, ...] | None:
    from jax._src import sharding_impls

    call = _call_of(stage)
    if call is None:
        return None
    executable: Any = stage._executable
    # What JAX's call does besides running the executable: tokens, callbacks, Refs, recompilation with a profile.
    kept_indices = tuple(sorted(executable._kept_var_idx))
    if call.ordered_effects or call.has_unordered_effects or call.has_host_callbacks:
        return None
    # A Ref is an argument that the program writes to, and a profile has JAX compile the program once more.
    if call.mut is not None or call.pgle_profiler is not None:
        return None
    # Arguments that are not leaves: constants of the program.
    if len(executable._all_args_info.in_avals) != len(leaves) or len(executable.in_avals) != len(kept_indices):  # pyright: ignore
        return None
    hosts: list[tuple[Any, ...]] = []
    expected = zip(
        kept_indices, call.in_handler.in_shardings, executable._xla_in_layouts, executable.in_avals, strict=True
    )
    for i, sharding, layout, aval in expected:
        if isinstance(leaves[i], np.ndarray | np.generic):
            host = _host_copy(leaves[i], sharding, layout, aval)
            if host is None:
                return None
            hosts.append((i, *host))
            continue
        # An array of keys is passed as the plain array behind it, which has one more dimension.
        array = leaves[i] if type(leaves[i]) is array_class() else leaves[i]._base_array
        if leaves[i].shape != aval.shape or leaves[i].dtype != aval.dtype:
            return None
        physical = sharding if array is leaves[i] else sharding_impls.physical_sharding(aval, sharding)
        # An executable does not move its arguments, as `jax.jit` does before it runs one.
        same_place = array.sharding._internal_device_list == physical._internal_device_list
        if not same_place or not array.sharding.is_equivalent_to(physical, array.ndim):
            return None
        if array is leaves[i] and layout is not None and not array.is_deleted() and array.format.layout != layout:
            return None
    # The host's vectors, the last leaves, may be read in place. A donated buffer would be overwritten.
    handlers = list(call.out_handler.handlers)
    donated = [info.donated for info in tree_util.tree_leaves(stage.args_info)]
    ring = _ring([host for host in hosts if host[0] >= len(leaves) - inputs and not donated[host[0]]], stage)
    return call.xla_executable.execute_sharded, handlers, kept_indices, number, any(donated), hosts, ring


def _ring(hosts: Sequence[tuple[Any, ...]], stage: Any) -> tuple[Any, ...] | None:
    """Host buffers that an executable on the CPU reads in place, for these of its NumPy leaves.

    A buffer may be reused once a result (a witness) of the call that read it is ready.

    Returns:
        (the results that are small enough to be kept until then, the best first; for each place: for each leaf an
        array and its address; of each leaf: is it floating, bytes of an element, elements).
    """
    # Only the CPU reads the host's memory in place, and only if JAX has a name for asking that.
    device_put, in_place = _device_put()[0], getattr(type(_device_put()[1]), "ZERO_COPY", None)
    if not hosts or in_place is None or any(devices[0].platform != "cpu" for *_, devices in hosts):
        return None
    results = enumerate(tree_util.tree_leaves(stage.out_info))
    witnesses = tuple(
        i
        for i, output in results
        if not jax.numpy.issubdtype(output.dtype, dtypes.extended) and output.size * output.dtype.itemsize <= _SMALL
    )
    if not witnesses:
        return None
    slots: list[list[tuple[Any, int]]] = []
    for _ in range(_RING_SLOTS):
        slots.append([])
        for _, aval, sharding, devices in hosts:
            memory = _aligned(aval)
            array = device_put(aval, sharding, [memory], devices, False, False, in_place)
            address = memory.ctypes.data
            if array.unsafe_buffer_pointer() != address:  # it was copied after all
                return None
            slots[-1].append((array, address))
    elements = [(aval.dtype.kind == "f", aval.dtype.itemsize, aval.size) for _, aval, _, _ in hosts]
    return witnesses[:_MAX_WITNESSES], slots, elements


def _aligned(aval: Any) -> np.ndarray[Any, Any]:
    """A vector aligned so that XLA uses its memory without a copy."""
    size = aval.size * aval.dtype.itemsize
    # NumPy promises no such alignment.
    memory = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(aval.dtype)


def _host_copy(leaf: Any, sharding: Any, layout: Any, aval: Any) -> tuple[Any, ...] | None:
    """Aval, sharding and devices of the copy that the executable takes for a NumPy leaf; None for several devices."""
    devices = list(sharding.device_set)
    if len(devices) != 1 or leaf.shape != aval.shape or dtypes.canonicalize_dtype(leaf.dtype) != aval.dtype:
        return None
    device_sharding = jax.sharding.SingleDeviceSharding(devices[0])
    if sharding.memory_kind not in (None, device_sharding.memory_kind):
        return None
    if layout is not None and jax.device_put(leaf, device_sharding).format.layout != layout:
        return None
    return aval, device_sharding, devices


def _passes_self_test() -> bool:
    """Has the self-test passed? Runs it once, before the first direct call."""
    with _state.lock:
        if not _state.tested:
            _state.tested = True  # from here on: the self-test captures, too
            try:
                with jax.log_compiles(False):  # the program counts its own compilations
                    _self_test()
            except Exception as error:
                _state.disable(f"the self-test failed on JAX {jax.__version__}: {type(error).__name__}: {error}")
        if not _state.searched_fields:
            _state.searched_fields = True
            # The offsets of the fields differ between builds of jaxlib, and no header tells them.
            with contextlib.suppress(Exception):  # where they are not found, each array is asked by its getters
                _core.find_array_parts([(a, a.aval, a._sharding, a._committed) for a in _samples()])
    return _state.reason is None


@functools.cache
def counts_buffer_users() -> bool:
    """Can the core tell whether an array is the only user of its buffer? Looks for the place where JAX counts them."""
    if not _passes_self_test():
        return False
    device = jax.local_devices()[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    pairs = [jax.numpy.full(size, float(size)) + 1 for size in (3, 3, 1000, 1000, 70_000, 70_000)]
    # The first makes another array of the device's buffer, the second one of the same list of buffers.
    aliases = [functools.partial(jax.device_put, device=place) for place in (device, sharding)]
    try:
        return _core.find_buffer_users(jax.block_until_ready(pairs), aliases)
    except Exception:
        return False


@functools.cache
def counts_buffer_users_on_meshes() -> bool:
    """The same for arrays on several devices, each of which has a buffer of its own."""
    if not counts_buffer_users():
        return False
    devices = jax.local_devices()
    try:
        groups = [_mesh_samples(devices[:count]) for count in (2, min(len(devices), 5))]
        return _core.find_buffer_users_on_meshes(groups, _with_the_buffers_of)
    except Exception:
        return False


def _mesh_samples(devices: Sequence[Any]) -> tuple[tuple[Any, Any], list[Callable[[Any], Any]]]:
    """Two arrays on these devices, and for each device a function that makes another array of the buffer there."""
    mesh = jax.sharding.Mesh(np.array(devices), ("i",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))
    first, second = (jax.device_put(np.full((len(devices), 3), value), sharding) + 1 for value in (1.0, 2.0))

    def of_device(array: Any, i: int) -> Any:
        return _with_the_buffers_of(array).addressable_data(i)  # an array keeps what it has made of its own buffers

    return jax.block_until_ready((first, second)), [functools.partial(of_device, i=i) for i in range(len(devices))]


def _with_the_buffers_of(array: Any) -> Any:
    sharding = array.sharding
    spec = jax.sharding.PartitionSpec(*sharding.spec, None)  # JAX gives an array of a sharding that is equal back
    return jax.device_put(array, jax.sharding.NamedSharding(sharding.mesh, spec))


def _samples() -> list[Any]:
    """Arrays that differ in all of their fields, so that no two fields can be confused."""
    device = jax.local_devices()[0]
    values = np.zeros(1, "int8"), 1, np.zeros((2, 3)), 1.0, np.zeros(4, "uint16"), 1j, np.zeros(5, bool), True
    devices = [None, None, *(jax.sharding.SingleDeviceSharding(device) for _ in range(3)), None, None, device]
    return [
        jax.device_put(value, device_or_sharding) for value, device_or_sharding in zip(values, devices, strict=True)
    ]


def _self_test() -> None:
    """Runs a small program both ways: results, types, placement, weak types and forwarding have to be the same."""
    # The second call of a process waits for it: it compiles this one program, and nothing on the way there.

    def program(x: Any, unused: Any, key: Any, i: Any, host: Any) -> tuple[Any, Any, Any]:
        # Each result is a copy: the part of XLA that compiles arithmetic takes 8 MB when it is first used.
        del unused
        x, bits, i, host = jax.lax.optimization_barrier((x, jax.random.key_data(key), i, host))
        return (x, jax.random.wrap_key_data(bits, impl="threefry2x32"), i, host), (x,), (None, ())

    jitted = own_jit(program)
    bits = jax.device_put(np.asarray([0, 3], "uint32"))
    numbers = np.arange(6.0, dtype="float32").reshape(2, 3), np.zeros(4, "float32"), np.asarray(5, "int16")
    x, unused, i = map(jax.device_put, numbers)
    plain = x, unused, jax.random.wrap_key_data(bits, impl="threefry2x32"), i
    leaves: tuple[Any, ...] = (*plain, np.arange(3.0))
    expected: Any = jitted(*leaves)
    captured = _capture_executable(jitted, leaves, tupled=False)
    if not captured:
        raise RuntimeError("the program was refused")
    execute, handlers, kept_indices, number, donates, hosts, _ = captured
    # `unused` is dropped, and `(None, ())` is how the number 2 of an Outcome is written.
    expect((kept_indices, number, donates) == ((0, 2, 3, 4), 2, False), (kept_indices, number, donates))
    # The NumPy leaf, the only one: copied as the core does it.
    [(_, *put_arguments, devices)] = hosts
    host = _device_put()[0](*put_arguments, [leaves[4].copy()], devices, False, False, _device_put()[1])
    inputs = [leaves[0], leaves[2]._base_array, leaves[3], host]
    results = execute(inputs).consume_with_handlers(handlers)
    a: Any
    b: Any
    for a, b in zip((*expected[0], *expected[1]), results, strict=True):
        expect(type(a) is type(b) and a.aval == b.aval and a.sharding == b.sharding, (a, b))
        if isinstance(a, key_class()):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        expect(a._committed == b._committed and a.weak_type == b.weak_type and a.tolist() == b.tolist(), (a, b))


class _CacheClearListener:
    """Notices `jax.clear_caches()`: JAX takes it for one of its caches, which is always empty."""

    def cache_clear(self) -> None:
        _core.caches_cleared()

    def cache_info(self) -> Any:
        return functools.lru_cache(maxsize=0)(len).cache_info()

    def cache_keys(self) -> list[Any]:
        return []


_cache_clear_listener = _CacheClearListener()  # JAX holds its caches weakly
