# SPDX-License-Identifier: Apache-2.0
"""Ways in which Python code holds an array: each takes the array and returns a function that reads what is held."""

import collections
import concurrent.futures
import contextvars
import copy
import ctypes
import functools
import itertools
import queue
import threading
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

import graftax

WORKERS = concurrent.futures.ThreadPoolExecutor(2)


def buffers(array):
    """An array for each buffer: of an array on one device that one itself, which has no cache of its shards then."""
    return [array] if len(array.sharding.device_set) == 1 else [shard.data for shard in array.addressable_shards]


def last_buffer(array):
    return buffers(array)[-1]


def with_the_buffers_of(array):
    """Another array that lies where this one does, of a sharding that is not equal and comes to the same."""
    sharding = array.sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        mesh = jax.sharding.Mesh(sharding.mesh.devices[..., None], (*sharding.mesh.axis_names, "one"))
        spec = jax.sharding.PartitionSpec(*sharding.spec) if sharding.spec else jax.sharding.PartitionSpec("one")
        return jax.device_put(array, jax.sharding.NamedSharding(mesh, spec))
    return jax.device_put(array, jax.sharding.SingleDeviceSharding(*array.devices()))


class Slotted:
    __slots__ = ("held",)


def in_variable(array):
    return lambda: array


def in_list(array):
    held = [0, array]
    return lambda: held[1]


def in_tuple(array):
    held = ("note", (array,))
    return lambda: held[1][0]


def in_dict(array):
    held = {"w": array}
    return lambda: held["w"]


def in_deque(array):
    held = collections.deque([array])
    return lambda: held[0]


def in_attribute(array):
    held = types.SimpleNamespace(w=array)
    return lambda: held.w


def in_slot(array):
    held = Slotted()
    held.held = array
    return lambda: held.held


def in_class(array):
    cls = type("Best", (), {"w": array})
    return lambda: cls.w


def in_default(array):
    def read(held=array):
        return held

    return read


def in_partial(array):
    return functools.partial(lambda held: held, array)


def in_method(array):
    return types.MethodType(lambda held: held, array)


def in_cache(array):
    read = functools.lru_cache(lambda: array)
    read()
    return read


def in_generator(array):
    def values(held):
        yield
        yield held

    generator = values(array)
    next(generator)
    return functools.cache(lambda: next(generator))


def in_coroutine(array):
    class Wait:
        def __await__(self):
            yield

    async def work(held):
        await Wait()
        return held

    coroutine = work(array)
    coroutine.send(None)

    @functools.cache
    def read():
        try:
            coroutine.send(None)
        except StopIteration as stop:
            return stop.value

    return read


def in_iterator(array):
    held = iter([array])
    return functools.cache(lambda: next(held))


def in_repeat(array):
    held = itertools.repeat(array)
    return lambda: next(held)


def in_map(array):
    held = map(lambda x: x, (array,))
    return functools.cache(lambda: next(held))


def in_traceback(array):
    def fail(held):
        raise ValueError

    try:
        fail(array)
    except ValueError as error:
        saved = error
    return lambda: saved.__traceback__.tb_next.tb_frame.f_locals["held"]


def in_exception(array):
    error = ValueError(array)
    return lambda: error.args[0]


def in_thread(array):
    asked, results = threading.Event(), queue.Queue()

    def work(held):
        asked.wait()
        results.put(held)

    thread = threading.Thread(target=work, args=(array,), daemon=True)
    thread.start()

    @functools.cache
    def read():
        asked.set()
        return results.get()

    weakref.finalize(read, asked.set)
    return read


def in_thread_local(array):
    local = threading.local()
    local.held = array
    return lambda: local.held


def in_context_variable(array):
    variable, context = contextvars.ContextVar("held"), contextvars.copy_context()
    context.run(variable.set, array)
    return lambda: context[variable]


def in_future(array):
    future = concurrent.futures.Future()
    future.set_result(array)
    return future.result


def in_work(array):
    return WORKERS.submit(np.array, array).result


def in_device_get_of_a_worker(array):
    return WORKERS.submit(jax.device_get, array).result


def in_queue(array):
    held = queue.Queue()
    held.put(array)
    return lambda: held.queue[0]


def in_finalizer(array):
    anchor, seen = concurrent.futures.Future(), []
    finalizer = weakref.finalize(anchor, seen.append, array)
    finalizer.atexit = False
    return lambda: anchor and finalizer.peek()[2][0]


def in_resurrected(array):
    class Phoenix:
        def __del__(self):
            saved.append(self.held)

    saved, bird = [], Phoenix()
    bird.held = array
    del bird
    return lambda: saved[0]


def in_memo(array):
    memo = {}
    copy.deepcopy([array], memo)
    return lambda: next(kept for kept in memo[id(memo)] if isinstance(kept, jax.Array))


def in_bound_method(array):
    held = array.block_until_ready
    return lambda: held()


def in_update_helper(array):
    held = array.at[...]
    return lambda: held.get()


def in_object_array(array):
    held = np.empty(2, object)
    held[0] = array
    return lambda: held[0]


def in_py_object(array):
    held = ctypes.py_object(array)
    return lambda: held.value


def in_proxy(array):
    held = types.MappingProxyType({"w": array})
    return lambda: held["w"]


def in_tree(array):
    held = jax.tree.map(lambda x: x, {"a": [array]})
    return lambda: held["a"][0]


def in_numpy_view(array):
    held = np.asarray(array)
    return lambda: held


def in_part_of_view(array):
    held = np.asarray(array)[1:]
    return lambda: held


def in_memoryview(array):
    held = memoryview(last_buffer(array))
    return lambda: np.frombuffer(held, np.float32)


def in_memoryview_of_numpy(array):
    held = memoryview(np.asarray(array))
    return lambda: np.frombuffer(held, np.float32)


def in_host_copy(array):
    array.copy_to_host_async()
    held = np.asarray(array)
    return lambda: held


def in_dlpack(array):
    held = (np if jax.default_backend() == "cpu" else jnp).from_dlpack(last_buffer(array))
    return lambda: held


def in_capsule(array):
    class Exporter:
        def __init__(self, capsule, device):
            self.capsule, self.device = capsule, device

        def __dlpack__(self, **options):
            return self.capsule

        def __dlpack_device__(self):
            return self.device

    part = last_buffer(array)
    held = Exporter(part.__dlpack__(), part.__dlpack_device__())
    return functools.cache(lambda: np.from_dlpack(held))


def in_device_get(array):
    held = jax.device_get({"w": array})
    return lambda: held["w"]


def in_shard(array):
    held = array.addressable_shards[0]
    return lambda: held.data


def in_shard_data(array):
    held = array.addressable_shards[0].data
    return lambda: held


def in_assembled_of_shards(array):
    shards = [shard.data for shard in array.addressable_shards]
    held = jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)
    return lambda: held


def in_last_shard(array):
    held = array.addressable_shards[-1].data
    return lambda: held


def in_view_of_last_shard(array):
    held = np.asarray(array.addressable_shards[-1].data)
    return lambda: held


def in_shard_of_another_array(array):
    held = with_the_buffers_of(array).addressable_data(0)
    return lambda: held


def in_view_of_another_array(array):
    held = np.asarray(last_buffer(with_the_buffers_of(array)))
    return lambda: held


def in_array_of_the_buffers(array):
    held = with_the_buffers_of(array)
    return lambda: held


def in_part_of_shards(array):
    shards = [jax.device_put(part, next(iter(part.devices()))) for part in buffers(array)]
    del shards[:-1]
    return lambda: shards[0]


def in_replicated(array):
    mesh = jax.sharding.Mesh(np.array(sorted(array.devices(), key=lambda device: device.id)), ("i",))
    held = jax.device_put(array, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    return lambda: held


def in_other_order_of_devices(array):
    mesh = jax.sharding.Mesh(np.array(sorted(array.devices(), key=lambda device: -device.id)), ("i",))
    held = jax.device_put(array, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    return lambda: held


def in_addressable_data(array):
    held = array.addressable_data(0)
    return lambda: held


def in_device_put(array):
    held = jax.device_put(array, jax.devices()[0])
    return lambda: held


def in_sharding(array):
    held = jax.device_put(array, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    return lambda: held


def in_named_sharding(array):
    mesh = jax.make_mesh((1,), ("i",))
    held = jax.device_put(array, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i")))
    return lambda: held


def in_same_sharding(array):
    held = jax.device_put(array, array.sharding)
    return lambda: held


def in_to_device(array):
    held = array.to_device(jax.devices()[0])
    return lambda: held


def in_alias_if_possible(array):
    held = jax.device_put(array, may_alias=True)
    return lambda: held


def in_jax_dlpack(array):
    held = jax.dlpack.from_dlpack(last_buffer(array))
    return lambda: held


def in_callback_array(array):
    indices = list(array.sharding.addressable_devices_indices_map(array.shape).values())
    parts = buffers(array)
    held = jax.make_array_from_callback(array.shape, array.sharding, lambda index: parts[indices.index(index)])
    return lambda: held


def in_assembled(array):
    held = jax.make_array_from_single_device_arrays(array.shape, array.sharding, buffers(array))
    return lambda: held


def in_ref(array):
    held = jax.new_ref(array) if hasattr(jax, "new_ref") else [array]
    return lambda: held[...] if hasattr(jax, "new_ref") else held[0]


def in_pullback(array):
    _, pull = jax.vjp(lambda x: (x * array).sum(), jnp.ones(array.shape))
    return lambda: pull(jnp.ones(()))[0]


def in_jit(array):
    read = jax.jit(lambda: array + 0)
    read()
    return read


def in_graftax_jit(array):
    read = graftax.jit(lambda: array + 0)
    read()
    return read


_returned = jax.jit(lambda x: x)
_returned_by_graftax = graftax.jit(lambda x: x)
_in_handle = {"max_bytes": 1 << 10, "copy": False, "donate": False}


def in_result_of_jit(array):
    held = _returned(array)
    return lambda: held


def in_result_of_graftax_jit(array):
    held = _returned_by_graftax(array)
    return lambda: held


def in_result_without_gradient(array):
    held = jax.lax.stop_gradient(array)
    return lambda: held


def in_result_of_the_same_shape(array):
    held = jnp.asarray(array).astype(array.dtype).reshape(array.shape)
    return lambda: held


def in_packed(array):
    held = graftax.pack([array], **_in_handle)
    return lambda: held.unpack()[0]


class Received:
    """What callbacks of two programs were given, by number."""

    def __init__(self):
        self.numbers, self.arrays = itertools.count(), {}
        self.debug = jax.jit(lambda array, number: jax.debug.callback(self.receive, array, number))
        shape = jax.ShapeDtypeStruct((), jnp.int32)
        self.io = jax.jit(lambda array, number: io_callback(self.receive, shape, array, number))

    def receive(self, array, number):
        self.arrays[int(number)] = array
        return np.int32(number)

    def hold(self, program, array):
        number = next(self.numbers)
        program(array, number)
        return functools.cache(functools.partial(self.read, number))

    def read(self, number):
        jax.effects_barrier()
        return self.arrays.pop(number)


received = Received()


def in_debug_callback(array):
    return received.hold(received.debug, array)


def in_io_callback(array):
    return received.hold(received.io, array)


def in_pending_computation(array):
    held = jnp.sin(array) * 0 + array
    return lambda: held


def in_copy(array):
    held = jnp.copy(array)
    return lambda: held


HOLDERS = {name[3:]: value for name, value in list(globals().items()) if name.startswith("in_")}
