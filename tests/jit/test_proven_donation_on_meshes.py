# SPDX-License-Identifier: Apache-2.0
"""`donate="auto"` with arrays on several devices: who holds one of the buffers holds the array."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import graftax
from array_holders import HOLDERS, with_the_buffers_of
from devices import run_again
from graftax._jax import fast_dispatch
from sizes import sized

P = PartitionSpec
COUNT = len(jax.devices())
SIZE = 1 << 13

pytestmark = pytest.mark.skipif(
    not fast_dispatch.counts_buffer_users(), reason="donate='auto' needs direct calls and the users of a buffer"
)
eight = pytest.mark.skipif(COUNT < 8, reason="runs in a process with eight devices")


def mesh(count=8):
    return jax.sharding.Mesh(np.array(jax.devices()[:count]), ("i",))


PLACES = {
    "one": lambda: NamedSharding(mesh(1), P("i")),
    "two": lambda: NamedSharding(mesh(2), P("i")),
    "eight": lambda: NamedSharding(mesh(), P("i")),
    "replicated": lambda: NamedSharding(mesh(3), P()),
    "explicit": lambda: NamedSharding(jax.make_mesh((8,), ("i",), axis_types=(AxisType.Explicit,)), P("i")),
}


def double(state):
    for name in list(state):
        state[name] = state[name] * 2 + 1


def full(value, place, shape=(SIZE,)):
    return jax.device_put(np.full(shape, value, np.float32), place) + 0


def pointers(state):
    """Of each buffer. An array keeps what was made of its buffers, so another array of them is asked."""
    others = [with_the_buffers_of(array) for array in state.values()]
    return [[shard.data.unsafe_buffer_pointer() for shard in other.addressable_shards] for other in others]


@eight
@pytest.mark.quick(9)
@pytest.mark.parametrize("name", PLACES)
def test_arrays_on_meshes_are_updated_in_their_own_memory(name):
    f, place = graftax.jit(lambda state: double(state), donate="auto"), PLACES[name]()
    state = {"a": full(1, place), "b": full(2, place)}
    f(state)
    before = pointers(state)
    for _ in range(3):
        f(state)
        assert pointers(state) == before
    assert (np.asarray(state["a"]) == 31).all() and (np.asarray(state["b"]) == 47).all()
    assert {array.sharding for array in state.values()} == {place}
    assert (f.donation().calls_donated, f.cache_info().traces) == (4, 1)


@eight
@pytest.mark.quick(30)
@pytest.mark.parametrize("name", HOLDERS)
@pytest.mark.parametrize("where", ["eight", "replicated"])
def test_what_somebody_holds_of_an_array_is_as_without_jit(name, where):
    f, place = graftax.jit(double, donate="auto"), PLACES[where]()
    state = {"a": full(1, place), "b": full(2, place)}
    f(state)
    read = HOLDERS[name](state["b"])
    f(state)
    assert np.asarray(read())[[0, -1]].tolist() == [5, 5]
    assert (np.asarray(state["a"]) == 7).all() and (np.asarray(state["b"]) == 11).all()


@eight
@pytest.mark.quick(8)
@pytest.mark.parametrize("device", range(8))
def test_each_single_shard_keeps_its_array_until_it_is_let_go_of(device):
    f, place = graftax.jit(double, donate="auto"), PLACES["eight"]()
    state = {"a": full(1, place), "b": full(2, place)}
    f(state)
    shard = with_the_buffers_of(state["b"]).addressable_data(device)
    f(state)
    assert {array.path for array in f.donation().kept if array.holders} == {"state['b']"}
    assert (np.asarray(shard) == 5).all() and len(shard) == SIZE // 8
    del shard
    f(state)
    assert {array.path for array in f.donation().donated} == {"state['a']", "state['b']"}


@eight
def test_arrays_of_memory_that_devices_share_do_not_write_to_it():
    source = np.ones(SIZE, np.float32)
    place = PLACES["replicated"]()
    state = {"a": jax.device_put(source, place, may_alias=True)}
    f = graftax.jit(double, donate="auto")
    for value in (3, 7, 15):
        f(state)
        assert (source == 1).all()
        assert all((np.asarray(shard.data) == value).all() for shard in state["a"].addressable_shards)


@eight
def test_a_sharded_training_step_is_donated_and_keeps_its_shardings():
    transformation, rows, columns = optax.adam(1e-3), NamedSharding(mesh(), P("i")), NamedSharding(mesh(), P(None, "i"))

    def step(state, x):
        gradients = jax.grad(lambda w: ((x @ w["in"] @ w["out"]) ** 2).mean())(state.params)
        updates, state.opt = transformation.update(gradients, state.opt)
        state.params = optax.apply_updates(state.params, updates)

    def train(options):
        params = {"in": full(0.1, columns, (64, 64)), "out": full(0.2, rows, (64, 64))}
        state, x = SimpleNamespace(params=params, opt=transformation.init(params)), full(1, rows, (16, 64))
        count = jax.device_put(state.opt[0].count, NamedSharding(mesh(), P()))
        state.opt = (state.opt[0]._replace(count=count), *state.opt[1:])
        del params
        f = graftax.jit(step, **options)
        for _ in range(4):
            f(state, x)
        return f, state

    f, state = train({"donate": "auto"})
    assert len(f.donation().donated) == 6 and not f.donation().kept and f.donation().calls_donated == 4
    _, other = train({})
    for leaf, expected in zip(jax.tree.leaves(vars(state)), jax.tree.leaves(vars(other)), strict=True):
        assert leaf.sharding == expected.sharding and np.allclose(leaf, expected, rtol=1e-6)


@eight
def test_an_array_on_one_device_beside_a_mesh_donates_nothing():
    @graftax.jit(donate="auto")
    def f(state, x):
        state["a"] = state["a"] + x

    state = {"a": full(1, PLACES["eight"]())}
    for _ in range(3):
        held = state["a"]
        f(state, jnp.ones(()))
    assert held[0] == 3 and state["a"][0] == 4 and "no call has looked" in str(f.donation())


@eight
@pytest.mark.parametrize("place", ["sharded", "replicated"])
def test_random_programs_on_meshes_never_lose_an_array_that_can_be_reached(place):
    environment = {**os.environ, "GRAFTAX_HELD_PLACE": place, "GRAFTAX_HELD_SIZE": "64"}
    program = Path(__file__).parents[1] / "support" / "held_arrays.py"
    command = [sys.executable, str(program), str(sized(300, 10))]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0 and "nothing was found" in run.stdout, run.stderr[-3000:]


@pytest.mark.quick(0)
def test_in_a_process_with_eight_devices():
    if COUNT < 8:
        run_again(__file__, 8)
