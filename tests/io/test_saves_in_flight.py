# SPDX-License-Identifier: Apache-2.0
"""Saves that Orbax writes in the background while steps with `donate="auto"` run: each has the values of its moment."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import graftax
from devices import run_again
from graftax._jax import fast_dispatch

ocp = pytest.importorskip("orbax.checkpoint")
tensorstore = pytest.importorskip("tensorstore")

SIZE = 1 << 15
COUNT = len(jax.devices())

pytestmark = [
    pytest.mark.quick(1),
    pytest.mark.skipif(not fast_dispatch.counts_buffer_users(), reason="donate='auto' does not work here"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::ResourceWarning"),
]


@pytest.fixture
def gate(monkeypatch):
    """Nothing is written before this event is set, and with `fails` nothing ever."""
    event, open_store = threading.Event(), tensorstore.open
    event.reached, event.fails = threading.Event(), False

    async def wait_and_open(*arguments, **options):
        event.reached.set()
        while not event.is_set():
            await asyncio.sleep(0.001)
        if event.fails:
            raise OSError("no space")
        return await open_store(*arguments, **options)

    monkeypatch.setattr(tensorstore, "open", wait_and_open)
    yield event
    event.set()


# Each begins to save and returns two functions: one that waits for it, one that reads the arrays.


def by_checkpoints(folder, state):
    checkpoints = graftax.Checkpoints(folder, every=1)
    assert checkpoints.save(0, state)

    def read():
        checkpoints.restore(like := jax.tree.map(jnp.zeros_like, state))
        return like

    return checkpoints.wait, read


def by_manager(folder, state):
    manager = ocp.CheckpointManager(folder)
    manager.save(0, args=ocp.args.StandardSave(state))
    return manager.wait_until_finished, lambda: manager.restore(0)


def by_checkpointer(folder, state):
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(folder / "0", state)
    return checkpointer.wait_until_finished, lambda: checkpointer.restore(folder / "0")


def by_handler(handler, arguments):
    def save(folder, state):
        checkpointer = ocp.AsyncCheckpointer(handler())
        checkpointer.save(folder / "0", args=arguments(state))
        return checkpointer.wait_until_finished, lambda: checkpointer.restore(folder / "0")

    return save


WAYS = {
    "Checkpoints": by_checkpoints,
    "CheckpointManager": by_manager,
    "StandardCheckpointer": by_checkpointer,
    "StandardCheckpointHandler": by_handler(ocp.StandardCheckpointHandler, ocp.args.StandardSave),
    "PyTreeCheckpointHandler": by_handler(ocp.PyTreeCheckpointHandler, ocp.args.PyTreeSave),
}


def double(state):
    for name in state:
        if isinstance(state[name], dict):
            double(state[name])
        elif jnp.issubdtype(state[name].dtype, jax.dtypes.prng_key):
            state[name] = jax.vmap(lambda key: jax.random.fold_in(key, 1))(state[name])
        else:
            state[name] = state[name] * 2 + 1


def large(value):
    return jnp.full(SIZE, value) + 0


def sharded(value):
    mesh = jax.make_mesh((COUNT,), ("data",))
    return jax.device_put(large(value), NamedSharding(mesh, PartitionSpec("data")))


STATES = {
    "one array": lambda: {"a": large(1.0)},
    "a tree": lambda: {"a": large(1.0), "deep": {"b": large(2.0), "small": jnp.ones(3)}, "n": large(4)},
    "bfloat16": lambda: {"a": large(1.0).astype(jnp.bfloat16), "b": large(2.0)},
    "keys": lambda: {"keys": jax.random.split(jax.random.key(0), SIZE), "a": large(1.0)},
}
if COUNT > 1:
    STATES["sharded"] = lambda: {"a": sharded(1.0), "b": sharded(2.0)}
    STATES["sharded and not"] = lambda: {"a": sharded(1.0), "b": large(2.0)}


def numbers(state):
    """A copy on the host."""

    def of(leaf):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.array(jax.random.key_data(leaf) if is_key else leaf)

    return jax.tree.map(of, state)


def assert_same(state, expected):
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    assert all(map(np.array_equal, jax.tree.leaves(state), jax.tree.leaves(expected)))


def stepped(make=STATES["a tree"]):
    """A step that has donated, and a state that only it has."""
    step, state = graftax.jit(double, donate="auto"), make()
    step(state), step(state)
    return step, state


@pytest.mark.parametrize("make", STATES)
@pytest.mark.parametrize("way", WAYS)
def test_a_save_in_flight_has_the_values_of_its_moment(gate, tmp_path, way, make):
    step, state = stepped(STATES[make])
    expected = numbers(state)
    wait, read = WAYS[way](tmp_path, state)
    for _ in range(3):
        step(state)
    assert gate.reached.wait(60) and not gate.is_set()  # nothing was written before the steps
    after = numbers(state)
    gate.set()
    wait()
    assert_same(numbers(read()), expected)
    assert_same(numbers(state), after)
    if "sharded" not in make:
        assert step.donation().donated and step.donation().calls_donated >= 4


@pytest.mark.parametrize("way", WAYS)
def test_of_a_state_that_is_saved_in_part_only_this_part_is_kept(gate, tmp_path, way):
    step, state = stepped()
    expected = numbers(state["deep"])
    wait, read = WAYS[way](tmp_path, state["deep"])
    step(state), step(state)
    gate.set()
    wait()
    assert_same(numbers(read()), expected)
    assert step.donation().donated


def test_one_array_in_flight(gate, tmp_path):
    step, state = stepped()
    first = float(state["a"][0])
    checkpointer = ocp.AsyncCheckpointer(ocp.ArrayCheckpointHandler())
    checkpointer.save(tmp_path / "0", args=ocp.args.ArraySave(state["a"]))
    step(state)
    assert [array.path for array in step.donation().kept] == ["state['a']"] or not step.donation().donated
    step(state)
    gate.set()
    checkpointer.wait_until_finished()
    assert (np.asarray(checkpointer.restore(tmp_path / "0")) == first).all()


@pytest.mark.parametrize("way", WAYS)
def test_two_saves_in_flight_each_have_their_moment(gate, tmp_path, way):
    step, state = stepped()
    saves = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        expected = numbers(state)
        saves.append((*WAYS[way](tmp_path / name, state), expected))
        step(state)
    step(state)
    gate.set()
    for wait, read, expected in saves:
        wait()
        assert_same(numbers(read()), expected)


@pytest.mark.parametrize("way", WAYS)
def test_saves_of_another_thread_and_steps_in_between(tmp_path, way):
    step, state = stepped()
    with ThreadPoolExecutor(1) as pool:
        for i in range(3):
            (tmp_path / str(i)).mkdir()
            expected = numbers(state)
            wait, read = pool.submit(WAYS[way], tmp_path / str(i), state).result()
            step(state), step(state)
            pool.submit(wait).result() if i % 2 else wait()
            step(state)
            assert_same(numbers(read()), expected)
    assert step.donation().donated


def keeps_what_it_copied():
    """Has an array of this JAX its memory on the host for ever, once it was copied there? Before JAX 0.11 it has."""
    step, state = stepped()
    jax.tree.map(lambda leaf: leaf.copy_to_host_async(), state)
    step(state)
    return bool(step.donation().kept)


@pytest.mark.parametrize("way", WAYS)
def test_a_finished_save_holds_nothing(tmp_path, way):
    step, state = stepped()
    wait, read = WAYS[way](tmp_path, state)
    wait()
    expected = numbers(state)
    step(state)
    assert not step.donation().kept or keeps_what_it_copied()
    step(state)
    assert not step.donation().kept
    assert_same(numbers(read()), expected)


@pytest.mark.parametrize("way", WAYS)
def test_after_a_save_that_failed_the_state_goes_on(gate, tmp_path, way):
    step, state = stepped()
    wait, _ = WAYS[way](tmp_path, state)
    step(state), step(state)
    after, gate.fails = numbers(state), True
    gate.set()
    with pytest.raises(Exception, match="no space"):
        wait()
    assert_same(numbers(state), after)
    step(state), step(state)
    assert step.donation().donated


@pytest.mark.parametrize("donate", [True, False])
def test_a_packed_state_in_flight(gate, tmp_path, donate):
    made = {"a": large(1.0), "small": [jnp.ones(3), jnp.zeros(4)]}

    @graftax.jit(donate="auto")
    def step(state):
        state["a"] = state["a"] * 2 + 1
        state["small"] = [value + 1 for value in state["small"]]

    state = graftax.pack(made, donate=donate)
    step(state), step(state)
    expected = numbers(state.unpack())
    checkpoints, manager = graftax.Checkpoints(tmp_path / "a", every=1), ocp.CheckpointManager(tmp_path / "b")
    checkpoints.save(0, state)
    manager.save(0, args=ocp.args.StandardSave(state.unpack()))
    step(state), step(state)
    gate.set()
    checkpoints.restore(like := graftax.pack(made))
    assert_same(numbers(like.unpack()), expected)
    manager.wait_until_finished()
    assert_same(numbers(manager.restore(0)), expected)


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="this JAX has no jax.Ref to make")
def test_what_is_read_of_a_ref_in_flight(gate, tmp_path):
    @graftax.jit(donate="auto")
    def step(state):
        state["ref"][...] = state["ref"][...] + 1
        state["a"] = state["a"] + state["ref"][...]

    state = {"ref": jax.new_ref(large(1.0)), "a": large(0.0)}
    step(state), step(state)
    checkpoints = graftax.Checkpoints(tmp_path / "a", every=1)
    manager = ocp.CheckpointManager(tmp_path / "b")
    checkpoints.save(0, state)
    manager.save(0, args=ocp.args.StandardSave({"ref": state["ref"][...], "a": state["a"]}))
    step(state), step(state)
    gate.set()
    like = {"ref": jax.new_ref(large(0.0)), "a": large(0.0)}
    checkpoints.restore(like)
    manager.wait_until_finished()
    for saved in (like, manager.restore(0)):
        assert saved["ref"][...][0] == 3 and saved["a"][0] == 5
    assert state["ref"][...][0] == 5


@pytest.mark.quick(0)
@pytest.mark.skipif(COUNT > 1, reason="has them")
def test_all_of_this_on_four_devices():
    run_again(__file__, 4)
