# SPDX-License-Identifier: Apache-2.0
"""What runs in each process: `checkpoint_hosts.py NUMBER COUNT PORT FOLDER save|restore|preempted [MESH, as 2x2]`."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import graftax

P = PartitionSpec


class Loader:
    """What a process has for itself."""

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def get_state(self) -> dict[str, int]:
        return {"position": self.position}

    def set_state(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def over(shape: tuple[int, ...]) -> Any:
    """A mesh over all devices."""
    return jax.make_mesh(shape, ("a", "b")[: len(shape)], axis_types=(AxisType.Auto,) * len(shape))


def state(value: int, mesh: Any) -> dict[Any, Any]:
    """Arrays of each kind: parts in each process, whole in each, of one process alone, on the host."""
    rows, whole = NamedSharding(mesh, P(mesh.axis_names)), NamedSharding(mesh, P())

    def put(array: Any, sharding: Any = rows) -> Any:
        return jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])

    big = put(np.arange(400 * 200, dtype=np.float32).reshape(400, 200) + value)
    keys = jax.jit(lambda: jax.random.split(jax.random.key(value), 8), out_shardings=rows)()
    return {
        "big": big,
        "tied": [big],
        "small": put(np.arange(8) + value),
        "whole": put(np.full((300, 200), value, np.float32), whole),
        "eight": put(np.full(8, value).astype(jnp.float8_e4m3fn)),
        "four": put(np.full(8, value).astype(jnp.int4)),
        "keys": keys,
        "key": jax.random.key(value),
        "own": jnp.full(3, value),
        "own_big": jnp.full((300, 200), value),
        "numpy": np.full(40_000, value),
        "n": value,
        3: "text",
    }


def different(one: dict[Any, Any], other: dict[Any, Any]) -> list[str]:
    """The names of what this process holds otherwise."""
    return [str(name) for name in one if not _is_same(one[name], other[name])]


def _is_same(one: Any, other: Any) -> bool:
    if not isinstance(one, jax.Array):
        return bool(np.all(one == other)) if not isinstance(one, list) else _is_same(one[0], other[0])
    if not one.sharding.is_equivalent_to(other.sharding, one.ndim) or one.dtype != other.dtype:
        return False
    if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
        return _is_same(jax.random.key_data(one), jax.random.key_data(other))
    parts = zip(one.addressable_shards, other.addressable_shards, strict=True)
    return all(bool(np.all(np.asarray(a.data) == np.asarray(b.data))) for a, b in parts)


def preempted(number: int, count: int, folder: str) -> Any:
    """The last process gets the signal; all save one step, and leave."""
    values, begun, is_preempted, step = state(1, over((jax.device_count(),))), time.monotonic(), False, 0
    with graftax.Checkpoints(folder, every=1_000_000) as checkpoints:
        checkpoints.save(0, values)
        while not checkpoints.preempted:
            assert time.monotonic() - begun < 100
            step += 1
            time.sleep(0.02)
            if number == count - 1 and not is_preempted and step > 20:
                os.kill(os.getpid(), signal.SIGTERM)
                is_preempted = True
            checkpoints.save(step, values)
        return checkpoints.steps == [0, step], step > 20


def main(number: int, count: int, port: str, folder: str, what: str, shape: str = "") -> None:
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", count, number)
    if what == "preempted":
        result = preempted(number, count, folder)
    else:
        mesh = over(tuple(map(int, shape.split("x"))))
        assert math.prod(mesh.devices.shape) == jax.device_count()
        with graftax.Checkpoints(folder, every=1) as checkpoints:
            if what == "save":
                result = [checkpoints.save(step, state(step, mesh), Loader(step * 10 + number)) for step in (5, 6)]
            else:
                like, loader = state(0, mesh), Loader()
                steps = [checkpoints.restore(like, host=loader)]
                wrong, tied = different(like, state(6, mesh)), like["tied"][0] is like["big"]
                steps.append(checkpoints.restore(like, step=5, only="big"))
                wrong += different({"big": like["big"]}, state(5, mesh))
                result = [steps, wrong, tied, loader.position]
    print("RESULT " + json.dumps([what, result]), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
