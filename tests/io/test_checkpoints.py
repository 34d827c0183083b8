# SPDX-License-Identifier: Apache-2.0
"""Steps of a training: kept, found again, complete or not there at all."""

import inspect
import random
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import graftax
from sizes import sized
from zoo import Box

pytest.importorskip("orbax.checkpoint")
pytestmark = [
    pytest.mark.quick(1),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::ResourceWarning"),
]


def state(value):
    big = jnp.full((300, 200), value, jnp.float32)
    return Box(
        big=big,
        tied=[big],
        half=jnp.full((400, 100), value, jnp.bfloat16),
        eight=jnp.full(100_000, value, jnp.float8_e4m3fn),
        numpy=np.full(40_000, value),
        keys=jax.random.split(jax.random.key(int(value)), 10_000),
        small=jnp.full(3, value),
        n=int(value),
        act=lambda x: x,
        history=[float(i) for i in range(int(value))],
    )


def same(one, other):
    one.act = other.act = None
    return graftax.equal(one, other)


def test_orbax_has_what_is_used():
    from orbax.checkpoint import v1

    training = v1.training
    taken = set(inspect.signature(training.Checkpointer).parameters)
    assert taken >= {"directory", "save_decision_policy", "preservation_policy", "cleanup_tmp_directories"}
    for name in ("save_checkpointables_async", "load_checkpointables", "should_save", "wait", "close", "checkpoints"):
        assert hasattr(training.Checkpointer, name)
    assert hasattr(training.Checkpointer, "is_saving_in_progress") and hasattr(v1, "PLACEHOLDER")
    for name in ("FixedIntervalPolicy", "PreemptionCheckpointingPolicy", "AnySavePolicy"):
        assert hasattr(training.save_decision_policies, name)
    for name in ("LatestN", "BestN", "PreserveAll", "AnyPreservationPolicy"):
        assert hasattr(training.preservation_policies, name)


def test_steps_are_saved_kept_and_restored(tmp_path):
    with graftax.Checkpoints(tmp_path / "run", every=2, keep=2) as checkpoints:
        assert checkpoints.restore(state(0.0)) is None and checkpoints.latest is None
        assert [checkpoints.save(step, state(step + 1.0)) for step in range(6)] == [True, False] * 3
        checkpoints.wait()
        assert checkpoints.steps == [2, 4] and checkpoints.latest == 4
        like = state(0.0)
        act, numpy = like.act, like.numpy
        assert checkpoints.restore(like) == 4
        assert like.act is act and like.tied[0] is like.big and not like.big.committed and like.numpy is not numpy
        assert same(like, state(5.0))
        like = state(0.0)
        assert checkpoints.restore(like, step=2) == 2 and same(like, state(3.0))
        like = state(0.0)
        assert checkpoints.restore(like, only="big") == 4
        assert like.big[0, 0] == 5 and like.half[0, 0] == 0 and like.n == 0
        names = {tensor.name for tensor in checkpoints.peek().tensors}
        assert names == {"big", "half", "eight", "numpy", "keys", "small"}
        with pytest.raises(graftax.LoadError, match="no step 3"):
            checkpoints.restore(like, step=3)
    reopened = graftax.Checkpoints(tmp_path / "run")
    assert reopened.steps == [2, 4]
    reopened.close()


def test_every_difference_is_told_and_nothing_is_written(tmp_path):
    with graftax.Checkpoints(tmp_path / "run", every=1) as checkpoints:
        checkpoints.save(0, {"a": jnp.ones((300, 300)), "b": jnp.ones(2)})
        like = {"a": jnp.zeros((300, 301)), "c": jnp.zeros(2)}
        with pytest.raises(graftax.LoadError) as caught:
            checkpoints.restore(like)
        assert len(caught.value.differences) == 3 and like["a"].shape == (300, 301)


@pytest.mark.parametrize("is_numpy_first", [False, True])
def test_an_array_at_two_paths_becomes_what_like_has_at_each(tmp_path, is_numpy_first):
    shared = jnp.ones(100_000)
    on_device = jax.device_put(jnp.zeros(100_000), jax.devices()[-1])
    like = {"a": on_device, "b": np.zeros(100_000, np.float32), "c": jax.device_put(on_device, jax.devices()[0])}
    order = ["b", "a", "c"] if is_numpy_first else ["a", "b", "c"]
    with graftax.Checkpoints(tmp_path / "run", every=1) as checkpoints:
        checkpoints.save(0, dict.fromkeys(order, shared))
        restored = {key: like[key] for key in order}
        checkpoints.restore(restored)
    for key, value in restored.items():
        assert type(value) is type(like[key]) and value.all()
        assert getattr(value, "sharding", None) == getattr(like[key], "sharding", None)


def test_arrays_go_where_like_or_shard_has_them(tmp_path):
    mesh = jax.make_mesh((1,), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    with graftax.Checkpoints(tmp_path / "run", every=1) as checkpoints:
        checkpoints.save(0, {"a": jnp.ones((300, 300)), "b": jnp.ones((300, 300)), "c": jnp.ones(2)})
        like = {"a": jax.device_put(jnp.zeros((300, 300)), split), "b": jnp.zeros((300, 300)), "c": jnp.zeros(2)}
        checkpoints.restore(like)
        assert like["a"].sharding == split and not like["b"].committed
        checkpoints.restore(like, shard=PartitionSpec("data"), mesh=mesh)
        assert like["b"].sharding == split == like["c"].sharding and like["b"].sum() == 90_000


def test_what_is_saved_is_what_was_there_then(tmp_path):
    with graftax.Checkpoints(tmp_path / "run", every=1) as checkpoints:
        x = {"numpy": np.ones(100_000), "jax": jnp.ones(100_000)}
        checkpoints.save(0, x)
        x["numpy"][:] = 5
        jax.jit(lambda x: x * 3, donate_argnums=0)(x["jax"]).block_until_ready()
        like = {"numpy": np.zeros(100_000), "jax": jnp.zeros(100_000)}
        checkpoints.restore(like)
        assert like["numpy"].sum() == 100_000 == like["jax"].sum()


def test_the_best_step_is_kept_and_one_can_be_forced(tmp_path):
    with graftax.Checkpoints(tmp_path / "run", every=1, keep=1, best="loss") as checkpoints:
        for step, loss in enumerate([3.0, 1.0, 2.0, 4.0]):
            checkpoints.save(step, [jnp.ones(2)], metrics={"loss": loss})
        checkpoints.wait()
        assert checkpoints.steps == [1, 3]
        with pytest.raises(ValueError, match="metric"):
            checkpoints.save(4, [jnp.ones(2)])
    with graftax.Checkpoints(tmp_path / "other", every=100) as checkpoints:
        assert not checkpoints.save(7, [jnp.ones(2)]) and checkpoints.save(7, [jnp.ones(2)], force=True)
        checkpoints.wait()
        assert checkpoints.steps == [7]


def test_a_save_that_fails_in_the_background_is_told_with_its_step(tmp_path, monkeypatch):
    from graftax._io.checkpoints import _Part

    checkpoints = graftax.Checkpoints(tmp_path / "run", every=1)
    with monkeypatch.context() as patch:

        async def fail(self, directory):
            async def write():
                raise OSError("no space")

            return write()

        patch.setattr(_Part, "save", fail)
        checkpoints.save(3, [jnp.ones(2)])
        with pytest.raises(graftax.GraftaxError, match=r"step 3 was not saved.*no space"):
            for _ in range(200):
                checkpoints.save(4, [jnp.ones(2)])
                time.sleep(0.01)
    assert checkpoints.steps == []
    with graftax.Checkpoints(tmp_path / "run", every=1) as reopened:
        reopened.save(5, [jnp.ones(2)])
        reopened.wait()
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["5"]  # what was stale there is gone


def program(folder, log):
    script = Path(__file__).parent / "killed_training.py"
    return subprocess.Popen([sys.executable, "-W", "ignore", script, folder, log], stderr=subprocess.DEVNULL)


def losses(log):
    """step -> losses that were computed there, in all runs."""
    losses_of_step = {}
    for line in log.read_text().splitlines():
        parts = line.split()
        if len(parts) == 3 and line in log.read_text().split("\n")[:-1]:
            assert int(parts[2]) == int(parts[0]) + 1  # the history of the run has all steps
            losses_of_step.setdefault(int(parts[0]), set()).add(parts[1])
    return losses_of_step


def kill(tmp_path, kills, seed):
    rng = random.Random(seed)
    assert program(tmp_path / "whole", tmp_path / "whole.txt").wait() == 0
    wanted = losses(tmp_path / "whole.txt")
    assert sorted(wanted) == list(range(40)) and all(len(values) == 1 for values in wanted.values())
    done, round_ = 0, 0
    while done < kills:
        folder, log = tmp_path / f"killed{round_}", tmp_path / f"killed{round_}.txt"
        round_ += 1
        ended = False
        while not ended:
            running = program(folder, log)
            size, begin = log.stat().st_size if log.exists() else 0, time.monotonic()
            while running.poll() is None and (not log.exists() or log.stat().st_size == size):
                time.sleep(0.01)
                assert time.monotonic() - begin < 100
            if done < kills:
                time.sleep(rng.uniform(0, 0.8))
                running.kill()
            assert running.wait() in (0, -9)
            done += running.returncode != 0
            ended = running.returncode == 0
        assert losses(log) == wanted


@pytest.mark.quick(0)
def test_a_killed_training_goes_on_bit_for_bit(tmp_path):
    kill(tmp_path, sized(2, 1), seed=0)


@pytest.mark.quick(0)  # the one above runs instead
@pytest.mark.parametrize("seed", range(1, 6))
def test_fifty_kills_at_random_moments(tmp_path, seed):
    kill(tmp_path, 10, seed)
