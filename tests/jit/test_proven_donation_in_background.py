# SPDX-License-Identifier: Apache-2.0
"""What uses arrays later, while steps with `donate="auto"` go on: callbacks, tasks, recorders, keys, shared memory."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import shared_memory
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import graftax
from graftax.__main__ import main
from graftax._jax import fast_dispatch
from sizes import sized

SIZE = 1 << 15

pytestmark = pytest.mark.skipif(not fast_dispatch.counts_buffer_users(), reason="donate='auto' does not work here")


def double(state):
    state["a"] = state["a"] * 2 + 1


def stepped():
    """A step that has donated, and a state of threes that only it has."""
    step, state = graftax.jit(double, donate="auto"), {"a": jnp.zeros(SIZE)}
    step(state), step(state)
    return step, state


def test_a_recorder_of_the_step_keeps_the_calls_that_it_can_replay(tmp_path: Path, capsys):
    step, state = stepped()
    recorder = graftax.record(step, last=3, dir=tmp_path)
    for _ in range(5):
        recorder(state)
    recorder.save(tmp_path / "calls.graftax")
    assert main(["replay", str(tmp_path / "calls.graftax")]) == 0
    assert capsys.readouterr().out.count("equal to what was recorded") == 3
    del recorder
    step(state), step(state)
    assert step.donation().donated and state["a"][0] == 2**9 - 1


def test_a_recorder_of_another_function_keeps_what_that_was_given(tmp_path: Path, capsys):
    step, state = stepped()
    recorder = graftax.record(lambda state: state["a"].sum(), last=2, dir=tmp_path)
    for _ in range(3):
        recorder(state), step(state)
    recorder.save(tmp_path / "calls.graftax")
    assert main(["replay", str(tmp_path / "calls.graftax")]) == 0
    assert capsys.readouterr().out.count("equal to what was recorded") == 2


@pytest.mark.parametrize("callback", ["debug", "io"])
def test_callbacks_of_the_step_itself_receive_the_old_values(callback):
    received = []

    @graftax.jit(donate="auto")
    def step(state):
        if callback == "debug":
            jax.debug.callback(received.append, state["a"])
        else:
            io_callback(received.append, None, state["a"])
        state["a"] = state["a"] + 1

    state = {"a": jnp.zeros(SIZE)}
    for _ in range(5):
        step(state)
    jax.effects_barrier()
    assert sorted(float(array[-1]) for array in received) == [0, 1, 2, 3, 4]


def test_tasks_read_what_they_were_given_before_steps_that_came_between():
    step, state = stepped()

    async def read_later(array, view, turns):
        for _ in range(turns):
            await asyncio.sleep(0)
        return float(array[0]), float(view[-1])

    async def train():
        tasks = []
        for turns in range(6):
            number = float(state["a"][0])
            view = memoryview(np.asarray(state["a"]))
            tasks.append((asyncio.create_task(read_later(state["a"], view, turns)), number))
            del view
            step(state)
            await asyncio.sleep(0)
        for task, number in tasks:
            assert await task == (number, number)

    asyncio.run(train())
    step(state), step(state), step(state)
    assert step.donation().donated


def test_threads_copy_to_the_host_what_they_were_given_while_steps_run():
    step, state = stepped()
    ways = [np.array, jax.device_get, lambda array: array + 0, lambda array: jnp.copy(array), jax.block_until_ready]
    with ThreadPoolExecutor(2) as pool:
        copies = []
        for i in range(sized(400, 60)):
            state["a"] = state["a"] % 1024
            number = float(state["a"][0])
            state["a"].copy_to_host_async()
            copies.append((pool.submit(ways[i % len(ways)], state["a"]), number))
            step(state)
            if i % 7 == 0:
                for copy, number in copies:
                    assert (np.asarray(copy.result()) == number).all()
                copies.clear()
                step(state)
    assert step.donation().calls_donated > 2


def test_a_thread_that_waits_with_an_array_on_its_stack_has_it():
    step, state = stepped()
    begun, asked, seen = threading.Event(), threading.Event(), []

    def wait():
        begun.set()
        return asked.wait()

    thread = threading.Thread(target=lambda: seen.append((state["a"], wait())[0]))
    thread.start()
    begun.wait()
    step(state), step(state)
    asked.set()
    thread.join()
    assert seen[0][0] == 3 and state["a"][0] == 15


def test_the_rest_of_an_expression_has_what_was_read_before_the_call():
    step, state = stepped()
    old, _, new = state["a"], step(state), state["a"]
    assert [float(value[0]) for value in (old, new)] == [3, 7]
    assert float((state["a"] - (step(state), state["a"])[1])[0]) == 7 - 15


def test_keys_of_an_array_and_the_data_of_keys_are_kept():
    def add(state):
        state["data"] = state["data"] + 1
        state["keys"] = jax.random.split(state["keys"][0], SIZE)

    step = graftax.jit(add, donate="auto")
    state = {"data": jnp.zeros((SIZE, 2), jnp.uint32), "keys": jax.random.split(jax.random.key(0), SIZE)}
    step(state), step(state)
    keys, data = jax.random.wrap_key_data(state["data"]), jax.random.key_data(state["keys"])
    expected = np.array(data)
    step(state), step(state)
    assert jax.random.key_data(keys)[0].tolist() == [2, 2] and (np.asarray(data) == expected).all()


def test_memory_that_processes_share_is_not_written_to():
    step, _ = stepped()
    memory = shared_memory.SharedMemory(create=True, size=4 * SIZE)
    try:
        shared = np.ndarray(SIZE, np.float32, memory.buf)
        shared[:] = 1
        state = {"a": jax.device_put(shared, may_alias=True)}
        step(state), step(state)
        assert (shared == 1).all() and (state["a"] == 7).all()
        shared[:] = np.asarray(state["a"])
        step(state)
        assert (shared == 7).all() and (state["a"] == 15).all()
        del state, shared
    finally:
        memory.close()
        memory.unlink()


@pytest.mark.parametrize("copy", [True, False])
def test_a_handle_of_packed_arrays_has_those_that_lie_outside_of_its_buffers(copy):
    step, state = stepped()
    handle = graftax.pack({"a": state["a"], "small": jnp.ones(3)}, copy=copy)
    step(state), step(state)
    assert handle.unpack()["a"][0] == 3 and state["a"][0] == 15
    total = graftax.jit(lambda state: state["a"][0] + state["small"].sum())
    assert total(handle) == 6


def test_a_step_that_calls_another_jitted_step_of_the_same_state():
    inner = graftax.jit(double, donate="auto")

    @graftax.jit(donate="auto")
    def outer(state):
        inner(state)
        state["b"] = state["b"] + state["a"]

    state = {"a": jnp.zeros(SIZE), "b": jnp.zeros(SIZE)}
    for _ in range(3):
        outer(state), inner(state)
    held = state["a"]
    outer(state), inner(state)
    assert [float(x[0]) for x in (held, state["a"], state["b"])] == [63, 255, 1 + 7 + 31 + 127]
