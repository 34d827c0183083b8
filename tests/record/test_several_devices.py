# SPDX-License-Identifier: Apache-2.0
"""Recorded calls on arrays of several devices, where the check's scalar has to be copied to the host, as on a GPU."""

import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from devices import run_again
from graftax._record.replay import RecordedCalls

COUNT = 2


@pytest.mark.quick(0)
def test_with_several_devices():
    if jax.device_count() < COUNT:
        run_again(__file__, COUNT)


@pytest.mark.skipif(jax.device_count() < COUNT, reason="runs in the process that test_with_several_devices starts")
@pytest.mark.parametrize("bad", range(8))
def test_each_call_is_read_before_it_is_forgotten(tmp_path: Path, bad: int):
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    recorder = graftax.record(lambda x: jnp.log(x) * 2, last=3, dir=tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", graftax.RecordedCallWarning)
        for number in range(8):
            x = jax.device_put(jnp.full(4, -1.0 if number == bad else 1.0 + number), sharding)
            jax.block_until_ready(recorder(x))
        recorder.flush()
    assert len(caught) == 1 and "not finite" in str(caught[0].message)
    (file,) = tmp_path.iterdir()
    recorded = RecordedCalls(file)
    values = [float(recorded.prepare(number).args[0][0]) for number in range(len(recorded))]
    given = [*(1.0 + number for number in range(bad)), -1.0]
    assert values == given[-len(values) :] and len(values) >= min(len(given), 2)
